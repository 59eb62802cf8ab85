"""Requests that are accepted go into the queue of their version: bounds, levels, time-outs (S7, S8, S20-S23). Pure.

Most of what shares a log entry is alike, and is queued together without a look at each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from batcher.scheduling.decisions import BurstWave, Decision
from batcher.scheduling.observations import Observation, QueuedRequest, RequestQueued, RequestState
from batcher.scheduling.queues.dynamic_batching import BatchRules
from batcher.scheduling.queues.ledger import QUEUE_FULL
from charonia.errors import ErrorCode

from .model_state import ModelState, ModelVersion


class Arrivals:
    """The arrivals of one model, in order. `decide(now_ns, decisions)` dispatches what may be."""

    __slots__ = ("_decide", "_state")

    def __init__(self, state: ModelState, decide: Callable[[int, list[Decision]], None]) -> None:
        self._state = state
        self._decide = decide

    def enqueue(self, request: QueuedRequest, now_ns: int, decisions: list[Decision]) -> None:
        """Queue one request, or end it where it may not be queued."""
        ledger = self._state.ledger
        if request.id in ledger.known:
            return
        queueing = ledger.queueing
        level, policy = (0, queueing.only) if queueing.only is not None else queueing.place(request.level)
        request.queue_level = level
        limit = policy.max_queue_size
        if request.wave:
            ledger.has_waves = True
            if not ledger.takes(request, now_ns, limit):
                self._burst(request, decisions)
                return
        # A request that was admitted once, perhaps by another owner, is so again: the limit is for new ones.
        elif limit and not ledger.was_admitted(request) and ledger.levels.get(level, 0) >= limit:
            self._decide(now_ns, decisions)  # what came with it may leave room
            if ledger.levels.get(level, 0) >= limit:
                ledger.reject(request, ErrorCode.UNAVAILABLE, QUEUE_FULL, "REJECTED", decisions)
                return
        if ledger.has_waves and self._meets_others(request, decisions):
            return
        request.order = self._state.next_order
        self._state.next_order += 1
        # The other reasons do not exist for a new request, and one row always fits.
        if request.deadline_ns or request.rows > 1:
            ledger.has_deadlines |= request.deadline_ns > 0
            if not request.wave and not ledger.admit(request, now_ns, decisions):
                return
        ledger.known[request.id] = request
        version = self._state.versions.get(request.version) or self._state.version(request.version)
        if request.lane:
            self._state.set_lane(request)
        is_last = version.queue.append(request)
        ledger.levels[level] = ledger.levels.get(level, 0) + request.count
        ledger.queued += request.count
        timeout_us = policy.default_timeout_us and policy.timeout_us(request.timeout_us)
        if timeout_us:
            request.timeout_ns = request.enqueued_ns + timeout_us * 1000
        if timeout_us or request.deadline_ns:
            ledger.due.arm(request)
        self._grown(version, request.signature, is_last, request.enqueued_ns)

    @staticmethod
    def _burst(wave: QueuedRequest, decisions: list[Decision]) -> None:
        wave.state = RequestState.ENDED
        decisions.append(BurstWave(wave))

    def _meets_others(self, request: QueuedRequest, decisions: list[Decision]) -> bool:
        """Burst waves that would share a batch with single requests if they were such; whether this one was burst.

        Those are waves that wait for company while the configuration delays them, and waves of one behind an execution:
        a burst costs them nothing, as they wait all the same.
        """
        rules = self._state.ledger.batching
        version = self._state.versions.get(request.version)
        if rules is None or version is None or not version.queue.rows:
            return False
        if not rules.delay_ns:
            return self._meets_neighbours(request, version, rules, decisions)
        if version.queue.rows >= rules.largest_preferred:
            return False
        others = [other for other in version.queue if other.signature == request.signature ^ 1]
        if request.wave:
            if others:
                self._burst(request, decisions)
            return bool(others)
        for wave in others:
            self._state.remove(wave)
            self._state.ledger.burst(wave, decisions)
        return False

    def _meets_neighbours(
        self, request: QueuedRequest, version: ModelVersion, rules: BatchRules, decisions: list[Decision]
    ) -> bool:
        """The same where nothing waits for company: of the requests before it, the last ones may share its batch."""
        if request.wave and request.count > 1:
            return False
        seat = version.instances.best
        if seat is not None and seat.free_slots > 0:
            return False  # they leave in this tick
        rows = request.rows
        others: list[QueuedRequest] = []
        for other in version.queue.last(request.queue_level):
            rows += other.rows
            if other.signature != request.signature ^ 1 or other.count > 1 or rows > rules.largest_preferred:
                break
            if request.wave:
                self._burst(request, decisions)
                return True
            others.append(other)
        for wave in reversed(others):
            self._state.remove(wave)
            self._state.ledger.burst(wave, decisions)
        return False

    def enqueue_alike(self, events: list[Observation], decisions: list[Decision]) -> int:
        """`enqueue` of as many of the first events as are requests like the first and may all be queued; how many.

        That is where one level has neither bound nor time-out, and they have one row and no deadline.
        """
        ledger = self._state.ledger
        policy = ledger.queueing.only
        first = events[0]
        if policy is None or policy.max_queue_size or policy.default_timeout_us or type(first) is not RequestQueued:
            return 0
        number, signature, lane = first.version, first.signature, first.lane
        unlike = (
            place
            for place, request in enumerate(events)
            if type(request) is not RequestQueued
            or request.rows != 1
            or request.wave
            or request.deadline_ns
            or request.signature != signature
            or request.version != number
            or request.lane != lane
        )
        count = next(unlike, len(events))
        queued = cast(list[QueuedRequest], events[:count])
        by_id = {request.id: request for request in queued}
        known = ledger.known
        if not queued or len(by_id) < count or not known.keys().isdisjoint(by_id):
            return 0  # what was seen before is told apart one by one
        if ledger.has_waves:
            self._meets_others(queued[0], decisions)
        known |= by_id
        for order, request in enumerate(queued, self._state.next_order):
            request.order = order
        self._state.next_order += count
        if lane:
            for request in queued:
                self._state.set_lane(request)
        version = self._state.version(number)
        is_last = version.queue.extend(queued)
        ledger.levels[0] = ledger.levels.get(0, 0) + count
        ledger.queued += count
        enqueued_ns = min([r.enqueued_ns for r in queued]) if version.pause is not None else first.enqueued_ns
        self._grown(version, signature, is_last, enqueued_ns)
        return count

    def _grown(self, version: ModelVersion, signature: int, is_last: bool, enqueued_ns: int) -> None:
        """Look at the queue of a version if what was queued, with this signature, may make a batch."""
        pause = version.pause
        if pause is None:
            if version.instances.best is not None:
                self._state.changed[version.number] = None
        elif (
            not is_last
            or version.queue.rows >= pause.until_rows
            or signature != pause.signature
            or enqueued_ns < pause.oldest_ns
        ):
            self._state.touch(version.number)
