"""The scheduler as a state machine: whatever happens, requests end exactly once and the rules S1-S8, S20-S25 hold."""

from __future__ import annotations

from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from scheduler_account import (
    EXECUTORS,
    HUGE_LEVELS,
    MICROSECOND_NS,
    TOO_LARGE,
    VERSIONS,
    SchedulerAccount,
    Shape,
    interfaces,
    queued_by_level,
)

from batcher.scheduling.decisions import (
    DispatchBatch,
    RejectRequest,
)
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchReturned,
    BatchRunning,
    BatchTooLarge,
    ExecutorLost,
    Observation,
    PolicyChanged,
    QueueHeld,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    RequestState,
    ResponsesBegun,
    SlotFreed,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching


@given(
    interface=interfaces(),
    arrivals=st.lists(
        st.tuples(
            st.tuples(st.sampled_from((1, 2)), st.sampled_from((0, 1, 3)), st.sampled_from((0, 1, 2))),
            st.lists(
                st.tuples(
                    st.integers(0, 40),
                    st.integers(0, 2000),
                    st.just({})
                    | st.just({})
                    | st.sampled_from(
                        (
                            {"rows": 2},
                            {"deadline_us": 3},
                            {"timeout_us": 4},
                            {"signature": 8},
                            {"version": 2},
                            {"lane": 3},
                            {"level": 2},
                            {"attempt": 1},
                        )
                    ),
                ),
                min_size=2,
                max_size=7,
            ),
            st.sampled_from((1, 1000, 5000)),
            st.lists(st.integers(0, 40), max_size=2),
        ),
        max_size=6,
    ),
)
def test_what_is_queued_together_is_queued_as_one_by_one(
    interface: ModelInterface,
    arrivals: list[tuple[tuple[int, int, int], list[tuple[int, int, dict[str, int]]], int, list[int]]],
) -> None:
    """Alike requests are queued without a look at each: the decisions are those of one look at each."""
    decided: list[list[object]] = []
    for one_by_one in (False, True):
        scheduler = ModelScheduler("b")
        now_ns = 1_000_000
        scheduler.observe(PolicyChanged(interface), now_ns)
        scheduler.observe(VersionServed("a", 1, "h", 2), now_ns)
        told: list[object] = []
        for (version, level, lane), made, passed_ns, cancelled in arrivals:
            now_ns += passed_ns
            usual = {"version": version, "level": level, "lane": lane, "rows": 1, "signature": 7, "timeout_us": 0}
            requests: list[Observation] = []
            for number, age_ns, own in made:
                about = usual | own
                deadline_us = about.pop("deadline_us", 0)
                deadline_ns = deadline_us and now_ns + deadline_us * MICROSECOND_NS
                request_id, enqueued_ns = number.to_bytes(16, "big"), now_ns - age_ns
                requests.append(RequestQueued(request_id, deadline_ns=deadline_ns, enqueued_ns=enqueued_ns, **about))
            requests += [RequestCancelled(number.to_bytes(16, "big")) for number in cancelled]
            decisions = scheduler.observe_all(iter(requests) if one_by_one else requests, now_ns)
            for decision in decisions:
                if isinstance(decision, DispatchBatch):
                    told.append((decision.batch_id, [request.id for request in decision.requests]))
                elif isinstance(decision, RejectRequest):
                    told.append((decision.message, decision.request.id, decision.request.state))
            for decision in decisions[:1]:
                if isinstance(decision, DispatchBatch):
                    scheduler.observe(BatchFinished(decision.batch_id, "a"), now_ns)
            told.append((scheduler.next_wakeup(), queued_by_level(scheduler), scheduler.queued_by_version()))
            told.append([(r.id, r.order, r.state, r.queue_level, r.lane, r.due_ns) for r in scheduler.waiting()])
        assert scheduler.pending_count() == len(scheduler.waiting()) == sum(queued_by_level(scheduler).values())
        decided.append(told)
    assert decided[0] == decided[1]


class SchedulerMachine(SchedulerAccount):
    """Whatever may happen to a scheduler."""

    @initialize(interface=interfaces(), prefetch=st.integers(0, 1), steady=st.integers(0, 3))
    def start(self, interface: ModelInterface, prefetch: int, steady: int) -> None:
        self.interface = interface
        self.steady = steady > 0
        self.prefetch = prefetch
        self.scheduler = ModelScheduler("p", prefetch)
        self.apply(self.scheduler.observe(PolicyChanged(interface), self.now_ns))

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
        level = data.draw(st.sampled_from((old.level, 0, 1, 2, 3)))
        about = old.version, level, old.rows, old.signature, old.timeout_us, old.deadline_ns, old.enqueued_ns
        copy = RequestQueued(old.id, *about, carrier=old.carrier, lane=self.lanes[old.id])
        known = self.scheduler.find(old.id)
        if known is not None and known.state in (RequestState.QUEUED, RequestState.DELAYED):
            # it goes behind those that arrived before it was read again
            self.count += 1
            copy.carrier = self.arrivals[old.id] = self.count
            self.requests[old.id] = copy
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
    @rule(data=st.data())
    def divide(self, data: st.DataObject) -> None:
        """A batch has more bytes than the log takes."""
        batch = self.give_up(data.draw(st.sampled_from(sorted(self.running))))
        self.too_large = {request.id for request in batch.requests if len(batch.requests) == 1}
        self.apply(self.scheduler.observe(BatchTooLarge(batch.batch_id, batch.executor, TOO_LARGE), self.now_ns))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), blameless=st.booleans(), in_company=st.booleans())
    def die(self, data: st.DataObject, blameless: bool, in_company: bool) -> None:
        batch = self.give_up(data.draw(st.sampled_from(sorted(self.running))))
        ids = frozenset(request.id for request in batch.requests)
        self.in_company = in_company
        self.was_apart = batch.suspects == "apart"
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
        assert queued_by_level(self.scheduler) == {}
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
    max_examples=examples(120), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS
TestOrdered = OrderedMachine.TestCase
TestOrdered.settings = SETTINGS
