"""The scheduler's promises one by one: S1-S8, S20-S25, losses, recovery and stale facts (F11)."""

from __future__ import annotations

import pytest

from batcher.scheduling.blame import MAX_STALLS
from batcher.scheduling.decisions import (
    CondemnRequest,
    Decision,
    DispatchBatch,
    RejectRequest,
    ReleaseReplies,
    StopExecution,
)
from batcher.scheduling.observations import (
    BatchDied,
    BatchFinished,
    BatchLost,
    BatchReturned,
    BatchRunning,
    ExecutorLost,
    ExecutorReturned,
    Observation,
    PolicyChanged,
    QueueHeld,
    RequestCancelled,
    RequestQueued,
    RequestSettled,
    VersionsAbandoned,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.scheduler import ModelScheduler
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

US = 1000
HUGE = 2**64 - 1
DELAY = TimeoutAction.DELAY


def interface(max_batch_size: int, block: DynamicBatching | None) -> ModelInterface:
    return ModelInterface(
        name="m",
        backend="",
        platform="",
        max_batch_size=max_batch_size,
        inputs={},
        outputs={},
        dynamic_batching=block,
    )


class Model:
    """A scheduler, a clock, and decisions in words: "a: 1 2" is a batch of requests 1 and 2 for executor a."""

    def __init__(
        self,
        block: DynamicBatching | None = None,
        *,
        max_batch_size: int = 4,
        slots: int = 1,
        prefetch: int = 0,
    ) -> None:
        self.scheduler = ModelScheduler("p", prefetch)
        self.now_ns = 0
        self.batches: dict[int, DispatchBatch] = {}
        self.see(PolicyChanged(interface(max_batch_size, block)))
        if slots:
            self.see(VersionServed("a", 1, "h1", slots))

    def see(self, *events: Observation) -> list[str]:
        return self.words(self.scheduler.observe_all(events, self.now_ns))

    def lose(self, executor: str, *events: Observation) -> list[str]:
        """An executor is lost a second later than whatever was before."""
        self.now_ns += 1_000_000_000
        return self.see(ExecutorLost(executor), *events)

    def at(self, us: int) -> list[str]:
        self.now_ns = us * US
        return self.words(self.scheduler.advance(self.now_ns))

    def put(self, *numbers: int, **fields: int) -> list[str]:
        return self.see(*[self.request(number, **fields) for number in numbers])

    def request(
        self,
        number: int,
        *,
        version: int = 1,
        level: int = 0,
        rows: int = 1,
        signature: int = 7,
        timeout_us: int = 0,
        deadline_us: int = 0,
        attempt: int = 0,
    ) -> RequestQueued:
        return RequestQueued(
            ident(number), version, level, rows, signature, timeout_us, deadline_us * US, self.now_ns, attempt, number
        )

    def finish(self, number: int, *, held: bool = False) -> list[str]:
        """The batch that request `number` was last in finished."""
        batch = self.batches[number]
        return self.see(BatchFinished(batch.batch_id, batch.executor, held))

    def give_back(self, number: int) -> list[str]:
        batch = self.batches[number]
        return self.see(BatchReturned(batch.batch_id, batch.executor))

    def wakeup_us(self) -> float | None:
        wakeup_ns = self.scheduler.next_wakeup()
        return None if wakeup_ns is None else wakeup_ns / US

    def words(self, decisions: list[Decision]) -> list[str]:
        said = []
        for decision in decisions:
            match decision:
                case DispatchBatch():
                    numbers = [number_of(request) for request in decision.requests]
                    self.batches |= dict.fromkeys(numbers, decision)
                    said.append(f"{decision.executor}: {' '.join(map(str, numbers))}")
                case RejectRequest():
                    number = number_of(decision.request)
                    said.append(f"{number} {decision.code.name} {decision.reason} {decision.message}".strip())
                case CondemnRequest():
                    said.append(f"{number_of(decision.request)} condemned on {decision.executor}: {decision.message}")
                case StopExecution():
                    said.append(f"stop {number_of(decision.request)} on {decision.executor}")
                case ReleaseReplies():
                    batch = next(b for b in self.batches.values() if b.batch_id == decision.batch_id)
                    said.append(f"answer {' '.join(str(number_of(r)) for r in batch.requests)}")
        return said


def ident(number: int) -> bytes:
    return number.to_bytes(16, "little")


def number_of(request: RequestQueued) -> int:
    return int.from_bytes(request.id, "little")


# -- S1: the default scheduler -----------------------------------------------------------------------------------------


def test_without_dynamic_batching_each_request_is_an_execution() -> None:
    model = Model(None, max_batch_size=8, slots=2)
    assert model.put(1, 2, 3, level=9) == ["a: 1", "a: 2"]
    assert model.finish(1) == ["a: 3"]
    assert model.scheduler.queued_by_level() == {}


# -- S2-S5, S25: batches -----------------------------------------------------------------------------------------------


def test_what_arrives_together_joins_one_batch() -> None:
    model = Model(DynamicBatching())
    assert model.put(1, 2, 3) == ["a: 1 2 3"]


def test_a_batch_grows_while_no_instance_is_free() -> None:
    model = Model(DynamicBatching())
    assert model.put(1) == ["a: 1"]
    assert model.put(2) == []
    assert model.put(3, 4, 5, 6) == []
    assert model.finish(1) == ["a: 2 3 4 5"]
    assert model.finish(2) == ["a: 6"]


def test_the_delay_ends_a_wait_and_is_the_wakeup() -> None:
    model = Model(DynamicBatching(max_queue_delay_us=10))
    assert model.put(1) == []
    assert model.wakeup_us() == 10
    model.now_ns = 4 * US
    assert model.put(2) == []
    assert model.wakeup_us() == 10
    assert model.at(9) == []
    assert model.at(10) == ["a: 1 2"]
    assert model.wakeup_us() is None


def test_an_arrival_that_reaches_a_preferred_size_ends_the_wait() -> None:
    model = Model(DynamicBatching(preferred_batch_sizes=(2,), max_queue_delay_us=10))
    assert model.put(1) == []
    assert model.put(2) == ["a: 1 2"]


def test_an_arrival_of_another_signature_ends_the_wait() -> None:
    model = Model(DynamicBatching(max_queue_delay_us=10), slots=2)
    assert model.put(1) == []
    assert model.put(2, signature=8) == ["a: 1"]
    assert model.wakeup_us() == 10


def test_cancelling_the_oldest_lets_the_rest_wait_on() -> None:
    model = Model(DynamicBatching(max_queue_delay_us=10))
    model.put(1)
    model.at(5)
    model.put(2)
    assert model.see(RequestCancelled(ident(1))) == ["1 CANCELLED CANCELED"]
    assert model.wakeup_us() == 15


def test_only_a_batch_that_cannot_grow_goes_ahead_of_a_free_instance() -> None:
    model = Model(DynamicBatching(), prefetch=1)
    assert model.put(1) == ["a: 1"]
    assert model.put(2, 3) == []
    assert model.put(4, 5, 6) == ["a: 2 3 4 5"]
    assert model.put(7, 8, 9, 10) == []
    assert model.finish(1) == ["a: 6 7 8 9"]


def test_with_several_executors_the_idle_one_is_fed() -> None:
    model = Model(DynamicBatching())
    assert model.put(1) == ["a: 1"]
    assert model.see(VersionServed("b", 1, "h1", 1)) == []
    assert model.put(2) == ["b: 2"]
    model.finish(1)
    assert model.put(3) == ["a: 3"]


def test_a_dispatch_names_the_incarnation_that_runs_it() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    assert (model.batches[1].batch_id, model.batches[1].content_hash, model.batches[1].attempts) == ("p-1", "h1", (1,))
    model.see(VersionServed("a", 1, "h2", 1))
    model.finish(1)
    model.put(2)
    assert (model.batches[2].batch_id, model.batches[2].content_hash) == ("p-2", "h2")


def test_versions_are_batched_apart_and_do_not_block_each_other() -> None:
    model = Model(DynamicBatching())
    assert model.put(1, 2, version=9) == []
    assert model.see(model.request(3), model.request(4, version=9), model.request(5)) == ["a: 3 5"]
    assert model.scheduler.queued_by_version() == {9: 3}
    assert model.see(VersionServed("b", 9, "h9", 1)) == ["b: 1 2 4"]


def test_nothing_is_dispatched_before_a_configuration_is_known() -> None:
    scheduler = ModelScheduler("p")
    scheduler.observe(VersionServed("a", 1, "h", 1), 0)
    assert scheduler.observe(RequestQueued(ident(1), 1, 0, 1, 7, 0, 0, 0), 0) == []
    assert len(scheduler.observe(PolicyChanged(interface(4, None)), 0)) == 1


# -- S6: preserve_ordering ---------------------------------------------------------------------------------------------


def ordered(slots: int = 3, max_batch_size: int = 2) -> Model:
    return Model(DynamicBatching(preserve_ordering=True), slots=slots, max_batch_size=max_batch_size)


def test_replies_are_released_in_request_order() -> None:
    model = ordered()
    assert model.put(1, 2, 3, 4, 5) == ["a: 1 2", "a: 3 4", "a: 5"]
    assert model.batches[1].via_owner
    assert model.finish(5, held=True) == []
    assert model.finish(3, held=True) == []
    assert model.finish(1, held=True) == ["answer 1 2", "answer 3 4", "answer 5"]


def test_later_replies_wait_for_requests_that_run_again() -> None:
    model = ordered(slots=1)
    model.see(VersionServed("b", 1, "h1", 1))
    assert model.put(1, 2, 3, 4) == ["a: 1 2", "b: 3 4"]
    assert model.finish(3, held=True) == []
    assert model.see(ExecutorLost("a")) == ["b: 1"]
    assert model.finish(1, held=True) == ["answer 1", "b: 2"]
    assert model.finish(2, held=True) == ["answer 2", "answer 3 4"]


def test_a_rerun_never_joins_requests_from_behind_an_open_batch() -> None:
    model = ordered(slots=1, max_batch_size=3)
    model.see(VersionServed("b", 1, "h1", 1))
    assert model.put(1) == ["a: 1"]
    assert model.put(2) == ["b: 2"]
    model.put(3, 4)
    model.finish(2, held=True)
    assert model.batches[3].requests[0].id == ident(3)
    assert model.see(ExecutorLost("a")) == []
    assert model.finish(3, held=True) == ["b: 1"]
    assert model.finish(1, held=True) == ["answer 1", "answer 2", "answer 3 4"]


def test_a_rejected_request_holds_no_replies_back() -> None:
    model = ordered(slots=1)
    model.see(VersionServed("b", 1, "h1", 1))
    model.put(1, 2, 3, 4)
    model.finish(3, held=True)
    model.see(VersionWithdrawn("a", 1), VersionWithdrawn("b", 1))
    model.give_back(1)
    assert model.see(RequestCancelled(ident(1))) == ["1 CANCELLED CANCELED"]
    assert model.see(RequestCancelled(ident(2))) == ["2 CANCELLED CANCELED", "answer 3 4"]


def test_replies_of_a_batch_given_up_before_are_not_kept() -> None:
    model = ordered(slots=1)
    model.put(1)
    model.see(ExecutorLost("a"))
    assert model.finish(1, held=True) == ["answer 1"]


def test_a_repeated_report_releases_nothing_early() -> None:
    model = ordered()
    model.put(1, 2, 3, 4)
    assert model.finish(3, held=True) == []
    assert model.finish(3, held=True) == []
    assert model.finish(1, held=True) == ["answer 1 2", "answer 3 4"]


# -- S7: queue size ----------------------------------------------------------------------------------------------------


def test_the_queue_size_counts_waiting_requests_only() -> None:
    model = Model(DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=2)))
    assert model.put(1) == ["a: 1"]
    assert model.put(2, 3, 4) == ["4 UNAVAILABLE REJECTED Exceeds maximum queue size"]
    assert model.finish(1) == ["a: 2 3"]
    assert model.put(5) == []


