"""Decides which requests at the head of a queue form the next batch, and when (S1-S5), and orders answers (S6). Pure.

Uses sizes, signatures and ages only; `queueing` supplies the requests, `model_state` picks the executor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from batcher.scheduling.observations import RequestQueued
from charonia.batch_strategies import BatchCandidate, BatchStrategy, Joins
from charonia.models.interface import ModelInterface
from charonia.models.latency_target import target_p99_ns

NO_BOUNDARY = 1 << 127
"""An order no request reaches."""


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The configuration of batch formation; sizes in rows. Without `dynamic` each request is a batch (S1). With a
    `target_p99_ns`, `adaptive_batching` chooses the sizes and the delay continuously. `several`: requests may have
    several responses.
    """

    dynamic: bool
    max_rows: int
    preferred: frozenset[int]
    largest_preferred: int
    delay_ns: int
    preserve_ordering: bool
    target_p99_ns: int = 0
    several: bool = False
    strategy: BatchStrategy | None = None
    """The custom strategy, which may keep a request out of a batch (P22)."""

    @property
    def runs_waves_whole(self) -> bool:
        """Whether any fitting requests may share a batch, so that a wave of them may run as it is."""
        return (
            self.dynamic
            and self.preferred == {self.max_rows}
            and not self.preserve_ordering
            and not self.target_p99_ns
            and not self.several
            and self.strategy is None
        )

    @staticmethod
    def of(interface: ModelInterface, strategy: BatchStrategy | None = None) -> BatchRules:
        """An empty preferred list stands for `[max_batch_size]` (S3)."""
        block = interface.dynamic_batching
        max_rows = max(1, interface.max_batch_size)
        if block is None:
            return BatchRules(False, max_rows, frozenset((max_rows,)), max_rows, 0, False)
        preferred = frozenset(block.preferred_batch_sizes) or frozenset((max_rows,))
        return BatchRules(
            dynamic=True,
            max_rows=max_rows,
            preferred=preferred,
            largest_preferred=max(preferred),
            delay_ns=block.max_queue_delay_us * 1000,
            preserve_ordering=block.preserve_ordering,
            target_p99_ns=target_p99_ns(interface.parameters),
            several=interface.decoupled,
            strategy=strategy,
        )


class Formation(NamedTuple):
    """The result of batch formation: a batch of the first `size` requests; with `size` 0 no batch yet.

    `saturated`: no later arrival can change this batch, so it may be sent to an executor before an instance there is
    free. The other fields say when to try again if there is no batch:

    - at `until_ns`;
    - when the queue holds `until_rows` rows;
    - when a request arrives with another signature than `signature`;
    - when a request arrives with a higher priority;
    - when a request arrives that was accepted before `oldest_ns`.
    """

    size: int
    saturated: bool
    until_ns: int
    until_rows: int
    signature: int
    oldest_ns: int = 0


NOTHING = Formation(0, False, 0, 0, 0)


def form_batch(
    requests: Iterable[RequestQueued], rules: BatchRules, now_ns: int, boundary: int = NO_BOUNDARY
) -> Formation:
    """The next batch from `requests`, in order of service, none of them expired (S3, S4). Requests with `order` past
    `boundary` do not join one from before it: with preserve_ordering, an unanswered batch lies between them.
    """
    count = rows = best = signature = 0
    stopped = False
    oldest_ns = now_ns
    max_rows, largest, preferred = rules.max_rows, rules.largest_preferred, rules.preferred
    joins = rules.strategy.begin() if rules.strategy is not None and rules.dynamic else None
    for request in requests:
        grown = rows + request.rows
        apart = joins is not None and not _joins(joins, request)
        if count:
            if grown > largest and not best:
                best = count
            if apart or grown > max_rows or request.signature != signature or request.order > boundary:
                stopped = True
                break
        else:
            signature = request.signature
            if not rules.dynamic:
                return Formation(1, True, 0, 0, signature)
        count += 1
        rows = grown
        if request.enqueued_ns < oldest_ns:
            oldest_ns = request.enqueued_ns
        if rows in preferred:
            best = count
    if not count:
        return NOTHING
    delay_ns = rules.delay_ns
    delay_passed = 0 < delay_ns <= now_ns - oldest_ns
    saturated = stopped or rows >= largest
    if best and not delay_passed:
        return Formation(best, saturated, 0, 0, signature)
    if saturated or delay_passed or not delay_ns:
        return Formation(count, saturated, 0, 0, signature)
    # with a strategy any request may end the batch
    until_rows = min(size for size in preferred if size > rows) if joins is None else 0
    return Formation(0, False, oldest_ns + delay_ns, until_rows, signature, oldest_ns)


def _joins(joins: Joins, request: RequestQueued) -> bool:
    """Whether the strategy lets a request join the current batch."""
    meta = request.meta
    if meta is None:
        return True
    return joins(BatchCandidate(request.rows, meta.size_bytes, meta.inputs, meta.parameters))


class ReleaseOrder:
    """Unanswered batches of one version, by the order of their first request, for `preserve_ordering` (S6).

    Batches run in parallel and finish in any order. A batch is answered once no request accepted before its first one
    is unanswered. Ranges of batches never interleave: `form_batch` ends a rerun at the next open batch, so comparing
    first requests is enough and no two batches wait for each other.
    """

    __slots__ = ("_finished", "_ids", "firsts")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self._ids: dict[int, str] = {}
        self._finished: set[int] = set()

    def open(self, first: int, batch_id: str) -> None:
        """A batch whose first request has order `first` was dispatched."""
        self.firsts.insert(bisect_left(self.firsts, first), first)
        self._ids[first] = batch_id

    def lose(self, first: int) -> None:
        """The batch will not finish; its requests are queued again."""
        del self.firsts[bisect_left(self.firsts, first)]
        del self._ids[first]

    def finish(self, first: int) -> None:
        """All requests of the batch are settled."""
        self._finished.add(first)

    def boundary(self, head: int) -> int:
        """The order that a batch starting with order `head` must not reach past."""
        at = bisect_right(self.firsts, head)
        return self.firsts[at] if at < len(self.firsts) else NO_BOUNDARY

    def release(self, earliest_queued: int) -> list[str]:
        """The batches that may be answered now, in order; they are forgotten."""
        count = 0
        for first in self.firsts:
            if first not in self._finished or first > earliest_queued:
                break
            count += 1
        ready = self.firsts[:count]
        del self.firsts[:count]
        self._finished.difference_update(ready)
        return [self._ids.pop(first) for first in ready]
