"""The scheduler of one model: facts and an instant in, decisions out (items S1-S8, S20-S25). Pure: it never waits.

    observe(event, now_ns) -> decisions      a fact happened
    observe_all(events, now_ns) -> decisions the same for facts that arrived together: requests join one batch
    advance(now_ns) -> decisions             time passed
    next_wakeup() -> ns | None               when `advance` is next due, if nothing happens before

Each version of the model is queued and batched by itself, so one that nobody serves holds up no other; `max_queue_size`
counts over all versions (S7). A batch is decided on only when an instance could be fed (S25), so that it grows as long
as it can; ahead of a free instance (`prefetch`) goes only a batch that cannot grow any more (S4).
Every observed request ends once: its batch finishes, it is rejected here, or somebody else settled it.
Durability, fencing and settling are the service's.
"""

from __future__ import annotations

from collections.abc import Iterable

from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface

from .decisions import Decision, DispatchBatch, ReleaseReplies
from .dynamic_batching import NO_BOUNDARY, BatchRules, Formation, form_batch
from .ledger import DEADLINE_PASSED, NOT_READY, QUEUE_FULL, TIMED_OUT, RequestLedger
from .model_version import Batch, ModelVersion
from .observations import (
    BatchFinished,
    BatchReturned,
    BatchRunning,
    ExecutorLost,
    Observation,
    PolicyChanged,
    QueuedRequest,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    RequestState,
    VersionsAbandoned,
    VersionServed,
    VersionWithdrawn,
)
from .queueing import NEVER_NS, delays

QUEUED = RequestState.QUEUED
DELAYED = RequestState.DELAYED
DISPATCHED = RequestState.DISPATCHED
ENDED = RequestState.ENDED

FIRST_RECOVERED_ORDER = -(1 << 62)
"""What a predecessor dispatched came before whatever is queued."""


