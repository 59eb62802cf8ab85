"""Waves beside requests that come by themselves: who waits for company finds it, whatever form it comes in."""

from __future__ import annotations

from scheduler_bench import US, Model

from batcher.scheduling.observations import RequestQueued
from charonia.models.scheduling import DynamicBatching, QueuePolicy

WAITS = DynamicBatching(max_queue_delay_us=1000)


def test_a_wave_that_waits_is_burst_when_a_request_comes_that_might_join_it() -> None:
    model = Model(WAITS)
    assert model.see(model.wave(1, 2)) == []
    assert model.put(2) == ["burst 1"]
    assert model.put(3, 4) == [], "as its requests, which come by themselves"
    assert model.put(5) == ["a: 2 3 4 5"]


def test_a_wave_is_burst_where_requests_wait_for_company() -> None:
    model = Model(WAITS)
    assert model.put(1) == []
    assert model.see(model.wave(2, 2)) == ["burst 2"]
    assert model.wakeup_us() == 1000


def test_what_comes_together_in_both_forms_waits_together() -> None:
    model = Model(WAITS)
    assert model.see(model.wave(1, 2), model.request(2)) == ["burst 1"]
    assert model.put(3, 4, 5) == ["a: 2 3 4 5"]


def test_waves_of_another_signature_are_left_as_they_are() -> None:
    model = Model(WAITS)
    assert model.see(model.wave(1, 2, signature=9)) == []
    assert model.put(2) == ["a: 1"], "the queue goes on in order"


def test_nothing_is_burst_where_nobody_waits() -> None:
    model = Model(DynamicBatching(), slots=1)
    assert model.put(1) == ["a: 1"]
    assert model.put(2) == []
    assert model.see(model.wave(3, 2)) == []
    assert model.put(4) == []
    assert model.finish(1) == ["a: 2"]
    assert model.finish(2) == ["a: 3"]


def test_a_full_batch_of_requests_needs_no_wave() -> None:
    model = Model(WAITS, slots=1)
    assert model.put(1, 2, 3, 4) == ["a: 1 2 3 4"]
    assert model.put(5, 6, 7, 8) == []
    assert model.see(model.wave(9, 2)) == []
    model.now_ns += 2000 * US
    assert model.finish(1) == ["a: 5 6 7 8"]
    assert model.finish(5) == ["a: 9"]


def test_waves_of_one_behind_an_execution_join_requests_that_come_by_themselves() -> None:
    model = Model(DynamicBatching(), slots=1)
    assert model.put(1) == ["a: 1"]
    assert model.put(2) == []
    assert model.see(model.wave(3)) == ["burst 3"]
    assert model.put(3) == [], "as a request, which comes by itself"
    assert model.finish(1) == ["a: 2 3"]


def test_a_request_behind_waves_of_one_shares_their_batch() -> None:
    model = Model(DynamicBatching(), slots=1)
    assert model.put(1) == ["a: 1"]
    assert model.see(model.wave(2)) == []
    assert model.see(model.wave(3)) == []
    assert model.put(4) == ["burst 2", "burst 3"]
    assert model.put(2, 3) == []
    assert model.finish(1) == ["a: 4 2 3"]


def test_requests_together_behind_waves_of_one_share_their_batch() -> None:
    model = Model(DynamicBatching(), slots=1)
    assert model.put(1) == ["a: 1"]
    assert model.see(model.wave(2)) == []
    assert model.put(3, 4) == ["burst 2"]


def test_waves_of_one_that_could_not_join_are_left_as_they_are() -> None:
    model = Model(DynamicBatching(), slots=1)
    assert model.put(1) == ["a: 1"]
    assert model.see(model.wave(2, signature=9)) == []
    assert model.put(3) == [], "another form"
    assert model.see(model.wave(4)) == ["burst 4"]
    assert model.see(model.wave(5, signature=9)) == []
    assert model.finish(1) == ["a: 2"]


def test_waves_of_one_are_not_burst_where_an_instance_is_free() -> None:
    model = Model(DynamicBatching(), slots=2)
    assert model.see(model.request(1), model.wave(2)) == ["a: 1", "a: 2"]


def test_requests_of_a_burst_wave_have_the_places_it_had() -> None:
    bound = QueuePolicy(max_queue_size=2)
    model = Model(DynamicBatching(default_queue_policy=bound), slots=1)
    assert model.put(1) == ["a: 1"]
    assert model.see(model.wave(2)) == []
    assert model.put(3) == ["burst 2"]
    assert model.put(4) == [], "it was faster, and there was room"
    assert model.put(2) == [], "it was in the queue before"
    assert model.put(5) == ["5 UNAVAILABLE REJECTED Exceeds maximum queue size"]
    assert model.finish(1) == ["a: 3 4 2"]


def together(model: Model, *waves: RequestQueued) -> list[str]:
    """What came in one read."""
    return model.words(model.scheduler.observe_all(list(waves), model.now_ns))


def test_waves_that_come_together_are_one_batch() -> None:
    model = Model(DynamicBatching())
    assert together(model, model.wave(1, 1), model.wave(2, 2), model.wave(3, 1)) == ["a: 1 2 3"]
    assert model.see(model.wave(4, 1)) == []
    assert model.finish(3) == ["a: 4"]


def test_waves_that_make_no_batch_are_queued_in_order() -> None:
    model = Model(DynamicBatching(), slots=1)
    assert together(model, model.wave(1, 3), model.wave(2, 2)) == ["a: 1"]
    assert model.finish(1) == ["a: 2"]
    assert model.finish(2) == []
    assert together(model, model.wave(3, 1), model.wave(4, 1, signature=9)) == ["a: 3"]
    assert model.finish(3) == ["a: 4"]
    assert model.finish(4) == []
    assert together(model, model.wave(5, 1), model.request(6)) == ["a: 5"]


def test_a_wave_that_comes_twice_runs_once() -> None:
    model = Model(DynamicBatching(), slots=2)
    assert together(model, model.wave(1, 1), model.wave(1, 1)) == ["join 1", "a: 1"]
    assert together(model, model.wave(1, 1)) == ["join 1"]


def test_waves_with_deadlines_leave_at_once_unless_these_have_passed() -> None:
    model = Model(DynamicBatching(), slots=2)
    model.now_ns = 10 * US
    in_time, late = model.wave(1, 2), model.wave(2, 2)
    in_time.deadline_ns, late.deadline_ns = 20 * US, 5 * US
    assert together(model, in_time) == ["a: 1"]
    assert model.wakeup_us() is None, "its gateway tells its callers"
    assert together(model, late) == ["burst 2"]
