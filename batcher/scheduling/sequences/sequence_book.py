"""What the scheduler of sequences knows, the moves that keep its parts in agreement, and what is asked of it. Pure.

The lowest of four layers, each of which knows those below it: `sequence_slots` says who has a slot, `sequence_batches`
what becomes of batches, `sequence_scheduler` takes facts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from batcher.scheduling.deadlock.waits import SlotGroup, Step
from batcher.scheduling.decisions import Decision, ForgetSequences, RejectReason, RejectRequest
from batcher.scheduling.observations import QueuedRequest, RequestState
from batcher.scheduling.poison.blame import Blame
from batcher.scheduling.queues.due_times import NEVER_NS, DueTimes
from batcher.scheduling.queues.ledger import cut_short
from charonia.errors import ErrorCode
from charonia.wire import SequenceMark

from .sequence_batching import SequenceRules
from .sequence_instances import LiveSequence, SequenceInstance, SequenceInstances

QUEUED = RequestState.QUEUED
ENDED = RequestState.ENDED

Cut = tuple[ErrorCode, str, RejectReason]
"""How a request ends that will not run."""
CANCELLED: Cut = (ErrorCode.CANCELLED, "", "CANCELED")  # a code and no text (G26)


@dataclass(frozen=True, slots=True)
class Delays:
    """For tests (S43): nothing is given out before so many requests wait in slots and, of them, in the backlog."""

    requests: int = 0
    backlog_requests: int = 0


NO_DELAYS = Delays()


@dataclass(slots=True)
class GivenBatch:
    """A batch an executor has; `sequences` are those of `requests`.

    `freed`: its instance takes the next one, while responses of this one are still to come. `alone`: it is suspected,
    and gets no company.
    """

    executor: str
    version: int
    instance: int
    requests: list[QueuedRequest]
    sequences: list[LiveSequence]
    alone: bool = False
    freed: bool = False


class VersionSequences:
    """The sequences of one version: `live` by key, the newest of each; `backlog` those without a slot, in order."""

    __slots__ = ("backlog", "instances", "live", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.live: dict[bytes, LiveSequence] = {}
        self.backlog: OrderedDict[LiveSequence, None] = OrderedDict()
        self.instances = SequenceInstances()


class SequenceBook:
    """`first_binding` makes the numbers of places unique over owners."""

    def __init__(self, batch_prefix: str, first_binding: int = 0, delays: Delays = NO_DELAYS) -> None:
        self._batch_prefix = batch_prefix
        self._next_batch = 0
        self._next_order = 0
        self._binding = first_binding
        self._delays = delays
        self._held = False
        self._model = ""
        self.on_conflict: Callable[[str], None] | None = None
        """Told in words of a sequence that was begun anew before it had ended (S33)."""
        self._repeatable = False
        self._rules: SequenceRules | None = None
        self._known: dict[bytes, tuple[QueuedRequest, LiveSequence]] = {}
        self._queued = 0
        self._versions: dict[int, VersionSequences] = {}
        self._batches: dict[str, GivenBatch] = {}
        self._alone: set[bytes] = set()
        self._blame = Blame()
        self._due = DueTimes()
        self._idle: dict[LiveSequence, int] = {}
        """When each sequence that rests has rested too long; one idle time holds for all, so the first is due first."""
        self._look_ns = NEVER_NS

    def _version(self, number: int) -> VersionSequences:
        version = self._versions.get(number)
        if version is None:
            version = self._versions[number] = VersionSequences(number)
        return version

    # -- requests ------------------------------------------------------------------------------------------------------

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

    def _cut(
        self, sequence: LiveSequence, request: QueuedRequest, how: Cut | None, now_ns: int, decisions: list[Decision]
    ) -> None:
        """A waiting request ends (`how` None: it is settled), and with it what follows until the next START."""
        queue = list(sequence.queue)
        at = queue.index(request)
        last = at + 1
        while last < len(queue) and not mark_of(queue[last]).start:
            last += 1
        sequence.queue = deque(queue[:at] + queue[last:])
        for one in queue[at:last]:
            self._unqueue(one)
            if one is not request:
                self._refuse(one, CANCELLED, decisions)
            elif how is not None:
                self._refuse(one, how, decisions)
            else:
                one.state = ENDED
                self._known.pop(one.id, None)
        if sequence.again is request:
            sequence.again = None
        if request.id == sequence.run:  # it had been given out, and began nothing
            sequence.unbegin()
        self._settle_down(sequence, now_ns, decisions)

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

    def _again_or_cut(
        self, sequence: LiveSequence, request: QueuedRequest, why: str, now_ns: int, decisions: list[Decision]
    ) -> None:
        """The run of a request that waits again was lost: the next one begins anew, unless responses were seen."""
        if request.responding and not self._repeatable:
            self._cut(sequence, request, cut_short(why), now_ns, decisions)

    def _forget_request(self, request: QueuedRequest) -> None:
        request.state = ENDED
        self._known.pop(request.id, None)
        self._alone.discard(request.id)
        if request.due_ns:
            self._due.disarm(request)

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
        before = sequence.waits_for()
        self._idle.pop(sequence, None)
        version = self._versions[sequence.version]
        if sequence.instance is not None:
            sequence.instance.release(sequence)
        else:
            version.backlog.pop(sequence, None)
        if version.live.get(sequence.key) is sequence:
            if before is not None:  # which has had its END, and which the next one of this id has to wait for
                version.live[sequence.key] = before
            else:
                del version.live[sequence.key]
        if decisions is not None:
            for run in dict.fromkeys(filter(None, (sequence.run, *sequence.former))):
                decisions.append(ForgetSequences({sequence.record_key: run}))

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
        """(executor, version, requests) of the batches that hold an instance; no executor with those that let it go."""
        return [("" if b.freed else b.executor, b.version, b.requests) for b in self._batches.values()]

    def step(self, request_id: bytes) -> Step | None:
        """What a request waits for in its queue; None for one that is not in it."""
        request, sequence = self._known.get(request_id, (None, None))
        if request is None or request.state is not QUEUED:
            return None
        before: list[bytes] = []
        instance: list[bytes] = []
        has_slot = True
        while sequence is not None:
            if sequence.running is not None:
                before.append(sequence.running.id)
            if sequence.queue:  # else its last request runs, and it needs neither a slot nor its instance any more
                if sequence.instance is None:
                    has_slot = False
                else:
                    instance += self._keep_busy(sequence.instance)
            sequence = sequence.waits_for()
        return Step(tuple(before), tuple(instance), has_slot)

    def slot_groups(self, number: int) -> tuple[SlotGroup, ...]:
        """The instances of a version and who has their slots."""
        version = self._versions.get(number)
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
        """A request of each batch that has to end before the instance gets another."""
        batches = [self._batches[instance.batch]] if instance.batch in self._batches else []
        if self._alone and any(sequence.queue[0].id in self._alone for sequence in instance.ready):
            place = (instance.executor, instance.index)
            batches = [batch for batch in self._batches.values() if (batch.executor, batch.instance) == place]
        return tuple([batch.requests[0].id for batch in batches if batch.requests])

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


def mark_of(request: QueuedRequest) -> SequenceMark:
    """A request that is in a queue here has one."""
    assert request.sequence is not None
    return request.sequence
