"""Random histories of the scheduler with waves among the requests: every request ends exactly once."""

from __future__ import annotations

from example_counts import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_account import queued_by_level
from scheduler_bench import interface

from batcher.scheduling.decisions import (
    BurstWave,
    CondemnRequest,
    Decision,
    DispatchBatch,
    RejectRequest,
    StopExecution,
)
from batcher.scheduling.observations import (
    WAVE_BIT,
    BatchDied,
    BatchFinished,
    BatchLost,
    BatchReturned,
    ExecutorLost,
    Observation,
    PolicyChanged,
    QueueHeld,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    VersionsAbandoned,
    VersionServed,
    VersionWithdrawn,
    WaveOpened,
)
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

EXECUTORS = ("a", "b")
VERSIONS = (1, 2)
US = 1000


@st.composite
def blocks(draw: st.DrawFn) -> DynamicBatching:
    """Mostly configurations that take waves."""
    return DynamicBatching(
        preferred_batch_sizes=draw(st.sampled_from([(), (), (8,), (2, 4)])),
        max_queue_delay_us=draw(st.sampled_from([0, 0, 5])),
        preserve_ordering=draw(st.integers(0, 5)) == 0,
        default_queue_policy=QueuePolicy(
            timeout_action=draw(st.sampled_from(list(TimeoutAction))) if draw(st.booleans()) else TimeoutAction.REJECT,
            default_timeout_us=draw(st.sampled_from([0, 0, 20])),
            allow_timeout_override=True,
            max_queue_size=draw(st.sampled_from([0, 0, 6, 20])),
        ),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelInterface:
    block = draw(st.one_of(blocks(), blocks(), st.none()))
    if block is not None and block.preserve_ordering:
        block = DynamicBatching(preserve_ordering=True)
    return interface(8, block)


class WavesMachine(RuleBasedStateMachine):
    """Waves and requests by their prefix; `burst` are waves that are taken apart and not yet read again."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1_000_000
        self.number = 0
        self.members: dict[bytes, list[RequestQueued]] = {}
        """What a wave's requests are when they arrive one by one."""
        self.outcomes: dict[bytes, str] = {}
        self.running: dict[str, DispatchBatch] = {}
        self.settled: set[bytes] = set()
        self.burst: list[BurstWave] = []
        self.queued_items: set[bytes] = set()
        self.asked: set[bytes] = set()
        self.on_hold = False

    @initialize(model=models(), prefetch=st.integers(0, 1))
    def start(self, model: ModelInterface, prefetch: int) -> None:
        self.model = model
        self.scheduler = ModelScheduler("p", prefetch)
        self.see(PolicyChanged(model))
        self.see(VersionServed("a", 1, "h", 1))

    # -- what is decided ----------------------------------------------------------------------------------------------

    def see(self, *events: Observation) -> None:
        self.apply(self.scheduler.observe_all(list(events), self.now_ns))

    def end(self, request_id: bytes, how: str) -> None:
        assert request_id not in self.outcomes, f"{self.outcomes[request_id]}, then {how}"
        self.outcomes[request_id] = how

    def apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case DispatchBatch():
                    self.check(decision)
                case RejectRequest() | CondemnRequest():
                    assert not decision.request.wave, "a wave has no outcome of its own"
                    self.end(decision.request.id, "refused")
                case BurstWave():
                    assert decision.request.wave
                    assert self.scheduler.find(decision.request.id) is None
                    self.burst.append(decision)
                case StopExecution():
                    assert not decision.request.wave

    def check(self, batch: DispatchBatch) -> None:
        rules = self.model.dynamic_batching
        assert not self.on_hold
        assert batch.requests
        limit = max(1, self.model.max_batch_size)
        assert sum(request.rows for request in batch.requests) <= limit
        assert len({request.wave for request in batch.requests}) == 1, "waves share batches with waves alone"
        assert {request.version for request in batch.requests} == {batch.version}
        for request, attempt in zip(batch.requests, batch.attempts, strict=True):
            if request.wave:
                assert attempt == 1, "a wave runs once"
                assert batch.suspects == ""
                assert not batch.via_owner
                assert rules is not None or request.count == 1
                for member in self.members[request.id]:
                    assert member.id not in self.outcomes
            else:
                assert request.id not in self.outcomes or request.id in self.settled
        self.running[batch.batch_id] = batch

    # -- what happens -------------------------------------------------------------------------------------------------

    def _id(self) -> bytes:
        self.number += 1
        return self.number.to_bytes(15, "big")

    def request(self, request_id: bytes, version: int, rows: int, signature: int, timeout_us: int, deadline_ns: int):
        return RequestQueued(
            request_id, version, 0, rows, signature, timeout_us, deadline_ns, self.now_ns, 0, request_id
        )

    shapes = st.tuples(
        st.sampled_from([1, 1, 2]),
        st.sampled_from([1, 1, 2]),
        st.sampled_from([10, 10, 20]),
        st.sampled_from([0, 0, 15]),
        st.sampled_from([0, 0, 9]),
        st.sampled_from([0, 1, 2, 3, 4, 4, 9]),
    )

    @rule(shapes=st.lists(shapes, min_size=1, max_size=4))
    def arrive(self, shapes: list[tuple[int, int, int, int, int, int]]) -> None:
        events: list[Observation] = []
        for version, rows, signature, timeout_us, deadline_us, count in shapes:
            prefix = self._id()
            deadline_ns = self.now_ns + deadline_us * US if deadline_us else 0
            about = (version, rows, signature, timeout_us, deadline_ns)
            members = [self.request(prefix + bytes((last,)), *about) for last in range(max(1, count))]
            for member in members:
                self.asked.add(member.id)
            if not count:
                events += members
                continue
            wave = self.request(prefix + b"\xff", version, rows * count, signature ^ WAVE_BIT, timeout_us, deadline_ns)
            wave.count, wave.wave = count, True
            self.members[wave.id] = members
            events.append(wave)
        self.see(*events)

    @precondition(lambda self: self.burst)
    @rule(data=st.data())
    def read_again(self, data: st.DataObject) -> None:
        """The requests of a wave that was taken apart are read, unless they were settled before."""
        decision = self.burst.pop(data.draw(st.integers(0, len(self.burst) - 1)))
        members = self.members.pop(decision.request.id)
        if any(member.id in self.outcomes for member in members):
            assert all(member.id in self.outcomes for member in members)
            return
        lost = [BatchLost(decision.executor, members, len(members), "", False)] if decision.suspect else []
        self.see(*members, *lost)
        if lost:
            known = [self.scheduler.find(member.id) for member in members]
            for batch in self.running.values():
                aboard = [r for r in known if r is not None and r in batch.requests]
                assert len(aboard) < len(members) or len(members) == 1, "they run together again"

    @rule(executor=st.sampled_from(EXECUTORS), version=st.sampled_from(VERSIONS), slots=st.integers(1, 2))
    def serve(self, executor: str, version: int, slots: int) -> None:
        self.see(VersionServed(executor, version, "h", slots))

    @rule(executor=st.sampled_from(EXECUTORS), version=st.sampled_from(VERSIONS))
    def withdraw(self, executor: str, version: int) -> None:
        self.see(VersionWithdrawn(executor, version))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        for request in batch.requests:
            for one in self.members.pop(request.id) if request.wave else [request]:
                if one.id not in self.outcomes:
                    self.end(one.id, "finished")
        self.see(BatchFinished(batch.batch_id, batch.executor, batch.via_owner))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["returned", "died", "blameless", "in company", "half"]))
    def come_back(self, data: st.DataObject, how: str) -> None:
        batch = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        if how == "returned":
            self.see(BatchReturned(batch.batch_id, batch.executor))
            return
        left = batch.requests[: len(batch.requests) // 2] if how == "half" else batch.requests
        for request in batch.requests[len(left) :]:
            for one in self.members[request.id] if request.wave else [request]:
                if one.id not in self.outcomes:
                    self.end(one.id, "answered before it died")
                    self.settled.add(one.id)
        ids = frozenset(request.id for request in left)
        died = BatchDied(batch.batch_id, batch.executor, ids, "died", "", how == "blameless", how == "in company")
        self.see(died)

    @rule(executor=st.sampled_from(EXECUTORS), drained=st.booleans())
    def lose(self, executor: str, drained: bool) -> None:
        self.running = {i: batch for i, batch in self.running.items() if batch.executor != executor}
        self.see(ExecutorLost(executor, drained))

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.on_hold = held
        self.see(QueueHeld(held))
        if held:
            assert not any(r.wave for r in self.scheduler.waiting()), "who looks into a queue finds requests"

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def open_one(self, data: st.DataObject) -> None:
        """A request of a wave is cancelled: the wave is taken apart unless it runs."""
        wave_id = data.draw(st.sampled_from(sorted(self.members)))
        self.see(WaveOpened(wave_id))
        found = self.scheduler.find(wave_id)
        assert found is None or any(found in batch.requests for batch in self.running.values())

    @precondition(lambda self: len(self.outcomes) < len(self.asked))
    @rule(data=st.data(), settled=st.booleans())
    def cancel(self, data: st.DataObject, settled: bool) -> None:
        one = data.draw(st.sampled_from(sorted(self.asked - self.outcomes.keys())))
        request = self.scheduler.find(one)
        if request is None:  # it is in a wave
            self.see(RequestCancelled(one))
            return
        if settled:
            self.end(one, "settled elsewhere")
            self.settled.add(one)
            self.see(RequestSettled(one))
        else:
            self.settled.add(one)
            self.see(RequestCancelled(one))
            assert one in self.outcomes

    @rule(version=st.sampled_from(VERSIONS))
    def abandon(self, version: int) -> None:
        self.see(VersionsAbandoned(frozenset({version}), {}))
        assert not any(r.version != version for r in self.scheduler.waiting())

    @rule(model=models())
    def reload(self, model: ModelInterface) -> None:
        self.model = model
        self.see(PolicyChanged(model))

    @rule(us=st.integers(0, 30))
    def wait(self, us: int) -> None:
        self.now_ns += us * US
        self.see()
        wakeup_ns = self.scheduler.next_wakeup()
        assert wakeup_ns is None or wakeup_ns > self.now_ns

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_forgotten(self) -> None:
        """What has not ended waits, runs, or is in a wave that does or is taken apart."""
        if not self.asked:
            return
        waiting = self.scheduler.waiting()
        aboard = [request for batch in self.running.values() for request in batch.requests]
        found: set[bytes] = set()
        for request in [*waiting, *aboard, *[decision.request for decision in self.burst]]:
            found |= {one.id for one in self.members[request.id]} if request.wave else {request.id}
        assert self.asked - self.outcomes.keys() <= found

    @invariant()
    def counts_are_of_requests(self) -> None:
        if not self.asked:
            return
        waiting = self.scheduler.waiting()
        assert self.scheduler.pending_count() == sum(request.count for request in waiting)
        assert sum(queued_by_level(self.scheduler).values()) == self.scheduler.pending_count()
        assert sum(self.scheduler.queued_by_version().values()) == self.scheduler.pending_count()
        aboard = [request for batch in self.running.values() for request in batch.requests]
        assert self.scheduler.outstanding_requests() == sum(request.count for request in aboard)
        assert sum(self.scheduler.outstanding().values()) == len(self.running)


TestWaves = WavesMachine.TestCase
TestWaves.settings = settings(max_examples=examples(60), stateful_step_count=40)
