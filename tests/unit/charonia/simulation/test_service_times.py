"""The fit of execution times and of times on the way finds what a recording was made of."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from statistics import pstdev

import pytest

from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching
from charonia.simulation.machine_pauses import Pause, Stall, pauses_of
from charonia.simulation.recorded_requests import Outcome, RecordedBatch, RecordedRequest, recording
from charonia.simulation.service_times import Draws, Fit, ServiceFit, SizeFit, WayFit, fitted, service_fit

MS = 1_000_000


def batch(rows: int, service_ns: int, number: int = 0) -> RecordedBatch:
    return RecordedBatch(f"b-{number}", "e", rows, 0, service_ns, (0,))


def test_medians_and_the_line_between_and_beyond_them() -> None:
    batches = [batch(rows, (5 + rows) * MS + jitter) for rows in (1, 2, 4) for jitter in (-1000, 0, 1000)]
    fit = service_fit(batches)
    assert [(size.rows, size.count, size.median_ns) for size in fit.sizes] == [
        (1, 3, 6 * MS), (2, 3, 7 * MS), (4, 3, 9 * MS),
    ]  # fmt: skip
    assert fit.base_ns == pytest.approx(5 * MS)
    assert fit.row_ns == pytest.approx(MS)
    assert fit.r_squared > 0.99
    assert fit.typical_ns(3) == pytest.approx(8 * MS)
    assert fit.typical_ns(8) == pytest.approx(13 * MS)
    assert [fit.knows(rows) for rows in (1, 3, 4, 5)] == [True, True, True, False]


def test_a_size_that_was_seldom_seen_is_taken_to_lie_near_the_line() -> None:
    chance = random.Random(1)

    def seen(rows: int, count: int, off_ms: float = 0.0) -> list[RecordedBatch]:
        return [batch(rows, round((6 + rows + off_ms + chance.gauss(0, 0.4)) * MS)) for _ in range(count)]

    batches = [*seen(1, 200), *seen(2, 100), *seen(3, 50), *seen(4, 25), *seen(8, 1, 2.0)]
    found = {size.rows: size for size in service_fit(batches).sizes}
    assert found[8].median_ns > 15 * MS
    assert found[8].typical_ns == pytest.approx(14 * MS, rel=0.03)
    # a size that takes another time whenever it is seen is no chance
    padded = {size.rows: size for size in service_fit([*batches[:-1], *seen(8, 100, 4.0)]).sizes}
    assert padded[8].typical_ns == pytest.approx(18 * MS, rel=0.01)
    assert padded[1].typical_ns == pytest.approx(padded[1].median_ns, rel=0.02)


@pytest.mark.parametrize(("multiplied", "growth"), [(True, 1.0), (False, 0.0)])
def test_deviations_grow_with_the_size_as_far_as_they_did(multiplied: bool, growth: float) -> None:
    chance = random.Random(2)
    batches = []
    for rows in (1, 4, 16):
        middle = 2.0 + rows
        for _ in range(400):
            batches.append(batch(rows, round((middle + chance.gauss(0, 0.05 * (middle if multiplied else 3))) * MS)))
    assert service_fit(batches).growth == pytest.approx(growth, abs=0.15)


def test_a_long_pause_is_no_deviation_and_keeps_its_place() -> None:
    batches = [batch(1, (10 + number % 3) * MS, number) for number in range(100)]
    starts = [number * 20 * MS for number in range(100)]
    batches = [
        replace(one, started_ns=at, computed_ns=at + one.service_ns) for at, one in zip(starts, batches, strict=True)
    ]
    batches[50] = replace(batches[50], computed_ns=1500 * MS)
    service = service_fit(batches)
    assert service.stalls == (Stall(1000 * MS + round(5.5 * MS), 489 * MS),)
    assert len(service.deviations) == 99
    fit = Fit(service, WayFit(), 0, 2000 * MS, pauses_of(service.stalls, batches))
    for pace in (1, 2):
        arrivals = [RecordedRequest(number * 20 * MS * pace) for number in range(101)]
        drawn = Draws(fit, random.Random(1), arrivals)
        long = [at for at in range(0, 2000 * pace, 20) if sum(drawn.service_ns(1, at * MS)) > 400 * MS]
        assert len(long) == 1
        assert abs(long[0] - 1000 * pace) <= 20
    assert all(sum(Draws(fit, random.Random(1)).service_ns(1, at * MS)) < 20 * MS for at in range(0, 2000, 20))


def test_pauses_come_by_time() -> None:
    pauses = tuple(Pause(at * MS, (MS,)) for at in range(0, 100, 10))
    service = ServiceFit((SizeFit(1, 1, MS, MS, MS),), 0.0, 0.0, 1.0, 1.0, (0.0,))
    fit = Fit(service, WayFit(), 0, 100 * MS, pauses)

    def met(last_ms: float) -> int:
        drawn = Draws(fit, random.Random(1), [RecordedRequest(0), RecordedRequest(round(last_ms * MS))])
        return sum(drawn.service_ns(1, 10**12)) // MS - 1

    assert [met(100), met(50), met(25), met(200)] == [10, 5, 3, 10]


def test_the_spread_of_the_clock_is_taken_out_and_long_executions_stay() -> None:
    chance = random.Random(3)
    batches = []
    for number in range(1000):
        begin, end = chance.random(), chance.random()  # of their milliseconds, and where they are drawn in them
        blurred = 10 + chance.gauss(0, 0.1) + (chance.random() - begin) + (chance.random() - end)
        batches.append(batch(1, round((blurred + (6 if number % 50 == 0 else 0)) * MS), number))
    assert pstdev(service_fit(batches).deviations[1:50]) * 10 > 0.4
    found = service_fit(batches, MS * MS / 3)
    spread = [ns / MS for ns in found.deviations]  # growth 0: nanoseconds
    assert found.growth == 0.0
    usual = [ms for number, ms in enumerate(spread) if number % 50]
    assert pstdev(usual) < 0.3
    assert abs(sum(usual) / len(usual)) < 0.1
    assert all(4 < ms < 8 for number, ms in enumerate(spread) if number % 50 == 0)


def draws(batches: list[RecordedBatch], rows: int, count: int, seed: int = 1) -> list[int]:
    drawn = Draws(Fit(service_fit(batches), WayFit()), random.Random(seed))
    return [round(sum(drawn.service_ns(rows)) / MS) for _ in range(count)]


def test_draws_have_the_recorded_spread_and_repeat_with_their_seed() -> None:
    batches = [batch(1, ns * MS) for ns in range(5, 16)] * 3
    assert set(draws(batches, 1, 2000)) == set(range(5, 16))
    assert draws(batches, 1, 200) == draws(batches, 1, 200)
    assert draws(batches, 1, 200) != draws(batches, 1, 200, seed=2)


def test_another_size_has_the_same_ratios() -> None:
    batches = [*[batch(1, ns * MS) for ns in (8, 10, 12)] * 10, batch(2, 20 * MS)]
    assert set(draws(batches, 2, 1000)) == {16, 20, 24}


def test_what_followed_one_another_mostly_does_so_again() -> None:
    slow = [batch(1, 10 * MS)] * 80 + [batch(1, 50 * MS)] * 20
    drawn = draws(slow, 1, 5000)
    again = [after for before, after in pairwise(drawn) if before == 50]
    assert sum(ms == 50 for ms in again) / len(again) > 0.6  # drawn one by one it would be about 0.2
    assert 0.05 < sum(ms == 50 for ms in drawn) / len(drawn) < 0.4


def model(block: DynamicBatching | None = None) -> ModelInterface:
    return ModelInterface("m", "", "", 4, {}, {}, dynamic_batching=block or DynamicBatching())


def ran(at: int, start: int, end: int, back: int) -> RecordedRequest:
    return RecordedRequest(
        at, batch=f"b-{start}", executor="e", started_ns=start, computed_ns=end, ended_ns=end + back,
        outcome=Outcome.ANSWERED,
    )  # fmt: skip


def test_the_way_is_seen_where_an_instance_was_free_and_where_one_was_awaited() -> None:
    requests = []
    for number in range(20):  # one finds the instance free, the next one waits for it
        at = MS * 100 * number + MS
        requests += [ran(at, at + 300_000, at + 6 * MS, 50_000)]
        requests += [ran(at + MS, at + 6 * MS + 200_000, at + 12 * MS, 50_000)]
    way = fitted(recording("m", requests, "test", 1), model(), 1).way
    assert set(way.turn_ns) == {200_000}
    assert set(way.lead_ns) == {200_000}  # without the half turn that the order takes
    assert set(way.tail_ns) == {50_000}


def test_without_batches_there_is_no_fit() -> None:
    with pytest.raises(InvalidArgument, match="no batch"):
        fitted(recording("m", [RecordedRequest(1)], "test", 1), model(), 1)


@pytest.mark.parametrize(
    ("way", "factor", "in_service_ns", "expected"),
    [
        # 800 from an arrival to the beginning: a quarter of it for an order, and for a report
        (WayFit((400, 500, 300), (700, 800, 900), (50,)), 1.25, 0, WayFit((400, 500, 300), (1100, 1200, 1300), (50,))),
        # of a journal: 800 with the half turn that its executions have in them
        (WayFit((400,), (600,), (0,)), 1.25, 200, WayFit((400,), (1000,), (0,))),
        # nothing waited for an instance
        (WayFit((800,), (0,), (50,)), 1.5, 0, WayFit((800,), (800,), (50,))),
        (WayFit(), 1.5, 0, WayFit()),
        # 1000, a fifth of it for an order, and for a report
        (WayFit((400,), (1200, 1300, 100), (50,)), 0.8, 0, WayFit((400,), (800, 900, 0), (50,))),
        # the leads have the order in them
        (WayFit((1000, 1100, 100), (0,), (50,)), 0.8, 0, WayFit((800, 900, 0), (0,), (50,))),
    ],
)
def test_the_way_with_the_batcher_elsewhere(way: WayFit, factor: float, in_service_ns: float, expected: WayFit) -> None:
    assert way.with_batcher(factor, in_service_ns) == expected


@pytest.mark.parametrize(("journalled", "apart"), [(0, 1.5), (2, 1 + 0.5 / 1.5), (4, 1.25)])
def test_a_journalled_request_passes_the_log_once_more_with_the_batcher_anywhere(journalled: int, apart: float) -> None:
    requests = [
        RecordedRequest(
            at, batch=f"b-{at}", started_ns=10 * at, computed_ns=10 * at + 5, outcome=Outcome.ANSWERED,
            journalled=at <= journalled,
        )
        for at in (1, 2, 3, 4)
    ]  # fmt: skip
    refused = RecordedRequest(9, outcome=Outcome.REFUSED, journalled=True)
    fit = fitted(recording("m", [*requests, refused], "test", 1), model(), 1)
    assert fit.apart == pytest.approx(apart)
    way = WayFit((400, 450, 500), (800, 900, 1000), (50,))
    back = way.with_batcher(fit.apart).with_batcher(1 / fit.apart)
    assert (back.lead_ns, back.turn_ns) == (way.lead_ns, pytest.approx(way.turn_ns, abs=1))
