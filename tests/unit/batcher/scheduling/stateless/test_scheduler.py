"""The rules of batches one by one: S1-S8, S25."""

from __future__ import annotations

from scheduler_account import queued_by_level
from scheduler_bench import HUGE, US, Model, ident, interface

from batcher.scheduling.observations import (
    BatchTooLarge,
    ExecutorLost,
    PolicyChanged,
    QueueHeld,
    RequestCancelled,
    RequestQueued,
    VersionServed,
    VersionWithdrawn,
)
from batcher.scheduling.stateless.scheduler import ModelScheduler
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction

# -- S1: the default scheduler -----------------------------------------------------------------------------------------


def test_without_dynamic_batching_each_request_is_an_execution() -> None:
    model = Model(None, max_batch_size=8, slots=2)
    assert model.put(1, 2, 3, level=9) == ["a: 1", "a: 2"]
    assert model.finish(1) == ["a: 3"]
    assert queued_by_level(model.scheduler) == {}


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


def test_an_arrival_that_was_longer_on_its_way_shortens_the_wait() -> None:
    """Also one among many that are queued together."""
    model = Model(DynamicBatching(max_queue_delay_us=10), max_batch_size=8)
    model.now_ns = 100 * US
    assert model.put(1) == []
    young, old = model.request(2), model.request(3)
    old.enqueued_ns -= 5 * US
    assert model.scheduler.observe_all([young, old], model.now_ns) == []
    assert model.wakeup_us() == 105
    assert model.at(105) == ["a: 1 2 3"]


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


def ordered(slots: int = 3, max_batch_size: int = 2) -> Model:
    return Model(DynamicBatching(preserve_ordering=True), slots=slots, max_batch_size=max_batch_size)


# -- S6: preserve_ordering ---------------------------------------------------------------------------------------------


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
    assert queued_by_level(model.scheduler) == {1: 2, 2: 1}


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
    assert queued_by_level(model.scheduler) == {1: 1, 5: 2, HUGE: 1}
    assert model.finish(1) == ["a: 5 3 4 2"]


def test_a_more_urgent_arrival_changes_a_batch_that_waits() -> None:
    block = DynamicBatching(
        preferred_batch_sizes=(2, 4), max_queue_delay_us=10, priority_levels=2, default_priority_level=2
    )
    model = Model(block)
    assert model.put(1, rows=3) == []
    # 3 rows wait for 4; with 2 rows in front of them the preferred size 2 is hit first
    assert model.put(2, level=1, rows=2) == ["a: 2"]


# -- requests that are read again from another entry -------------------------------------------------------------------


def test_a_waiting_request_that_is_read_again_goes_to_where_it_was_read_last() -> None:
    model = Model(DynamicBatching(priority_levels=3, default_priority_level=2), max_batch_size=1)
    assert model.put(1, 2, 3, 4) == ["a: 1"]
    assert model.put(4, level=1) == ["join 4"]
    assert model.put(2, level=3) == ["join 2"]
    assert queued_by_level(model.scheduler) == {1: 1, 2: 1, 3: 1}
    assert [model.finish(number) for number in (1, 4, 3, 2)] == [["a: 4"], ["a: 3"], ["a: 2"], []]
    assert model.scheduler.unended() == []


def test_a_request_that_is_read_again_keeps_what_is_known_of_it() -> None:
    """Its attempts: a settlement of an earlier one would be fenced. And its place in a level that is full."""
    bounded = QueuePolicy(max_queue_size=1)
    model = Model(DynamicBatching(priority_levels=2, default_priority_level=2, default_queue_policy=bounded), slots=1)
    model.put(1)
    model.give_back(1)
    assert model.batches[1].attempts == (2,)
    model.see(QueueHeld(True))
    assert model.give_back(1) == []
    model.put(2, level=1)
    assert model.put(1, level=1) == ["join 1"], "the level is full, and it was admitted before"
    assert model.see(QueueHeld(False)) == ["a: 2 1"]
    assert model.batches[1].attempts == (1, 3)


