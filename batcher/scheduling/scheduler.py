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
from dataclasses import dataclass

from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface

from .decisions import Decision, DispatchBatch, RejectReason, RejectRequest, ReleaseReplies
from .dynamic_batching import NO_BOUNDARY, BatchRules, Formation, form_batch
from .instance_group import InstanceGroup
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
from .preserve_ordering import ReleaseOrder
from .queueing import NEVER_NS, DueTimes, QueueRules, VersionQueue, delays

QUEUED = RequestState.QUEUED
DELAYED = RequestState.DELAYED
DISPATCHED = RequestState.DISPATCHED
ENDED = RequestState.ENDED

FIRST_RECOVERED_ORDER = -(1 << 62)
"""What a predecessor dispatched came before whatever is queued."""

QUEUE_FULL = "Exceeds maximum queue size"
TIMED_OUT = "Request timeout expired"
NOT_READY = "Request for unknown model: '{model}' version {version} is not at ready state"
DEADLINE_PASSED = "Deadline exceeded before execution"


@dataclass(slots=True)
class _Batch:
    """A dispatched batch until it is finished, returned or lost; `first` is the order of its first request."""

    executor: str
    version: int
    requests: list[QueuedRequest]
    dispatched_ns: int
    first: int
    via_owner: bool


class _Version:
    """What is kept for one version of the model."""

    __slots__ = ("instances", "number", "pause", "queue", "releases")

    def __init__(self, number: int, prefetch: int) -> None:
        self.number = number
        self.queue = VersionQueue()
        self.instances = InstanceGroup(prefetch)
        self.releases = ReleaseOrder()
        self.pause: Formation | None = None
        """The queue was looked at and nothing is to be done before one of these conditions holds."""

    def is_idle(self) -> bool:
        return not (self.queue.size or self.instances or self.releases)


