"""The scheduler of a model with a sequence batcher (S30-S43): the verbs and queries of `scheduler`, other rules. Pure.

- A sequence begins with START and is bound to one slot of one instance until its END, or until it has been idle for
  too long (S34, S38). Of its requests one runs at a time, in order.
- Sequences without a slot wait, whole, first come first served (S37).
- When its executor goes, a sequence gets another place, before those that have had none. Whether its state can
  follow is for the executor to find out that gets it (`charonia.facts.sequence_states`).
- A request that is taken out of the middle takes the rest of its sequence's queue with it (I10): what follows was
  meant to come after it.
- What was aboard when an instance or executor ended runs alone the next time; a request that ends one alone is
  condemned.
"""

from __future__ import annotations

from collections.abc import Iterable

from batcher.scheduling.decisions import Decision, RejectRequest, StopExecution
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchLost,
    BatchReturned,
    BatchRunning,
    CallRefused,
    ExecutorLost,
    ExecutorReturned,
    Observation,
    PolicyChanged,
    QueuedRequest,
    QueueHeld,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    RequestsRescheduled,
    RequestState,
    ResponsesBegun,
    ResponsesSeen,
    SequenceFound,
    SlotFreed,
    VersionsAbandoned,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.queues.due_times import NEVER_NS
from batcher.scheduling.queues.ledger import DEADLINE_PASSED, DEADLINE_PASSED_RUNNING
from charonia.errors import ErrorCode

from .sequence_batches import SequenceBatches
from .sequence_book import CANCELLED, NO_DELAYS, Cut, Delays
from .sequence_instances import LiveSequence

DISPATCHED = RequestState.DISPATCHED

NOT_STARTED = (
    "inference request for sequence {id} to model '{model}' must specify the START flag on the first request of the "
    "sequence"
)
CONFLICT = (
    "sequence {id} for model '{model}' has a conflict. The previous sequence did not end before this sequence start. "
    "Previous sequence will be terminated early."
)
TIMED_OUT = "timeout of the corresponding sequence has been expired"
NO_ID = "inference request to model '{model}' must specify a non-zero or non-empty correlation ID"


class SequenceScheduler(SequenceBatches):
    """Decides for one model with a sequence batcher; see the module's head."""

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

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _fold(self, event: Observation, now_ns: int, decisions: list[Decision]) -> None:
        match event:
            case RequestQueued():
                self._enqueue(event, now_ns, decisions)
            case BatchFinished():
                self._finish(event, now_ns, decisions)
            case RequestsRescheduled():
                self._reschedule(event)
            case SlotFreed():
                self._free(event)
            case ResponsesBegun():
                self._begin_responses(event)
            case ResponsesSeen():
                self._seen(event, now_ns, decisions)
            case BatchReturned():
                batch = self._batches.get(event.batch_id)
                if batch is not None and batch.executor == event.executor:
                    self._take_back(event.batch_id, "its executor gave it back", now_ns, decisions)
            case BatchDied():
                self._die(event, now_ns, decisions)
            case RequestCancelled():
                self._end_one(event.id, CANCELLED, now_ns, decisions)
            case CallRefused():
                self._end_one(event.id, (ErrorCode.UNAVAILABLE, event.message, "REJECTED"), now_ns, decisions)
            case RequestSettled():
                self._drop(event.id, now_ns, decisions)
            case QueueHeld():
                self._held = event.held
            case VersionsAbandoned():
                self._abandon(event.kept, decisions)
            case VersionServed():
                self._serve(event, now_ns, decisions)
            case VersionWithdrawn():
                version = self._versions.get(event.version)
                if version is not None:
                    self._displace(version, version.instances.withdraw(event.executor), now_ns, decisions)
            case ExecutorLost():
                self._lose(event, now_ns, decisions)
            case ExecutorReturned():
                self._blame.returned(event.executor)
            case SequenceFound():
                self._found(event, now_ns)
            case BatchRunning():
                self._adopt(event)
            case BatchLost():
                for request in event.requests:
                    self._alone.add(request.id)
            case PolicyChanged():
                self._change_policy(event.interface, now_ns, decisions)

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
            version.backlog[sequence] = None
        elif sequence is None or sequence.closed:
            text = NOT_STARTED.format(id=mark.correlation_id, model=self._model)
            self._refuse(request, (ErrorCode.INVALID_ARG, text, "OTHER"), decisions, bare=True)
            return
        elif mark.start and self.on_conflict is not None:
            self.on_conflict(CONFLICT.format(id=mark.correlation_id, model=self._model))
        # S33: a START on a live sequence ends what was before and goes on in its place
        sequence.closed = mark.end
        sequence.queue.append(request)
        self._wait(request, sequence)
        self._time(request, sequence)
        self._touch(sequence, now_ns)

    def _end_one(self, request_id: bytes, how: Cut, now_ns: int, decisions: list[Decision]) -> None:
        request, sequence = self._known.get(request_id, (None, None))
        if request is None or sequence is None:
            return
        if request.state is DISPATCHED:
            self._end_running(request, how, decisions)
        else:
            self._cut(sequence, request, how, now_ns, decisions)

    def _drop(self, request_id: bytes, now_ns: int, decisions: list[Decision]) -> None:
        request, sequence = self._known.get(request_id, (None, None))
        if request is None or sequence is None:
            return
        if request.state is DISPATCHED:
            self._stop(request, decisions)
        else:
            self._cut(sequence, request, None, now_ns, decisions)

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


__all__ = ["NO_DELAYS", "Delays", "SequenceScheduler"]
