"""Handles batches of a model with sequences that are finished, returned, lost, or adopted from another owner. Pure.

Requests of a batch that failed run alone the next time. A request that ends an instance alone is condemned, and one
that is alone at the loss of `MAX_LOSSES_ALONE` executors. Where others may have ended the instance (`in_company`), one
that was alone runs apart first: instances of an isolated model share a process.
"""

from __future__ import annotations

from batcher.scheduling.decisions import CondemnRequest, Decision, ReleaseReplies
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchReturned,
    BatchRunning,
    BatchTooLarge,
    ExecutorLost,
    RequestQueued,
    RequestsRescheduled,
    ResponsesBegun,
    ResponsesSeen,
    SlotFreed,
)
from batcher.scheduling.poison.poison_isolation import CULPRIT_OF_LOSSES, Blame
from batcher.scheduling.queues.ledger import CANCELLED, cut_short
from charonia.errors import ErrorCode

from .sequence_instances import LiveSequence
from .sequence_ledger import QUEUED, DispatchedBatch, SequenceLedger, mark_of
from .sequence_slots import SequenceSlots

LOST = "its executor was lost"
MAX_LOSSES_ALONE = 5
"""How many executors are lost with a request alone in its batch until it is condemned. `RequestQueued.losses_apart`
counts them. `MAX_LOSSES_APART` is of single requests: those run apart, where no other batch of the model can be the
cause.
"""


