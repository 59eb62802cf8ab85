"""The scheduler as a state machine: whatever happens, requests end exactly once and the rules S1-S8, S20-S25 hold."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batcher.scheduling.decisions import (
    CondemnRequest,
    Decision,
    DispatchBatch,
    RejectRequest,
    ReleaseReplies,
    StopExecution,
)
from batcher.scheduling.dynamic_batching import NO_BOUNDARY, form_batch
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchReturned,
    BatchRunning,
    ExecutorLost,
    PolicyChanged,
    QueueHeld,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    ResponsesBegun,
    SlotFreed,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.scheduler import ModelScheduler
from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

MICROSECOND_NS = 1000
EXECUTORS = ("a", "b", "c")
VERSIONS = (1, 2)
HUGE_LEVELS = 2**64 - 1

Shape = tuple[int, int, int, int, int, int | None, int, int]
"""version, level, rows, signature, time-out us, deadline us from now, us it spent on its way, lane."""


@st.composite
def queue_policies(draw: st.DrawFn, *, may_delay: bool) -> QueuePolicy:
    actions = list(TimeoutAction) if may_delay else [TimeoutAction.REJECT]
    return QueuePolicy(
        timeout_action=draw(st.sampled_from(actions)),
        default_timeout_us=draw(st.sampled_from((0, 0, 5, 20))),
        allow_timeout_override=draw(st.booleans()),
        max_queue_size=draw(st.sampled_from((0, 0, 2, 6))),
    )


@st.composite
def interfaces(draw: st.DrawFn) -> ModelInterface:
    max_batch_size = draw(st.integers(0, 8))
    block = None
    if draw(st.integers(0, 4)):
        preserve = draw(st.booleans())
        levels = draw(st.sampled_from((0, 1) if preserve else (0, 1, 3, HUGE_LEVELS)))
        numbers = st.integers(1, min(levels, 4)) if levels else st.nothing()
        block = DynamicBatching(
            preferred_batch_sizes=tuple(sorted(draw(st.sets(st.integers(1, max(1, max_batch_size)), max_size=2)))),
            max_queue_delay_us=draw(st.sampled_from((0, 0, 3, 10))),
            preserve_ordering=preserve,
            priority_levels=levels,
            default_priority_level=draw(numbers) if levels else 0,
            default_queue_policy=draw(queue_policies(may_delay=not preserve)),
            priority_queue_policies=draw(st.dictionaries(numbers, queue_policies(may_delay=not preserve), max_size=2))
            if levels
            else {},
        )
    return ModelInterface(
        name="m",
        backend="",
        platform="",
        max_batch_size=max_batch_size,
        inputs={},
        outputs={},
        scheduling="dynamic_batching" if block else "default",
        dynamic_batching=block,
        parameters={"charonia.repeatable": "true"} if draw(st.booleans()) else {},
    )


@given(
    interface=interfaces(),
    arrivals=st.lists(
        st.lists(
            st.tuples(st.sampled_from((1, 1, 1, 2)), st.sampled_from((0, 0, 0, 3)), st.integers(0, 9)),
            min_size=2,
            max_size=6,
        ),
        max_size=6,
    ),
)
def test_what_is_queued_together_is_queued_as_one_by_one(
    interface: ModelInterface, arrivals: list[list[tuple[int, int, int]]]
) -> None:
    """Alike requests are queued without a look at each: the decisions are those of one look at each."""
    decided = []
    for one_by_one in (False, True):
        scheduler = ModelScheduler("b")
        now_ns = 1_000_000
        scheduler.observe(PolicyChanged(interface), now_ns)
        scheduler.observe(VersionServed("a", 1, "h", 2), now_ns)
        told: list[tuple[str, list[bytes]]] = []
        for made in arrivals:
            now_ns += 1
            requests = [
                RequestQueued(number.to_bytes(16, "big"), 1, 0, rows, 7, 0, deadline and now_ns + deadline, now_ns)
                for rows, deadline, number in made
            ]
            decisions = scheduler.observe_all(iter(requests) if one_by_one else requests, now_ns)
            for decision in decisions:
                if isinstance(decision, DispatchBatch):
                    told.append((decision.batch_id, [request.id for request in decision.requests]))
                elif isinstance(decision, RejectRequest):
                    told.append((decision.message, [decision.request.id]))
            for decision in decisions[:1]:
                if isinstance(decision, DispatchBatch):
                    scheduler.observe(BatchFinished(decision.batch_id, "a"), now_ns)
        told.append(("waiting", sorted(request.id for request in scheduler.waiting())))
        assert scheduler.pending_count() == len(scheduler.waiting()) == sum(scheduler.queued_by_level().values())
        decided.append(told)
    assert decided[0] == decided[1]


class SchedulerMachine(RuleBasedStateMachine):
    """Keeps its own, simple account of what was asked and decided, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1_000_000
        self.count = 0
        self.recoveries = 0
        self.requests: dict[bytes, RequestQueued] = {}
        self.arrivals: dict[bytes, int] = {}
        self.outcomes: dict[bytes, str] = {}
        self.running: dict[str, DispatchBatch] = {}
        self.held: dict[str, list[bytes]] = {}
        self.answered: list[bytes] = []
        self.first_dispatches: list[RequestQueued] = []
        self.rerun: set[bytes] = set()
        self.delayed: set[bytes] = set()
        self.cancelled: set[bytes] = set()
        self.stopped: set[bytes] = set()
        self.on_hold = False
        self.settled: set[bytes] = set()
        self.slots: dict[tuple[str, int], int] = {}
        self.attempts: dict[bytes, int] = {}
        self.lanes: dict[bytes, int] = {}
        self.past_batches: list[tuple[str, str]] = []
        self.policy_changes = 0
        self.recovered: set[bytes] = set()
        self.freed: set[str] = set()
        self.responding: set[bytes] = set()
        self.in_company = False

    @initialize(interface=interfaces(), prefetch=st.integers(0, 1), steady=st.integers(0, 3))
    def start(self, interface: ModelInterface, prefetch: int, steady: int) -> None:
        self.interface = interface
        self.steady = steady > 0
        self.prefetch = prefetch
        self.scheduler = ModelScheduler("p", prefetch)
        self.apply(self.scheduler.observe(PolicyChanged(interface), self.now_ns))

    # -- rules ---------------------------------------------------------------------------------------------------------

    def make(
        self,
        version: int,
        level: int,
        rows: int,
        signature: int,
        timeout_us: int,
        deadline_us: int | None,
        lag_us: int = 0,
        lane: int = 0,
    ) -> RequestQueued:
        self.count += 1
        request = RequestQueued(
            id=self.count.to_bytes(16, "little"),
            version=version,
            level=level,
            rows=min(rows, max(1, self.interface.max_batch_size)),
            signature=signature,
            timeout_us=timeout_us,
            deadline_ns=0 if deadline_us is None else self.now_ns + deadline_us * MICROSECOND_NS,
            enqueued_ns=self.now_ns - lag_us * MICROSECOND_NS,
            attempt=0,
            carrier=self.count,
            lane=lane,
        )
        self.lanes[request.id] = lane
        self.requests[request.id] = request
        self.arrivals[request.id] = self.count
        self.attempts[request.id] = 0
        return request

    requests_strategy = st.tuples(
        st.sampled_from((*VERSIONS, 1, 1)),
        st.sampled_from((0, 0, 1, 2, 3, HUGE_LEVELS)),
        st.integers(1, 4),
        st.sampled_from((7, 7, 7, 8)),
        st.sampled_from((0, 0, 4, 30)),
        st.sampled_from((None, None, None, 0, 6, 25)),
        st.sampled_from((0, 0, 0, 4, 11)),
        st.sampled_from((0, 0, 0, 1, 2)),
    )

    @rule(shapes=st.lists(requests_strategy, min_size=1, max_size=5))
    def arrive(self, shapes: list[Shape]) -> None:
        made = [self.make(*shape) for shape in shapes]
        if len(made) == 1:
            self.apply(self.scheduler.observe(made[0], self.now_ns))
        else:
            self.apply(self.scheduler.observe_all(made, self.now_ns))

    @rule(
        shape=requests_strategy,
        count=st.integers(2, 9),
        others=st.dictionaries(st.integers(0, 8), requests_strategy, max_size=2),
    )
    def arrive_alike(self, shape: Shape, count: int, others: dict[int, Shape]) -> None:
        """What shares an entry is mostly alike."""
        version, level, _, signature, *_ = shape
        alike: Shape = (version, level, 1, signature, 0, None, 0, shape[7])
        made = [self.make(*others.get(number, alike)) for number in range(count)]
        self.apply(self.scheduler.observe_all(made, self.now_ns))

    @precondition(lambda self: len(self.outcomes) < len(self.requests))
    @rule(data=st.data())
    def arrive_again(self, data: st.DataObject) -> None:
        unended = [r for r in self.requests.values() if r.id not in self.outcomes]
        old = data.draw(st.sampled_from(unended))
        copy = RequestQueued(
            old.id, old.version, old.level, old.rows, old.signature, old.timeout_us, old.deadline_ns, old.enqueued_ns
        )
        self.apply(self.scheduler.observe(copy, self.now_ns))

    @rule(executor=st.sampled_from(EXECUTORS), version=st.sampled_from(VERSIONS), slots=st.integers(0, 2))
    def serve(self, executor: str, version: int, slots: int) -> None:
        self.slots[executor, version] = slots
        self.apply(self.scheduler.observe(VersionServed(executor, version, f"h{version}", slots), self.now_ns))

    @rule(executor=st.sampled_from(EXECUTORS), version=st.sampled_from(VERSIONS))
    def withdraw(self, executor: str, version: int) -> None:
        self.slots.pop((executor, version), None)
        self.apply(self.scheduler.observe(VersionWithdrawn(executor, version), self.now_ns))

    @rule(executor=st.sampled_from(EXECUTORS), drained=st.booleans())
    def lose(self, executor: str, drained: bool) -> None:
        for version in VERSIONS:
            self.slots.pop((executor, version), None)
        for batch_id in [batch_id for batch_id, batch in self.running.items() if batch.executor == executor]:
            self.give_up(batch_id)
        self.apply(self.scheduler.observe(ExecutorLost(executor, drained), self.now_ns))

    def give_up(self, batch_id: str) -> DispatchBatch:
        batch = self.running.pop(batch_id)
        self.past_batches.append((batch_id, batch.executor))
        self.rerun.update(request.id for request in batch.requests)
        for request in batch.requests:
            if request.id in self.settled and request.id not in self.outcomes:
                self.end(request.id, "settled elsewhere")
        return batch

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 3))
    def finish(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.running))):
            batch_id = data.draw(st.sampled_from(sorted(self.running)))
            self.finish_one(batch_id)

    def finish_one(self, batch_id: str) -> None:
        batch = self.running.pop(batch_id)
        self.past_batches.append((batch_id, batch.executor))
        for request in batch.requests:
            if request.id not in self.stopped:
                self.end(request.id, "finished")
        if batch.via_owner:
            self.held[batch_id] = [request.id for request in batch.requests]
        event = BatchFinished(batch_id, batch.executor, batch.via_owner)
        self.apply(self.scheduler.observe(event, self.now_ns))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        batch = self.give_up(data.draw(st.sampled_from(sorted(self.running))))
        self.apply(self.scheduler.observe(BatchReturned(batch.batch_id, batch.executor), self.now_ns))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), blameless=st.booleans(), in_company=st.booleans())
    def die(self, data: st.DataObject, blameless: bool, in_company: bool) -> None:
        batch = self.give_up(data.draw(st.sampled_from(sorted(self.running))))
        ids = frozenset(request.id for request in batch.requests)
        self.in_company = in_company
        event = BatchDied(batch.batch_id, batch.executor, ids, "died", "", blameless, in_company)
        self.apply(self.scheduler.observe(event, self.now_ns))
        self.in_company = False

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """An instance takes its next batch while responses of this one are still to come."""
        batch = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if batch.suspects != "apart":
            self.freed.add(batch.batch_id)
        self.apply(self.scheduler.observe(SlotFreed(batch.batch_id, batch.executor), self.now_ns))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """First responses of some requests of a batch are seen."""
        batch = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if batch.requests:
            begun = data.draw(st.sets(st.sampled_from([r.id for r in batch.requests])))
            self.responding |= begun
            event = ResponsesBegun(batch.batch_id, batch.executor, frozenset(begun))
            self.apply(self.scheduler.observe(event, self.now_ns))

    @rule(held=st.sampled_from((False, False, True)))
    def hold(self, held: bool) -> None:
        self.on_hold = held
        self.apply(self.scheduler.observe(QueueHeld(held), self.now_ns))

    @precondition(lambda self: self.past_batches)
    @rule(data=st.data(), returned=st.booleans())
    def stale_report(self, data: st.DataObject, returned: bool) -> None:
        batch_id, executor = data.draw(st.sampled_from(self.past_batches))
        event = BatchReturned(batch_id, executor) if returned else BatchFinished(batch_id, executor)
        before = self.scheduler.pending_count(), self.scheduler.outstanding()
        self.apply(self.scheduler.observe(event, self.now_ns))
        assert before[0] >= self.scheduler.pending_count()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), settled=st.booleans(), stale=st.integers(0, 4))
    def cancel(self, data: st.DataObject, settled: bool, stale: int) -> None:
        candidates = [i for i in self.requests if stale == 0 or i not in self.outcomes] or list(self.requests)
        request_id = data.draw(st.sampled_from(candidates))
        dispatched = any(request_id == r.id for batch in self.running.values() for r in batch.requests)
        if request_id not in self.outcomes:
            if not settled:
                self.cancelled.add(request_id)
            elif dispatched:
                self.settled.add(request_id)
                self.stopped.add(request_id)
                self.end(request_id, "settled elsewhere")
            else:
                self.end(request_id, "settled elsewhere")
        event = RequestSettled(request_id) if settled else RequestCancelled(request_id)
        decisions = self.scheduler.observe(event, self.now_ns)
        self.apply(decisions)
        assert request_id in self.outcomes or dispatched, "a queued request is cancelled at once"

    @rule(us=st.integers(0, 12))
    def wait(self, us: int) -> None:
        self.now_ns += us * MICROSECOND_NS
        self.apply(self.scheduler.advance(self.now_ns))
        self.check_wakeup()

    @precondition(lambda self: self.scheduler.next_wakeup() is not None)
    @rule()
    def wait_for_wakeup(self) -> None:
        wakeup_ns = self.scheduler.next_wakeup()
        assert wakeup_ns is not None
        self.now_ns = max(self.now_ns, wakeup_ns)
        self.apply(self.scheduler.advance(self.now_ns))
        self.check_wakeup()

    @precondition(lambda self: not self.steady)
    @rule(interface=interfaces())
    def change_policy(self, interface: ModelInterface) -> None:
        self.interface = interface
        self.policy_changes += 1
        self.apply(self.scheduler.observe(PolicyChanged(interface), self.now_ns))

    @rule(executor=st.sampled_from(EXECUTORS), shapes=st.lists(requests_strategy, max_size=3), queued=st.booleans())
    def recover(self, executor: str, shapes: list[Shape], queued: bool) -> None:
        """A predecessor's batch comes to light; with `queued`, after its requests were read from the queue."""
        block = self.interface.dynamic_batching
        most = max(1, self.interface.max_batch_size) if block is not None else 1
        made = [self.make(1, shape[1], 1, 7, *shape[4:]) for shape in shapes[:most]]
        for request in made:
            self.recovered.add(request.id)
            request.attempt = self.attempts[request.id] = 1
        via_owner = bool(self.interface.dynamic_batching and self.interface.dynamic_batching.preserve_ordering)
        self.recoveries += 1
        batch_id = f"old-{self.recoveries}"
        if queued:
            # A new owner reads the queue before it hears of capacity.
            for executor_version in [key for key in self.slots if key[1] == 1]:
                self.withdraw(*executor_version)
            copies = [
                RequestQueued(
                    r.id, r.version, r.level, r.rows, r.signature, r.timeout_us, r.deadline_ns, r.enqueued_ns, 1
                )
                for r in made
                if r.deadline_ns == 0
            ]
            for copy in copies:
                self.requests[copy.id] = copy
            self.apply(self.scheduler.observe_all(copies, self.now_ns))
        left = [request for request in made if request.id not in self.outcomes]
        self.running[batch_id] = DispatchBatch(
            batch_id, executor, 1, "h1", left, (1,) * len(left), via_owner and bool(left)
        )
        self.apply(self.scheduler.observe(BatchRunning(batch_id, executor, 1, left, via_owner), self.now_ns))

    # -- what decisions mean, and what they must obey ------------------------------------------------------------------

    def end(self, request_id: bytes, outcome: str) -> None:
        assert request_id not in self.outcomes, f"{self.outcomes[request_id]}, then {outcome}"
        self.outcomes[request_id] = outcome

    def apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case DispatchBatch():
                    self.check_dispatch(decision)
                case RejectRequest():
                    self.check_reject(decision)
                case CondemnRequest():
                    assert decision.request.id in self.rerun
                    assert not self.in_company, "the culprit may be another"
                    self.end(decision.request.id, "condemned")
                case StopExecution():
                    self.stopped.add(decision.request.id)
                    batch = self.running[decision.batch_id]
                    assert batch.executor == decision.executor
                    assert decision.request.id in {request.id for request in batch.requests}
                case ReleaseReplies():
                    self.answered.extend(self.held.pop(decision.batch_id))

    def check_dispatch(self, batch: DispatchBatch) -> None:
        block = self.interface.dynamic_batching
        requests = batch.requests
        assert requests
        assert not self.on_hold
        assert batch.batch_id.startswith("p-")
        assert batch.batch_id not in self.running
        limit = max(1, self.interface.max_batch_size)
        assert sum(request.rows for request in requests) <= limit
        if block is None:
            assert len(requests) == 1
        assert {request.version for request in requests} == {batch.version}
        assert len({request.signature for request in requests}) == 1
        assert batch.via_owner == bool(block and block.preserve_ordering)
        slots = self.slots.get((batch.executor, batch.version), 0)
        assert slots, "an executor that does not serve the version"
        self.running[batch.batch_id] = batch
        mine = [b for b in self.running.values() if (b.executor, b.version) == (batch.executor, batch.version)]
        assert len([b for b in mine if b.batch_id not in self.freed]) <= slots + self.prefetch
        for request, attempt in zip(requests, batch.attempts, strict=True):
            assert request.id not in self.outcomes
            assert not request.deadline_ns or self.now_ns < request.deadline_ns
            assert request.id not in self.cancelled
            assert request.id not in self.responding or self.may_repeat(), "two runs of one stream"
            assert attempt == self.attempts[request.id] + 1
            self.attempts[request.id] = attempt
            assert request.carrier == self.arrivals[request.id] or request.carrier is None
            if request.id not in self.rerun:
                self.first_dispatches.append(request)
            if block and not request.delayed and request.id not in self.rerun and not self.policy_changes:
                policy = block.queue_policy(block.level(request.level))
                timeout_us = policy.timeout_us(request.timeout_us)
                assert not timeout_us or self.now_ns < request.enqueued_ns + timeout_us * MICROSECOND_NS

    def check_reject(self, rejection: RejectRequest) -> None:
        request = rejection.request
        self.end(request.id, rejection.message or "cancelled")
        match rejection.code:
            case ErrorCode.UNAVAILABLE if rejection.message.startswith("STREAM_INTERRUPTED: "):
                assert rejection.reason == "BACKEND"
                assert request.id in self.responding & self.rerun
                assert not self.interface.repeatable
            case ErrorCode.CANCELLED:
                assert request.id in self.cancelled
            case ErrorCode.DEADLINE_EXCEEDED:
                assert 0 < request.deadline_ns <= self.now_ns
            case ErrorCode.UNAVAILABLE if rejection.message == "Request timeout expired":
                assert not request.delayed
            case ErrorCode.UNAVAILABLE:
                assert rejection.message == "Exceeds maximum queue size"
                assert request.id not in self.rerun
            case _:
                assert rejection.code is ErrorCode.INVALID_ARG
                assert request.rows > max(1, self.interface.max_batch_size)

    def may_repeat(self) -> bool:
        return self.interface.repeatable or self.policy_changes > 0

    def check_wakeup(self) -> None:
        wakeup_ns = self.scheduler.next_wakeup()
        assert wakeup_ns is None or wakeup_ns > self.now_ns, "advance left something undone"

    # -- always --------------------------------------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        in_batches = {request.id for batch in self.running.values() for request in batch.requests}
        unended = len(self.requests) - len(self.outcomes)
        assert self.scheduler.outstanding_requests() == len(in_batches)
        assert self.scheduler.pending_count() == unended - len(in_batches - self.outcomes.keys())
        levels = self.scheduler.queued_by_level()
        assert sum(levels.values()) == self.scheduler.pending_count()
        assert all(count > 0 for count in levels.values())
        outstanding = self.scheduler.outstanding()
        assert sum(outstanding.values()) == len(self.running)

    @invariant()
    def no_instance_idles_while_a_batch_is_due(self) -> None:
        """Whatever was skipped to save work, looking at everything afresh changes nothing."""
        if self.on_hold:
            return
        rules = self.scheduler._state.ledger.batching
        assert rules is not None
        for version in self.scheduler._state.versions.values():
            seat = version.instances.best()
            if seat is None or not version.queue.size:
                continue
            head = next(iter(version.queue)).order
            boundary = version.releases.boundary(head) if rules.preserve_ordering else NO_BOUNDARY
            verdict = form_batch(list(version.queue), rules, self.now_ns, boundary)
            if seat.free_slots > 0:
                assert verdict.size == 0
                wakeup_ns = self.scheduler.next_wakeup()
                assert wakeup_ns is not None
                assert wakeup_ns <= verdict.until_ns
            else:
                assert not verdict.saturated

    @invariant()
    def order_within_a_level(self) -> None:
        """First dispatches of one version, level and lane come in order of arrival (those not delayed)."""
        if self.policy_changes:
            return
        seen: dict[tuple[int, int, int], int] = {}
        for request in self.first_dispatches:
            if request.delayed:
                continue
            key = (request.version, request.queue_level, self.lanes[request.id])
            assert seen.get(key, 0) < self.arrivals[request.id]
            seen[key] = self.arrivals[request.id]

    @invariant()
    def answers_in_order(self) -> None:
        """With preserve_ordering from the start, answers of a version leave in order of arrival (S6)."""
        if self.policy_changes:
            return
        seen: dict[int, int] = {}
        for request_id in self.answered:
            if request_id in self.recovered:
                continue
            version = self.requests[request_id].version
            assert seen.get(version, 0) < self.arrivals[request_id]
            seen[version] = self.arrivals[request_id]

    def teardown(self) -> None:
        """Liveness: with executors and time, everything ends and is answered, and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        self.hold(False)
        for version in VERSIONS:
            self.serve("a", version, 1)
        for _ in range(4 * len(self.requests) + 4):
            for batch_id in sorted(self.running):
                self.finish_one(batch_id)
            wakeup_ns = self.scheduler.next_wakeup()
            if wakeup_ns is not None:
                self.now_ns = max(self.now_ns, wakeup_ns)
                self.apply(self.scheduler.advance(self.now_ns))
                self.check_wakeup()
            elif not self.running:
                break
        assert set(self.outcomes) == set(self.requests)
        assert not self.held, "replies that are never released"
        assert self.scheduler.pending_count() == 0
        assert self.scheduler.next_wakeup() is None
        assert self.scheduler.queued_by_level() == {}
        assert self.scheduler.outstanding() == {}


class OrderedMachine(SchedulerMachine):
    """The same with preserve_ordering, capacity from the start and frequent losses, where S6 is hardest."""

    withdraw = recover = change_policy = arrive_again = wait_for_wakeup = None  # type: ignore[assignment]

    @initialize(max_batch_size=st.integers(1, 4), slots=st.integers(1, 2))
    def start(self, max_batch_size: int, slots: int) -> None:
        self.steady = True
        self.prefetch = 0
        self.interface = ModelInterface(
            name="m",
            backend="",
            platform="",
            max_batch_size=max_batch_size,
            inputs={},
            outputs={},
            scheduling="dynamic_batching",
            dynamic_batching=DynamicBatching(preserve_ordering=True),
        )
        self.scheduler = ModelScheduler("p")
        self.apply(self.scheduler.observe(PolicyChanged(self.interface), self.now_ns))
        for executor in EXECUTORS:
            self.serve(executor, 1, slots)


SETTINGS = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS
TestOrdered = OrderedMachine.TestCase
TestOrdered.settings = SETTINGS
