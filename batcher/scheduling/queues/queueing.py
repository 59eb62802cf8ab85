"""The queue of one model version: priority levels (S8) and queue policies (S20-S22). Pure.

Lanes share a level by turns (`fair_sharing`); a level with one lane is a plain queue. There may be 2^64-1 levels, so
only those with requests exist. Removal is lazy: a request that left the queue keeps its place in a deque until it is
reached or until such places outnumber the rest. `dynamic_batching` forms the batches, `ledger` tracks due times, the
scheduler rejects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batcher.scheduling.observations import RequestQueued, RequestState
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

from .fair_sharing import TurnRules

QUEUED = RequestState.QUEUED
DELAYED = RequestState.DELAYED

SHARED = -1
"""The `lane` of a level that several lanes share."""
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
        """The queue level of a request's `priority`, and that level's policy."""
        if self.only is not None:
            return 0, self.only
        level = self.block.level(priority)
        return level, self.block.queue_policy(level)


def moves_behind(policy: QueuePolicy) -> bool:
    """Whether a time-out moves a request behind its level instead of rejecting it (S22)."""
    return policy.timeout_action is TimeoutAction.DELAY


class LevelQueue:
    """One lane's requests of one level: `live` ones in time, then the `delayed` ones (S22); both with stale places."""

    __slots__ = ("_stale", "delayed", "lane", "live", "size")

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.live: deque[RequestQueued] = deque()
        self.delayed: deque[RequestQueued] = deque()
        self._stale = 0
        self.size = 0

    def __iter__(self) -> Iterator[RequestQueued]:
        """In order of service."""
        for request in self.live:
            if request.state is QUEUED:
                yield request
        for request in self.delayed:
            if request.state is DELAYED:
                yield request

    def in_order(self) -> Iterable[RequestQueued]:
        """The same, faster if none is delayed."""
        return self if self._stale or self.delayed else self.live

    def delay(self, request: RequestQueued) -> None:
        """A queued request's time-out passed: it goes behind all others."""
        request.state = DELAYED
        self.delayed.append(request)
        self._went_stale()

    def put_back(self, request: RequestQueued) -> None:
        """A dispatched request returns to the front, behind those that arrived before it. Only requests that returned
        earlier can be in front of it, so the search is short.
        """
        self.size += 1
        if request.delayed:
            request.state = DELAYED
            self.delayed.appendleft(request)
            return
        live = self.live
        passed: list[RequestQueued] = []
        while live and (live[0].state is not QUEUED or live[0].order < request.order):
            first = live.popleft()
            if first.state is QUEUED:
                passed.append(first)
            else:
                self._stale -= 1
        request.state = QUEUED
        live.appendleft(request)
        live.extendleft(reversed(passed))

    def leave(self, _request: RequestQueued) -> None:
        """A queued request's state was changed in place."""
        self.size -= 1
        self._went_stale()

    def earliest_order(self) -> int:
        """The `order` of the request served first; at least one is queued."""
        return next(iter(self)).order

    def take(self, count: int) -> list[RequestQueued]:
        """Remove up to `count` requests from the front."""
        taken: list[RequestQueued] = []
        live = self.live
        if count >= len(live) and not self._stale:
            taken = list(live)
            live.clear()
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
        """Drop the places of requests that left."""
        if not self._stale:
            return
        self.live = deque(request for request in self.live if request.state is QUEUED)
        self.delayed = deque(request for request in self.delayed if request.state is DELAYED)
        self._stale = 0

    def _went_stale(self) -> None:
        self._stale += 1
        if self._stale > _MIN_STALE and self._stale > self.size:
            self.sweep()