def test_a_delayed_request_that_is_read_again_stays_behind_its_level() -> None:
    late = QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_us=10)
    model = Model(
        DynamicBatching(priority_levels=2, default_priority_level=2, default_queue_policy=late), max_batch_size=1
    )
    model.put(1, 2)
    assert model.at(20) == []
    model.put(3, level=1)
    assert model.put(2, level=1) == ["join 2"]
    model.put(4, level=1)
    assert [model.finish(number) for number in (1, 3, 4)] == [["a: 3"], ["a: 4"], ["a: 2"]]


def test_a_dispatched_request_that_is_read_again_runs_on_and_is_queued_again_where_it_was_read_last() -> None:
    model = Model(DynamicBatching(priority_levels=2, default_priority_level=2), max_batch_size=1)
    model.put(1, 2)
    assert model.put(1, level=1) == ["join 1"]
    assert model.scheduler.outstanding_requests() == 1
    model.see(QueueHeld(True))
    model.give_back(1)
    assert queued_by_level(model.scheduler) == {1: 1, 2: 1}
    assert model.see(QueueHeld(False)) == ["a: 1"]
    assert model.batches[1].attempts == (2,)


def test_a_suspected_request_that_is_read_again_still_runs_by_itself() -> None:
    model = Model(DynamicBatching())
    model.put(1, 2)
    model.lose("a")
    assert model.put(1) == ["join 1"]
    model.see(VersionServed("b", 1, "h1", 1))
    assert len(model.batches[1].requests) == 1
    assert model.scheduler.unended() != []


def test_what_is_observed_twice_is_read_once() -> None:
    model = Model(DynamicBatching(max_queue_delay_us=10))
    one = model.request(1)
    assert model.see(one) == model.see(one) == []
    assert model.scheduler.pending_count() == 1


def test_a_wave_that_is_read_again_runs_once() -> None:
    model = Model(DynamicBatching(), max_batch_size=8)
    assert model.see(model.wave(1, 2)) == ["a: 1"]
    assert model.see(model.wave(1, 2)) == ["join 1"]
    assert model.see(model.wave(2, 2)) == []
    assert model.see(model.wave(2, 2)) == ["join 2"]
    assert model.finish(1) == ["a: 2"]
    assert model.finish(2) == []


# -- batches that cannot be sent ---------------------------------------------------------------------------------------


def too_large(model: Model, number: int) -> list[str]:
    batch = model.batches[number]
    return model.see(BatchTooLarge(batch.batch_id, batch.executor, "too large"))


def test_a_batch_that_is_too_large_is_halved_until_it_is_not() -> None:
    model = Model(DynamicBatching(), max_batch_size=8)
    assert model.put(1, 2, 3, 4, 5) == ["a: 1 2 3 4 5"]
    model.put(6)
    assert too_large(model, 1) == ["a: 1 2 3"]
    assert too_large(model, 1) == ["a: 1 2"]
    assert model.finish(1) == ["a: 3"]
    assert model.finish(3) == ["a: 4 5"]
    assert model.finish(4) == ["a: 6"]
    assert model.finish(6) == []
    assert model.scheduler.unended() == []


def test_a_request_that_is_too_large_alone_ends_and_no_other_does() -> None:
    model = Model(DynamicBatching())
    model.put(1, 2)
    assert too_large(model, 1) == ["a: 1"]
    assert too_large(model, 1) == ["1 INVALID_ARG OTHER too large", "a: 2"]
    assert model.finish(2) == []
    assert model.scheduler.unended() == []


def test_a_batch_that_ended_or_is_of_another_executor_is_not_halved() -> None:
    model = Model(DynamicBatching())
    model.put(1, 2)
    batch = model.batches[1]
    assert model.see(BatchTooLarge(batch.batch_id, "z", "too large")) == []
    model.finish(1)
    assert model.see(BatchTooLarge(batch.batch_id, "a", "too large")) == []


def test_waves_of_a_batch_that_is_too_large_are_burst() -> None:
    model = Model(DynamicBatching(), max_batch_size=8)
    assert model.see(model.wave(1, 2), model.wave(2, 2)) == ["a: 1 2"]
    assert too_large(model, 1) == ["burst 1", "burst 2"]
