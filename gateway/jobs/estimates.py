"""When a job may be expected to end: from what its model's executions took, its instances and how fast it goes lately.

It is an estimate: `charonia.facts.jobs` counts what is served before a job, and more may come meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from charonia import keys
from charonia.catalog.catalog import ServedVersion
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import Statistics

_FRESH_NS = 1_000_000_000
_STALE_NS = 60_000_000_000
_BACKLOG_BATCHES = 2
_DURATION = re.compile(r"b(\d+)_(?:input|infer|output)_ns")
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a model version goes. `batch_s` is the mean time of an execution, `row_s` that of a row in it.

    `rows_per_s` is what was completed lately, over all instances; 0 when nothing was.
    """

    batch_s: float
    row_s: float
    rows_per_s: float = 0.0


def mean_pace(fields: Mapping[str, int], rows_per_s: float = 0.0) -> Pace | None:
    """The pace of a version's statistics (X3); None when nothing was executed."""
    spent_ns = sum(value for name, value in fields.items() if _DURATION.fullmatch(name))
    executions, rows = fields.get("execution_count", 0), fields.get("inference_count", 0)
    if executions <= 0 or rows <= 0:
        return None
    return Pace(spent_ns / executions / 1e9, spent_ns / rows / 1e9, rows_per_s)


def queued_eta_s(pace: Pace, before: int, slots: int, max_batch_size: int) -> float:
    """Seconds until a job with `before` requests before it has ended; each is taken for one row."""
    slots = max(1, slots)
    of_capacity_s = pace.row_s * before / slots
    if pace.rows_per_s > 0 and before > _BACKLOG_BATCHES * max(1, max_batch_size) * slots:
        # under a backlog what is seen counts: hand-over, other callers, stalls
        of_capacity_s = max(of_capacity_s, before / pace.rows_per_s)
    return of_capacity_s + pace.batch_s


def running_eta_s(pace: Pace, ran_s: float) -> float:
    """Seconds until a running job has ended."""
    return max(0.0, pace.batch_s - ran_s)


class Paces:
    """The pace of every version, from statistics that are at most a second old."""

    def __init__(self, log: Statistics) -> None:
        self._log = log
        self._known: dict[bytes, tuple[int, int, Pace | None]] = {}

    async def of(self, served: ServedVersion) -> Pace | None:
        """None when nothing is known, also when the log cannot be reached."""
        key = keys.statistics(served.model, served.version, served.content_hash)
        now_ns = monotonic_ns()
        known = self._known.get(key)
        if known is not None and now_ns - known[0] < _FRESH_NS:
            return known[2]
        try:
            fields = await self._log.statistics(key)
        except CharoniaError:
            return None
        rows = fields.get("inference_count", 0)
        rows_per_s = 0.0
        if known is not None and now_ns - known[0] < _STALE_NS:
            rows_per_s = max(0, rows - known[1]) * 1e9 / (now_ns - known[0])
        pace = mean_pace(fields, rows_per_s)
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = (now_ns, rows, pace)
        return pace