def test_what_arrives_together_is_not_refused_while_an_instance_is_free() -> None:
    model = Model(DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=2)), slots=2)
    assert model.put(1, 2, 3, 4) == ["a: 1 2", "a: 3 4"]


def test_the_queue_size_is_per_level_and_over_all_versions() -> None:
    block = DynamicBatching(
        priority_levels=2, default_priority_level=2, priority_queue_policies={2: QueuePolicy(max_queue_size=1)}
    )
    model = Model(block, slots=0)
    assert model.put(1, 2, level=1) == []
    assert model.put(3, level=2) == []
    assert model.put(4, version=5) == ["4 UNAVAILABLE REJECTED Exceeds maximum queue size"]
    assert model.scheduler.queued_by_level() == {1: 2, 2: 1}


def test_requests_that_return_from_an_executor_are_not_refused() -> None:
    model = Model(DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=1)))
    model.put(1)
    model.put(2)
    assert model.see(ExecutorLost("a")) == []
    assert model.scheduler.pending_count() == 2
    assert model.put(3, attempt=1) == []


# -- S8: priorities ----------------------------------------------------------------------------------------------------


def test_level_1_goes_before_level_2_and_a_batch_may_mix_them() -> None:
    model = Model(DynamicBatching(priority_levels=HUGE, default_priority_level=5))
    model.put(1)
    model.put(2, level=HUGE)
    model.put(3, level=0)
    model.put(4, level=HUGE + 7)
    model.put(5, level=1)
    assert model.scheduler.queued_by_level() == {1: 1, 5: 1, HUGE: 2}
    assert model.finish(1) == ["a: 5 3 2 4"]


