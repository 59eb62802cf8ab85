"""Adds up how a candidate's answers differ, and says whether it may be released. Pure.

The verdict is the exit code of `charonia replay`: `SAME`, `DIFFERENT`, or `NOT_RUN` where too little was compared to
say that the answers are the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.operations.text.rendering import one_line
from charonia.releases.answer_differences import Comparison

from .replay_lines import Recorded

SAME, DIFFERENT, NOT_RUN = 0, 1, 2
_VERDICTS = ("same", "different", "not run")
_NAMED = 10
"""Ids that are named of each reason."""


@dataclass(slots=True)
class _Output:
    """Figures of one output over all responses."""

    compared: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    absolute: tuple[float, str] = (0.0, "")
    relative: tuple[float, str] = (0.0, "")

    def add(self, one: Comparison, name: str) -> None:
        self.compared += 1
        if one.kind:
            self.kinds[one.kind] += 1
        if one.worst_absolute > self.absolute[0]:
            self.absolute = one.worst_absolute, name
        if one.worst_relative > self.relative[0]:
            self.relative = one.worst_relative, name


Rank = tuple[bool, float, float]
"""How bad a request's differences are: whether there is more than numbers, then by how much those differ."""


@dataclass(slots=True)
class DifferenceReport:
    """`allowed_percent` of the compared requests may differ, and at least `min_requests` have to be compared."""

    model: str
    version: int
    allowed_percent: float = 0.0
    min_requests: int = 1
    worst_shown: int = 10
    same: int = 0
    different: int = 0
    answered_by: Counter[int] = field(default_factory=Counter)
    """Compared requests by the version that had answered them."""
    _outputs: dict[str, _Output] = field(default_factory=dict)
    _whole: Counter[str] = field(default_factory=Counter)
    _worst: list[tuple[Rank, Recorded, list[Comparison]]] = field(default_factory=list)
    _unreplayable: dict[str, list[str]] = field(default_factory=dict)
    _unanswered: dict[str, list[str]] = field(default_factory=dict)

    def add(self, one: Recorded, comparisons: Sequence[Comparison]) -> None:
        """Count a request that was answered."""
        self.answered_by[one.version] += 1
        differences = [comparison for comparison in comparisons if comparison.kind]
        for comparison in comparisons:
            if comparison.output:
                self._outputs.setdefault(comparison.output, _Output()).add(comparison, one.name)
            else:
                self._whole[comparison.kind] += 1
        if not differences:
            self.same += 1
            return
        self.different += 1
        self._worst.append((_rank(differences), one, differences))
        if len(self._worst) > 2 * self.worst_shown:
            self._keep_worst()

    def _keep_worst(self) -> None:
        # of equal ones the first recorded stay
        self._worst.sort(key=lambda found: (found[0], -found[1].at_us), reverse=True)
        del self._worst[self.worst_shown :]

    def unreplayable(self, one: Recorded, reason: str) -> None:
        """Count a request that cannot be asked again."""
        self._unreplayable.setdefault(reason, []).append(one.name)

    def unanswered(self, one: Recorded, reason: str) -> None:
        """Count a request to which there was no answer of the candidate."""
        self._unanswered.setdefault(reason, []).append(one.name)

    @property
    def compared(self) -> int:
        return self.same + self.different

    @property
    def percent_different(self) -> float:
        return 100.0 * self.different / self.compared if self.compared else 0.0

    @property
    def verdict(self) -> int:
        if self.percent_different > self.allowed_percent:
            return DIFFERENT
        return NOT_RUN if self._unanswered or self.compared < self.min_requests else SAME

    def document(self) -> dict[str, Any]:
        """The report as JSON has it. An infinite difference is the string "inf", as JSON has no such number."""
        self._keep_worst()
        return {
            "model": self.model,
            "version": self.version,
            "verdict": _VERDICTS[self.verdict],
            "compared": self.compared,
            "same": self.same,
            "different": self.different,
            "percent_different": round(self.percent_different, 4),
            "percent_different_allowed": self.allowed_percent,
            "min_requests": self.min_requests,
            "answered_by": {str(version): count for version, count in sorted(self.answered_by.items())},
            "answers": dict(sorted(self._whole.items())),
            "outputs": [_output_document(name, output) for name, output in sorted(self._outputs.items())],
            "worst": [_request_document(one, found) for _, one, found in self._worst],
            "unanswered": _reasons(self._unanswered),
            "unreplayable": _reasons(self._unreplayable),
        }


