"""Adds up the metrics pages of several parts, series by series. Text in, text out; no metrics library is needed. Pure.

Parts export only what they did, so a counter of two executors is their sum, and so is a gauge of what each holds.
Histogram buckets add up like counters; quantiles of summaries are computed again (`quantiles`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import inf

from .quantiles import joint_quantiles

SEEN_BY_ALL = frozenset({"charonia_log_memory_used_bytes", "charonia_log_memory_max_bytes"})
"""Families of something that all parts share: of equal series the largest stands, not their sum."""

RESTARTS = "counter_restarts"
"""Family of how often a part has begun the counters of a version again at 0; only between the parts of one server."""

_RESTARTS = re.compile(rf"^{RESTARTS}(\{{.*\}}) (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Version = tuple[str, str, str]
"""A version of a model as labels name it: namespace, model, version."""


def merge(pages: list[str], *, last: bool = True, earlier: Mapping[str, float] | None = None) -> bytes:
    """Join text expositions (0.0.4): families keep their first HELP and TYPE, equal series are added (but
    `SEEN_BY_ALL`).

    `earlier` has counts of parts that are gone (`counters`); they are added to series that a page still has. Unless it
    is the `last` join, the result is such a part again, with what is only between parts.
    """
    heads, series = _read(pages)
    lines: list[str] = []
    for family, values in series.items():
        if last and family == RESTARTS:
            continue
        head = heads.get(family, [])
        lines += head
        if earlier:
            values = {name: value + earlier.get(name, 0.0) for name, value in values.items()}
        if last and f"# TYPE {family} summary" in head:
            values = joint_quantiles(family, values)
        lines += [f"{name} {_number(value)}" for name, value in values.items()]
    return ("\n".join(lines) + "\n").encode()


def counters(page: str) -> dict[str, float]:
    """The series of a page that only grow: counters, histograms, and the counts and sums of summaries."""
    heads, series = _read([page])
    found: dict[str, float] = {}
    for family, values in series.items():
        head = heads.get(family, [])
        if f"# TYPE {family} counter" in head or f"# TYPE {family} histogram" in head:
            found |= values
        elif f"# TYPE {family} summary" in head:
            sums = (f"{family}_count", f"{family}_sum")
            found |= {name: value for name, value in values.items() if name.partition("{")[0] in sums}
    return found


def restarts(page: str) -> dict[Version, float]:
    """How often the part of this page has begun counters again, by version."""
    return {_version_of(labels): float(count) for labels, count in _RESTARTS.findall(page)}


def is_of(series: str, versions: Collection[Version]) -> bool:
    """Whether a series, or a line with its value, is Triton's of one of these versions."""
    return series.startswith("nv_") and _version_of(series) in versions


def _version_of(series: str) -> Version:
    labels = dict(_LABEL.findall(series))
    return labels.get("namespace", ""), labels.get("model", ""), labels.get("version", "")


def _read(pages: list[str]) -> tuple[dict[str, list[str]], dict[str, dict[str, float]]]:
    """HELP and TYPE lines by family, and the sums of equal series by family."""
    heads: dict[str, list[str]] = {}
    series: dict[str, dict[str, float]] = {}
    for page in pages:
        family = ""
        for line in page.split("\n"):  # and nowhere else: a label value may hold any other line separator
            if line.startswith(("# HELP ", "# TYPE ")):
                _, word, family, *_ = line.split(" ", 3)
                known = heads.setdefault(family, [])
                if not any(head.split(" ", 2)[1] == word for head in known):
                    known.append(line)
                series.setdefault(family, {})
            elif line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                try:
                    amount = float(value)
                except ValueError:
                    continue  # one part's bad line must not cost the page
                values = series.setdefault(family, {})
                before = values.get(name, 0.0)
                values[name] = max(before, amount) if family in SEEN_BY_ALL else before + amount
    return heads, series


def _number(value: float) -> str:
    if value != value or value in (inf, -inf):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