class ModelScheduler:
    """Decides for one model which requests run together, where and when; see the module's head.

    `batch_prefix` makes batch ids unique over owners: they are `<prefix>-<counter>`. `prefetch` is the number of
    batches an executor may hold beyond its slots, 0 where it is in this process.
    """

    def __init__(self, batch_prefix: str, prefetch: int = 0) -> None:
        self._batch_prefix = batch_prefix
        self._prefetch = prefetch
        self._model = ""
        self._batching: BatchRules | None = None
        self._queueing = QueueRules.of(None)
        self._versions: dict[int, _Version] = {}
        self._known: dict[bytes, QueuedRequest] = {}
        self._batches: dict[str, _Batch] = {}
        self._held: set[str] = set()
        self._levels: dict[int, int] = {}
        self._queued = 0
        self._due = DueTimes()
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
        if self._due.nearest_ns <= now_ns:
            self._expire(now_ns, decisions)
        for event in events:
            if type(event) is RequestQueued:
                self._enqueue(event, now_ns, decisions)
            else:
                self._fold(event, now_ns, decisions)
        if self._changed or self._paused or self._due.nearest_ns <= now_ns:
            self._decide(now_ns, decisions)
        return decisions

    def advance(self, now_ns: int) -> list[Decision]:
        """Time passed: time-outs, deadlines and batching delays that are due by now."""
        return self.observe_all((), now_ns)

    def next_wakeup(self) -> int | None:
        """The instant `advance` is due, None when only a fact can change anything."""
        due_ns = self._due.next_ns()
        if self._paused:
            pause_ns = min(self._paused.values())
            if not due_ns or pause_ns < due_ns:
                due_ns = pause_ns
        return due_ns or None

    # -- what statistics ask -------------------------------------------------------------------------------------------

    def pending_count(self) -> int:
        """Requests that wait in the queue, not those given to executors (M2)."""
        return self._queued

    def queued_by_level(self) -> dict[int, int]:
        """The same for each priority level that has any; level 0 when the model has no levels."""
        return dict(self._levels)

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
        return len(self._known) - self._queued

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
        if request.id in self._known:
            return
        queueing = self._queueing
        level, policy = (0, queueing.only) if queueing.only is not None else queueing.place(request.level)
        request.queue_level = level
        limit = policy.max_queue_size
        # A request that has been in a batch was admitted once (by another owner): the limit is for new ones.
        if limit and not request.attempt and self._levels.get(level, 0) >= limit:
            self._decide(now_ns, decisions)  # what came with it may leave room
            if self._levels.get(level, 0) >= limit:
                self._reject(request, ErrorCode.UNAVAILABLE, QUEUE_FULL, "REJECTED", decisions)
                return
        request.order = self._next_order
        self._next_order += 1
        # The other reasons do not exist for a new request, and one row always fits.
        if (request.deadline_ns or request.rows > 1) and not self._may_queue(request, now_ns, decisions):
            return
        self._known[request.id] = request
        version = self._versions.get(request.version) or self._version(request.version)
        is_last = version.queue.append(request)
        self._levels[level] = self._levels.get(level, 0) + 1
        self._queued += 1
        timeout_us = policy.default_timeout_us and policy.timeout_us(request.timeout_us)
        if timeout_us:
            request.timeout_ns = request.enqueued_ns + timeout_us * 1000
        if timeout_us or request.deadline_ns:
            self._due.arm(request)
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
        known = self._known
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
        request = self._known.get(request_id)
        if request is None:
            return
        if request.state is DISPATCHED:
            request.cancelled = True
            return
        self._remove(request)
        # The scheduler's cancellation has a code and no text (G26).
        self._reject(request, ErrorCode.CANCELLED, "", "CANCELED", decisions)

    def _drop(self, request_id: bytes) -> None:
        request = self._known.get(request_id)
        if request is None:
            return
        if request.state is DISPATCHED:
            request.settled = True
        else:
            self._remove(request)

    def _abandon(self, kept: frozenset[int], decisions: list[Decision]) -> None:
        waiting = [r for r in self._known.values() if r.version not in kept and r.state in (QUEUED, DELAYED)]
        for request in waiting:
            self._remove(request)
            message = NOT_READY.format(model=self._model, version=request.version)
            self._reject(request, ErrorCode.UNAVAILABLE, message, "REJECTED", decisions)

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
            known = self._known.get(request.id)
            if known is None:
                known = request
                known.attempt = max(known.attempt, 1)
                known.order = self._next_recovered
                self._next_recovered += 1
                known.state = DISPATCHED
                self._known[known.id] = known
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
        self._batches[event.batch_id] = _Batch(event.executor, event.version, requests, now_ns, first, via_owner)
        if via_owner:
            version.releases.open(first, event.batch_id)
        self._touch(event.version)

    def _change_policy(self, interface: ModelInterface, now_ns: int, decisions: list[Decision]) -> None:
        batching, queueing = BatchRules.of(interface), QueueRules.of(interface)
        self._model = interface.name
        if batching == self._batching and queueing == self._queueing:
            return
        self._batching, self._queueing = batching, queueing
        for number, version in self._versions.items():
            for request in version.queue.drain():
                self._uncount(request)
                if self._may_queue(request, now_ns, decisions):
                    self._place_again(request)
                    version.queue.append(request)
                    if request.delayed:
                        version.queue.delay(request)
            self._touch(number)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _may_queue(self, request: QueuedRequest, now_ns: int, decisions: list[Decision]) -> bool:
        """Whether a request that is in no queue may go into one; otherwise it ends here."""
        if request.settled:
            self._known.pop(request.id, None)
            request.state = ENDED
        elif request.cancelled:
            self._reject(request, ErrorCode.CANCELLED, "", "CANCELED", decisions)
        elif request.deadline_ns and request.deadline_ns <= now_ns:
            self._reject(request, ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED, "REJECTED", decisions)
        elif self._batching is not None and request.rows > self._batching.max_rows:
            # Its gateway checked against an older configuration (I3).
            message = f"inference request batch-size must be <= {self._batching.max_rows} for '{self._model}'"
            self._reject(request, ErrorCode.INVALID_ARG, message, "OTHER", decisions)
        else:
            return True
        return False

    def _place_again(self, request: QueuedRequest) -> None:
        """Level, count and times of a request that goes back into a queue, by the rules of now."""
        level, policy = self._queueing.place(request.level)
        request.queue_level = level
        self._levels[level] = self._levels.get(level, 0) + 1
        self._queued += 1
        timeout_us = 0 if request.delayed else policy.timeout_us(request.timeout_us)
        request.timeout_ns = request.enqueued_ns + request.away_ns + timeout_us * 1000 if timeout_us else 0
        self._due.arm(request)

    def _take_back(self, batch_id: str, now_ns: int, decisions: list[Decision]) -> None:
        """A batch will not finish: its requests return to the front of their levels."""
        batch = self._batches.pop(batch_id)
        version = self._versions[batch.version]
        version.instances.release(batch.executor)
        if batch.via_owner:
            version.releases.lose(batch.first)
        for request in reversed(batch.requests):
            request.away_ns += now_ns - batch.dispatched_ns
            if self._may_queue(request, now_ns, decisions):
                self._place_again(request)
                version.queue.put_back(request)
        self._touch(batch.version)

    def _remove(self, request: QueuedRequest, state: RequestState = ENDED) -> None:
        """Take a request out of the queue; when that ends it, it is forgotten."""
        self._versions[request.version].queue.remove(request, state)
        self._uncount(request)
        if state is ENDED:
            del self._known[request.id]
        self._touch(request.version)

    def _uncount(self, request: QueuedRequest) -> None:
        self._queued -= 1
        level = request.queue_level
        left = self._levels[level] - 1
        if left:
            self._levels[level] = left
        else:
            del self._levels[level]
        if request.due_ns:
            self._due.disarm(request)

    def _uncount_all(self, requests: list[QueuedRequest]) -> None:
        if requests[0].queue_level == requests[-1].queue_level:
            # In order of service, so all are of one level: the first stands for the rest.
            level, others = requests[0].queue_level, len(requests) - 1
            self._levels[level] -= others
            self._queued -= others
            for request in requests[1:]:
                if request.due_ns:
                    self._due.disarm(request)
            self._uncount(requests[0])
        else:
            for request in requests:
                self._uncount(request)

    def _expire(self, now_ns: int, decisions: list[Decision]) -> None:
        """Requests whose time-out or deadline has come (S21-S23)."""
        while (request := self._due.pop(now_ns)) is not None:
            timed_out = 0 < request.timeout_ns <= now_ns
            if timed_out and delays(self._queueing.place(request.level)[1]):
                request.timeout_ns = 0
                request.delayed = True
                version = self._versions[request.version]
                version.queue.delay(request)
                self._due.arm(request)
                self._touch(request.version)
                continue
            deadline_first = 0 < request.deadline_ns <= (request.timeout_ns or NEVER_NS)
            self._remove(request)
            if deadline_first:
                self._reject(request, ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED, "REJECTED", decisions)
            else:
                self._reject(request, ErrorCode.UNAVAILABLE, TIMED_OUT, "REJECTED", decisions)

    def _reject(
        self, request: QueuedRequest, code: ErrorCode, message: str, reason: RejectReason, decisions: list[Decision]
    ) -> None:
        request.state = ENDED
        self._known.pop(request.id, None)
        decisions.append(RejectRequest(request, code, message, reason))

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _version(self, number: int) -> _Version:
        version = self._versions.get(number)
        if version is None:
            version = self._versions[number] = _Version(number, self._prefetch)
        return version

    def _touch(self, number: int) -> None:
        """Something changed for a version: look at its queue again."""
        self._changed[number] = None
        version = self._versions.get(number)
        if version is not None and version.pause is not None:
            version.pause = None
            self._paused.pop(number, None)

    def _decide(self, now_ns: int, decisions: list[Decision]) -> None:
        if self._due.nearest_ns <= now_ns:
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
            if self._batching is not None:
                self._dispatch(version, self._batching, now_ns, decisions)
            if version.is_idle():
                del self._versions[number]

    def _dispatch(self, version: _Version, rules: BatchRules, now_ns: int, decisions: list[Decision]) -> None:
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
            self._uncount_all(requests)
            self._next_batch += 1
            batch_id = f"{self._batch_prefix}-{self._next_batch}"
            first = requests[0].order
            via_owner = rules.preserve_ordering
            self._batches[batch_id] = _Batch(seat.executor, version.number, requests, now_ns, first, via_owner)
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
