"""The batches of a model with a sequence batcher: given out, finished, taken back, adopted from another owner. Pure.

What was aboard when an instance or executor ended runs alone the next time; a request that ends one alone is condemned.
"""

from __future__ import annotations

from batcher.scheduling.decisions import CondemnRequest, Decision, DispatchBatch, ReleaseReplies
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchRunning,
    ExecutorLost,
    QueuedRequest,
    RequestsRescheduled,
    RequestState,
    ResponsesBegun,
    ResponsesSeen,
    SlotFreed,
)
from batcher.scheduling.poison.poison_isolation import CULPRIT_OF_LOSSES
from batcher.scheduling.queues.due_times import NEVER_NS
from batcher.scheduling.queues.ledger import cut_short
from charonia.wire import BatchPlaces, SequencePlace

from .sequence_batching import SequenceRules, choose
from .sequence_book import NO_DELAYS, QUEUED, GivenBatch, mark_of
from .sequence_instances import LiveSequence, SequenceInstance
from .sequence_slots import SequenceSlots

DISPATCHED = RequestState.DISPATCHED

LOST_UNSEEN = "its executor was lost"
MAX_LOSSES_ALONE = 5
"""Executors lost while they ran a request in a batch of its own, from which on it is the culprit."""


class SequenceBatches(SequenceSlots):
    """The batches of one model."""

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
        alone = self._alone
        suspects = [sequence for sequence in instance.ready if sequence.queue[0].id in alone] if alone else []
        if suspects:
            if any(instance is self._instance_of(batch) for batch in self._batches.values()):
                return  # what ends an instance now must have been this
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
            if mark_of(request).start and not again:
                sequence.begin(request.id)
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
        given = GivenBatch(instance.executor, version, instance.index, requests, chosen, bool(suspects))
        self._batches[batch_id] = given
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
        instance = self._instance_of(batch)
        if instance is not None and instance.batch == batch_id:
            instance.batch = ""
        for sequence in batch.sequences:
            sequence.running = None
        return batch

    def _instance_of(self, batch: GivenBatch) -> SequenceInstance | None:
        return self._version(batch.version).instances.find(batch.executor, batch.instance)

    def _free(self, event: SlotFreed) -> None:
        """The instance takes the next batch; the sequences of this one still have a request that runs."""
        batch = self._batches.get(event.batch_id)
        if batch is not None and batch.executor == event.executor and not batch.alone:
            batch.freed = True
            instance = self._instance_of(batch)
            if instance is not None and instance.batch == event.batch_id:
                instance.batch = ""

    def _begin_responses(self, event: ResponsesBegun) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is not None and batch.executor == event.executor:
            for request in batch.requests:
                request.responding |= request.id in event.ids

    def _seen(self, event: ResponsesSeen, now_ns: int, decisions: list[Decision]) -> None:
        """Of these a response is visible; the run of those that wait went with a predecessor."""
        seen = [self._known[i] for i in event.ids if i in self._known]
        for request, sequence in sorted(seen, key=lambda one: one[0].order):
            request.responding = True
            if request.state is QUEUED:
                self._cut(sequence, request, cut_short(LOST_UNSEEN), now_ns, decisions)

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
            if not request.settled:
                sequence.former = ()
            self._forget_request(request)
            if sequence.rests and sequence.closed:
                # an END that its executor settled has ended the record as well
                self._end(sequence, decisions if request.settled or not mark_of(request).end else None)
            else:
                self._touch(sequence, now_ns)

    def _reschedule(self, event: RequestsRescheduled) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is not None and batch.executor == event.executor:
            for request, sequence in zip(batch.requests, batch.sequences, strict=True):
                if request.id in event.ids:
                    sequence.again = request

    def _take_back(self, batch_id: str, why: str, now_ns: int, decisions: list[Decision]) -> GivenBatch:
        """A batch did not run, or not to its end, `why`: what is unsettled of it waits again."""
        batch = self._close(batch_id)
        for request, sequence in zip(batch.requests, batch.sequences, strict=True):
            sequence.again = None
            if request.settled:
                self._forget_request(request)
                self._settle_down(sequence, now_ns, decisions)
            else:
                self._put_back(request, sequence, now_ns)
                self._again_or_cut(sequence, request, why, now_ns, decisions)
        return batch

    def _die(self, event: BatchDied, now_ns: int, decisions: list[Decision]) -> None:
        batch = self._batches.get(event.batch_id)
        if batch is None or batch.executor != event.executor:
            return
        for request in batch.requests:
            request.settled |= request.id not in event.ids
        self._take_back(event.batch_id, event.reason, now_ns, decisions)
        if event.blameless:
            return
        left = [request for request in batch.requests if request.state is QUEUED]
        for request in left:
            if len(batch.requests) == 1 and not event.in_company:
                self._condemn(request, event.reason, event.stderr, batch.executor, now_ns, decisions)
            else:
                self._alone.add(request.id)

    def _lose(self, event: ExecutorLost, now_ns: int, decisions: list[Decision]) -> None:
        for version in self._versions.values():
            self._displace(version, version.instances.withdraw(event.executor), now_ns, decisions)
        counted: list[QueuedRequest] = []
        self._blame.lost(event.executor, counted)
        for batch_id in [i for i, batch in self._batches.items() if batch.executor == event.executor]:
            why = "its executor was stopped" if event.drained else "its executor was lost"
            batch = self._take_back(batch_id, why, now_ns, decisions)
            if event.drained:
                continue
            for request in batch.requests:
                if request.state is not QUEUED:
                    continue
                self._alone.add(request.id)
                if len(batch.requests) == 1:
                    request.losses_apart += 1
                    counted.append(request)
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
            place = places.get(request.id if mark_of(request).start else sequence.run)
            sequence.queue.popleft()
            self._unqueue(request)
            request.state = DISPATCHED
            if request.deadline_ns:
                self._due.arm(request)
            sequence.running = request
            self._idle.pop(sequence, None)
            if place is not None:
                sequence.begin(place.run)
                sequence.binding = place.binding
                if sequence.instance is None:
                    sequence.wanted = (event.executor, event.sequences.instance, place.slot, event.content_hash)
            requests.append(request)
            sequences.append(sequence)
        self._batches[event.batch_id] = GivenBatch(
            event.executor, event.version, event.sequences.instance, requests, sequences
        )
