"""Work that shares cores: while more is in progress than there are cores, all of it gets equal parts of them. Pure.

A piece of work uses one core for all of its time, unless it says how many. This is processor sharing
(https://en.wikipedia.org/wiki/Processor_sharing), which an operating system comes to for processes of equal priority.
"""

from __future__ import annotations

import heapq
from itertools import count


class SharedCores:
    """What is in progress, by what is left of it. Times passed to it never fall."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._ends: list[tuple[float, int, str, float]] = []
        """A heap: when each ends by `_done_ns`, in what order it began, its name, how many cores it uses."""
        self._used = 0.0
        """How many cores would be used if there were enough."""
        self._done_ns = 0.0
        """What has been done of work that began at the beginning."""
        self._now_ns = 0
        self._numbers = count()

    def begin(self, name: str, work_ns: int, now_ns: int, uses: float = 1.0) -> None:
        """`name` begins now, and takes `work_ns` with all of the cores that it uses."""
        self._advance(now_ns)
        self._used += uses
        heapq.heappush(self._ends, (self._done_ns + work_ns, next(self._numbers), name, uses))

    def next_end_ns(self) -> int | None:
        """When the next one ends, if none begins until then; None while there is none."""
        if not self._ends:
            return None
        return self._now_ns + max(0, round((self._ends[0][0] - self._done_ns) / self._pace()))

    def end_next(self, now_ns: int) -> str:
        """The name of the one that ends now, at `next_end_ns`."""
        self._advance(now_ns)
        at_ns, _, name, uses = heapq.heappop(self._ends)
        self._used = self._used - uses if self._ends else 0.0
        self._done_ns = max(self._done_ns, at_ns)  # now_ns is rounded
        return name

    def _pace(self) -> float:
        return min(1.0, self._cores / self._used)

    def _advance(self, now_ns: int) -> None:
        if self._ends:
            self._done_ns += (now_ns - self._now_ns) * self._pace()
        self._now_ns = now_ns
