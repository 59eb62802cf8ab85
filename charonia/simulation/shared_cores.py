"""Executions that share cores: while more run than there are cores, each gets an equal part of them. Pure.

An execution uses one core for all of its time. This is processor sharing
(https://en.wikipedia.org/wiki/Processor_sharing), which an operating system comes to for processes of equal priority.
"""

from __future__ import annotations

import heapq
from itertools import count


class SharedCores:
    """Those that run, by what is left of their work. Times passed to it never fall."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._ends: list[tuple[float, int, str]] = []
        """A heap: when each ends by `_done_ns`, in what order it began, its name."""
        self._done_ns = 0.0
        """What an execution has done that ran from the beginning on."""
        self._now_ns = 0
        self._numbers = count()

    def begin(self, name: str, work_ns: int, now_ns: int) -> None:
        """`name` runs from now on, and needs a core for `work_ns`."""
        self._advance(now_ns)
        heapq.heappush(self._ends, (self._done_ns + work_ns, next(self._numbers), name))

    def next_end_ns(self) -> int | None:
        """When the next one ends, if none begins until then; None while none runs."""
        if not self._ends:
            return None
        return self._now_ns + max(0, round((self._ends[0][0] - self._done_ns) / self._pace()))

    def end_next(self, now_ns: int) -> str:
        """The name of the one that ends now, at `next_end_ns`."""
        self._advance(now_ns)
        at_ns, _, name = heapq.heappop(self._ends)
        self._done_ns = max(self._done_ns, at_ns)  # now_ns is rounded
        return name

    def _pace(self) -> float:
        return min(1.0, self._cores / len(self._ends))

    def _advance(self, now_ns: int) -> None:
        if self._ends:
            self._done_ns += (now_ns - self._now_ns) * self._pace()
        self._now_ns = now_ns