def _rank(differences: Sequence[Comparison]) -> Rank:
    return (
        any(math.isinf(one.worst_absolute) or not one.worst_absolute for one in differences),
        max(one.worst_relative for one in differences),
        max(one.worst_absolute for one in differences),
    )


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _output_document(name: str, output: _Output) -> dict[str, Any]:
    return {
        "name": name,
        "compared": output.compared,
        "different": output.kinds.total(),
        "kinds": dict(sorted(output.kinds.items())),
        "worst_absolute": _number(output.absolute[0]),
        "worst_absolute_id": output.absolute[1],
        "worst_relative": _number(output.relative[0]),
        "worst_relative_id": output.relative[1],
    }


def _request_document(one: Recorded, differences: Sequence[Comparison]) -> dict[str, Any]:
    return {
        "id": one.name,
        "request_id": one.client_id,
        "tenant": one.tenant,
        "recorded_us": one.at_us,
        "answered_by": one.version,
        **({"sequence": one.sequence.id} if one.sequence is not None else {}),
        "differences": [
            {
                "output": found.output,
                "kind": found.kind,
                "detail": found.detail,
                "elements": found.elements,
                "differing": found.differing,
                "worst_absolute": _number(found.worst_absolute),
                "worst_relative": _number(found.worst_relative),
            }
            for found in differences
        ],
    }


def _reasons(found: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return [
        {"reason": reason, "count": len(names), "ids": list(names[:_NAMED])} for reason, names in sorted(found.items())
    ]


def report_text(document: Mapping[str, Any]) -> str:
    """A document in sentences and a table."""
    allowed = document["percent_different_allowed"]
    lines = [
        f"{document['model']}:{document['version']}: {document['verdict']}: of {document['compared']} requests "
        f"compared {document['same']} are the same and {document['different']} differ "
        f"({document['percent_different']:.4g}%, allowed {allowed:.4g}%)"
    ]
    if document["compared"] < document["min_requests"]:
        lines.append(f"too few were compared: at least {document['min_requests']} are wanted")
    for kind, count in document["answers"].items():
        lines.append(f"  {kind}: {count}")
    if document["outputs"]:
        lines.append(f"  {'output':<24} {'compared':>9} {'different':>9} {'worst abs':>11} {'worst rel':>11}  kinds")
    for output in document["outputs"]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in output["kinds"].items())
        figures = f"{_figure(output['worst_absolute']):>11} {_figure(output['worst_relative']):>11}"
        row = f"  {output['name']:<24} {output['compared']:>9} {output['different']:>9} {figures}  {kinds}"
        lines.append(row.rstrip())
    if document["worst"]:
        lines.append("worst requests")
    for one in document["worst"]:
        called = f" (id '{one_line(one['request_id'])}')" if one["request_id"] else ""
        for found in one["differences"]:
            about = f"{found['output']}: " if found["output"] else ""
            lines.append(f"  {one['id']}{called} {about}{found['kind']}: {one_line(found['detail'])}")
    for what in ("unanswered", "unreplayable"):
        for reason in document[what]:
            more = ", ..." if reason["count"] > len(reason["ids"]) else ""
            lines.append(f"{what}: {reason['count']}: {one_line(reason['reason'])} ({', '.join(reason['ids'])}{more})")
    return "\n".join(lines) + "\n"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