def test_a_more_urgent_arrival_changes_a_batch_that_waits() -> None:
    block = DynamicBatching(
        preferred_batch_sizes=(2, 4), max_queue_delay_us=10, priority_levels=2, default_priority_level=2
    )
    model = Model(block)
    assert model.put(1, rows=3) == []
    # 3 rows wait for 4; with 2 rows in front of them the preferred size 2 is hit first
    assert model.put(2, level=1, rows=2) == ["a: 2"]


# -- S20-S23: time-outs and deadlines ----------------------------------------------------------------------------------


def timing(action: TimeoutAction, *, override: bool = False, timeout_us: int = 10) -> DynamicBatching:
    return DynamicBatching(
        default_queue_policy=QueuePolicy(
            timeout_action=action, default_timeout_us=timeout_us, allow_timeout_override=override
        )
    )


def test_reject_is_prompt_while_all_instances_are_busy() -> None:
    model = Model(timing(TimeoutAction.REJECT))
    model.put(1)
    model.put(2, 3)
    assert model.wakeup_us() == 10
    assert model.at(10) == [
        "2 UNAVAILABLE REJECTED Request timeout expired",
        "3 UNAVAILABLE REJECTED Request timeout expired",
    ]
    assert model.wakeup_us() is None
    assert model.finish(1) == []


