"""In which order finished batches may be answered when `preserve_ordering` is set (S6).

Batches run in parallel and finish in any order. A batch is answered once nothing accepted before its first request is
unanswered. Ranges of batches never interleave: `form_batch` ends a rerun at the next batch that is still open, so
comparing first requests is enough and no two batches wait for each other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from .dynamic_batching import NO_BOUNDARY


class ReleaseOrder:
    """Unanswered batches of one version by the order of their first request."""

    __slots__ = ("_finished", "_firsts", "_ids")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ids: dict[int, str] = {}
        self._finished: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def open(self, first: int, batch_id: str) -> None:
        """A batch whose first request has order `first` was dispatched."""
        self._firsts.insert(bisect_left(self._firsts, first), first)
        self._ids[first] = batch_id

    def lose(self, first: int) -> None:
        """The batch will not finish; its requests are queued again."""
        del self._firsts[bisect_left(self._firsts, first)]
        del self._ids[first]

    def finish(self, first: int) -> None:
        """All requests of the batch are settled."""
        self._finished.add(first)

    def boundary(self, head: int) -> int:
        """The order that a batch starting with order `head` must not reach past."""
        at = bisect_right(self._firsts, head)
        return self._firsts[at] if at < len(self._firsts) else NO_BOUNDARY

    def release(self, earliest_queued: int) -> list[str]:
        """The batches that may be answered now, in order; they are forgotten."""
        count = 0
        for first in self._firsts:
            if first not in self._finished or first > earliest_queued:
                break
            count += 1
        ready = self._firsts[:count]
        del self._firsts[:count]
        self._finished.difference_update(ready)
        return [self._ids.pop(first) for first in ready]
