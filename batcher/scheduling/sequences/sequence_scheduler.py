"""The scheduler of a model with a sequence batcher (S30-S43), with the verbs of every scheduler (`verbs`). Pure.

- A sequence begins with START and is bound to one slot of one instance until its END, or until it has been idle for
  too long (S34, S38). Of its requests one runs at a time, in order.
- Sequences without a slot wait, whole, first come first served (S37).
- When its executor goes, a sequence gets another place, before those that have had none. The
  executor that gets it finds out whether its state can follow (`charonia.facts.sequence_states`).
- A request that is taken out of the middle takes the rest of its sequence's queue with it (I10): what follows was
  meant to come after it.
- Requests that ran when an instance or executor failed run alone the next time; `SequenceBatches` condemns the culprit.

The parts share one `SequenceLedger`: `SequenceSlots` says who has a slot, `SequenceDispatching` what runs next,
`SequenceBatches` what becomes of batches, `SequenceEndings` how requests end that do not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from batcher.scheduling.deadlock.waits import SlotGroup, Step
from batcher.scheduling.decisions import Decision, JoinEntries
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
    RequestsRescheduled,
    ResponsesBegun,
    ResponsesSeen,
    SequenceFound,
    SlotFreed,
    VersionsAbandoned,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.queues.ledger import (
    NEVER_NS,
    Cut,
)
from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface

from .sequence_batches import SequenceBatches
from .sequence_batching import SequenceRules
from .sequence_dispatch import NO_DELAYS, Delays, SequenceDispatching
from .sequence_endings import SequenceEndings
from .sequence_instances import LiveSequence, SequenceInstance
from .sequence_ledger import QUEUED, SequenceLedger
from .sequence_slots import SequenceSlots

NOT_STARTED = (
    "inference request for sequence {id} to model '{model}' must specify the START flag on the first request of the "
    "sequence"
)
CONFLICT = (
    "sequence {id} for model '{model}' has a conflict. The previous sequence did not end before this sequence start. "
    "Previous sequence will be terminated early."
)
NO_ID = "inference request to model '{model}' must specify a non-zero or non-empty correlation ID"


class SequenceScheduler:
    """Decides for one model with a sequence batcher; see the module docstring.

    `batch_prefix` makes batch ids unique over owners, `first_binding` the numbers of bindings. `delays` are for tests.
    """

    def __init__(self, batch_prefix: str, first_binding: int = 0, delays: Delays = NO_DELAYS) -> None:
        self._ledger = SequenceLedger()
        self._slots = SequenceSlots(self._ledger, first_binding)
        self._dispatching = SequenceDispatching(self._ledger, batch_prefix, delays)
        self._batches = SequenceBatches(self._ledger, self._slots)
        self._endings = SequenceEndings(self._ledger)
        self._next_order = 0
        self.on_conflict: Callable[[str], None] | None = None
        """Called with a message to log when a sequence is started again before it has ended (S33)."""

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def observe(self, event: Observation, now_ns: int) -> list[Decision]:
        """A fact happened. Unknown ids and repeated facts are ignored."""
        return self.observe_all((event,), now_ns)

    def observe_all(self, events: Iterable[Observation], now_ns: int) -> list[Decision]:
        """Several facts arrived together: decide once, after the last."""
        decisions: list[Decision] = []
        self._endings.expire(now_ns, decisions)
        for event in events:
            self._fold(event, now_ns, decisions)
        for version in self._ledger.versions.values():
            self._slots.fill(version)
        self._dispatching.decide(now_ns, decisions)
        return decisions

    def advance(self, now_ns: int) -> list[Decision]:
        """Time passed."""
        return self.observe_all((), now_ns)

    def next_wakeup(self) -> int | None:
        """The instant `advance` is due, None when only a fact can change anything."""
        wakeup_ns = min(self._endings.next_ns(), self._dispatching.next_check_ns)
        return wakeup_ns if wakeup_ns < NEVER_NS else None

    # -- what statistics ask -------------------------------------------------------------------------------------------

    def pending_count(self) -> int:
        """The number of waiting requests, without dispatched ones (M2)."""
        return self._ledger.queued

    def queued_by_version(self) -> dict[int, int]:
        """The number of waiting requests of each version that has any."""
        counts: dict[int, int] = {}
        for request in self.waiting():
            counts[request.version] = counts.get(request.version, 0) + 1
        return counts

    def find(self, request_id: bytes) -> RequestQueued | None:
        """Returns a request that has not ended."""
        found = self._ledger.known.get(request_id)
        return found[0] if found is not None else None

    def waiting(self) -> list[RequestQueued]:
        """The waiting requests, in no particular order."""
        return [request for request, _ in self._ledger.known.values() if request.state is QUEUED]

    def unended(self) -> list[RequestQueued]:
        """All requests that have not ended, in no particular order."""
        return [request for request, _ in self._ledger.known.values()]

    def holding(self) -> list[tuple[str, int, list[RequestQueued]]]:
        """(executor, version, requests) of the batches that hold an instance; without executor those that have freed
        theirs.
        """
        return [("" if b.freed else b.executor, b.version, b.requests) for b in self._ledger.batches.values()]

    def step(self, request_id: bytes) -> Step | None:
        """What a request waits for in its queue; None for one that is not in it."""
        request, sequence = self._ledger.known.get(request_id, (None, None))
        if request is None or request.state is not QUEUED:
            return None
        before: list[bytes] = []
        instance: list[bytes] = []
        has_slot = True
        while sequence is not None:
            if sequence.running is not None:
                before.append(sequence.running.id)
            if sequence.queue:  # otherwise its last request runs, and it needs neither a slot nor its instance any more
                if sequence.instance is None:
                    has_slot = False
                else:
                    instance += self._keep_busy(sequence.instance)
            sequence = sequence.waits_for()
        return Step(tuple(before), tuple(instance), has_slot)

    def slot_groups(self, number: int) -> tuple[SlotGroup, ...]:
        """The instances of a version and the sequences that have their slots."""
        version = self._ledger.versions.get(number)
        return tuple(
            [
                SlotGroup(
                    instance.executor,
                    instance.index,
                    instance.size,
                    self._keep_busy(instance),
                    tuple([s.running.id for s in instance.slots.values() if s.running is not None]),
                )
                for instance in (version.instances.all() if version is not None else ())
            ]
        )

    def _keep_busy(self, instance: SequenceInstance) -> tuple[bytes, ...]:
        """A request of each batch that must end before the instance gets another."""
        ledger = self._ledger
        batches = [ledger.batches[instance.batch]] if instance.batch in ledger.batches else []
        if ledger.alone and any(sequence.queue[0].id in ledger.alone for sequence in instance.ready):
            place = (instance.executor, instance.index)
            batches = [batch for batch in ledger.batches.values() if (batch.executor, batch.instance) == place]
        if instance.executor in self._dispatching.kept():
            batches = [batch for batch in ledger.batches.values() if batch.executor == instance.executor]
        return tuple([batch.requests[0].id for batch in batches if batch.requests])

    def outstanding_requests(self) -> int:
        """The number of requests in batches that executors have and did not finish or return."""
        return len(self._ledger.known) - self._ledger.queued

    def live_sequences(self) -> int:
        """The number of sequences that have begun or wait to, and have not ended."""
        return sum(len(version.live) for version in self._ledger.versions.values())

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _fold(self, event: Observation, now_ns: int, decisions: list[Decision]) -> None:
        match event:
            case RequestQueued():
                self._enqueue(event, now_ns, decisions)
            case BatchFinished():
                self._batches.finish(event, now_ns, decisions)
            case RequestsRescheduled():
                self._batches.reschedule(event)
            case SlotFreed():
                self._batches.free_instance(event)
            case ResponsesBegun():
                self._batches.begin_responses(event)
            case ResponsesSeen():
                self._batches.seen(event, now_ns, decisions)
            case BatchReturned():
                self._batches.give_back(event, now_ns, decisions)
            case BatchTooLarge():
                self._batches.divide(event, now_ns, decisions)
            case BatchDied():
                self._batches.die(event, now_ns, decisions)
            case RequestCancelled():
                self._endings.cancel(event, now_ns, decisions)
            case CallRefused():
                refused: Cut = (ErrorCode.UNAVAILABLE, event.message, "REJECTED")
                self._endings.end_one(event.id, refused, now_ns, decisions)
            case RequestSettled():
                self._endings.end_one(event.id, None, now_ns, decisions)
            case QueueHeld():
                self._dispatching.is_held = event.held
            case VersionsAbandoned():
                self._endings.abandon(event, decisions)
            case VersionServed():
                self._slots.serve(event, now_ns, decisions)
            case VersionWithdrawn():
                if (version := self._ledger.versions.get(event.version)) is not None:
                    self._slots.withdraw(version, event.executor, now_ns, decisions)
            case ExecutorLost():
                self._batches.lose(event, now_ns, decisions)
            case ExecutorReturned():
                self._batches.returned(event.executor)
            case SequenceFound():
                self._slots.found(event, now_ns)
            case BatchRunning():
                self._batches.adopt(event)
            case BatchLost():
                self._ledger.alone.update(request.id for request in event.requests)
            case PolicyChanged():
                self._change_policy(event.interface, now_ns, decisions)

    def _enqueue(self, request: RequestQueued, now_ns: int, decisions: list[Decision]) -> None:
        ledger = self._ledger
        if request.id in ledger.known:
            known, _ = ledger.known[request.id]
            if known is not request:
                decisions.append(JoinEntries(known, request))
            return
        request.order = self._next_order
        self._next_order += 1
        mark = request.sequence
        if mark is None:  # its gateway knew another configuration of the model
            text = NO_ID.format(model=ledger.model)
            ledger.refuse(request, (ErrorCode.INVALID_ARG, text, "OTHER"), decisions, bare=True)
            return
        version = ledger.version(request.version)
        sequence = version.live.get(mark.key)
        if mark.start and (sequence is None or sequence.closed):
            sequence = version.live[mark.key] = LiveSequence(version.number, mark.key, sequence)
            version.backlog[sequence] = None
        elif sequence is None or sequence.closed:
            text = NOT_STARTED.format(id=mark.correlation_id, model=ledger.model)
            ledger.refuse(request, (ErrorCode.INVALID_ARG, text, "OTHER"), decisions, bare=True)
            return
        elif mark.start and self.on_conflict is not None:
            self.on_conflict(CONFLICT.format(id=mark.correlation_id, model=ledger.model))
        # S33: a START on a live sequence ends its present run; the new one keeps its slot
        sequence.closed = mark.end
        ledger.queue(request, sequence)
        ledger.touch(sequence, now_ns)

    def _change_policy(self, interface: ModelInterface, now_ns: int, decisions: list[Decision]) -> None:
        ledger = self._ledger
        ledger.model, ledger.repeatable = interface.name, interface.repeatable
        rules, before = SequenceRules.of(interface), ledger.rules
        if rules == before:
            return
        ledger.rules = rules
        for request, sequence in ledger.known.values() if before is None else ():
            if request.state is QUEUED and not request.due_ns:
                ledger.time(request, sequence)
        if rules is not None:
            self._slots.resize(now_ns, decisions)
        for version in ledger.versions.values():
            for sequence in version.live.values():
                ledger.touch(sequence, now_ns)