@pytest.mark.parametrize(
    ("default_us", "override", "asked_us", "expected_us"),
    [
        (10, True, 4, 4),
        (10, True, 40, 10),
        (10, True, 0, 10),
        (10, False, 4, 10),
        (0, True, 4, None),
    ],
)
def test_an_override_can_only_shorten(default_us: int, override: bool, asked_us: int, expected_us: int | None) -> None:
    model = Model(timing(TimeoutAction.REJECT, override=override, timeout_us=default_us), slots=0)
    model.put(1, timeout_us=asked_us)
    assert model.wakeup_us() == expected_us


def test_delay_serves_the_expired_after_the_rest_and_never_rejects() -> None:
    model = Model(timing(DELAY), max_batch_size=2)
    model.put(1)
    model.put(2, 3)
    assert model.at(10) == []
    model.put(4)
    assert model.wakeup_us() == 20
    assert model.finish(1) == ["a: 4 2"]
    assert model.at(1000) == []
    assert model.finish(4) == ["a: 3"]


def test_delayed_requests_still_count_towards_the_queue_size() -> None:
    policy = QueuePolicy(timeout_action=DELAY, default_timeout_us=10, max_queue_size=1)
    model = Model(DynamicBatching(default_queue_policy=policy))
    model.put(1)
    model.put(2)
    model.at(10)
    assert model.put(3) == ["3 UNAVAILABLE REJECTED Exceeds maximum queue size"]


@pytest.mark.parametrize("block", [None, DynamicBatching(max_queue_delay_us=50), timing(DELAY)])
def test_a_deadline_ends_a_request_on_time_and_before_execution(block: DynamicBatching | None) -> None:
    model = Model(block, slots=0)
    model.put(1, deadline_us=20)
    model.at(19)
    assert model.wakeup_us() == 20
    assert model.at(20) == ["1 DEADLINE_EXCEEDED REJECTED Deadline exceeded before execution"]
    assert model.put(2, deadline_us=20) == ["2 DEADLINE_EXCEEDED REJECTED Deadline exceeded before execution"]
    assert model.see(VersionServed("a", 1, "h1", 1)) == []


