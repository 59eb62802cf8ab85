"""Waves beside requests that come by themselves: who waits for company finds it, whatever form it comes in."""

from __future__ import annotations

from scheduler_bench import US, Model

from charonia.models.scheduling import DynamicBatching

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
