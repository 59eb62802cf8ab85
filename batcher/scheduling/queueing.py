"""The queue of one model version: priority levels (S8), queue policies (S20-S22), and the instants they come due.

Levels may number 2^64-1, so only those that hold something exist. Removal is lazy: a request that left the queue keeps
its place in a deque until it is reached or until such places outnumber the rest. Which requests go together is
`dynamic_batching`'s, what a rejection says the scheduler's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

from .observations import QueuedRequest, RequestState

QUEUED = RequestState.QUEUED
DELAYED = RequestState.DELAYED

NEVER_NS = 1 << 127
_MIN_STALE = 64
"""Fewer stale places than this are not worth a sweep."""


@dataclass(frozen=True, slots=True)
class QueueRules:
    """Levels and policies of a configuration. `only` is the policy where there is one level, number 0."""

    block: DynamicBatching
    only: QueuePolicy | None

    @staticmethod
    def of(interface: ModelInterface | None) -> QueueRules:
        """The default scheduler's queue is one level without bounds (S1)."""
        block = interface.dynamic_batching if interface is not None else None
        if block is None:
            return QueueRules(DynamicBatching(), QueuePolicy())
        return QueueRules(block, block.queue_policy(0) if block.priority_levels == 0 else None)

    def place(self, priority: int) -> tuple[int, QueuePolicy]:
        """The level that a request's `priority` lands on, and that level's policy."""
        if self.only is not None:
            return 0, self.only
        level = self.block.level(priority)
        return level, self.block.queue_policy(level)


def delays(policy: QueuePolicy) -> bool:
    """Whether a time-out moves a request behind its level instead of rejecting it (S22)."""
    return policy.timeout_action is TimeoutAction.DELAY


class LevelQueue:
    """The requests of one level: `live`, those in time, then the `delayed` ones (S22); both with stale places."""

    __slots__ = ("_stale", "delayed", "live", "size")

    def __init__(self) -> None:
        self.live: deque[QueuedRequest] = deque()
        self.delayed: deque[QueuedRequest] = deque()
        self._stale = 0
        self.size = 0

    def __iter__(self) -> Iterator[QueuedRequest]:
        """In order of service."""
        for request in self.live:
            if request.state is QUEUED:
                yield request
        for request in self.delayed:
            if request.state is DELAYED:
                yield request

    def delay(self, request: QueuedRequest) -> None:
        """A queued request's time-out passed: behind all others."""
        request.state = DELAYED
        self.delayed.append(request)
        self._went_stale()

    def put_back(self, request: QueuedRequest) -> None:
        """A request that was dispatched returns to the front, behind those that came before it.

        Only requests put back earlier can be in front of it, so the search is short.
        """
        self.size += 1
        if request.delayed:
            request.state = DELAYED
            self.delayed.appendleft(request)
            return
        live = self.live
        passed: list[QueuedRequest] = []
        while live and (live[0].state is not QUEUED or live[0].order < request.order):
            first = live.popleft()
            if first.state is QUEUED:
                passed.append(first)
            else:
                self._stale -= 1
        request.state = QUEUED
        live.appendleft(request)
        live.extendleft(reversed(passed))

    def leave(self) -> None:
        """One queued request changed its state to something else in place."""
        self.size -= 1
        self._went_stale()

    def take(self, count: int) -> list[QueuedRequest]:
        """Remove up to `count` requests from the front."""
        taken: list[QueuedRequest] = []
        live = self.live
        while live and count > len(taken):
            request = live.popleft()
            if request.state is QUEUED:
                taken.append(request)
            else:
                self._stale -= 1
        delayed = self.delayed
        while delayed and count > len(taken):
            request = delayed.popleft()
            if request.state is DELAYED:
                taken.append(request)
            else:
                self._stale -= 1
        self.size -= len(taken)
        return taken

    def sweep(self) -> None:
        """Give up the places of requests that left."""
        self.live = deque(request for request in self.live if request.state is QUEUED)
        self.delayed = deque(request for request in self.delayed if request.state is DELAYED)
        self._stale = 0

    def _went_stale(self) -> None:
        self._stale += 1
        if self._stale > _MIN_STALE and self._stale > self.size:
            self.sweep()


