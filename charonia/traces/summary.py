"""Summarises where the time of traced requests went, from the objects of trace files (N7). Pure.

Requests are grouped by the path of models: a step of an ensemble is separate from direct requests to the same model.
Triton's own files can be read as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.errors import InvalidArgument

from .reports import (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
)

_FRONTS = (
    ("receive", (("HTTP_RECV_START", "HTTP_RECV_END"), ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"))),
    ("send", (("HTTP_SEND_START", "HTTP_SEND_END"), ("GRPC_SEND_START", "GRPC_SEND_END"))),
)
_PARTS = (
    ("request", REQUEST_START, REQUEST_END),
    ("queue", QUEUE_START, COMPUTE_START),
    ("compute", COMPUTE_START, COMPUTE_END),
    ("input", COMPUTE_START, COMPUTE_INPUT_END),
    ("infer", COMPUTE_INPUT_END, COMPUTE_OUTPUT_START),
    ("output", COMPUTE_OUTPUT_START, COMPUTE_END),
)
SPANS = ("receive", "request", "queue", "compute", "input", "infer", "output", "steps", "overhead", "send")
"""The figures of a request; not every one has all of them. `steps` is the time in which anything made for a request
that computes nothing itself was under way; `overhead` is what neither queue, compute nor steps account for.
"""


@dataclass(slots=True)
class _Request:
    """One traced request."""

    model: str = ""
    version: str = ""
    parent: int = 0
    stamps: dict[str, int] = field(default_factory=dict)
    children: list[_Request] = field(default_factory=list)

    def spans(self) -> dict[str, int]:
        """Its figures in ns."""
        stamps = self.stamps
        found = {name: stamps[end] - stamps[begin] for name, begin, end in _PARTS if begin in stamps and end in stamps}
        for name, pairs in _FRONTS:
            for begin, end in pairs:
                if begin in stamps and end in stamps:
                    found[name] = stamps[end] - stamps[begin]
        if self.children and "compute" not in found:
            found["steps"] = _covered([child.stamps for child in self.children])
        if "request" in found:
            known = sum(found.get(name, 0) for name in ("queue", "compute", "steps"))
            found["overhead"] = max(0, found["request"] - known)
        return found


def summary(files: Iterable[Sequence[Any]], models: Sequence[str] = ()) -> dict[str, Any]:
    """The document of `charonia trace summary`: rows by path, parents before children, means in us.

    `files` hold the objects of one file each; `models` selects those whose own requests are included, all if empty.
    Raises `InvalidArgument` for objects that do not belong to a trace.
    """
    roots = [root for objects in files for root in _requests(objects)]
    chosen = [root for root in roots if not models or root.model in models]
    gathered: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for root in chosen:
        _gather(root, (), gathered)
    rows = [
        {
            "path": list(path),
            "count": len(values[""]),
            **{f"{name}_us": _mean(values[name]) / 1000 for name in SPANS if name in values},
            **({"request_p99_us": _percentile(values["request"], 0.99) / 1000} if "request" in values else {}),
            **_share(values, gathered[path[:1]]),
        }
        for path, values in gathered.items()
    ]
    return {"traces": len(chosen), "models": rows}


def _requests(objects: Sequence[Any]) -> list[_Request]:
    """The requests of one file that no other request made."""
    found: dict[int, _Request] = {}
    for entry in objects:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), int):
            raise InvalidArgument("no trace file: it must be a JSON array of objects with an 'id'")
        request = found.setdefault(entry["id"], _Request())
        if "model_name" in entry:
            request.model, request.version = str(entry["model_name"]), str(entry.get("model_version", ""))
            request.parent = entry.get("parent_id", 0)
        request.stamps |= _stamps(entry.get("timestamps", ()))
    roots: list[_Request] = []
    for request in found.values():
        parent = found.get(request.parent) if request.parent else None
        (parent.children if parent is not None else roots).append(request)
    return roots


def _stamps(timestamps: Any) -> dict[str, int]:
    try:
        return {str(stamp["name"]): int(stamp["ns"]) for stamp in timestamps}
    except (TypeError, KeyError, ValueError):
        raise InvalidArgument("no trace file: its timestamps must have a 'name' and 'ns'") from None


def _gather(request: _Request, above: tuple[str, ...], into: dict[tuple[str, ...], dict[str, list[int]]]) -> None:
    path = (*above, request.model)
    values = into.setdefault(path, {})
    values.setdefault("", []).append(1)
    for name, ns in request.spans().items():
        values.setdefault(name, []).append(ns)
    for child in request.children:
        _gather(child, path, into)


def _covered(requests: Sequence[Mapping[str, int]]) -> int:
    """The time during which at least one of these requests was running."""
    spans = sorted((s[REQUEST_START], s[REQUEST_END]) for s in requests if REQUEST_START in s and REQUEST_END in s)
    covered = until = 0
    for begin, end in spans:
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered


def _share(values: Mapping[str, Sequence[int]], of: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """The share of the outermost requests' time that these took."""
    whole = sum(of.get("request", ()))
    return {"share": sum(values["request"]) / whole} if whole and "request" in values else {}


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _percentile(values: Sequence[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
