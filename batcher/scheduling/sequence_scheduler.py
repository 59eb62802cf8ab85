"""The scheduler of a model with a sequence batcher (S30-S43): the verbs and queries of `scheduler`, other rules. Pure.

- A sequence begins with START and is bound to one slot of one instance until its END, or until it has been idle for
  too long (S34, S38). Of its requests one runs at a time, in order.
- Sequences without a slot wait, whole, first come first served (S37).
- When its executor goes, a sequence gets another place, before those that have had none. Whether its state can
  follow is for the executor to find out that gets it (`charonia.sequences`).
- A request that is taken out of the middle takes the rest of its sequence's queue with it (I10): what follows was
  meant to come after it.
- What was aboard when an instance or executor ended runs alone the next time; a request that ends one alone is
  condemned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface
from charonia.wire import BatchPlaces, SequenceMark, SequencePlace

from .decisions import (
    CondemnRequest,
    Decision,
    DispatchBatch,
    ForgetSequences,
    RejectReason,
    RejectRequest,
    ReleaseReplies,
    StopExecution,
)
from .due_times import NEVER_NS, DueTimes
from .isolation import CULPRIT_OF_LOSSES
from .ledger import DEADLINE_PASSED, DEADLINE_PASSED_RUNNING, NOT_READY
from .live_sequence import LiveSequence
from .observations import (
    BatchDied,
    BatchFinished,
    BatchLost,
    BatchReturned,
    BatchRunning,
    ExecutorLost,
    Observation,
    PolicyChanged,
    QueuedRequest,
    QueueHeld,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    RequestsRescheduled,
    RequestState,
    SequenceFound,
    VersionsAbandoned,
    VersionServed,
    VersionWithdrawn,
)
from .sequence_batching import SequenceRules, choose
from .sequence_instances import SequenceInstance, SequenceInstances

QUEUED = RequestState.QUEUED
DISPATCHED = RequestState.DISPATCHED
ENDED = RequestState.ENDED

NOT_STARTED = (
    "inference request for sequence {id} to model '{model}' must specify the START flag on the first request of the "
    "sequence"
)
TIMED_OUT = "timeout of the corresponding sequence has been expired"
NO_ID = "inference request to model '{model}' must specify a non-zero or non-empty correlation ID"

MAX_LOSSES_ALONE = 5
"""Executors lost while they ran a request in a batch of its own, from which on it is the culprit."""

Cut = tuple[ErrorCode, str, RejectReason]
_CANCELLED: Cut = (ErrorCode.CANCELLED, "", "CANCELED")  # a code and no text (G26)


@dataclass(frozen=True, slots=True)
class Delays:
    """For tests (S43): nothing is given out before so many requests wait in slots and, of them, in the backlog."""

    requests: int = 0
    backlog_requests: int = 0


NO_DELAYS = Delays()


@dataclass(slots=True)
class GivenBatch:
    """A batch an executor has; `sequences` are those of `requests`."""

    executor: str
    version: int
    instance: int
    requests: list[QueuedRequest]
    sequences: list[LiveSequence]


class VersionSequences:
    """The sequences of one version: `live` by key, the newest of each; `backlog` those without a slot, in order."""

    __slots__ = ("backlog", "instances", "live", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.live: dict[bytes, LiveSequence] = {}
        self.backlog: deque[LiveSequence] = deque()
        self.instances = SequenceInstances()


class SequenceScheduler:
    """Decides for one model with a sequence batcher. `first_binding` makes the numbers of places unique over owners."""

    def __init__(self, batch_prefix: str, first_binding: int = 0, delays: Delays = NO_DELAYS) -> None:
        self._batch_prefix = batch_prefix
        self._next_batch = 0
        self._next_order = 0
        self._binding = first_binding
        self._delays = delays
        self._held = False
        self._model = ""
        self._rules: SequenceRules | None = None
        self._known: dict[bytes, tuple[QueuedRequest, LiveSequence]] = {}
        self._queued = 0
        self._versions: dict[int, VersionSequences] = {}
        self._batches: dict[str, GivenBatch] = {}
        self._alone: set[bytes] = set()
        self._due = DueTimes()
        self._idle: dict[LiveSequence, int] = {}
        """When each sequence that rests has rested too long; one idle time holds for all, so the first is due first."""
        self._look_ns = NEVER_NS

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def observe(self, event: Observation, now_ns: int) -> list[Decision]:
        """A fact happened. Unknown ids and repeated facts are ignored (F11)."""
        return self.observe_all((event,), now_ns)

    def observe_all(self, events: Iterable[Observation], now_ns: int) -> list[Decision]:
        """Several facts arrived together: decide once, after the last."""
        decisions: list[Decision] = []
        self._expire(now_ns, decisions)
        for event in events:
            self._fold(event, now_ns, decisions)
        self._decide(now_ns, decisions)
        return decisions

    def advance(self, now_ns: int) -> list[Decision]:
        """Time passed."""
        return self.observe_all((), now_ns)

    def next_wakeup(self) -> int | None:
        """The instant `advance` is due, None when only a fact can change anything."""
        instants = [self._due.next_ns() or NEVER_NS, self._look_ns, next(iter(self._idle.values()), NEVER_NS)]
        wakeup_ns = min(instants)
        return wakeup_ns if wakeup_ns < NEVER_NS else None

    # -- what statistics ask -------------------------------------------------------------------------------------------

    def pending_count(self) -> int:
        """Requests that wait, not those given to executors (M2)."""
        return self._queued

    def queued_by_level(self) -> dict[int, int]:
        """There is one level."""
        return {0: self._queued} if self._queued else {}

    def queued_by_version(self) -> dict[int, int]:
        """The waiting requests of each version that has any."""
        counts: dict[int, int] = {}
        for request, _ in self._known.values():
            if request.state is QUEUED:
                counts[request.version] = counts.get(request.version, 0) + 1
        return counts

    def find(self, request_id: bytes) -> QueuedRequest | None:
        """A request that has not ended."""
        found = self._known.get(request_id)
        return found[0] if found is not None else None

    def waiting(self) -> list[QueuedRequest]:
        """The requests that wait, in no particular order."""
        return [request for request, _ in self._known.values() if request.state is QUEUED]

    def unended(self) -> list[QueuedRequest]:
        """All requests that have not ended, in no particular order."""
        return [request for request, _ in self._known.values()]

    def holding(self) -> list[tuple[str, int, list[QueuedRequest]]]:
        """(executor, version, requests) of the batches that hold an instance."""
        return [(b.executor, b.version, b.requests) for b in self._batches.values()]

    def outstanding(self) -> dict[str, int]:
        """Executor to the number of batches it was given and has not finished or returned."""
        counts: dict[str, int] = {}
        for batch in self._batches.values():
            counts[batch.executor] = counts.get(batch.executor, 0) + 1
        return counts

    def outstanding_requests(self) -> int:
        """Requests in those batches."""
        return len(self._known) - self._queued

    def live_sequences(self) -> int:
        """Sequences that have begun or wait to, and have not ended."""
        return sum(len(version.live) for version in self._versions.values())

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _fold(self, event: Observation, now_ns: int, decisions: list[Decision]) -> None:
        match event:
            case RequestQueued():
                self._enqueue(event, now_ns, decisions)
            case BatchFinished():
                self._finish(event, now_ns, decisions)
            case RequestsRescheduled():
                self._reschedule(event)
            case BatchReturned():
                batch = self._batches.get(event.batch_id)
                if batch is not None and batch.executor == event.executor:
                    self._take_back(event.batch_id, now_ns, decisions)
            case BatchDied():
                self._die(event, now_ns, decisions)
            case RequestCancelled():
                self._cancel(event.id, now_ns, decisions)
            case RequestSettled():
                self._drop(event.id, now_ns, decisions)
            case QueueHeld():
                self._held = event.held
            case VersionsAbandoned():
                self._abandon(event.kept, decisions)
            case VersionServed():
                self._serve(event, now_ns)
            case VersionWithdrawn():
                version = self._versions.get(event.version)
                if version is not None:
                    self._displace(version, version.instances.withdraw(event.executor), now_ns)
            case ExecutorLost():
                self._lose(event, now_ns, decisions)
            case SequenceFound():
                self._found(event, now_ns)
            case BatchRunning():
                self._adopt(event)
            case BatchLost():
                for request in event.requests:
                    self._alone.add(request.id)
            case PolicyChanged():
                self._change_policy(event.interface, now_ns)

    def _version(self, number: int) -> VersionSequences:
        version = self._versions.get(number)
        if version is None:
            version = self._versions[number] = VersionSequences(number)
        return version

    # -- requests ------------------------------------------------------------------------------------------------------

    def _enqueue(self, request: QueuedRequest, now_ns: int, decisions: list[Decision]) -> None:
        if request.id in self._known:
            return
        request.order = self._next_order
        self._next_order += 1
        mark = request.sequence
        if mark is None:  # its gateway knew another configuration of the model
            self._refuse(
                request, (ErrorCode.INVALID_ARG, NO_ID.format(model=self._model), "OTHER"), decisions, bare=True
            )
            return
        version = self._version(request.version)
        sequence = version.live.get(mark.key)
        if mark.start and (sequence is None or sequence.closed):
            sequence = version.live[mark.key] = LiveSequence(version.number, mark.key, sequence)
            version.backlog.append(sequence)
        elif sequence is None or sequence.closed:
            text = NOT_STARTED.format(id=mark.correlation_id, model=self._model)
            self._refuse(request, (ErrorCode.INVALID_ARG, text, "OTHER"), decisions, bare=True)
            return
        # S33: a START on a live sequence ends what was before and goes on in its place
        sequence.closed = mark.end
        sequence.queue.append(request)
        self._wait(request, sequence)
        self._time(request, sequence)
        self._touch(sequence, now_ns)

    def _time(self, request: QueuedRequest, sequence: LiveSequence) -> None:
        """Arm what may come due; without a slot a request waits no longer than its time-out (S37)."""
        # until the model is known, what runs and what is bound is not known either (recovery)
        waits = self._rules is not None and sequence.instance is None and sequence.wanted is None
        if request.timeout_us and waits:
            request.timeout_ns = request.enqueued_ns + request.timeout_us * 1000
        if request.timeout_ns or request.deadline_ns:
            self._due.arm(request)

    def _wait(self, request: QueuedRequest, sequence: LiveSequence) -> None:
        request.state = QUEUED
        self._known[request.id] = (request, sequence)
        self._queued += 1

    def _refuse(self, request: QueuedRequest, how: Cut, decisions: list[Decision], *, bare: bool = False) -> None:
        """A request that is in no queue ends with an error."""
        request.state = ENDED
        self._known.pop(request.id, None)
        self._alone.discard(request.id)
        decisions.append(RejectRequest(request, *how, bare))

    def _unqueue(self, request: QueuedRequest) -> None:
        """A request has left its queue."""
        self._queued -= 1
        if request.due_ns:
            self._due.disarm(request)

    def _cancel(self, request_id: bytes, now_ns: int, decisions: list[Decision]) -> None:
        request, sequence = self._known.get(request_id, (None, None))
        if request is None or sequence is None:
            return
        if request.state is DISPATCHED:
            self._end_running(request, _CANCELLED, decisions)
        else:
            self._cut(sequence, request, _CANCELLED, now_ns, decisions)

    def _drop(self, request_id: bytes, now_ns: int, decisions: list[Decision]) -> None:
        request, sequence = self._known.get(request_id, (None, None))
        if request is None or sequence is None:
            return
        if request.state is DISPATCHED:
            self._stop(request, decisions)
        else:
            self._cut(sequence, request, None, now_ns, decisions)

    def _cut(
        self, sequence: LiveSequence, request: QueuedRequest, how: Cut | None, now_ns: int, decisions: list[Decision]
    ) -> None:
        """A waiting request ends (`how` None: it is settled), and with it what follows until the next START."""
        queue = list(sequence.queue)
        at = queue.index(request)
        last = at + 1
        while last < len(queue) and not _mark(queue[last]).start:
            last += 1
        sequence.queue = deque(queue[:at] + queue[last:])
        for one in queue[at:last]:
            self._unqueue(one)
            if one is not request:
                self._refuse(one, _CANCELLED, decisions)
            elif how is not None:
                self._refuse(one, how, decisions)
            else:
                one.state = ENDED
                self._known.pop(one.id, None)
        if sequence.again is request:
            sequence.again = None
        self._settle_down(sequence, now_ns, decisions)

    def _end_running(self, request: QueuedRequest, how: Cut, decisions: list[Decision]) -> None:
        """End a request while it is with an executor: whoever settles first wins, and it is not run again."""
        if not request.settled:
            decisions.append(RejectRequest(request, *how))
            self._stop(request, decisions)

    def _stop(self, request: QueuedRequest, decisions: list[Decision]) -> None:
        if not request.settled:
            request.settled = True
            if request.due_ns:
                self._due.disarm(request)
            batch_id, batch = next((i, b) for i, b in self._batches.items() if request in b.requests)
            decisions.append(StopExecution(request, batch_id, batch.executor))

    def _expire(self, now_ns: int, decisions: list[Decision]) -> None:
        """Requests whose deadline has come, sequences that waited (S37) or rested (S38) too long."""
        while (request := self._due.pop(now_ns)) is not None:
            _, sequence = self._known[request.id]
            if request.state is DISPATCHED:
                how: Cut = (ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED_RUNNING, "OTHER")
                self._end_running(request, how, decisions)
            elif 0 < request.deadline_ns <= now_ns:
                how = (ErrorCode.DEADLINE_EXCEEDED, DEADLINE_PASSED, "REJECTED")
                self._cut(sequence, request, how, now_ns, decisions)
            elif sequence.instance is None and sequence.running is None:
                for waiting in list(sequence.queue):
                    self._unqueue(waiting)
                    self._refuse(waiting, (ErrorCode.UNAVAILABLE, TIMED_OUT, "REJECTED"), decisions)
                sequence.queue.clear()
                self._end(sequence, decisions)
            else:  # it has its slot by now
                request.timeout_ns = 0
                self._due.arm(request)
        while self._idle:
            sequence, due_ns = next(iter(self._idle.items()))
            if due_ns > now_ns:
                break
            self._end(sequence, decisions)

    # -- sequences -----------------------------------------------------------------------------------------------------

    def _touch(self, sequence: LiveSequence, now_ns: int) -> None:
        """Something changed for a sequence: is it ready, does it rest?"""
        if sequence.instance is not None:
            sequence.instance.refresh(sequence)
        self._idle.pop(sequence, None)
        if sequence.rests and not sequence.done and self._rules is not None:
            self._idle[sequence] = now_ns + self._rules.block.max_idle_us * 1000

    def _settle_down(self, sequence: LiveSequence, now_ns: int, decisions: list[Decision]) -> None:
        """Requests of a sequence are gone: it ends when it was closed or never began, and nothing is left of it."""
        if sequence.rests and (sequence.closed or not sequence.run):
            self._end(sequence, decisions)
        else:
            self._touch(sequence, now_ns)

    def _end(self, sequence: LiveSequence, decisions: list[Decision] | None) -> None:
        """A sequence is over. With `decisions` it ended without a last request: the log may know it still."""
        sequence.done = True
        sequence.waits_for()  # forget those that are over
        self._idle.pop(sequence, None)
        version = self._versions[sequence.version]
        if sequence.instance is not None:
            sequence.instance.release(sequence)
        else:
            version.backlog = deque(one for one in version.backlog if one is not sequence)
        if version.live.get(sequence.key) is sequence:
            del version.live[sequence.key]
        if decisions is not None and sequence.run:
            decisions.append(ForgetSequences({sequence.record_key: sequence.run}))

    def _bind(self, sequence: LiveSequence, instance: SequenceInstance, slot: int = -1) -> bool:
        """Give a sequence a slot; what it had elsewhere is stale from now on."""
        if not instance.take(sequence, slot):
            return False
        self._binding += 1
        sequence.binding = self._binding
        return True

    def _fill(self, version: VersionSequences) -> None:
        """Give free slots to who waits, in order (S37)."""
        if not version.backlog or version.instances.roomiest() is None:
            return
        left: deque[LiveSequence] = deque()
        for sequence in version.backlog:
            instance = version.instances.roomiest() if sequence.waits_for() is None else None
            if instance is None:
                left.append(sequence)
            else:
                self._bind(sequence, instance)
        version.backlog = left

    def _displace(self, version: VersionSequences, sequences: list[LiveSequence], now_ns: int) -> None:
        """These lost their slots; they come before those that have had none, the oldest first."""
        sequences.sort(key=lambda sequence: sequence.binding)
        version.backlog.extendleft(reversed(sequences))
        for sequence in sequences:
            self._touch(sequence, now_ns)

    def _found(self, event: SequenceFound, now_ns: int) -> None:
        about = event.about
        version = self._version(about.version)
        key = about.key[len(b"%d:" % about.version) :]
        if key not in version.live:
            sequence = version.live[key] = LiveSequence.found(about, key)
            version.backlog.append(sequence)
            self._touch(sequence, now_ns)

    def _serve(self, event: VersionServed, now_ns: int) -> None:
        version = self._version(event.version)
        slots = self._rules.slots if self._rules is not None else 0
        new, displaced = version.instances.serve(event.executor, event.content_hash, event.slots, slots)
        running = {(b.executor, b.instance): i for i, b in self._batches.items() if b.version == version.number}
        for instance in new:
            instance.batch = running.get((instance.executor, instance.index), "")
            for sequence in instance.slots.values():  # another incarnation remembers nothing of them
                self._binding += 1
                sequence.binding = self._binding
            self._reclaim(version, instance)
        self._displace(version, displaced, now_ns)

    def _reclaim(self, version: VersionSequences, instance: SequenceInstance) -> None:
        """What a predecessor had bound to this instance stays there."""
        here = (instance.executor, instance.index)
        placed = set()
        for sequence in version.backlog:
            wanted = sequence.wanted
            if wanted is not None and wanted[:2] == here and instance.take(sequence, wanted[2]):
                placed.add(sequence)
                if wanted[3] != instance.content_hash:
                    self._binding += 1
                    sequence.binding = self._binding
        if placed:
            version.backlog = deque(sequence for sequence in version.backlog if sequence not in placed)

    def _change_policy(self, interface: ModelInterface, now_ns: int) -> None:
        self._model = interface.name
        rules = SequenceRules.of(interface)
        if rules == self._rules:
            return
        first, self._rules = self._rules is None, rules
        for request, sequence in list(self._known.values()) if first else ():
            if request.state is QUEUED and not request.due_ns:
                self._time(request, sequence)
        for version in self._versions.values():
            if rules is not None:
                for executor in {instance.executor for instance in version.instances.all()}:
                    mine = [i for i in version.instances.all() if i.executor == executor]
                    event = VersionServed(executor, version.number, mine[0].content_hash, len(mine))
                    self._serve(event, now_ns)
            for sequence in version.live.values():
                self._touch(sequence, now_ns)

    # -- batches -------------------------------------------------------------------------------------------------------

    def _decide(self, now_ns: int, decisions: list[Decision]) -> None:
        self._look_ns = NEVER_NS
        for version in self._versions.values():
            self._fill(version)
        if self._held or self._rules is None or self._delayed():
            return
        for version in self._versions.values():
            for instance in version.instances.all():
                if instance.ready and not instance.batch:
                    self._dispatch(instance, self._rules, now_ns, decisions)

    def _delayed(self) -> bool:
        """S43: whether to wait for more requests before the first batch."""
        if not self._delays.requests:
            return False
        backlog = sum(len(sequence.queue) for version in self._versions.values() for sequence in version.backlog)
        if self._queued - backlog < self._delays.requests or backlog < self._delays.backlog_requests:
            return True
        self._delays = NO_DELAYS
        return False

    def _dispatch(
        self, instance: SequenceInstance, rules: SequenceRules, now_ns: int, decisions: list[Decision]
    ) -> None:
        suspects = [sequence for sequence in instance.ready if sequence.queue[0].id in self._alone]
        if suspects:
            chosen = [min(suspects, key=lambda sequence: sequence.queue[0].order)]
        else:
            chosen, until_ns = choose(instance, rules, now_ns)
            if not chosen:
                self._look_ns = min(self._look_ns, until_ns)
                return
        self._next_batch += 1
        batch_id = f"{self._batch_prefix}-{self._next_batch}"
        requests: list[QueuedRequest] = []
        places: list[SequencePlace] = []
        for sequence in chosen:
            request = sequence.queue.popleft()
            again, sequence.again = sequence.again is request, None
            if _mark(request).start and not again:
                sequence.run = request.id
            sequence.running = request
            instance.refresh(sequence)
            self._idle.pop(sequence, None)
            self._unqueue(request)
            request.state = DISPATCHED
            request.attempt += 1
            request.timeout_ns = 0
            if request.deadline_ns:
                self._due.arm(request)
            requests.append(request)
            places.append(SequencePlace(sequence.slot, sequence.run, sequence.binding, again))
        instance.batch = batch_id
        version = chosen[0].version
        self._batches[batch_id] = GivenBatch(instance.executor, version, instance.index, requests, chosen)
        rows = instance.rows if rules.block.direct and rules.batching else 0
        attempts = tuple([request.attempt for request in requests])
        decisions.append(
            DispatchBatch(
                batch_id,
                instance.executor,
                version,
                instance.content_hash,
                requests,
                attempts,
                False,
                "group" if suspects else "",
                BatchPlaces(instance.index, rows, tuple(places)),
            )
        )

    def _close(self, batch_id: str) -> GivenBatch:
        """A batch is over, one way or another; its instance is free."""
        batch = self._batches.pop(batch_id)
        instance = self._version(batch.version).instances.find(batch.executor, batch.instance)
        if instance is not None and instance.batch == batch_id:
            instance.batch = ""
        for sequence in batch.sequences:
            sequence.running = None
        return batch

    def _finish(self, event: BatchFinished, now_ns: int, decisions: list[Decision]) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is None or batch.executor != event.executor:
            if event.replies_held and batch is None:
                decisions.append(ReleaseReplies(event.batch_id))  # of a time when the model had another scheduler
            return
        self._close(event.batch_id)
        for request, sequence in zip(batch.requests, batch.sequences, strict=True):
            if sequence.again is request and not request.settled:
                # the same attempt goes on: nothing of it was settled
                request.attempt -= 1
                self._put_back(request, sequence, now_ns)
                continue
            sequence.again = None
            self._forget_request(request)
            if sequence.rests and sequence.closed:
                # an END that its executor settled has ended the record as well
                self._end(sequence, decisions if request.settled or not _mark(request).end else None)
            else:
                self._touch(sequence, now_ns)

    def _reschedule(self, event: RequestsRescheduled) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is not None and batch.executor == event.executor:
            for request, sequence in zip(batch.requests, batch.sequences, strict=True):
                if request.id in event.ids:
                    sequence.again = request

    def _forget_request(self, request: QueuedRequest) -> None:
        request.state = ENDED
        self._known.pop(request.id, None)
        self._alone.discard(request.id)
        if request.due_ns:
            self._due.disarm(request)

    def _put_back(self, request: QueuedRequest, sequence: LiveSequence, now_ns: int) -> None:
        """A request that was given out is the next of its sequence again."""
        if request.due_ns:
            self._due.disarm(request)
        sequence.queue.appendleft(request)
        request.state = QUEUED
        self._queued += 1
        if request.deadline_ns:
            self._due.arm(request)
        self._touch(sequence, now_ns)

    def _take_back(self, batch_id: str, now_ns: int, decisions: list[Decision]) -> GivenBatch:
        """A batch did not run, or not to its end: what is unsettled of it waits again."""
        batch = self._close(batch_id)
        for request, sequence in zip(batch.requests, batch.sequences, strict=True):
            sequence.again = None
            if request.settled:
                self._forget_request(request)
                self._settle_down(sequence, now_ns, decisions)
            else:
                self._put_back(request, sequence, now_ns)
        return batch

    def _die(self, event: BatchDied, now_ns: int, decisions: list[Decision]) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is None or batch.executor != event.executor:
            return
        for request in batch.requests:
            request.settled |= request.id not in event.ids
        self._take_back(event.batch_id, now_ns, decisions)
        if event.blameless:
            return
        left = [request for request in batch.requests if not request.settled]
        for request in left:
            if len(batch.requests) == 1:
                self._condemn(request, event.reason, event.stderr, batch.executor, now_ns, decisions)
            else:
                self._alone.add(request.id)

    def _lose(self, event: ExecutorLost, now_ns: int, decisions: list[Decision]) -> None:
        for version in self._versions.values():
            self._displace(version, version.instances.withdraw(event.executor), now_ns)
        for batch_id in [i for i, batch in self._batches.items() if batch.executor == event.executor]:
            batch = self._take_back(batch_id, now_ns, decisions)
            if event.drained:
                continue
            for request in batch.requests:
                if request.settled:
                    continue
                self._alone.add(request.id)
                request.losses_apart += len(batch.requests) == 1
                if request.losses_apart >= MAX_LOSSES_ALONE:
                    self._condemn(request, CULPRIT_OF_LOSSES, "", event.executor, now_ns, decisions)

    def _condemn(
        self,
        request: QueuedRequest,
        reason: str,
        stderr: str,
        executor: str,
        now_ns: int,
        decisions: list[Decision],
    ) -> None:
        """A request that waits ends as a dead letter, and what follows it with it."""
        _, sequence = self._known[request.id]
        self._alone.discard(request.id)
        decisions.append(CondemnRequest(request, reason, stderr, executor))
        self._cut(sequence, request, None, now_ns, decisions)

    def _abandon(self, kept: frozenset[int], decisions: list[Decision]) -> None:
        for number in [number for number in self._versions if number not in kept]:
            version = self._versions[number]
            message = NOT_READY.format(model=self._model, version=number)
            bound = [sequence for instance in version.instances.all() for sequence in instance.slots.values()]
            for sequence in {*version.live.values(), *version.backlog, *bound}:
                for request in sequence.queue:
                    self._unqueue(request)
                    self._refuse(request, (ErrorCode.UNAVAILABLE, message, "REJECTED"), decisions)
                sequence.queue.clear()
                if sequence.running is None:
                    self._end(sequence, decisions)
                else:
                    sequence.closed = True

    # -- recovery ------------------------------------------------------------------------------------------------------

    def _adopt(self, event: BatchRunning) -> None:
        """A batch of a predecessor: its requests are at the heads of their sequences' queues."""
        if event.batch_id in self._batches or event.sequences is None:
            return
        places = {place.run: place for place in event.sequences.places}
        requests: list[QueuedRequest] = []
        sequences: list[LiveSequence] = []
        for member in event.requests:
            request, sequence = self._known.get(member.id, (None, None))
            if request is None or sequence is None or request.state is not QUEUED or sequence.queue[0] is not request:
                continue
            request.attempt = max(request.attempt, member.attempt, 1)
            place = places.get(request.id if _mark(request).start else sequence.run)
            sequence.queue.popleft()
            self._unqueue(request)
            request.state = DISPATCHED
            if request.deadline_ns:
                self._due.arm(request)
            sequence.running = request
            self._idle.pop(sequence, None)
            if place is not None:
                sequence.run, sequence.binding = place.run, place.binding
                if sequence.instance is None:
                    sequence.wanted = (event.executor, event.sequences.instance, place.slot, event.content_hash)
            requests.append(request)
            sequences.append(sequence)
        self._batches[event.batch_id] = GivenBatch(
            event.executor, event.version, event.sequences.instance, requests, sequences
        )


def _mark(request: QueuedRequest) -> SequenceMark:
    assert request.sequence is not None
    return request.sequence


__all__ = ["NO_DELAYS", "Delays", "SequenceScheduler"]