def test_what_expires_at_the_instant_an_instance_frees_up_does_not_run() -> None:
    model = Model(timing(TimeoutAction.REJECT))
    model.put(1)
    model.put(2)
    model.now_ns = 10 * US
    assert model.finish(1) == ["2 UNAVAILABLE REJECTED Request timeout expired"]


def test_time_spent_in_a_lost_batch_is_no_queue_time() -> None:
    model = Model(timing(TimeoutAction.REJECT))
    model.put(1)
    model.at(100)
    assert model.see(ExecutorLost("a", drained=True)) == []
    assert model.wakeup_us() == 110


# -- S24: cancellation -------------------------------------------------------------------------------------------------


def test_cancel_ends_a_queued_request_and_a_running_one_once() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    model.put(2, 3)
    assert model.see(RequestCancelled(ident(2))) == ["2 CANCELLED CANCELED"]
    assert model.see(RequestCancelled(ident(2)), RequestCancelled(ident(1)), RequestCancelled(ident(99))) == [
        "1 CANCELLED CANCELED",
        "stop 1 on a",
    ]
    assert model.see(RequestCancelled(ident(1)), RequestSettled(ident(1))) == []
    assert model.finish(1) == ["a: 3"]


def test_a_request_cancelled_while_running_is_not_run_again() -> None:
    model = Model(DynamicBatching())
    model.put(1, 2)
    model.see(RequestCancelled(ident(1)))
    assert model.see(ExecutorLost("a")) == []
    assert model.see(VersionServed("b", 1, "h1", 1)) == ["b: 2"]


def test_a_running_request_ends_at_its_deadline() -> None:
    model = Model(DynamicBatching())
    assert model.put(1, 2, deadline_us=50) == ["a: 1 2"]
    assert model.wakeup_us() == 50
    assert model.at(50) == [
        "1 DEADLINE_EXCEEDED OTHER Deadline exceeded during execution",
        "stop 1 on a",
        "2 DEADLINE_EXCEEDED OTHER Deadline exceeded during execution",
        "stop 2 on a",
    ]
    assert model.wakeup_us() is None
    assert model.see(ExecutorLost("a"), VersionServed("b", 1, "h1", 1)) == []
    assert model.scheduler.find(ident(1)) is None


def test_a_held_queue_gives_out_nothing_and_still_ends_requests() -> None:
    model = Model(DynamicBatching(max_queue_delay_us=100), max_batch_size=2)
    model.put(1)
    assert model.see(QueueHeld(True)) == []
    assert model.wakeup_us() is None
    assert model.put(2, deadline_us=10) == []
    assert model.see(RequestCancelled(ident(1))) == ["1 CANCELLED CANCELED"]
    assert model.at(10) == ["2 DEADLINE_EXCEEDED REJECTED Deadline exceeded before execution"]
    model.put(3, 4)
    assert model.at(1000) == []
    assert model.see(QueueHeld(False)) == ["a: 3 4"]


# -- poison ------------------------------------------------------------------------------------------------------------


def die(model: Model, number: int, *, blameless: bool = False) -> list[str]:
    batch = model.batches[number]
    ids = frozenset(request.id for request in batch.requests)
    return model.see(BatchDied(batch.batch_id, batch.executor, ids, "not healthy", "Traceback", blameless))


def test_a_batch_that_died_is_halved_and_its_halves_run_alone() -> None:
    model = Model(DynamicBatching(), max_batch_size=8)
    model.put(*range(1, 9))
    model.put(9)
    assert die(model, 1) == ["a: 1 2 3 4"]
    assert model.finish(1) == ["a: 5 6 7 8"]
    assert die(model, 5) == ["a: 5 6"]
    assert model.finish(5) == ["a: 7 8"]
    assert die(model, 7) == ["a: 7"]
    assert die(model, 7) == ["7 condemned on a: not healthy", "a: 8"]
    assert model.finish(8) == ["a: 9"]
    assert model.batches[8].attempts == (4,)


