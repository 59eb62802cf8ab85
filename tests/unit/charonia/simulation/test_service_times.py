"""The fit of execution times and of times on the way finds what a recording was made of."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface
from charonia.models.scheduling import DynamicBatching
from charonia.simulation.recorded_requests import Outcome, RecordedBatch, RecordedRequest, recording
from charonia.simulation.service_times import Draws, Fit, WayFit, fitted, service_fit

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
    assert fit.median_ns(3) == pytest.approx(8 * MS)
    assert fit.median_ns(8) == pytest.approx(13 * MS)
    assert [fit.knows(rows) for rows in (1, 3, 4, 5)] == [True, True, True, False]


def draws(batches: list[RecordedBatch], rows: int, count: int, seed: int = 1) -> list[int]:
    drawn = Draws(Fit(service_fit(batches), WayFit()), random.Random(seed))
    return [round(drawn.service_ns(rows) / MS) for _ in range(count)]


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
