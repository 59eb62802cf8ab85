"""The scheduler of one model: facts and an instant in, decisions out (items S1-S8, S20-S25). Pure: it never waits.

    observe(event, now_ns) -> decisions      a fact happened
    observe_all(events, now_ns) -> decisions the same for facts that arrived together: requests join one batch
    advance(now_ns) -> decisions             time passed
    next_wakeup() -> ns | None               when `advance` is next due, if nothing happens before

Each version of the model is queued and batched by itself, so one that no executor serves holds up no other;
`max_queue_size` counts over all versions (S7). A batch is decided on only when an instance could be fed (S25), so that
it grows as long as it can; ahead of a free instance (`prefetch`) goes only a batch that cannot grow any more (S4).
Requests that ran when an instance or executor failed run apart until the culprit is known (`poison_isolation`). Every
observed request ends once: its batch finishes, it is rejected or condemned here, or it was settled from outside. The
service does durability, fencing and settling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from batcher.scheduling.decisions import Decision, ReleaseReplies
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchLost,
    BatchReturned,
    BatchRunning,
    BatchTooLarge,
    CallRefused,
    ExecutorLost,
    ExecutorReturned,
    Observation,
    PolicyChanged,
    QueueHeld,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    RequestState,
    ResponsesBegun,
    ResponsesSeen,
    SlotFreed,
    VersionsAbandoned,
    VersionServed,
    VersionWithdrawn,
    WaveOpened,
)
from batcher.scheduling.queues.adaptive_batching import AdaptiveBatching
from batcher.scheduling.routing.prefix_routing import PrefixRouting
from charonia.errors import ErrorCode

from .dispatch import Arrivals, Dispatching
from .endings import Endings
from .model_state import Batch, ModelState
from .recalls import Recalls
from .routed_dispatch import adopt_routing, ended_routed, found_routed

QUEUED = RequestState.QUEUED
DELAYED = RequestState.DELAYED
SUSPECT = RequestState.SUSPECT
DISPATCHED = RequestState.DISPATCHED
ENDED = RequestState.ENDED

FIRST_RECOVERED_ORDER = -(1 << 62)
"""What a predecessor dispatched came before whatever is queued."""


class ModelScheduler:
    """Decides for one model which requests run together, where and when; see the module docstring.

    `batch_prefix` makes batch ids unique over owners: they are `<prefix>-<counter>`. `prefetch` is the number of
    batches an executor may hold beyond its slots, 0 if it is in this process. `lane_weights` are the shares of lanes in
    a level, 1 by default. `waits_for`: nothing is dispatched before this many requests wait (S43).
    """

    def __init__(
        self,
        batch_prefix: str,
        prefetch: int = 0,
        lane_weights: Mapping[int, int] | None = None,
        waits_for: int = 0,
    ) -> None:
        self._state = ModelState(prefetch, lane_weights or {})
        self._endings = Endings(self._state)
        self._recalls = Recalls(self._state)
        self._dispatching = Dispatching(self._state, batch_prefix)
        self._dispatching.waits_for = waits_for
        self._arrivals = Arrivals(self._state, self._decide)
        self._next_recovered = FIRST_RECOVERED_ORDER

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def observe(self, event: Observation, now_ns: int) -> list[Decision]:
        """A fact happened. Unknown ids and repeated facts are ignored."""
        return self.observe_all((event,), now_ns)

    def observe_all(self, events: Iterable[Observation], now_ns: int) -> list[Decision]:
        """Several facts arrived together: decide once, after the last."""
        decisions: list[Decision] = []
        state = self._state
        due = state.ledger.due
        if due.nearest_ns <= now_ns:
            self._endings.expire(now_ns, decisions)
        if type(events) is list:
            if events and type(events[0]) is RequestQueued and events[0].wave:
                batch = self._dispatching.dispatch_at_once(events, now_ns)
                if batch is not None:
                    return [batch]
            elif len(events) > 1:  # most observations that arrive together are alike
                events = events[self._arrivals.enqueue_alike(events, decisions) :]
        for event in events:
            if type(event) is RequestQueued:
                self._arrivals.enqueue(event, now_ns, decisions)
            else:
                self._fold(event, now_ns, decisions)
        if state.changed or state.paused or state.fresh_waits or due.nearest_ns <= now_ns:
            self._decide(now_ns, decisions)
        return decisions

    def advance(self, now_ns: int) -> list[Decision]:
        """Time passed: time-outs, deadlines and batching delays that are due by now."""
        return self.observe_all((), now_ns)

    def next_wakeup(self) -> int | None:
        """The instant `advance` is due, None when only a fact can change anything."""
        due = self._state.ledger.due
        due_ns = due.next_ns() if due.armed else 0
        for waits in (self._state.paused, self._state.fresh_waits):
            if waits:
                wait_ns = min(waits.values())
                if not due_ns or wait_ns < due_ns:
                    due_ns = wait_ns
        return due_ns or None

    # -- what statistics ask -------------------------------------------------------------------------------------------

    def pending_count(self) -> int:
        """The number of waiting requests, without dispatched ones (M2)."""
        return self._state.ledger.queued

    def queued_by_version(self) -> dict[int, int]:
        """The same for each version that has any."""
        waiting = {
            number: version.queue.size + version.isolation.size for number, version in self._state.versions.items()
        }
        if self._state.ledger.has_waves:
            for request in self._state.ledger.known.values():
                if request.wave and request.state is not DISPATCHED:
                    waiting[request.version] += request.count - 1
        return {number: size for number, size in waiting.items() if size}

    def adaptive(self) -> dict[int, AdaptiveBatching]:
        """The current choice for each version, where the configuration has a target."""
        return {n: version.adaptive for n, version in self._state.versions.items() if version.adaptive is not None}

    def routing(self) -> dict[int, PrefixRouting]:
        """What is known of the executors of each version, where prompts decide between them."""
        return {n: version.routing for n, version in self._state.versions.items() if version.routing is not None}

    def find(self, request_id: bytes) -> RequestQueued | None:
        """Returns a request that has not ended."""
        return self._state.ledger.known.get(request_id)

    def waiting(self) -> list[RequestQueued]:
        """The waiting requests, in no particular order."""
        return [r for r in self._state.ledger.known.values() if r.state in (QUEUED, DELAYED, SUSPECT)]

    def unended(self) -> list[RequestQueued]:
        """All requests that have not ended, in no particular order."""
        return list(self._state.ledger.known.values())

    def holding(self) -> list[tuple[str, int, list[RequestQueued]]]:
        """(executor, version, requests) of the batches that hold an instance, or wait for one at their executor.
        Batches that have freed their instance and are not finished come without an executor.
        """
        return [("" if b.freed else b.executor, b.version, b.requests) for b in self._state.batches.values()]

    def outstanding(self) -> dict[str, int]:
        """The number of unfinished batches by executor."""
        counts: dict[str, int] = {}
        for batch in self._state.batches.values():
            counts[batch.executor] = counts.get(batch.executor, 0) + 1
        return counts

    def outstanding_requests(self) -> int:
        """Requests in those batches."""
        return sum(request.count for batch in self._state.batches.values() for request in batch.requests)

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _fold(self, event: Observation, now_ns: int, decisions: list[Decision]) -> None:
        match event:
            case BatchFinished():
                self._finish(event, now_ns, decisions)
            case BatchReturned():
                batch = self._state.batches.get(event.batch_id)
                if batch is not None and batch.executor == event.executor:
                    self._recalls.take_back(event.batch_id, "its executor gave it back", now_ns, decisions)
            case BatchTooLarge():
                self._recalls.divide(event, now_ns, decisions)
            case SlotFreed():
                self._free(event)
            case ResponsesBegun():
                self._begin(event)
            case ResponsesSeen():
                self._endings.seen(event, decisions)
            case BatchDied():
                self._recalls.die(event, now_ns, decisions)
            case BatchLost():
                self._recalls.lose_unseen(event, now_ns, decisions)
            case RequestCancelled():
                self._endings.cancel(event, decisions)
            case RequestSettled():
                self._endings.drop(event.id, decisions)
            case CallRefused():
                self._endings.end_one(event.id, ErrorCode.UNAVAILABLE, event.message, "REJECTED", decisions)
            case WaveOpened():
                self._endings.open_wave(event.id, decisions)
            case QueueHeld():
                self._state.ledger.is_held = event.held
                if event.held:
                    self._endings.open_waves(decisions)
                self._state.fresh_waits.clear()
                for number in self._state.versions:
                    self._state.touch(number)
            case VersionsAbandoned():
                self._endings.abandon(event, decisions)
            case VersionServed():
                self._recalls.served(event.executor, now_ns)
                version = self._state.version(event.version)
                seat = version.instances.seats.get(event.executor)
                is_same = seat is not None and seat.slots and seat.content_hash == event.content_hash
                if version.routing is not None and not is_same:
                    version.routing.loaded(event.executor)
                version.instances.serve(event.executor, event.content_hash, event.slots)
                self._state.touch(event.version)
            case VersionWithdrawn():
                version = self._state.version(event.version)
                if version.routing is not None:
                    version.routing.lose(event.executor)
                version.instances.withdraw(event.executor)
                self._state.touch(event.version)
            case ExecutorLost():
                self._recalls.lose(event, now_ns, decisions)
            case ExecutorReturned():
                self._recalls.returned(event.executor)
            case BatchRunning():
                self._adopt(event, now_ns)
            case PolicyChanged():
                self._change_policy(event, now_ns, decisions)
            case RequestQueued():
                self._arrivals.enqueue(event, now_ns, decisions)

    def _finish(self, event: BatchFinished, now_ns: int, decisions: list[Decision]) -> None:
        state = self._state
        batch = state.batches.get(event.batch_id)
        if batch is None or batch.executor != event.executor:
            if event.replies_held and event.batch_id not in state.held and batch is None:
                # Given up before, or a predecessor's: these answers are settled and no others will come.
                decisions.append(ReleaseReplies(event.batch_id))
            return
        del state.batches[event.batch_id]
        ledger = state.ledger
        known = ledger.known
        for request in batch.requests:
            request.state = ENDED
            del known[request.id]
        if ledger.due.armed:
            for request in batch.requests:
                ledger.due.disarm(request)
        # a version without slots and requests may be removed already
        was_freed = batch.freed
        version = state.free_slot(batch)
        if version.adaptive is not None:
            state.measure(version.adaptive, batch, was_freed, now_ns)
        if version.routing is not None:
            ended_routed(state, version.routing, batch.requests, event.tokens)
        if state.kept:
            state.released(batch)
        if batch.via_owner:
            version.releases.finish(batch.first)
            state.held.add(event.batch_id)
        if not version.is_quiet():
            state.touch(batch.version)

    def _free(self, event: SlotFreed) -> None:
        batch = self._state.batches.get(event.batch_id)
        # a batch that runs apart has its executor for itself until it has ended
        if batch is not None and batch.executor == event.executor and not batch.apart:
            self._state.free_slot(batch)
            self._state.touch(batch.version)

    def _begin(self, event: ResponsesBegun) -> None:
        batch = self._state.batches.get(event.batch_id)
        if batch is not None and batch.executor == event.executor:
            routing = self._state.version(batch.version).routing
            for request in batch.requests:
                request.responding |= request.id in event.ids
                if routing is not None and request.id in event.ids:
                    routing.began(request.id)

    def _adopt(self, event: BatchRunning, now_ns: int) -> None:
        if event.batch_id in self._state.batches or event.batch_id in self._state.held:
            return
        version = self._state.version(event.version)
        requests: list[RequestQueued] = []
        for request in event.requests:
            known = self._state.ledger.known.get(request.id)
            if known is None:
                known = request
                known.attempt = max(known.attempt, 1)
                known.order = self._next_recovered
                self._next_recovered += 1
                known.state = DISPATCHED
                self._state.ledger.known[known.id] = known
            elif known.state is DISPATCHED:
                continue
            else:
                self._state.remove(known, DISPATCHED)
                known.attempt = max(known.attempt, request.attempt, 1)
            if known.deadline_ns:
                self._state.ledger.has_deadlines = True
                self._state.ledger.due.arm(known)
            requests.append(known)
        version.queue.sweep()
        requests.sort(key=lambda request: request.order)
        version.instances.occupy(event.executor)
        via_owner = event.via_owner and bool(requests)
        first = requests[0].order if requests else 0
        batch = Batch(event.executor, event.version, requests, now_ns, first, via_owner)
        self._state.batches[event.batch_id] = batch
        if version.routing is not None:
            found_routed(self._state, batch)
        if via_owner:
            version.releases.open(first, event.batch_id)
        self._state.touch(event.version)

    def _change_policy(self, event: PolicyChanged, now_ns: int, decisions: list[Decision]) -> None:
        routed = self._state.turns.shares is not None
        changed = self._state.ledger.adopt_policy(event.interface, event.strategy)
        adopt_routing(self._state, event.interface)
        if not changed and routed is (self._state.turns.shares is not None):
            return
        rules = self._state.ledger.batching
        assert rules is not None
        self._state.turns.quantum_rows = rules.max_rows if rules.dynamic else 1
        for number, version in self._state.versions.items():
            for request in version.queue.drain():
                self._state.ledger.uncount(request)
                if request.wave:
                    self._state.ledger.burst(request, decisions)
                elif self._state.ledger.admit(request, now_ns, decisions):
                    self._state.ledger.count_again(request)
                    self._state.set_lane(request)
                    version.queue.append(request)
                    if request.delayed:
                        version.queue.delay(request)
            for request in version.isolation.fit(rules):
                self._state.remove(request)
                self._state.ledger.admit(request, now_ns, decisions)
            self._state.touch(number)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _decide(self, now_ns: int, decisions: list[Decision]) -> None:
        if self._state.ledger.due.nearest_ns <= now_ns:
            self._endings.expire(now_ns, decisions)
        if self._state.paused or self._state.fresh_waits:
            self._state.touch_due(now_ns)
        self._dispatching.decide(now_ns, decisions)