class SharedLevel(LevelQueue):
    """The requests of one level in several lanes, which take turns; `live` is unused, `delayed` is for all lanes."""

    __slots__ = ("_lanes", "_turns")

    def __init__(self, first: LevelQueue, rules: TurnRules) -> None:
        super().__init__(SHARED)
        self.size = first.size
        self.delayed, first.delayed = first.delayed, deque()
        first.size = sum([request.state is QUEUED for request in first.live])
        self._turns = rules.turns()
        self._turns.begin(first.lane)
        self._lanes = {first.lane: first}

    def __iter__(self) -> Iterator[RequestQueued]:
        """In order of service."""
        turns = self._turns.copy()
        lanes: dict[int, Iterator[RequestQueued]] = {}
        while (number := turns.current()) is not None:
            if number not in lanes:
                lanes[number] = iter(self._lanes[number])
            request = next(lanes[number], None)
            if request is None:
                turns.pass_on(number)
            else:
                turns.spend(number, request)
                yield request
        for request in self.delayed:
            if request.state is DELAYED:
                yield request

    def in_order(self) -> Iterable[RequestQueued]:
        """The same."""
        return self

    def append(self, request: RequestQueued) -> None:
        """Queue a new request in its lane."""
        lane = self._lane(request.lane)
        lane.live.append(request)
        lane.size += 1
        self.size += 1

    def delay(self, request: RequestQueued) -> None:
        """A queued request's time-out passed: it goes behind all others, of every lane."""
        request.state = DELAYED
        self._lanes[request.lane].leave(request)
        self.delayed.append(request)

    def put_back(self, request: RequestQueued) -> None:
        """A dispatched request returns to the front of its lane."""
        self.size += 1
        if request.delayed:
            request.state = DELAYED
            self.delayed.appendleft(request)
        else:
            self._lane(request.lane).put_back(request)

    def leave(self, request: RequestQueued) -> None:
        """A queued request's state was changed in place."""
        self.size -= 1
        if not request.delayed:
            self._lanes[request.lane].leave(request)
            return
        self._stale += 1
        if self._stale > _MIN_STALE and self._stale > self.size:
            self._sweep_delayed()

    def earliest_order(self) -> int:
        """The smallest `order` at the head of any lane; at least one request is queued."""
        heads = [lane.earliest_order() for lane in self._lanes.values() if lane.size]
        return min(heads) if heads else next(iter(self)).order

    def take(self, count: int) -> list[RequestQueued]:
        """Remove up to `count` requests, those served first."""
        taken: list[RequestQueued] = []
        turns = self._turns
        while count > len(taken) and (number := turns.current()) is not None:
            served = self._lanes[number].take(1)
            if served:
                turns.spend(number, served[0])
                taken += served
            elif turns.pass_on(number):
                del self._lanes[number]
        while self.delayed and count > len(taken):
            request = self.delayed.popleft()
            if request.state is DELAYED:
                taken.append(request)
            else:
                self._stale -= 1
        self.size -= len(taken)
        return taken

    def sweep(self) -> None:
        """Drop the places of requests that left."""
        for lane in self._lanes.values():
            lane.sweep()
        self._sweep_delayed()

    def _sweep_delayed(self) -> None:
        self.delayed = deque(request for request in self.delayed if request.state is DELAYED)
        self._stale = 0

    def _lane(self, number: int) -> LevelQueue:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = LevelQueue(number)
        self._turns.join(number)
        return lane


