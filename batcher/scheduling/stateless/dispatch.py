"""From queues and free instances to batches: what a `ModelScheduler` decides once the facts are folded. Pure.

Which requests go together is `dynamic_batching`'s, who may take them `model_state`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from batcher.scheduling.decisions import Decision, DispatchBatch, ReleaseReplies
from batcher.scheduling.observations import Observation, QueuedRequest, RequestQueued, RequestState
from batcher.scheduling.poison.poison_isolation import Suspects
from batcher.scheduling.queues.dynamic_batching import NO_BOUNDARY, BatchRules, Formation, form_batch
from batcher.scheduling.queues.ledger import NEVER_NS

from .model_state import Batch, ModelState, ModelVersion, Seat

DISPATCHED = RequestState.DISPATCHED


class Dispatching:
    """Dispatches the batches of one model; `batch_prefix` as the scheduler has it. `is_held`: it dispatches none."""

    __slots__ = ("_batch_prefix", "_next_batch", "_state", "is_held", "waits_for")

    def __init__(self, state: ModelState, batch_prefix: str) -> None:
        self._state = state
        self._batch_prefix = batch_prefix
        self._next_batch = 0
        self.is_held = False
        self.waits_for = 0
        """For tests (S43): nothing is dispatched before so many requests wait."""

    def decide(self, now_ns: int, decisions: list[Decision]) -> None:
        """Look at every version that changed: answer what may be answered, dispatch what is due."""
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
            if self._state.ledger.batching is not None and not self.is_held and not (self.waits_for and self._waits()):
                if version.isolation.size or self._state.kept or self._state.fresh_waits:
                    self._dispatch_suspects(version, self._state.ledger.batching, now_ns, decisions)
                self._dispatch(version, self._state.ledger.batching, now_ns, decisions)
            if version.is_idle():
                del self._state.versions[number]

    def dispatch_at_once(self, arrived: Sequence[Observation], now_ns: int) -> DispatchBatch | None:
        """Dispatch waves that have just arrived to a free instance, where nothing waits and they make one batch.

        None where more has to be looked at: then they are queued like any request; they skip the queue and no more.
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
        waves: list[QueuedRequest] = []
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
            if not ledger.takes(wave, now_ns, policy.max_queue_size) or (several and policy.max_queue_size):
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
            wave.deadline_ns = 0  # its gateway tells callers when their deadline comes
        return self._batch_of(version, seat, waves, rules, now_ns)

    def _waits(self) -> bool:
        if self._state.ledger.queued >= self.waits_for:
            self.waits_for = 0
        return self.waits_for > 0

    def _dispatch(self, version: ModelVersion, rules: BatchRules, now_ns: int, decisions: list[Decision]) -> None:
        """Send batches as long as there is an executor to take one and the rules do not say to wait."""
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
        """Send the groups that run by themselves, before all else: they are older, and few."""
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
        """Responses that are seen as they come, and in order (S6), are those of one batch at a time."""
        return any(batch.version == version.number for batch in self._state.batches.values())

    def _batch_of(
        self,
        version: ModelVersion,
        seat: Seat,
        requests: list[QueuedRequest],
        rules: BatchRules,
        now_ns: int,
        *,
        suspects: Suspects | None = None,
    ) -> DispatchBatch:
        """These requests, which have left the queue, go to an executor."""
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
                    request.deadline_ns = 0  # its gateway tells callers when their deadline comes
                self._state.ledger.due.arm(request)
        first = requests[0].order
        via_owner = rules.preserve_ordering and not rules.several
        batch = Batch(seat.executor, version.number, requests, now_ns, first, via_owner, suspects)
        self._state.batches[batch_id] = batch
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
