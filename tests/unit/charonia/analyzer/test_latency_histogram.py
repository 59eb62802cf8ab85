"""The log-linear histogram: cells, percentiles and what adding keeps, against the sorted values."""

from __future__ import annotations

import statistics
from math import ceil

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.analyzer.latency_histogram import Durations, LatencyHistogram, bounds_of

VALUES = st.integers(0, 2**44)


def cell_of(value_ns: int) -> int:
    """The cell that a histogram counts a value in."""
    ((cell, _),) = LatencyHistogram.of([value_ns]).cumulative()
    return cell


@given(VALUES, VALUES)
@settings(max_examples=examples(200), deadline=None)
def test_cells_hold_their_values_in_order(one: int, other: int) -> None:
    lowest, highest = bounds_of(cell_of(one))
    assert lowest <= one <= highest
    assert highest - lowest <= one / 1024
    assert cell_of(lowest) == cell_of(highest)
    assert cell_of(highest + 1) == cell_of(highest) + 1
    if one <= other:
        assert cell_of(one) <= cell_of(other)


@given(st.lists(VALUES, min_size=1, max_size=200), st.floats(0.1, 100))
@settings(max_examples=examples(200), deadline=None)
def test_percentiles_are_those_of_the_sorted_values_within_a_cell(values: list[int], percent: float) -> None:
    histogram = LatencyHistogram.of(values)
    exact = sorted(values)[max(1, ceil(len(values) * percent / 100 - 1e-9)) - 1]
    assert cell_of(histogram.percentile_ns(percent)) == cell_of(exact)
    assert histogram.percentile_ns(100) == pytest.approx(max(values), rel=1 / 1024)


@given(st.lists(VALUES, max_size=60), st.lists(VALUES, max_size=60))
@settings(max_examples=examples(100), deadline=None)
def test_adding_is_counting_all_together(one: list[int], other: list[int]) -> None:
    together, added = LatencyHistogram.of(one + other), LatencyHistogram.of(one)
    added.add(LatencyHistogram.unpacked(LatencyHistogram.of(other).packed()))
    assert list(added.cumulative()) == list(together.cumulative())
    assert (added.count, added.total_ns, added.min_ns, added.max_ns) == (
        together.count, together.total_ns, together.min_ns, together.max_ns
    )  # fmt: skip
    assert added.squares_us2 == pytest.approx(together.squares_us2)


def test_mean_and_deviation_are_exact() -> None:
    values = [1_000_000, 2_000_000, 4_500_000]
    histogram = LatencyHistogram.of(values)
    assert histogram.mean_ns == pytest.approx(statistics.fmean(values))
    assert histogram.deviation_ns == pytest.approx(statistics.stdev(values))


def test_without_values_all_is_zero() -> None:
    empty = LatencyHistogram.of([])
    assert (empty.mean_ns, empty.deviation_ns, empty.percentile_ns(99), empty.count) == (0, 0, 0, 0)
    assert LatencyHistogram.of([-5]).max_ns == 0


@pytest.mark.parametrize("number", [0, 3, 512, 1300])
def test_durations_are_counted_in_pieces(number: int) -> None:
    durations = Durations()
    for value in range(number):
        durations.append(value * 1000)
    assert len(durations) == number
    assert len(durations._fresh) < 512
    histogram, whole = durations.histogram(), LatencyHistogram.of([value * 1000 for value in range(number)])
    assert list(histogram.cumulative()) == list(whole.cumulative())
    assert (histogram.count, histogram.max_ns, len(durations)) == (number, whole.max_ns, number)