class VersionQueue:
    """The queued requests of one version, by level. `rows` and `size` are their sum and number."""

    __slots__ = ("_descending", "_levels", "rows", "size")

    def __init__(self) -> None:
        self._levels: dict[int, LevelQueue] = {}
        self._descending: list[int] = []
        """Negated levels that hold something, so that the level served first is last and cheap to remove."""
        self.rows = 0
        self.size = 0

    def __iter__(self) -> Iterator[QueuedRequest]:
        """In order of service: all of a lower number before any of a higher one (S8)."""
        for key in reversed(self._descending):
            yield from self._levels[-key]

    def in_order(self) -> Iterable[QueuedRequest]:
        """The same; with one level in use, without a step in between."""
        return self._levels[-self._descending[0]] if len(self._descending) == 1 else self

    def append(self, request: QueuedRequest) -> bool:
        """Queue a new request on its `queue_level`; whether it is now the last to be served."""
        number = request.queue_level
        level = self._levels.get(number) or self._open(number)
        request.state = QUEUED
        level.live.append(request)
        level.size += 1
        self.size += 1
        self.rows += request.rows
        return -self._descending[0] == number and not level.delayed

    def put_back(self, request: QueuedRequest) -> None:
        """Queue a request again that had been dispatched, at the front of its level."""
        self._open(request.queue_level).put_back(request)
        self.size += 1
        self.rows += request.rows

    def delay(self, request: QueuedRequest) -> None:
        """Move a queued request behind its level (S22)."""
        self._levels[request.queue_level].delay(request)

    def remove(self, request: QueuedRequest, state: RequestState) -> None:
        """Take out a queued request; it becomes `state`."""
        level = self._levels[request.queue_level]
        request.state = state
        level.leave()
        self._gone(request.queue_level, level, 1, request.rows)

    def sweep(self) -> None:
        """Forget the places of requests that left: before one of them is put back beside its old place."""
        for level in self._levels.values():
            level.sweep()

    def take(self, count: int) -> list[QueuedRequest]:
        """Remove the `count` requests served first; their state is the caller's to set."""
        taken: list[QueuedRequest] = []
        while self.size and count > len(taken):
            number = -self._descending[-1]
            level = self._levels[number]
            part = level.take(count - len(taken))
            self._gone(number, level, len(part), sum([request.rows for request in part]))
            taken = taken + part if taken else part
        return taken

    def earliest_order(self, none: int) -> int:
        """The smallest `order` at the head of any level; `none` when nothing is queued."""
        return min((next(iter(level)).order for level in self._levels.values()), default=none)

    def drain(self) -> list[QueuedRequest]:
        """Remove everything; states stay as they are. In order of arrival, delayed ones last in order of delay."""
        everything = list(self)
        live = sorted((r for r in everything if r.state is QUEUED), key=lambda request: request.order)
        delayed = [r for r in everything if r.state is DELAYED]
        self._levels.clear()
        self._descending.clear()
        self.size = self.rows = 0
        return live + delayed

    def _open(self, number: int) -> LevelQueue:
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = LevelQueue()
            self._descending.insert(bisect_left(self._descending, -number), -number)
        return level

    def _gone(self, number: int, level: LevelQueue, count: int, rows: int) -> None:
        self.size -= count
        self.rows -= rows
        if not level.size:
            del self._levels[number]
            del self._descending[bisect_left(self._descending, -number)]


class DueTimes:
    """When queued requests time out or pass their deadline (S21, S23): a heap whose stale entries are skipped."""

    __slots__ = ("_armed", "_heap", "_pushes", "nearest_ns")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, QueuedRequest]] = []
        self._pushes = 0
        self._armed = 0
        self.nearest_ns = NEVER_NS
        """Nothing is due before; `next_ns` is exact."""

    def arm(self, request: QueuedRequest) -> None:
        """Set the request's `due_ns` from its time-out and deadline."""
        timeout_ns, deadline_ns = request.timeout_ns, request.deadline_ns
        due_ns = min(timeout_ns, deadline_ns) if timeout_ns and deadline_ns else timeout_ns or deadline_ns
        request.due_ns = due_ns
        if due_ns:
            self._armed += 1
            self._pushes += 1
            heappush(self._heap, (due_ns, self._pushes, request))
            if due_ns < self.nearest_ns:
                self.nearest_ns = due_ns

    def disarm(self, request: QueuedRequest) -> None:
        """The request left the queue; its entry no longer counts, and is kept no longer than the others are many."""
        if request.due_ns:
            request.due_ns = 0
            self._armed -= 1
            heap = self._heap
            if len(heap) > _MIN_STALE and len(heap) > 2 * self._armed:
                # Put back with the same deadline, a request may have several entries that look right.
                self._heap = list({entry[2]: entry for entry in heap if entry[2].due_ns == entry[0]}.values())
                heapify(self._heap)

    def next_ns(self) -> int:
        """The nearest instant, 0 for none."""
        heap = self._heap
        while heap and heap[0][2].due_ns != heap[0][0]:
            heappop(heap)
        self.nearest_ns = heap[0][0] if heap else NEVER_NS
        return heap[0][0] if heap else 0

    def pop(self, now_ns: int) -> QueuedRequest | None:
        """A request that is due, disarmed; None when there is none."""
        due_ns = self.next_ns()
        if not due_ns or due_ns > now_ns:
            return None
        request = heappop(self._heap)[2]
        self.disarm(request)
        return request
