"""The sequences, requests and batches of one model, and the operations that keep them consistent. Pure.

Decides nothing: `sequence_slots` allocates slots, `sequence_dispatch` chooses what runs next, `sequence_batches`
handles batches, `sequence_scheduler` ends requests without a run.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from batcher.scheduling.decisions import Decision, ForgetSequences, RejectRequest
from batcher.scheduling.observations import RequestQueued, RequestState
from batcher.scheduling.queues.ledger import CANCELLED, Cut, DueTimes, cut_short
from charonia.wire import SequenceMark

from .sequence_batching import SequenceRules
from .sequence_instances import LiveSequence, SequenceInstance, SequenceInstances

QUEUED = RequestState.QUEUED
DISPATCHED = RequestState.DISPATCHED
ENDED = RequestState.ENDED


@dataclass(slots=True)
class DispatchedBatch:
    """A batch at an executor; `sequences` are those of `requests`. `freed`: its instance takes the next one, while this
    one still produces responses. `alone`: it is suspected, and no request joins it. `apart`: its executor gets no other
    batch of the model meanwhile.
    """

    executor: str
    version: int
    instance: int
    requests: list[RequestQueued]
    sequences: list[LiveSequence]
    alone: bool = False
    apart: bool = False
    freed: bool = False


class VersionSequences:
    """The sequences of one version: `live` by key, the newest of each; `backlog` those without a slot, in order."""

    __slots__ = ("backlog", "instances", "live", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.live: dict[bytes, LiveSequence] = {}
        self.backlog: OrderedDict[LiveSequence, None] = OrderedDict()
        self.instances = SequenceInstances()


class SequenceLedger:
    """`known` are the unsettled requests, each with its sequence; `queued` counts those that wait. `rules` is None
    until the first configuration is known. The requests in `alone` run in batches of their own, and those of them that
    are in `apart` run while their executor has no other batch of the model.
    """

    __slots__ = (
        "alone",
        "apart",
        "batches",
        "due",
        "idle",
        "known",
        "model",
        "queued",
        "repeatable",
        "rules",
        "versions",
    )

    def __init__(self) -> None:
        self.model = ""
        self.repeatable = False
        self.rules: SequenceRules | None = None
        self.known: dict[bytes, tuple[RequestQueued, LiveSequence]] = {}
        self.queued = 0
        self.versions: dict[int, VersionSequences] = {}
        self.batches: dict[str, DispatchedBatch] = {}
        self.alone: set[bytes] = set()
        self.apart: set[bytes] = set()
        self.due = DueTimes()
        self.idle: dict[LiveSequence, int] = {}
        """When each resting sequence has been idle too long; all have the same idle time, so the first is due first."""

    def version(self, number: int) -> VersionSequences:
        version = self.versions.get(number)
        if version is None:
            version = self.versions[number] = VersionSequences(number)
        return version

    def batch_of(self, batch_id: str, executor: str) -> DispatchedBatch | None:
        """A batch, if that executor has it."""
        batch = self.batches.get(batch_id)
        return batch if batch is not None and batch.executor == executor else None

    def instance_of(self, batch: DispatchedBatch) -> SequenceInstance | None:
        return self.version(batch.version).instances.find(batch.executor, batch.instance)

    # -- requests ------------------------------------------------------------------------------------------------------

    def queue(self, request: RequestQueued, sequence: LiveSequence) -> None:
        """Append a new request to its sequence."""
        sequence.queue.append(request)
        request.state = QUEUED
        self.known[request.id] = (request, sequence)
        self.queued += 1
        self.time(request, sequence)

    def time(self, request: RequestQueued, sequence: LiveSequence) -> None:
        """Set its due times; without a slot a request waits no longer than its time-out (S37)."""
        # until the model is known, running batches and slots are not known either (recovery)
        waits = self.rules is not None and sequence.instance is None and sequence.wanted is None
        if request.timeout_us and waits:
            request.timeout_ns = request.enqueued_ns + request.timeout_us * 1000
        if request.timeout_ns or request.deadline_ns:
            self.due.arm(request)

    def dispatch(self, request: RequestQueued, sequence: LiveSequence) -> None:
        """Take the next request of a sequence, which runs."""
        sequence.queue.popleft()
        sequence.running = request
        self._unqueue(request)
        request.state = DISPATCHED
        if request.deadline_ns:
            self.due.arm(request)
        self.idle.pop(sequence, None)

    def put_back(self, request: RequestQueued, sequence: LiveSequence, now_ns: int) -> None:
        """A dispatched request is the next of its sequence again."""
        self.due.disarm(request)
        sequence.queue.appendleft(request)
        request.state = QUEUED
        self.queued += 1
        if request.deadline_ns:
            self.due.arm(request)
        self.touch(sequence, now_ns)

    def forget(self, request: RequestQueued) -> None:
        """A request that is in no queue has ended."""
        request.state = ENDED
        self.known.pop(request.id, None)
        self.alone.discard(request.id)
        self.apart.discard(request.id)
        self.due.disarm(request)

    def refuse(self, request: RequestQueued, how: Cut, decisions: list[Decision], *, bare: bool = False) -> None:
        """A request that is in no queue ends with an error."""
        self.forget(request)
        decisions.append(RejectRequest(request, *how, bare))

    def refuse_all(self, sequence: LiveSequence, how: Cut, decisions: list[Decision], *, bare: bool = False) -> None:
        """Ends the waiting requests of a sequence with an error."""
        for request in sequence.queue:
            self._unqueue(request)
            self.refuse(request, how, decisions, bare=bare)
        sequence.queue.clear()

    def cut(
        self, sequence: LiveSequence, request: RequestQueued, how: Cut | None, now_ns: int, decisions: list[Decision]
    ) -> None:
        """Ends a waiting request (`how` None: it is settled), and all that follow it until the next START."""
        queue = list(sequence.queue)
        at = queue.index(request)
        last = at + 1
        while last < len(queue) and not mark_of(queue[last]).start:
            last += 1
        sequence.queue = deque(queue[:at] + queue[last:])
        for one in queue[at:last]:
            self._unqueue(one)
            if one is not request:
                self.refuse(one, CANCELLED, decisions)
            elif how is not None:
                self.refuse(one, how, decisions)
            else:
                self.forget(one)
        if sequence.again is request:
            sequence.again = None
        if request.id == sequence.run:  # it had been dispatched, and began no run
            sequence.unbegin()
        self.settle_down(sequence, now_ns, decisions)

    def cut_if_seen(
        self, sequence: LiveSequence, request: RequestQueued, why: str, now_ns: int, decisions: list[Decision]
    ) -> None:
        """A request waits again and its run was lost: run it from its start, unless responses were visible."""
        if request.responding and not self.repeatable:
            self.cut(sequence, request, cut_short(why), now_ns, decisions)

    def _unqueue(self, request: RequestQueued) -> None:
        """A request has left its queue."""
        self.queued -= 1
        self.due.disarm(request)

    # -- sequences -----------------------------------------------------------------------------------------------------

    def touch(self, sequence: LiveSequence, now_ns: int) -> None:
        """A sequence has changed: update whether it is ready, and whether it rests."""
        if sequence.instance is not None:
            sequence.instance.refresh(sequence)
        self.idle.pop(sequence, None)
        if sequence.rests and not sequence.done and self.rules is not None:
            self.idle[sequence] = now_ns + self.rules.block.max_idle_us * 1000

    def settle_down(self, sequence: LiveSequence, now_ns: int, decisions: list[Decision]) -> None:
        """Requests of a sequence ended: it ends too if it was closed or never began, and none is left."""
        if sequence.rests and (sequence.closed or not sequence.run):
            self.end(sequence, decisions)
        else:
            self.touch(sequence, now_ns)

    def end(self, sequence: LiveSequence, decisions: list[Decision] | None) -> None:
        """A sequence ended. With `decisions` it ended without a last request: the log may still have its record."""
        sequence.done = True
        before = sequence.waits_for()
        self.idle.pop(sequence, None)
        version = self.versions[sequence.version]
        if sequence.instance is not None:
            sequence.instance.release(sequence)
        else:
            version.backlog.pop(sequence, None)
        if version.live.get(sequence.key) is sequence:
            if before is not None:  # its END has arrived, and the next sequence of this id waits for it
                version.live[sequence.key] = before
            else:
                del version.live[sequence.key]
        if decisions is not None:
            for run in dict.fromkeys(filter(None, (sequence.run, *sequence.former))):
                decisions.append(ForgetSequences({sequence.record_key: run}))


def mark_of(request: RequestQueued) -> SequenceMark:
    """The sequence mark of a request; every request queued here has one."""
    assert request.sequence is not None
    return request.sequence