def test_a_blameless_death_gives_the_batch_out_again() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    for _ in range(9):
        assert die(model, 1, blameless=True) == ["a: 1"]
    assert die(model, 1) == ["1 condemned on a: not healthy"]


def test_a_late_or_foreign_death_is_ignored() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    batch = model.batches[1]
    assert model.see(BatchDied(batch.batch_id, "b", frozenset((ident(1),)), "")) == []
    model.finish(1)
    assert die(model, 1) == []


def test_members_with_an_outcome_are_not_suspected() -> None:
    model = Model(DynamicBatching())
    model.put(1, 2, 3)
    batch = model.batches[1]
    ids = frozenset((ident(1), ident(3)))
    assert model.see(BatchDied(batch.batch_id, "a", ids, "")) == ["a: 1"]
    assert model.finish(1) == ["a: 3"]


def test_a_predecessors_death_isolates_what_waits() -> None:
    model = Model(DynamicBatching(), slots=0)
    model.put(1, 2, 3)
    assert model.see(BatchDied("old-1", "x", frozenset((ident(2), ident(3), ident(9))), "")) == []
    assert model.see(VersionServed("a", 1, "h1", 1)) == ["a: 2"]
    assert model.finish(2) == ["a: 3"]
    assert model.finish(3) == ["a: 1"]
    model = Model(DynamicBatching(), slots=0)
    model.put(1)
    assert model.see(BatchDied("old-1", "x", frozenset((ident(1),)), "why")) == ["1 condemned on x: why"]


