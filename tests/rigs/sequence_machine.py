"""The sequence scheduler under everything that may happen to it, as a state machine for Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, field

from google.protobuf import text_format
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batcher.scheduling.decisions import CondemnRequest, DispatchBatch, ForgetSequences, RejectRequest, StopExecution
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchReturned,
    BatchRunning,
    ExecutorLost,
    Observation,
    PolicyChanged,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    RequestsRescheduled,
    RequestState,
    ResponsesBegun,
    ResponsesSeen,
    SequenceFound,
    SlotFreed,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.sequences.sequence_scheduler import SequenceScheduler
from charonia.facts.sequence_states import SequenceAbout, sequence_key
from charonia.models.interface import ModelInterface
from charonia.wire import SequenceMark
from executors.configuration.config import normalise
from protos.model_config_pb2 import ModelConfig

IDLE_NS = 50_000
SLOTS = 2
EXECUTORS = ("e1", "e2")
INSTANCES = 2


def interface(strategy: str) -> ModelInterface:
    text = (
        f'name: "m" backend: "python" max_batch_size: {SLOTS} '
        f"sequence_batching {{ max_sequence_idle_microseconds: {IDLE_NS // 1000} {strategy} }}"
    )
    return ModelInterface.of(normalise(text_format.Parse(text, ModelConfig())))


DIRECT = interface("direct { }")
SLOW_DIRECT = interface("direct { max_queue_delay_microseconds: 20 minimum_slot_utilization: 0.7 }")
OLDEST = interface(f"oldest {{ max_candidate_sequences: {SLOTS} max_queue_delay_microseconds: 5 }}")


@dataclass
class Sent:
    """What the machine knows of a request it sent."""

    request: RequestQueued
    outcome: str = ""
    runs: int = 0


@dataclass
class World:
    """The batches out there, and the log."""

    batches: dict[str, DispatchBatch] = field(default_factory=dict)
    settled: set[bytes] = field(default_factory=set)
    records: dict[bytes, SequenceAbout] = field(default_factory=dict)


class Sequences(RuleBasedStateMachine):
    model = DIRECT

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000
        self.owners = 1
        self.scheduler = SequenceScheduler("b", 1 << 32)
        self.world = World()
        self.sent: dict[bytes, Sent] = {}
        self.freed: set[str] = set()
        """Batches whose instances take others, while responses are still to come."""
        self.accompanied: set[str] = set()
        """Batches that had another one at their executor at any time."""
        self.may_condemn = True
        self.visible: set[bytes] = set()
        self.empty: list[tuple[str, str]] = []
        self.ended: dict[int, list[bytes]] = {}
        self.serving: dict[str, str] = {}
        self.see(PolicyChanged(self.model))

    # -- telling and hearing ------------------------------------------------------------------------------------------

    def see(self, *events: Observation) -> None:
        self.hear(self.scheduler.observe_all(events, self.now))
        while self.empty:
            self.hear(self.scheduler.observe(BatchFinished(*self.empty.pop()), self.now))

    def hear(self, decisions: list[object]) -> None:
        for decision in decisions:
            if isinstance(decision, DispatchBatch):
                self.dispatched(decision)
            elif isinstance(decision, RejectRequest | CondemnRequest):
                assert not isinstance(decision, CondemnRequest) or self.may_condemn, "another may have ended it"
                self.end(decision.request, decision.code.name if isinstance(decision, RejectRequest) else "CONDEMNED")
            elif isinstance(decision, ForgetSequences):
                for key, run in decision.runs.items():
                    if key in self.world.records and self.world.records[key].run == run:
                        del self.world.records[key]
            else:
                assert isinstance(decision, StopExecution)
                assert decision.batch_id in self.world.batches

    def dispatched(self, batch: DispatchBatch) -> None:
        assert batch.sequences is not None
        assert batch.executor in self.serving
        assert len(batch.sequences.places) == len(batch.requests) == len(batch.attempts) > 0
        here = (batch.executor, batch.sequences.instance)
        for other in self.world.batches.values():
            assert other.sequences is not None
            if other.batch_id not in self.freed:
                assert (other.executor, other.sequences.instance) != here, "two batches with one instance"
            mine = {r.sequence.correlation_id for r in batch.requests if r.sequence}
            assert not mine & {r.sequence.correlation_id for r in other.requests if r.sequence}, "two of a sequence"
        slots = [place.slot for place in batch.sequences.places]
        assert len(set(slots)) == len(slots)
        assert max(slots) < SLOTS
        ids = [request.sequence.correlation_id for request in batch.requests if request.sequence]
        assert len(set(ids)) == len(ids)
        if self.model.sequence_batching is not None and self.model.sequence_batching.direct:
            assert slots == sorted(slots)
            assert max(slots) < batch.sequences.rows <= SLOTS
        # what beginning an attempt finds settled (by an executor that was lost meanwhile) is left out
        gone = {r.id for r in batch.requests if self.sent[r.id].outcome == "DONE"}
        batch = batch.without(gone)
        assert batch.sequences is not None
        if not batch.requests:
            self.empty.append((batch.batch_id, batch.executor))
            return
        for request, place in zip(batch.requests, batch.sequences.places, strict=True):
            assert not self.sent[request.id].outcome, "an ended request runs"
            assert self.sent[request.id].request is request
            self.sent[request.id].runs += 1
            assert place.again or request.id not in self.visible, "responses of two runs"
            assert request.sequence is not None
            if request.sequence.start:
                assert place.run == request.id
            else:
                assert place.run, "a sequence that nobody started"
            earlier = [
                one
                for one in self.sent.values()
                if one.request.sequence is not None
                and one.request.sequence.correlation_id == request.sequence.correlation_id
                and one.request.id < request.id
            ]
            assert all(one.outcome for one in earlier), "out of order"
        beside = [one.batch_id for one in self.world.batches.values() if one.executor == batch.executor]
        self.accompanied.update([*beside, batch.batch_id] if beside else ())
        self.world.batches[batch.batch_id] = batch

    def end(self, request: RequestQueued, outcome: str) -> None:
        sent = self.sent[request.id]
        if request.id not in self.world.settled:
            assert not sent.outcome, f"{sent.outcome} and {outcome}"
            sent.outcome = outcome
            self.world.settled.add(request.id)

    # -- what clients do ----------------------------------------------------------------------------------------------

    @rule(
        number=st.integers(1, 5),
        start=st.booleans(),
        end=st.booleans(),
        shape=st.integers(0, 4),
        timeout_us=st.sampled_from([0, 0, 0, 10]),
        deadline=st.sampled_from([0, 0, 0, 30_000]),
    )
    def send(self, number: int, start: bool, end: bool, shape: int, timeout_us: int, deadline: int) -> None:
        request_id = len(self.sent).to_bytes(16, "big")
        deadline_ns = self.now + deadline if deadline else 0
        mark = SequenceMark(number, start, end)
        request = RequestQueued(request_id, 1, 0, 1, shape // 4, timeout_us, deadline_ns, self.now, sequence=mark)
        self.sent[request_id] = Sent(request)
        self.see(request)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.sent:
            self.see(RequestCancelled(data.draw(st.sampled_from(sorted(self.sent)))))

    @rule(data=st.data())
    def settle_elsewhere(self, data: st.DataObject) -> None:
        open_ids = sorted(i for i, one in self.sent.items() if not one.outcome)
        if open_ids:
            request_id = data.draw(st.sampled_from(open_ids))
            self.sent[request_id].outcome = "ELSEWHERE"
            self.world.settled.add(request_id)
            self.see(RequestSettled(request_id))

    @rule(by=st.integers(1, 2 * IDLE_NS))
    def wait(self, by: int) -> None:
        self.now += by
        self.see()

    # -- what executors do --------------------------------------------------------------------------------------------

    @rule(executor=st.sampled_from(EXECUTORS), content=st.sampled_from("ab"), instances=st.integers(1, INSTANCES))
    def serve(self, executor: str, content: str, instances: int) -> None:
        self.serving[executor] = content
        self.see(VersionServed(executor, 1, content, instances))

    @rule(executor=st.sampled_from(EXECUTORS))
    def withdraw(self, executor: str) -> None:
        self.serving.pop(executor, None)
        self.see(VersionWithdrawn(executor, 1))

    @precondition(lambda self: self.world.batches)
    @rule(data=st.data(), again=st.booleans())
    def finish(self, data: st.DataObject, again: bool) -> None:
        batch = self.take(data)
        rescheduled = {batch.requests[0].id} if again and batch.requests[0].id not in self.world.settled else set()
        if rescheduled:
            self.see(RequestsRescheduled(batch.batch_id, batch.executor, frozenset(rescheduled)))
        self.settle(batch, rescheduled)
        self.see(BatchFinished(batch.batch_id, batch.executor))

    def settle(self, batch: DispatchBatch, but: set[bytes]) -> None:
        """What an executor writes."""
        assert batch.sequences is not None
        for request, place in zip(batch.requests, batch.sequences.places, strict=True):
            if request.id in self.world.settled or request.id in but:
                continue
            assert request.sequence is not None
            self.end(request, "DONE")
            key = sequence_key(1, request.sequence.key)
            if request.sequence.end:
                self.world.records.pop(key, None)
            else:
                self.world.records[key] = SequenceAbout(
                    key,
                    place.run,
                    1,
                    batch.content_hash,
                    batch.executor,
                    batch.sequences.instance,
                    place.slot,
                    place.binding,
                    1,
                    0,
                )

    @precondition(lambda self: self.world.batches)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        batch = self.take(data)
        self.see(BatchReturned(batch.batch_id, batch.executor))

    @precondition(lambda self: self.world.batches)
    @rule(data=st.data(), blameless=st.booleans())
    def die(self, data: st.DataObject, blameless: bool) -> None:
        batch = self.take(data)
        ids = frozenset(r.id for r in batch.requests if r.id not in self.world.settled)
        self.see(BatchDied(batch.batch_id, batch.executor, ids, "it died", blameless=blameless))

    @precondition(lambda self: self.accompanied & self.world.batches.keys())
    @rule(data=st.data(), times=st.integers(1, 3))
    def die_together(self, data: st.DataObject, times: int) -> None:
        """The process of all instances ends, perhaps each time: which batch ended it is unknown."""
        chosen = data.draw(st.sampled_from(sorted(self.accompanied & self.world.batches.keys())))
        executor = self.world.batches[chosen].executor
        for _ in range(times):
            for batch in [one for one in self.world.batches.values() if one.executor == executor]:
                if self.world.batches.pop(batch.batch_id, None) is None:
                    continue
                ids = frozenset(r.id for r in batch.requests if r.id not in self.world.settled)
                self.may_condemn = batch.batch_id not in self.accompanied
                self.see(BatchDied(batch.batch_id, executor, ids, "it died", in_company=True))
                self.may_condemn = True

    @precondition(lambda self: self.world.batches)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        batch = self.world.batches[data.draw(st.sampled_from(sorted(self.world.batches)))]
        if not batch.suspects:  # which the owner leaves alone, whatever it hears
            self.freed.add(batch.batch_id)
        self.see(SlotFreed(batch.batch_id, batch.executor))

    @precondition(lambda self: self.world.batches)
    @rule(data=st.data())
    def respond(self, data: st.DataObject) -> None:
        batch = self.world.batches[data.draw(st.sampled_from(sorted(self.world.batches)))]
        ids = frozenset({data.draw(st.sampled_from([request.id for request in batch.requests]))})
        self.visible |= ids - self.world.settled
        self.see(ResponsesBegun(batch.batch_id, batch.executor, ids))

    @rule(executor=st.sampled_from(EXECUTORS), drained=st.booleans(), settles=st.booleans())
    def lose(self, executor: str, drained: bool, settles: bool) -> None:
        lost = [batch for batch in self.world.batches.values() if batch.executor == executor]
        for batch in lost:
            del self.world.batches[batch.batch_id]
        self.serving.pop(executor, None)
        if settles:  # its last word reached the log, and the owner hears of it when it begins the next attempt
            for batch in lost:
                self.settle(batch, set())
        self.see(ExecutorLost(executor, drained))

    def take(self, data: st.DataObject) -> DispatchBatch:
        return self.world.batches.pop(data.draw(st.sampled_from(sorted(self.world.batches))))

    # -- owners -------------------------------------------------------------------------------------------------------

    @rule()
    def take_over(self) -> None:
        """Another owner begins with what the log and the executors have."""
        self.owners += 1
        self.scheduler = SequenceScheduler(f"b{self.owners}", self.owners << 32)
        self.see(*(SequenceFound(about) for about in self.world.records.values()))
        queued: dict[bytes, RequestQueued] = {}
        for sent in self.sent.values():
            if sent.request.id in self.world.settled:
                continue
            old = sent.request
            fresh = RequestQueued(
                *(old.id, old.version, old.level, old.rows, old.signature, old.timeout_us, old.deadline_ns),
                *(old.enqueued_ns, max(1, old.attempt)),
                sequence=old.sequence,
            )
            sent.request = queued[old.id] = fresh
        self.see(*queued.values())
        batches, self.world.batches = self.world.batches, {}
        for batch_id, batch in batches.items():
            assert batch.sequences is not None
            left = [queued[r.id] for r in batch.requests if r.id in queued and not self.sent[r.id].outcome]
            if left:
                places = batch.without({r.id for r in batch.requests} - {r.id for r in left}).sequences
                running = BatchRunning(batch_id, batch.executor, 1, left, False, batch.sequences, batch.content_hash)
                self.see(running)
                adopted = [r for r in left if r.state is RequestState.DISPATCHED]
                assert len(adopted) == len(left)
                self.world.batches[batch_id] = DispatchBatch(
                    batch_id, batch.executor, 1, batch.content_hash, left, (1,) * len(left), False, sequences=places
                )
        self.see(ResponsesSeen(frozenset(self.visible - self.world.settled)))
        self.see(PolicyChanged(self.model))
        self.see(*(VersionServed(executor, 1, content, 1) for executor, content in self.serving.items()))
        # executors say again what they told the former owner
        self.see(*(SlotFreed(i, batch.executor) for i, batch in self.world.batches.items() if i in self.freed))

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        running = {r.id for batch in self.world.batches.values() for r in batch.requests}
        # the log has the outcome of these, and their owner does not know it yet
        unheard = {i for i, one in self.sent.items() if one.outcome == "DONE" and self.scheduler.find(i)} - running
        for request_id, sent in self.sent.items():
            known = self.scheduler.find(request_id)
            if not sent.outcome:
                assert known is sent.request
                assert (known.state is RequestState.DISPATCHED) == (request_id in running)
            elif sent.outcome != "ELSEWHERE" and request_id not in unheard:
                assert known is None or request_id in running
        waiting = list(self.scheduler.waiting())
        assert len(waiting) == self.scheduler.pending_count()
        assert len(running) <= self.scheduler.outstanding_requests() <= len(running | unheard)

    @invariant()
    def slots_are_whole(self) -> None:
        version = self.scheduler._ledger.versions.get(1)
        if version is None:
            return
        seen: set[int] = set()
        for instance in version.instances.all():
            assert instance.room + len(instance.slots) == SLOTS
            for slot, sequence in instance.slots.items():
                assert (sequence.instance, sequence.slot, sequence.done) == (instance, slot, False)
                assert id(sequence) not in seen
                seen.add(id(sequence))
        for sequence in version.backlog:
            assert sequence.instance is None
            assert not sequence.done
            assert id(sequence) not in seen
            seen.add(id(sequence))
        for sequence in version.live.values():
            assert id(sequence) in seen, "a live sequence that is nowhere"
        if any(instance.room for instance in version.instances.all()):
            assert all(one.waits_for() is not None for one in version.backlog), "it waits beside a free slot"

    def teardown(self) -> None:
        """Given instances and time, everything ends and no slot stays taken."""
        self.serving["e1"] = "last"
        self.see(VersionServed("e1", 1, "last", 1))
        for _ in range(10_000):
            for _ in range(2):  # what comes due now may leave a sequence that has yet to rest
                if not self.world.batches:
                    self.now += 2 * IDLE_NS
                    self.see()
            if not self.world.batches:
                break
            batch_id, batch = next(iter(self.world.batches.items()))
            del self.world.batches[batch_id]
            self.settle(batch, set())
            self.see(BatchFinished(batch_id, batch.executor))
        assert all(sent.outcome for sent in self.sent.values())
        assert self.scheduler.live_sequences() == 0
        assert all(not i.slots for v in self.scheduler._ledger.versions.values() for i in v.instances.all())
        assert not self.world.records
        assert self.scheduler.next_wakeup() is None