class ModelScheduler:
    """Decides for one model which requests run together, where and when; see the module's head.

    `batch_prefix` makes batch ids unique over owners: they are `<prefix>-<counter>`. `prefetch` is the number of
    batches an executor may hold beyond its slots, 0 where it is in this process.
    """

    def __init__(self, batch_prefix: str, prefetch: int = 0) -> None:
        self._batch_prefix = batch_prefix
        self._prefetch = prefetch
        self._ledger = RequestLedger()
        self._versions: dict[int, ModelVersion] = {}
        self._batches: dict[str, Batch] = {}
        self._held: set[str] = set()
        self._changed: dict[int, None] = {}
        self._paused: dict[int, int] = {}
        self._next_order = 0
        self._next_recovered = FIRST_RECOVERED_ORDER
        self._next_batch = 0

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def observe(self, event: Observation, now_ns: int) -> list[Decision]:
        """A fact happened. Unknown ids and repeated facts are ignored (F11)."""
        return self.observe_all((event,), now_ns)

    def observe_all(self, events: Iterable[Observation], now_ns: int) -> list[Decision]:
        """Several facts arrived together: decide once, after the last."""
        decisions: list[Decision] = []
        if self._ledger.due.nearest_ns <= now_ns:
            self._expire(now_ns, decisions)
        for event in events:
            if type(event) is RequestQueued:
                self._enqueue(event, now_ns, decisions)
            else:
                self._fold(event, now_ns, decisions)
        if self._changed or self._paused or self._ledger.due.nearest_ns <= now_ns:
            self._decide(now_ns, decisions)
        return decisions

    def advance(self, now_ns: int) -> list[Decision]:
        """Time passed: time-outs, deadlines and batching delays that are due by now."""
        return self.observe_all((), now_ns)

    def next_wakeup(self) -> int | None:
        """The instant `advance` is due, None when only a fact can change anything."""
        due_ns = self._ledger.due.next_ns()
        if self._paused:
            pause_ns = min(self._paused.values())
            if not due_ns or pause_ns < due_ns:
                due_ns = pause_ns
        return due_ns or None

    # -- what statistics ask -------------------------------------------------------------------------------------------

    def pending_count(self) -> int:
        """Requests that wait in the queue, not those given to executors (M2)."""
        return self._ledger.queued

    def queued_by_level(self) -> dict[int, int]:
        """The same for each priority level that has any; level 0 when the model has no levels."""
        return dict(self._ledger.levels)

    def queued_by_version(self) -> dict[int, int]:
        """The same for each version that has any."""
        return {number: version.queue.size for number, version in self._versions.items() if version.queue.size}

    def outstanding(self) -> dict[str, int]:
        """Executor to the number of batches it was given and has not finished or returned."""
        counts: dict[str, int] = {}
        for batch in self._batches.values():
            counts[batch.executor] = counts.get(batch.executor, 0) + 1
        return counts

    def outstanding_requests(self) -> int:
        """Requests in those batches."""
        return len(self._ledger.known) - self._ledger.queued

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _fold(self, event: Observation, now_ns: int, decisions: list[Decision]) -> None:
        match event:
            case BatchFinished():
                self._finish(event, decisions)
            case BatchReturned():
                batch = self._batches.get(event.batch_id)
                if batch is not None and batch.executor == event.executor:
                    for request in batch.requests:
                        request.attempt -= 1
                    self._take_back(event.batch_id, now_ns, decisions)
            case RequestCancelled():
                self._cancel(event.id, decisions)
            case RequestSettled():
                self._drop(event.id)
            case VersionsAbandoned():
                self._abandon(event.kept, decisions)
            case VersionServed():
                self._version(event.version).instances.serve(event.executor, event.content_hash, event.slots)
                self._touch(event.version)
            case VersionWithdrawn():
                self._version(event.version).instances.withdraw(event.executor)
                self._touch(event.version)
            case ExecutorLost():
                self._lose(event.executor, now_ns, decisions)
            case BatchRunning():
                self._adopt(event, now_ns)
            case PolicyChanged():
                self._change_policy(event.interface, now_ns, decisions)
            case RequestQueued():
                self._enqueue(event, now_ns, decisions)

    def _enqueue(self, request: QueuedRequest, now_ns: int, decisions: list[Decision]) -> None:
        ledger = self._ledger
        if request.id in ledger.known:
            return
        queueing = ledger.queueing
        level, policy = (0, queueing.only) if queueing.only is not None else queueing.place(request.level)
        request.queue_level = level
        limit = policy.max_queue_size
        # A request that has been in a batch was admitted once (by another owner): the limit is for new ones.
        if limit and not request.attempt and ledger.levels.get(level, 0) >= limit:
            self._decide(now_ns, decisions)  # what came with it may leave room
            if ledger.levels.get(level, 0) >= limit:
                ledger.reject(request, ErrorCode.UNAVAILABLE, QUEUE_FULL, "REJECTED", decisions)
                return
        request.order = self._next_order
        self._next_order += 1
        # The other reasons do not exist for a new request, and one row always fits.
        if (request.deadline_ns or request.rows > 1) and not ledger.admit(request, now_ns, decisions):
            return
        ledger.known[request.id] = request
        version = self._versions.get(request.version) or self._version(request.version)
        is_last = version.queue.append(request)
        ledger.levels[level] = ledger.levels.get(level, 0) + 1
        ledger.queued += 1
        timeout_us = policy.default_timeout_us and policy.timeout_us(request.timeout_us)
        if timeout_us:
            request.timeout_ns = request.enqueued_ns + timeout_us * 1000
        if timeout_us or request.deadline_ns:
            ledger.due.arm(request)
        pause = version.pause
        if pause is None:
            if version.instances.best() is not None:
                self._changed[request.version] = None
        elif not is_last or version.queue.rows >= pause.until_rows or request.signature != pause.signature:
            self._touch(request.version)

    def _finish(self, event: BatchFinished, decisions: list[Decision]) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is None or batch.executor != event.executor:
            if event.replies_held and event.batch_id not in self._held and batch is None:
                # Given up before, or a predecessor's: these answers are settled and no others will come.
                decisions.append(ReleaseReplies(event.batch_id))
            return
        del self._batches[event.batch_id]
        known = self._ledger.known
        for request in batch.requests:
            request.state = ENDED
            del known[request.id]
        version = self._versions[batch.version]
        version.instances.release(batch.executor)
        if batch.via_owner:
            version.releases.finish(batch.first)
            self._held.add(event.batch_id)
        self._touch(batch.version)

    def _cancel(self, request_id: bytes, decisions: list[Decision]) -> None:
        request = self._ledger.known.get(request_id)
        if request is None:
            return
        if request.state is DISPATCHED:
            request.cancelled = True
            return
        self._remove(request)
        # The scheduler's cancellation has a code and no text (G26).
        self._ledger.reject(request, ErrorCode.CANCELLED, "", "CANCELED", decisions)

    def _drop(self, request_id: bytes) -> None:
        request = self._ledger.known.get(request_id)
        if request is None:
            return
        if request.state is DISPATCHED:
            request.settled = True
        else:
            self._remove(request)

    def _abandon(self, kept: frozenset[int], decisions: list[Decision]) -> None:
        waiting = [r for r in self._ledger.known.values() if r.version not in kept and r.state in (QUEUED, DELAYED)]
        for request in waiting:
            self._remove(request)
            message = NOT_READY.format(model=self._ledger.model, version=request.version)
            self._ledger.reject(request, ErrorCode.UNAVAILABLE, message, "REJECTED", decisions)

    def _lose(self, executor: str, now_ns: int, decisions: list[Decision]) -> None:
        for number, version in self._versions.items():
            version.instances.lose(executor)
            self._touch(number)
        for batch_id in [batch_id for batch_id, batch in self._batches.items() if batch.executor == executor]:
            self._take_back(batch_id, now_ns, decisions)

    def _adopt(self, event: BatchRunning, now_ns: int) -> None:
        if event.batch_id in self._batches or event.batch_id in self._held:
            return
        version = self._version(event.version)
        requests: list[QueuedRequest] = []
        for request in event.requests:
            known = self._ledger.known.get(request.id)
            if known is None:
                known = request
                known.attempt = max(known.attempt, 1)
                known.order = self._next_recovered
                self._next_recovered += 1
                known.state = DISPATCHED
                self._ledger.known[known.id] = known
            elif known.state is DISPATCHED:
                continue
            else:
                self._remove(known, DISPATCHED)
                known.attempt = max(known.attempt, request.attempt, 1)
            requests.append(known)
        version.queue.sweep()
        requests.sort(key=lambda request: request.order)
        version.instances.occupy(event.executor)
        via_owner = event.via_owner and bool(requests)
        first = requests[0].order if requests else 0
        self._batches[event.batch_id] = Batch(event.executor, event.version, requests, now_ns, first, via_owner)
        if via_owner:
            version.releases.open(first, event.batch_id)
        self._touch(event.version)

    def _change_policy(self, interface: ModelInterface, now_ns: int, decisions: list[Decision]) -> None:
        if not self._ledger.adopt_policy(interface):
            return
        for number, version in self._versions.items():
            for request in version.queue.drain():
                self._ledger.uncount(request)
                if self._ledger.admit(request, now_ns, decisions):
                    self._ledger.count_again(request)
                    version.queue.append(request)
                    if request.delayed:
                        version.queue.delay(request)
            self._touch(number)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _take_back(self, batch_id: str, now_ns: int, decisions: list[Decision]) -> None:
        """A batch will not finish: its requests return to the front of their levels."""
        batch = self._batches.pop(batch_id)
        version = self._versions[batch.version]
        version.instances.release(batch.executor)
        if batch.via_owner:
            version.releases.lose(batch.first)
        for request in reversed(batch.requests):
            request.away_ns += now_ns - batch.dispatched_ns
            if self._ledger.admit(request, now_ns, decisions):
                self._ledger.count_again(request)
                version.queue.put_back(request)
        self._touch(batch.version)

    def _remove(self, request: QueuedRequest, state: RequestState = ENDED) -> None:
        """Take a request out of the queue; when that ends it, it is forgotten."""
        self._versions[request.version].queue.remove(request, state)
        self._ledger.uncount(request)
        if state is ENDED:
            del self._ledger.known[request.id]
        self._touch(request.version)

    def _expire(self, now_ns: int, decisions: list[Decision]) -> None:
        """Requests whose time-out or deadline has come (S21-S23)."""
        while (request := self._ledger.due.pop(now_ns)) is not None:
            timed_out = 0 < request.timeout_ns <= now_ns
            if timed_out and delays(self._ledger.queueing.place(request.level)[1]):
                request.timeout_ns = 0
                request.delayed = True
                version = self._versions[request.version]
                version.queue.delay(request)
                self._ledger.due.arm(request)
                self._touch(request.version)
                continue
            deadline_first = 0 < request.deadline_ns <= (request.timeout_ns or NEVER_NS)
            self._remove(request)
            if deadline_first:
                self._ledger.reject(request, ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED, "REJECTED", decisions)
            else:
                self._ledger.reject(request, ErrorCode.UNAVAILABLE, TIMED_OUT, "REJECTED", decisions)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _version(self, number: int) -> ModelVersion:
        version = self._versions.get(number)
        if version is None:
            version = self._versions[number] = ModelVersion(number, self._prefetch)
        return version

    def _touch(self, number: int) -> None:
        """Something changed for a version: look at its queue again."""
        self._changed[number] = None
        version = self._versions.get(number)
        if version is not None and version.pause is not None:
            version.pause = None
            self._paused.pop(number, None)

    def _decide(self, now_ns: int, decisions: list[Decision]) -> None:
        if self._ledger.due.nearest_ns <= now_ns:
            self._expire(now_ns, decisions)
        if self._paused:
            for number in [number for number, until_ns in self._paused.items() if until_ns <= now_ns]:
                self._touch(number)
        while self._changed:
            number = self._changed.popitem()[0]
            version = self._versions.get(number)
            if version is None:
                continue
            if version.releases:
                for batch_id in version.releases.release(version.queue.earliest_order(NO_BOUNDARY)):
                    self._held.discard(batch_id)
                    decisions.append(ReleaseReplies(batch_id))
            if self._ledger.batching is not None:
                self._dispatch(version, self._ledger.batching, now_ns, decisions)
            if version.is_idle():
                del self._versions[number]

    def _dispatch(self, version: ModelVersion, rules: BatchRules, now_ns: int, decisions: list[Decision]) -> None:
        """Send batches as long as there is somebody to take one and the rules do not say to wait."""
        queue, instances, releases = version.queue, version.instances, version.releases
        while queue.size and (seat := instances.best()) is not None:
            boundary = NO_BOUNDARY
            if releases and rules.preserve_ordering:
                boundary = releases.boundary(next(iter(queue)).order)
            formation = form_batch(queue.in_order(), rules, now_ns, boundary)
            if not formation.size:
                version.pause = formation
                self._paused[version.number] = formation.until_ns
                return
            if seat.free_slots <= 0 and not formation.saturated:
                # Only a batch that cannot grow goes ahead of a free instance (S4); one more row count may end that.
                version.pause = Formation(0, False, NEVER_NS, rules.largest_preferred, formation.signature)
                return
            requests = queue.take(formation.size)
            for request in requests:
                request.state = DISPATCHED
                request.attempt += 1
            self._ledger.uncount_all(requests)
            self._next_batch += 1
            batch_id = f"{self._batch_prefix}-{self._next_batch}"
            first = requests[0].order
            via_owner = rules.preserve_ordering
            self._batches[batch_id] = Batch(seat.executor, version.number, requests, now_ns, first, via_owner)
            instances.occupy(seat.executor)
            if via_owner:
                releases.open(first, batch_id)
            decisions.append(
                DispatchBatch(
                    batch_id,
                    seat.executor,
                    version.number,
                    seat.content_hash,
                    requests,
                    tuple([request.attempt for request in requests]),
                    via_owner,
                )
            )
