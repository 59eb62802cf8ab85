"""What a scheduler must obey whatever happens (S1-S8, S20-S25), as the base of state machines for Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from batcher.scheduling.decisions import (
    CondemnRequest,
    Decision,
    DispatchBatch,
    RejectRequest,
    ReleaseReplies,
    StopExecution,
)
from batcher.scheduling.observations import (
    RequestQueued,
)
from batcher.scheduling.queues.dynamic_batching import NO_BOUNDARY, form_batch
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.errors import ErrorCode
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

MICROSECOND_NS = 1000
EXECUTORS = ("a", "b", "c")
VERSIONS = (1, 2)
HUGE_LEVELS = 2**64 - 1
TOO_LARGE = "too large"

Shape = tuple[int, int, int, int, int, int | None, int, int]
"""version, level, rows, signature, time-out us, deadline us from now, us it spent on its way, lane."""


def queued_by_level(scheduler: ModelScheduler) -> dict[int, int]:
    """How many requests wait for dispatch, by priority level; 0 where the model has none."""
    return dict(scheduler._state.ledger.levels)


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


class SchedulerAccount(RuleBasedStateMachine):
    """A simple account of its own of what was asked and decided, to compare with; the rules are its heirs'."""

    interface: ModelInterface
    scheduler: ModelScheduler
    prefetch: int

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
        self.first_dispatches: list[tuple[tuple[int, int, int], int]] = []
        """Version, level and lane, and the arrival, of requests as they were when they were dispatched first."""
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
        self.was_apart = False
        """Whether the batch that died ran apart."""
        self.too_large: set[bytes] = set()
        """The request of a batch of one that could not be sent."""

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
                    assert not self.in_company or self.was_apart, "the culprit may be another"
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
            if request.id not in self.rerun and not request.delayed:
                place = request.version, request.queue_level, self.lanes[request.id]
                self.first_dispatches.append((place, self.arrivals[request.id]))
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
            case ErrorCode.INVALID_ARG if rejection.message == TOO_LARGE:
                assert request.id in self.too_large
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
        levels = queued_by_level(self.scheduler)
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
            seat = version.instances.best
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
        for place, arrival in self.first_dispatches:
            assert seen.get(place, 0) < arrival
            seen[place] = arrival

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