def test_executors_lost_with_the_same_request_condemn_it_only_apart() -> None:
    model = Model(DynamicBatching(), max_batch_size=8)
    assert model.put(*range(1, 9)) == ["a: 1 2 3 4 5 6 7 8"]
    assert model.lose("a") == []
    model.put(9)
    assert model.see(VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    assert model.lose("b", VersionServed("c", 1, "h1", 2)) == ["c: 1"]  # apart: the other slot is idle
    assert model.lose("c", VersionServed("d", 1, "h1", 2)) == ["d: 1"]
    assert model.lose("d", VersionServed("e", 1, "h1", 2)) == [
        "1 condemned on d: Executors were lost while they ran this request alone",
        "e: 2",
        "e: 3",
    ]
    assert [word for number in range(2, 8) for word in model.finish(number)] == [f"e: {n}" for n in range(4, 10)]


def test_a_suspect_waits_for_a_fresh_executor_but_not_for_ever() -> None:
    model = Model(None, slots=1)
    model.see(VersionServed("b", 1, "h1", 1), VersionServed("c", 1, "h1", 1))
    assert model.put(1, 2, 3) == ["a: 1", "b: 2", "c: 3"]
    model.finish(2)
    assert model.lose("a") == ["b: 1"]
    model.finish(3)
    assert model.lose("b") == ["c: 1"]  # apart, though c has run something
    assert model.lose("c", VersionServed("d", 1, "h1", 1)) == ["d: 1"]
    assert model.give_back(1) == []  # d has had it: it waits
    assert model.put(4) == ["d: 4"]
    assert model.finish(4) == []
    assert model.wakeup_us() == 13_000_000
    assert model.at(13_000_000) == ["d: 1"]
    assert model.lose("d")[0].startswith("1 condemned on d")
    assert model.wakeup_us() is None


def test_executors_lost_together_condemn_nobody() -> None:
    model = Model(DynamicBatching(), slots=1, max_batch_size=1)
    assert model.put(1) == ["a: 1"]
    assert model.lose("a", VersionServed("b", 1, "h1", 1), VersionServed("c", 1, "h1", 1)) == ["b: 1"]
    for name, other, fresh in (("b", "c", "de"), ("d", "e", "fg"), ("f", "g", "hi")):
        model.lose(name)
        model.now_ns += 400_000_000
        arrived = [VersionServed(executor, 1, "h1", 1) for executor in fresh]
        assert model.see(ExecutorLost(other), *arrived) == [f"{fresh[0]}: 1"]
    assert model.lose("h") == ["i: 1"]  # apart now, and the first time that it counts
    assert model.lose("i")[0].startswith("1 condemned on i")


def test_executors_that_are_heard_of_again_condemn_nobody() -> None:
    model = Model(DynamicBatching(), slots=1, max_batch_size=1)
    assert model.put(1) == ["a: 1"]
    assert model.lose("a", VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    assert model.lose("b", VersionServed("c", 1, "h1", 1)) == ["c: 1"]  # apart from now on
    for _ in range(MAX_STALLS):
        # the same one again and again, whose machine has too much to do
        assert model.lose("c") == []
        assert model.see(VersionServed("c", 1, "h1", 1), ExecutorReturned("c")) == ["c: 1"]
    assert model.see(ExecutorReturned("never lost"), ExecutorReturned("c")) == []
    # it stops its executor each time it runs: that must end, too
    assert model.lose("c") == []
    assert model.see(VersionServed("c", 1, "h1", 1), ExecutorReturned("c")) == ["c: 1"]
    assert model.lose("c")[0].startswith("1 condemned on c")


def test_only_the_executor_that_came_back_is_forgiven() -> None:
    model = Model(DynamicBatching(), slots=1, max_batch_size=1)
    assert model.put(1) == ["a: 1"]
    assert model.lose("a", VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    assert model.lose("b", VersionServed("c", 1, "h1", 1)) == ["c: 1"]
    assert model.lose("c", VersionServed("d", 1, "h1", 1)) == ["d: 1"]
    assert model.see(ExecutorReturned("a"), ExecutorReturned("b")) == []
    assert model.lose("d")[0].startswith("1 condemned on d")


def test_a_suspect_that_this_process_had_before_a_stall_runs_apart_again() -> None:
    model = Model(DynamicBatching(), slots=0, max_batch_size=4)
    requests = [model.request(number) for number in (1, 2, 3)]
    requests[0].losses_apart = 1
    model.see(*requests)
    model.see(BatchLost("a", requests[:1], 1, "apart", stalled=True), BatchLost("a", requests[1:], 2, "", stalled=True))
    assert model.see(VersionServed("a", 1, "h1", 4)) == ["a: 1"]
    assert requests[0].losses_apart == 1
    assert model.finish(1) == ["a: 2 3"]


def test_a_suspect_that_is_cancelled_keeps_no_executor() -> None:
    model = Model(DynamicBatching(), slots=1, max_batch_size=1)
    model.put(1)
    assert model.see(ExecutorLost("a"), VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    model.see(VersionServed("c", 1, "h1", 2))
    assert model.put(3, 4) == ["c: 3", "c: 4"]
    assert model.see(ExecutorLost("b")) == []  # 1 waits for c to have nothing
    model.put(5)
    assert model.finish(3) == []
    assert model.see(RequestCancelled(ident(1))) == ["1 CANCELLED CANCELED", "c: 5"]


def test_requests_settled_elsewhere_are_dropped_without_a_word() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    model.put(2, 3)
    assert model.see(RequestSettled(ident(2)), RequestSettled(ident(1))) == ["stop 1 on a"]
    assert model.see(ExecutorLost("a")) == []
    assert model.see(VersionServed("b", 1, "h1", 1)) == ["b: 3"]


# -- losses, returns, recovery, stale facts ----------------------------------------------------------------------------


def test_lost_requests_come_first_in_their_order_and_count_an_attempt() -> None:
    model = Model(DynamicBatching(), slots=2, max_batch_size=2)
    assert model.put(1, 2, 3, 4, 5) == ["a: 1 2", "a: 3 4"]
    assert model.see(ExecutorLost("a", drained=True)) == []
    assert model.see(VersionServed("b", 1, "h1", 3)) == ["b: 1 2", "b: 3 4", "b: 5"]
    assert model.batches[1].attempts == (2, 2)
    assert model.batches[5].attempts == (1,)


def test_returned_requests_come_first_and_are_given_out_anew() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    model.put(2)
    model.see(VersionWithdrawn("a", 1))
    assert model.give_back(1) == []
    assert model.see(VersionServed("b", 1, "h1", 1)) == ["b: 1 2"]
    # every giving-out is an attempt of its own, so that one that was not returned for good is fenced
    assert model.batches[1].attempts == (2, 1)


def test_stale_and_repeated_facts_are_ignored() -> None:
    model = Model(DynamicBatching())
    first = model.request(1)
    assert model.see(first) == ["a: 1"]
    assert model.put(1) == []
    batch = model.batches[1]
    assert model.see(BatchFinished(batch.batch_id, "z"), BatchReturned("p-99", "a")) == []
    assert model.scheduler.outstanding() == {"a": 1}
    assert model.see(ExecutorLost("a"), VersionServed("b", 1, "h1", 1)) == ["b: 1"]
    assert model.see(BatchFinished(batch.batch_id, "a"), BatchReturned(batch.batch_id, "a")) == []
    assert model.scheduler.outstanding() == {"b": 1}
    model.finish(1)
    model.finish(1)
    assert model.put(2) == ["b: 2"]
    assert model.put(3) == []


@pytest.mark.parametrize("known", [False, True])
def test_a_new_owner_takes_over_what_runs_already(known: bool) -> None:
    model = Model(DynamicBatching(), slots=0)
    requests = [model.request(number) for number in (1, 2)]
    if known:
        model.see(*requests)
    model.put(3)
    assert model.see(BatchRunning("old-1", "a", 1, requests)) == []
    assert (model.scheduler.pending_count(), model.scheduler.outstanding_requests()) == (1, 2)
    assert model.see(VersionServed("a", 1, "h1", 1)) == []
    assert model.see(*[model.request(number) for number in (1, 2)]) == []
    assert model.see(ExecutorLost("a", drained=True), VersionServed("b", 1, "h1", 1)) == ["b: 1 2 3"]
    assert model.batches[1].attempts == (2, 2, 1)


def test_a_taken_over_batch_that_finishes_ends_its_requests() -> None:
    model = Model(DynamicBatching(), slots=0)
    model.see(BatchRunning("old-1", "a", 1, [model.request(1)]), VersionServed("a", 1, "h1", 1))
    assert model.put(2) == []
    assert model.see(BatchFinished("old-1", "a")) == ["a: 2"]
    assert model.scheduler.outstanding_requests() == 1


def test_abandoned_versions_refuse_what_waits_for_them() -> None:
    model = Model(DynamicBatching())
    model.put(1)
    model.put(2)
    model.put(3, version=4)
    assert model.see(VersionsAbandoned(frozenset({1}))) == [
        "3 UNAVAILABLE REJECTED Request for unknown model: 'm' version 4 is not at ready state"
    ]
    assert model.scheduler.pending_count() == 1


# -- a new configuration -----------------------------------------------------------------------------------------------


def test_a_new_configuration_holds_for_what_is_queued() -> None:
    model = Model(DynamicBatching(priority_levels=3, default_priority_level=3), slots=0)
    model.put(1, level=3)
    model.put(2, level=1)
    model.put(3, rows=4)
    model.see(PolicyChanged(interface(3, timing(TimeoutAction.REJECT))))
    assert model.scheduler.queued_by_level() == {0: 2}
    assert model.wakeup_us() == 10
    assert model.see(VersionServed("a", 1, "h1", 1)) == ["a: 1 2"]


def test_a_request_too_large_for_the_new_configuration_is_refused() -> None:
    model = Model(DynamicBatching(), slots=0)
    model.put(1, rows=4)
    assert model.see(PolicyChanged(interface(3, None))) == [
        "1 INVALID_ARG OTHER inference request batch-size must be <= 3 for 'm'"
    ]


def test_the_same_configuration_again_changes_nothing() -> None:
    block = DynamicBatching(max_queue_delay_us=10)
    model = Model(block)
    model.put(1)
    assert model.see(PolicyChanged(interface(4, block))) == []
    assert model.wakeup_us() == 10


def test_a_hook_holds_the_first_batch_back() -> None:
    """S43: nothing before so many wait, then as ever."""
    scheduler = ModelScheduler("b", waits_for=2)
    scheduler.observe_all([PolicyChanged(interface(4, DynamicBatching())), VersionServed("e", 1, "h", 1)], 0)

    def send(number: int) -> list[Decision]:
        return scheduler.observe(RequestQueued(bytes([number]) * 16, 1, 0, 1, 0, 0, 0, 0), 0)

    assert send(1) == []
    (batch,) = send(2)
    assert isinstance(batch, DispatchBatch)
    assert len(batch.requests) == 2
    scheduler.observe(BatchFinished(batch.batch_id, "e"), 0)
    assert len(send(3)) == 1