class SequenceBatches:
    """The dispatched batches of one model. When an executor is lost, its `slots` are removed."""

    __slots__ = ("_blame", "_ledger", "_slots")

    def __init__(self, ledger: SequenceLedger, slots: SequenceSlots) -> None:
        self._ledger = ledger
        self._slots = slots
        self._blame = Blame()

    def free_instance(self, event: SlotFreed) -> None:
        """The instance takes the next batch; the sequences of this one still have a running request."""
        batch = self._ledger.batch_of(event.batch_id, event.executor)
        if batch is not None and not batch.alone:
            batch.freed = True
            self._release(event.batch_id, batch)

    def begin_responses(self, event: ResponsesBegun) -> None:
        batch = self._ledger.batch_of(event.batch_id, event.executor)
        for request in batch.requests if batch is not None else ():
            request.responding |= request.id in event.ids

    def seen(self, event: ResponsesSeen, now_ns: int, decisions: list[Decision]) -> None:
        """Responses to these are visible; the run of those that wait was lost with a predecessor."""
        known = self._ledger.known
        for request, sequence in sorted([known[i] for i in event.ids if i in known], key=lambda one: one[0].order):
            request.responding = True
            if request.state is QUEUED:
                self._ledger.cut(sequence, request, cut_short(LOST), now_ns, decisions)

    def reschedule(self, event: RequestsRescheduled) -> None:
        """The model wants another turn for some requests of a batch (S41)."""
        batch = self._ledger.batch_of(event.batch_id, event.executor)
        if batch is not None:
            for request, sequence in zip(batch.requests, batch.sequences, strict=True):
                if request.id in event.ids:
                    sequence.again = request

    def finish(self, event: BatchFinished, now_ns: int, decisions: list[Decision]) -> None:
        ledger = self._ledger
        if ledger.batch_of(event.batch_id, event.executor) is None:
            if event.replies_held and event.batch_id not in ledger.batches:
                decisions.append(ReleaseReplies(event.batch_id))  # from a time when the model had another scheduler
            return
        batch = self._close(event.batch_id)
        for request, sequence in zip(batch.requests, batch.sequences, strict=True):
            if sequence.again is request and not request.settled:
                # the same attempt goes on: nothing of it was settled
                request.attempt -= 1
                ledger.put_back(request, sequence, now_ns)
                continue
            sequence.again = None
            if not request.settled:
                sequence.former = ()
            ledger.forget(request)
            if sequence.rests and sequence.closed:
                # the executor that settled an END has deleted the record as well
                ledger.end(sequence, decisions if request.settled or not mark_of(request).end else None)
            else:
                ledger.touch(sequence, now_ns)

    def give_back(self, event: BatchReturned, now_ns: int, decisions: list[Decision]) -> None:
        """An executor did not run a batch."""
        if self._ledger.batch_of(event.batch_id, event.executor) is not None:
            self._take_back(event.batch_id, "its executor gave it back", now_ns, decisions)

    def divide(self, event: BatchTooLarge, now_ns: int, decisions: list[Decision]) -> None:
        """A batch could not be sent: its requests run alone, and one that cannot be sent alone ends."""
        batch = self._ledger.batch_of(event.batch_id, event.executor)
        if batch is None:
            return
        left = self._take_back(event.batch_id, "its batch was too large", now_ns, decisions)
        if len(batch.requests) > 1:
            self._ledger.alone.update(request.id for request in left)
            return
        for request in left:
            _, sequence = self._ledger.known[request.id]
            self._ledger.cut(sequence, request, (ErrorCode.INVALID_ARG, event.message, "OTHER"), now_ns, decisions)

    def die(self, event: BatchDied, now_ns: int, decisions: list[Decision]) -> None:
        """A batch ended its instance."""
        batch = self._ledger.batch_of(event.batch_id, event.executor)
        if batch is None:
            return
        for request in batch.requests:
            request.settled |= request.id not in event.ids
        left = self._take_back(event.batch_id, event.reason, now_ns, decisions)
        if event.blameless:
            return
        is_single = len(batch.requests) == 1
        for request in left:
            if is_single and (not event.in_company or batch.apart):
                self._condemn(CondemnRequest(request, event.reason, event.stderr, batch.executor), now_ns, decisions)
                continue
            self._ledger.alone.add(request.id)
            if is_single:
                self._ledger.apart.add(request.id)

    def lose(self, event: ExecutorLost, now_ns: int, decisions: list[Decision]) -> None:
        """An executor is lost, with its instances and batches."""
        ledger = self._ledger
        for version in ledger.versions.values():
            self._slots.withdraw(version, event.executor, now_ns, decisions)
        counted: list[RequestQueued] = []
        self._blame.lost(event.executor, counted)
        for batch_id, batch in [(i, batch) for i, batch in ledger.batches.items() if batch.executor == event.executor]:
            why = "its executor was stopped" if event.drained else LOST
            left = self._take_back(batch_id, why, now_ns, decisions)
            for request in left if not event.drained else ():
                ledger.alone.add(request.id)
                if len(batch.requests) == 1:
                    request.losses_apart += 1
                    counted.append(request)
                if request.losses_apart >= MAX_LOSSES_ALONE:
                    self._condemn(CondemnRequest(request, CULPRIT_OF_LOSSES, "", event.executor), now_ns, decisions)

    def returned(self, executor: str) -> None:
        """An executor is heard of; it may have been presumed dead."""
        self._blame.returned(executor)

    def adopt(self, event: BatchRunning) -> None:
        """Adopts a batch of a predecessor: its requests are at the heads of their sequences' queues."""
        ledger = self._ledger
        if event.batch_id in ledger.batches or event.sequences is None:
            return
        places = {place.run: place for place in event.sequences.places}
        instance = event.sequences.instance
        requests: list[RequestQueued] = []
        sequences: list[LiveSequence] = []
        for member in event.requests:
            request, sequence = ledger.known.get(member.id, (None, None))
            if request is None or sequence is None or request.state is not QUEUED or sequence.queue[0] is not request:
                continue
            request.attempt = max(request.attempt, member.attempt, 1)
            place = places.get(request.id if mark_of(request).start else sequence.run)
            ledger.dispatch(request, sequence)
            if place is not None:
                sequence.begin(place.run)
                sequence.binding = place.binding
                if sequence.instance is None:
                    sequence.wanted = (event.executor, instance, place.slot, event.content_hash)
            requests.append(request)
            sequences.append(sequence)
        ledger.batches[event.batch_id] = DispatchedBatch(event.executor, event.version, instance, requests, sequences)

    def _close(self, batch_id: str) -> DispatchedBatch:
        """A batch ended, finished or not; its instance is free."""
        batch = self._ledger.batches.pop(batch_id)
        self._release(batch_id, batch)
        for sequence in batch.sequences:
            sequence.running = None
        return batch

    def _release(self, batch_id: str, batch: DispatchedBatch) -> None:
        """The instance of a batch may take another, unless it has one already."""
        instance = self._ledger.instance_of(batch)
        if instance is not None and instance.batch == batch_id:
            instance.batch = ""

    def _take_back(self, batch_id: str, why: str, now_ns: int, decisions: list[Decision]) -> list[RequestQueued]:
        """A batch did not run to its end, because of `why`: queue its unsettled requests again, and return them."""
        ledger = self._ledger
        batch = self._close(batch_id)
        for request, sequence in zip(batch.requests, batch.sequences, strict=True):
            sequence.again = None
            if request.settled:
                ledger.forget(request)
                ledger.settle_down(sequence, now_ns, decisions)
            else:
                ledger.put_back(request, sequence, now_ns)
                ledger.cut_if_seen(sequence, request, why, now_ns, decisions)
                if request.cancelled and request.state is QUEUED:
                    ledger.cut(sequence, request, CANCELLED, now_ns, decisions)
        return [request for request in batch.requests if request.state is QUEUED]

    def _condemn(self, end: CondemnRequest, now_ns: int, decisions: list[Decision]) -> None:
        """A waiting request becomes a dead letter, and all that follow it end with it."""
        decisions.append(end)
        _, sequence = self._ledger.known[end.request.id]
        self._ledger.cut(sequence, end.request, None, now_ns, decisions)
