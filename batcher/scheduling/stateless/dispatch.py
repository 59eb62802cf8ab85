"""Queues accepted requests (`Arrivals`), and dispatches batches of them when facts are folded (`Dispatching`). Pure.

`dynamic_batching` decides which requests go together, `model_state` which executors may take them. Each request on the
full way passes both classes; a wave that meets a free instance passes the second alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

from batcher.scheduling.decisions import BurstWave, Decision, DispatchBatch, JoinEntries, ReleaseReplies
from batcher.scheduling.observations import WAVE_BIT, Observation, RequestQueued, RequestState
from batcher.scheduling.poison.poison_isolation import Suspects
from batcher.scheduling.queues.dynamic_batching import NO_BOUNDARY, BatchRules, Formation, form_batch
from batcher.scheduling.queues.ledger import NEVER_NS, QUEUE_FULL, RequestLedger
from charonia.errors import ErrorCode

from .model_state import Batch, ModelState, ModelVersion, Seat
from .routed_dispatch import RoutedDispatching, dispatched_routed

DISPATCHED = RequestState.DISPATCHED


class Dispatching:
    """Dispatches the batches of one model; `batch_prefix` as the scheduler has it."""

    __slots__ = ("_batch_prefix", "_next_batch", "_routed", "_state", "waits_for")

    def __init__(self, state: ModelState, batch_prefix: str) -> None:
        self._state = state
        self._batch_prefix = batch_prefix
        self._next_batch = 0
        self._routed = RoutedDispatching(state, self._batch_of)
        self.waits_for = 0
        """For tests (S43): no batch is dispatched before this many requests wait."""

    def decide(self, now_ns: int, decisions: list[Decision]) -> None:
        """Process every version that changed: release answers, dispatch batches that are due."""
        while self._state.changed:
            number = self._state.changed.popitem()[0]
            version = self._state.versions.get(number)
            if version is None:
                continue
            if version.releases.firsts:
                earliest = min(version.queue.earliest_order(NO_BOUNDARY), version.isolation.earliest_order())
                for batch_id in version.releases.release(earliest):
                    self._state.held.discard(batch_id)
                    decisions.append(ReleaseReplies(batch_id))
            ledger = self._state.ledger
            if ledger.batching is not None and not ledger.is_held and not (self.waits_for and self._waits()):
                if version.isolation.size or self._state.kept or self._state.fresh_waits:
                    self._dispatch_suspects(version, ledger.batching, now_ns, decisions)
                if version.routing is not None:
                    self._routed.dispatch(version, version.routing, ledger.batching, now_ns, decisions)
                else:
                    self._dispatch(version, ledger.batching, now_ns, decisions)
            if version.is_idle():
                del self._state.versions[number]

    def dispatch_at_once(self, arrived: Sequence[Observation], now_ns: int) -> DispatchBatch | None:
        """Dispatch newly arrived waves to a free instance without queueing them, if the version's queue is empty and
        they form one batch. None in any other case: then they are queued like any request.
        """
        state, first = self._state, arrived[0]
        assert type(first) is RequestQueued
        ledger = state.ledger
        rules, version = ledger.batching, state.versions.get(first.version)
        if rules is None or version is None or version.adaptive is not None or not version.is_quiet():
            return None
        if state.changed or state.paused or state.kept or state.fresh_waits or self.waits_for:
            return None
        several = len(arrived) > 1
        waves: list[RequestQueued] = []
        rows = 0
        for wave in arrived:
            if type(wave) is not RequestQueued or not wave.wave:
                return None
            if wave.version != first.version or wave.signature != first.signature:
                return None
            waves.append(wave)
            queueing = ledger.queueing
            level, policy = (0, queueing.only) if queueing.only is not None else queueing.place(wave.level)
            wave.queue_level = level
            if not _may_queue(ledger, wave, now_ns, policy.max_queue_size) or (several and policy.max_queue_size):
                return None
            if wave.id in ledger.known:
                return None
            rows += wave.rows
        if several and (not rules.dynamic or rows > rules.max_rows or len({wave.id for wave in waves}) < len(waves)):
            return None
        if rules.delay_ns and rows < rules.largest_preferred:
            return None
        seat = version.instances.best
        if seat is None or seat.free_slots <= 0:
            return None
        ledger.has_waves = True
        for wave in waves:
            ledger.known[wave.id] = wave
            wave.order = state.next_order
            state.next_order += 1
            wave.deadline_ns = 0  # once dispatched, its requests are ended at their deadlines by the gateway
        return self._batch_of(version, seat, waves, rules, now_ns)

    def _waits(self) -> bool:
        if self._state.ledger.queued >= self.waits_for:
            self.waits_for = 0
        return self.waits_for > 0

    def _dispatch(self, version: ModelVersion, rules: BatchRules, now_ns: int, decisions: list[Decision]) -> None:
        """Send batches while an executor can take one and the rules do not delay them."""
        queue, instances, releases, isolation = version.queue, version.instances, version.releases, version.isolation
        if rules.target_p99_ns or version.adaptive is not None:
            rules = version.rules(rules, now_ns)
        in_turn = rules.preserve_ordering and rules.several
        while queue.size and (seat := instances.best) is not None:
            if in_turn and self._is_running(version):
                return
            boundary = NO_BOUNDARY
            if rules.preserve_ordering and (releases.firsts or isolation.size):
                head = next(iter(queue)).order
                boundary = min(releases.boundary(head), isolation.boundary(head))
            formation = form_batch(queue.in_order(), rules, now_ns, boundary)
            if not formation.size:
                version.pause = formation
                self._state.paused[version.number] = formation.until_ns
                return
            if seat.free_slots <= 0 and not formation.saturated:
                # Only a batch that cannot grow goes ahead of a free instance (S4); one more row count may end that.
                version.pause = Formation(0, False, NEVER_NS, rules.largest_preferred, formation.signature)
                return
            requests = queue.take(formation.size)
            self._state.ledger.uncount_all(requests)
            decisions.append(self._batch_of(version, seat, requests, rules, now_ns))

    def _dispatch_suspects(
        self, version: ModelVersion, rules: BatchRules, now_ns: int, decisions: list[Decision]
    ) -> None:
        """Send the groups that run by themselves first: they are older, and few."""
        isolation, state = version.isolation, self._state
        state.fresh_waits.pop(version.number, None)
        for group in isolation:
            seat = version.instances.best
            if group.apart:
                waits = now_ns < group.until_ns
                seat = state.kept.choose(version, state.batches.values(), fresh=waits)
                state.refresh()
                if seat is None and waits:
                    earliest_ns = state.fresh_waits.get(version.number, group.until_ns)
                    state.fresh_waits[version.number] = min(earliest_ns, group.until_ns)
            in_turn = rules.preserve_ordering and rules.several
            if seat is not None and not (in_turn and self._is_running(version)):
                requests = isolation.take(group)
                for request in requests:
                    state.ledger.uncount(request)
                decisions.append(self._batch_of(version, seat, requests, rules, now_ns, suspects=group))
        if not isolation.needs_executor and state.kept.give_up_idle(version, state.batches.values()):
            state.refresh()

    def _is_running(self, version: ModelVersion) -> bool:
        """Responses that are visible as they are made, and in order (S6), belong to one batch at a time."""
        return any(batch.version == version.number for batch in self._state.batches.values())

    def _batch_of(
        self,
        version: ModelVersion,
        seat: Seat,
        requests: list[RequestQueued],
        rules: BatchRules,
        now_ns: int,
        *,
        suspects: Suspects | None = None,
    ) -> DispatchBatch:
        """Dispatch requests that have left the queue to an executor."""
        self._next_batch += 1
        batch_id = f"{self._batch_prefix}-{self._next_batch}"
        attempts: list[int] = []
        for request in requests:
            request.state = DISPATCHED
            request.attempt = attempt = request.attempt + 1
            attempts.append(attempt)
        if self._state.ledger.has_deadlines:
            for request in requests:
                request.timeout_ns = 0
                if request.wave:
                    request.deadline_ns = 0  # once dispatched, its requests are ended at their deadlines by the gateway
                self._state.ledger.due.arm(request)
        first = requests[0].order
        via_owner = rules.preserve_ordering and not rules.several
        batch = Batch(seat.executor, version.number, requests, now_ns, first, via_owner, suspects)
        self._state.batches[batch_id] = batch
        if version.routing is not None:
            dispatched_routed(self._state, version, batch)
        if version.adaptive is not None:
            version.adaptive.dispatched(sum(request.rows for request in requests), now_ns)
            batch.started_ns = now_ns if seat.free_slots > 0 else 0
        version.instances.occupy(seat.executor)
        if via_owner:
            version.releases.open(first, batch_id)
        kind: Literal["", "group", "apart"] = ""
        if suspects is not None:
            kind = "apart" if suspects.apart else "group"
        return DispatchBatch(
            batch_id, seat.executor, version.number, seat.content_hash, requests, tuple(attempts), via_owner, kind
        )


def _may_queue(ledger: RequestLedger, wave: RequestQueued, now_ns: int, limit: int) -> bool:
    """Whether a wave may be queued as it is, on a level of at most `limit` requests (0: no bound)."""
    rules = ledger.batching
    if rules is None or ledger.is_held or wave.rows > rules.max_rows or 0 < wave.deadline_ns <= now_ns:
        return False
    if limit and ledger.levels.get(wave.queue_level, 0) + wave.count > limit:
        return False
    return ledger.runs_waves_whole or (wave.count == 1 and not rules.dynamic)


class Arrivals:
    """Queues the accepted requests of one model, in order: bounds, levels, time-outs (S7, S8, S20-S23). `decide(now_ns,
    decisions)` dispatches batches. Most requests of a log entry are alike, and are queued together without a check of
    each.
    """

    __slots__ = ("_decide", "_state")

    def __init__(self, state: ModelState, decide: Callable[[int, list[Decision]], None]) -> None:
        self._state = state
        self._decide = decide

    def enqueue(self, request: RequestQueued, now_ns: int, decisions: list[Decision]) -> None:
        """Queue one request, or end it if it may not be queued."""
        ledger = self._state.ledger
        if request.id in ledger.known:
            self._read_again(request, decisions)
            return
        queueing = ledger.queueing
        level, policy = (0, queueing.only) if queueing.only is not None else queueing.place(request.level)
        request.queue_level = level
        limit = policy.max_queue_size
        if request.wave:
            ledger.has_waves = True
            if not _may_queue(ledger, request, now_ns, limit):
                self._burst(request, decisions)
                return
        # A request that was admitted once, perhaps by another owner, stays admitted: the limit is for new ones.
        elif limit and not ledger.was_admitted(request) and ledger.levels.get(level, 0) >= limit:
            self._decide(now_ns, decisions)  # dispatching earlier requests may free capacity
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

    def _read_again(self, again: RequestQueued, decisions: list[Decision]) -> None:
        """A known request was read from another entry. If it waits, it goes behind the requests of the level where it
        was read last, with what is known of it. No bound applies: it was admitted before.
        """
        state = self._state
        known = state.ledger.known[again.id]
        if known is again:
            return
        decisions.append(JoinEntries(known, again))
        known.level = again.level  # should it be queued again
        if known.wave or known.state not in (RequestState.QUEUED, RequestState.DELAYED):
            return
        state.remove(known)
        again.attempt, again.away_ns, again.delayed = known.attempt, known.away_ns, known.delayed
        again.losses_apart, again.responding = known.losses_apart, known.responding
        again.order = state.next_order
        state.next_order += 1
        state.ledger.known[again.id] = again
        state.ledger.count_again(again)
        state.set_lane(again)
        queue = state.version(again.version).queue
        queue.append(again)
        if again.delayed:
            queue.delay(again)

    @staticmethod
    def _burst(wave: RequestQueued, decisions: list[Decision]) -> None:
        wave.state = RequestState.ENDED
        decisions.append(BurstWave(wave))

    def _meets_others(self, request: RequestQueued, decisions: list[Decision]) -> bool:
        """Bursts waves whose requests could join a batch of single requests; returns whether this one was burst. Those
        are waves that a configured delay holds for more requests, and waves of one that wait for a running
        batch: bursting costs them no time.
        """
        rules = self._state.ledger.batching
        version = self._state.versions.get(request.version)
        if rules is None or version is None or not version.queue.rows:
            return False
        if not rules.delay_ns:
            return self._meets_neighbours(request, version, rules, decisions)
        if version.queue.rows >= rules.largest_preferred:
            return False
        counterpart = request.signature ^ WAVE_BIT
        others = [other for other in version.queue if other.signature == counterpart]
        if request.wave:
            if others:
                self._burst(request, decisions)
            return bool(others)
        for wave in others:
            self._state.remove(wave)
            self._state.ledger.burst(wave, decisions)
        return False

    def _meets_neighbours(
        self, request: RequestQueued, version: ModelVersion, rules: BatchRules, decisions: list[Decision]
    ) -> bool:
        """The same if no request is delayed: the last of the waiting requests may share its batch."""
        if request.wave and request.count > 1:
            return False
        seat = version.instances.best
        if seat is not None and seat.free_slots > 0:
            return False  # they leave in this tick
        rows, counterpart = request.rows, request.signature ^ WAVE_BIT
        others: list[RequestQueued] = []
        for other in version.queue.last(request.queue_level):
            rows += other.rows
            if other.signature != counterpart or other.count > 1 or rows > rules.largest_preferred:
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
        """`enqueue` for the leading events that are requests like the first and may all be queued; returns how many.
        Only with one level that has neither bound nor time-out, and for requests of one row without deadline.
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
        queued = cast(list[RequestQueued], events[:count])
        by_id = {request.id: request for request in queued}
        known = ledger.known
        if not queued or len(by_id) < count or not known.keys().isdisjoint(by_id):
            return 0  # known requests are handled one by one
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
        """Try to form a batch if the newly queued requests, with this signature, may complete one."""
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
