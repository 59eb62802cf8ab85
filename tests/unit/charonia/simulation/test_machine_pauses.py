"""Stalls that overlap are one pause, and each batch takes it once, as long as it lasts."""

from __future__ import annotations

import pytest

from charonia.simulation.machine_pauses import Pause, PausedTime, Stall, pauses_of, placed
from charonia.simulation.recorded_requests import RecordedBatch


def batch(begin: int, end: int) -> RecordedBatch:
    return RecordedBatch(f"b-{begin}", "e", 1, begin, end, (begin,))


def test_stalls_that_overlap_are_one_pause() -> None:
    stalls = [Stall(104, 398), Stall(100, 400), Stall(300, 200), Stall(900, 50)]
    assert pauses_of(stalls, []) == (Pause(100, (400, 398, 200)), Pause(900, (50,)))
    assert pauses_of([], []) == ()


@pytest.mark.parametrize(
    ("of_another", "everywhere"),
    [((90, 510), True), ((40, 99), True), ((501, 510), True), ((290, 310), False), ((120, 301), False)],
)
def test_where_another_batch_began_or_ended_meanwhile_the_pause_is_not_everywhere(
    of_another: tuple[int, int], everywhere: bool
) -> None:
    (found,) = pauses_of([Stall(100, 400)], [batch(95, 505), batch(*of_another)])
    assert found.everywhere is everywhere


def test_each_batch_that_runs_over_a_pause_takes_it_once() -> None:
    time = PausedTime([Pause(100, (400, 398))])
    assert time.taken_ns(80, 10) == 10
    assert [time.taken_ns(at, 10) for at in (95, 98, 99)] == [410, 410, 410]
    assert time.taken_ns(300, 10) == 210  # until it is over
    assert [time.taken_ns(at, 10) for at in (500, 600)] == [10, 10]


def test_a_pause_of_some_is_taken_by_as_many_each_as_long_as_recorded() -> None:
    time = PausedTime([Pause(100, (400, 100), everywhere=False)])
    assert [time.taken_ns(at, 10) for at in (95, 98, 99, 300)] == [410, 110, 10, 10]


def test_a_batch_runs_over_several_pauses() -> None:
    time = PausedTime([Pause(100, (400,)), Pause(503, (50,)), Pause(700, (50,))])
    assert time.taken_ns(95, 10) == 460
    assert time.taken_ns(505, 10) == 58


def test_pauses_that_none_ran_over_come_to_the_next_batch() -> None:
    time = PausedTime([Pause(100, (40,)), Pause(200, (50,))])
    assert [time.taken_ns(at, 10) for at in (300, 350, 400)] == [100, 50, 10]


def test_pauses_keep_their_place_among_arrivals() -> None:
    pauses = [Pause(at, (10,), everywhere=at < 200) for at in (100, 200, 300)]
    assert placed(pauses, (0, 400), (1000, 1800)) == [
        Pause(1200, (10,)), Pause(1400, (10,), everywhere=False), Pause(1600, (10,), everywhere=False),
    ]  # fmt: skip
    assert len(placed(pauses, (0, 400), (0, 133))) == 1