class VersionQueue:
    """The queued requests of one version, by level. `rows` and `size` are their sum and number."""

    __slots__ = ("_descending", "_levels", "_turns", "rows", "size")

    def __init__(self, turns: TurnRules) -> None:
        self._turns = turns
        self._levels: dict[int, LevelQueue] = {}
        self._descending: list[int] = []
        """Negated levels that have requests, so that the level served first is last and cheap to remove."""
        self.rows = 0
        self.size = 0

    def __iter__(self) -> Iterator[RequestQueued]:
        """In order of service: all of a lower number before any of a higher one (S8)."""
        for key in reversed(self._descending):
            yield from self._levels[-key]

    def in_order(self) -> Iterable[RequestQueued]:
        """The same, faster with one level in use."""
        return self._levels[-self._descending[0]].in_order() if len(self._descending) == 1 else self

    def last(self, number: int) -> Iterator[RequestQueued]:
        """The requests of a level that are in time, the last to be served first; none if lanes share it."""
        level = self._levels.get(number)
        for request in reversed(level.live) if level is not None else ():
            if request.state is QUEUED:
                yield request

    def append(self, request: RequestQueued) -> bool:
        """Queue a new request on its `queue_level`; returns whether it is now the last to be served."""
        number = request.queue_level
        level = self._levels.get(number) or self._open(number, request.lane)
        request.state = QUEUED
        self.size += 1
        self.rows += request.rows
        if level.lane == request.lane:
            level.live.append(request)
            level.size += 1
            return -self._descending[0] == number and not level.delayed
        self._share(number, level).append(request)
        return False

    def extend(self, requests: list[RequestQueued]) -> bool:
        """`append` of several new requests of one row each, one `queue_level` and one lane."""
        first = requests[0]
        number, lane = first.queue_level, first.lane
        level = self._open(number, lane)
        self.size += len(requests)
        self.rows += len(requests)
        if level.lane == lane:
            level.live.extend(requests)
            level.size += len(requests)
            return -self._descending[0] == number and not level.delayed
        shared = self._share(number, level)
        for request in requests:
            shared.append(request)
        return False

    def put_back(self, request: RequestQueued) -> None:
        """Queue a dispatched request again, at the front of its level."""
        number = request.queue_level
        level = self._open(number, request.lane)
        if level.lane != request.lane:
            level = self._share(number, level)
        level.put_back(request)
        self.size += 1
        self.rows += request.rows

    def delay(self, request: RequestQueued) -> None:
        """Move a queued request behind its level (S22)."""
        self._levels[request.queue_level].delay(request)

    def remove(self, request: RequestQueued, state: RequestState) -> None:
        """Remove a queued request and set its state to `state`."""
        level = self._levels[request.queue_level]
        request.state = state
        level.leave(request)
        self._gone(request.queue_level, level, 1, request.rows)

    def sweep(self) -> None:
        """Drop the places of requests that left, before one of them returns beside its old place."""
        for level in self._levels.values():
            level.sweep()

    def take(self, count: int) -> list[RequestQueued]:
        """Remove the `count` requests served first; the caller sets their state."""
        taken: list[RequestQueued] = []
        while self.size and count > len(taken):
            number = -self._descending[-1]
            level = self._levels[number]
            part = level.take(count - len(taken))
            self._gone(number, level, len(part), sum([request.rows for request in part]))
            taken = taken + part if taken else part
        return taken

    def earliest_order(self, none: int) -> int:
        """The smallest `order` at the head of any level; `none` when the queue is empty."""
        return min((level.earliest_order() for level in self._levels.values()), default=none)

    def drain(self) -> list[RequestQueued]:
        """Remove all requests; states stay as they are. In order of arrival, delayed ones last in order of delay."""
        everything = list(self)
        live = sorted((r for r in everything if r.state is QUEUED), key=lambda request: request.order)
        delayed = [r for r in everything if r.state is DELAYED]
        self._levels.clear()
        self._descending.clear()
        self.size = self.rows = 0
        return live + delayed

    def _open(self, number: int, lane: int) -> LevelQueue:
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = LevelQueue(lane)
            self._descending.insert(bisect_left(self._descending, -number), -number)
        return level

    def _share(self, number: int, level: LevelQueue) -> SharedLevel:
        """Returns the level, shared by several lanes until it is empty."""
        if isinstance(level, SharedLevel):
            return level
        shared = self._levels[number] = SharedLevel(level, self._turns)
        return shared

    def _gone(self, number: int, level: LevelQueue, count: int, rows: int) -> None:
        self.size -= count
        self.rows -= rows
        if not level.size:
            del self._levels[number]
            del self._descending[bisect_left(self._descending, -number)]
