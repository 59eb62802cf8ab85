"""Recorded requests of one model: when they came, what they asked for, in which batch they ran, and when. Pure.

Files and journals become these (`trace_recording`, `journal_recording`); a simulated run gives the same form, so that
`run_figures` computes both alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from .processor_shares import Said


class Outcome(Enum):
    """How a request ended. LOST: the recording does not say."""

    ANSWERED = "answered"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request. Times are nanoseconds of one clock; 0 for what is not known.

    `level` is the priority as sent, `timeout_us` the caller's queue time-out. `batch` names the batch it ran in, of
    `executor`; `started_ns` and `computed_ns` are the beginning and the end of that batch, `ended_ns` when its answer
    had arrived. `journalled`: its attempt was written to the log before it ran.
    """

    arrived_ns: int
    rows: int = 1
    version: int = 1
    level: int = 0
    tenant: str = ""
    timeout_us: int = 0
    batch: str = ""
    executor: str = ""
    started_ns: int = 0
    computed_ns: int = 0
    ended_ns: int = 0
    outcome: Outcome = Outcome.LOST
    journalled: bool = False

    @property
    def ran(self) -> bool:
        return bool(self.batch) and self.outcome is Outcome.ANSWERED


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """One execution. Its `arrivals` ascend."""

    name: str
    executor: str
    rows: int
    started_ns: int
    computed_ns: int
    arrivals: tuple[int, ...]

    @property
    def service_ns(self) -> int:
        return self.computed_ns - self.started_ns


@dataclass(frozen=True, slots=True)
class Recording:
    """The requests of one model in order of arrival. `source` says where they are from; the times are exact to
    `resolution_ns`. `executors` is how many executors were seen, 0 where the source does not name them. Unless
    `knows_starts`, batches begin when they were sent to their executor, which may have had others to run before."""

    model: str
    requests: tuple[RecordedRequest, ...]
    source: str
    resolution_ns: int
    executors: int = 0
    knows_starts: bool = True
    said: tuple[Said, ...] = ()
    """What executors said of their processors meanwhile."""

    def cut(self, skip_ns: int, take_ns: int) -> Recording:
        """The requests that arrived from `skip_ns` after the first one on, for `take_ns` (0: all)."""
        if not self.requests or not (skip_ns or take_ns):
            return self
        begin = self.requests[0].arrived_ns + skip_ns
        end = begin + take_ns if take_ns else None
        kept = (one for one in self.requests if one.arrived_ns >= begin and (end is None or one.arrived_ns < end))
        said = (one for one in self.said if one[1].at_ns >= begin and (end is None or one[1].at_ns < end))
        return replace(self, requests=tuple(kept), said=tuple(said))


def recording(
    model: str,
    requests: Iterable[RecordedRequest],
    source: str,
    resolution_ns: int,
    *,
    knows_starts: bool = True,
    said: Iterable[Said] = (),
) -> Recording:
    """A recording of these requests, in any order."""
    ordered = tuple(sorted(requests, key=lambda one: one.arrived_ns))
    executors = len({one.executor for one in ordered if one.executor})
    return Recording(model, ordered, source, resolution_ns, executors, knows_starts, tuple(said))


def begun_in_turn(recorded: Recording, instances: int) -> Recording:
    """The recording with the beginnings that batches had if their executors, with so many instances each, ran them in
    the order in which they were sent: one that was sent ahead began when an instance was free."""
    began: dict[str, int] = {}
    running: dict[str, list[int]] = {}
    """By executor, the ends of the last batches of its instances."""
    for batch in batches_of(recorded.requests):
        ends = running.setdefault(batch.executor, [])
        free_ns = heapq.heappop(ends) if len(ends) >= instances else 0
        began[batch.name] = min(max(batch.started_ns, free_ns), batch.computed_ns - 1)
        heapq.heappush(ends, batch.computed_ns)
    requests = [replace(one, started_ns=began.get(one.batch, one.started_ns)) for one in recorded.requests]
    return replace(recorded, requests=tuple(requests), knows_starts=True)


def batches_of(requests: Sequence[RecordedRequest]) -> list[RecordedBatch]:
    """The batches whose times are known, in order of their beginning."""
    members: dict[str, list[RecordedRequest]] = {}
    for one in requests:
        if one.batch and one.started_ns and one.computed_ns > one.started_ns:
            members.setdefault(one.batch, []).append(one)
    found = [
        RecordedBatch(
            name,
            of[0].executor,
            sum(one.rows for one in of),
            of[0].started_ns,
            of[0].computed_ns,
            tuple(sorted(one.arrived_ns for one in of)),
        )
        for name, of in members.items()
    ]
    return sorted(found, key=lambda batch: batch.started_ns)
