"""When an open loop sends: all workers together keep the schedule."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.analyzer.send_schedule import CONSTANT, POISSON, TRACE, SendSchedule, send_times


def merged(schedule: SendSchedule, workers: int, until_ns: int) -> list[int]:
    times = (takewhile(lambda at: at < until_ns, send_times(schedule, k, workers, 7)) for k in range(workers))
    return sorted(at for one in times for at in one)


@given(st.integers(1, 5), st.integers(1, 2000))
@settings(max_examples=examples(50), deadline=None)
def test_constant_rates_are_even_whatever_the_number_of_workers(workers: int, rate: int) -> None:
    times = merged(SendSchedule(CONSTANT, float(rate)), workers, 1_000_000_000)
    assert times == merged(SendSchedule(CONSTANT, float(rate)), 1, 1_000_000_000)
    assert len(times) == rate


@given(st.integers(1, 5), st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(any))
@settings(max_examples=examples(50), deadline=None)
def test_intervals_are_repeated_and_shared(workers: int, intervals: list[int]) -> None:
    schedule = SendSchedule(TRACE, intervals_us=tuple(intervals))
    alone = list(islice(send_times(schedule, 0, 1, 0), 40))
    assert [late - early for early, late in zip([0, *alone], alone, strict=False)] == [
        intervals[number % len(intervals)] * 1000 for number in range(40)
    ]
    assert merged(schedule, workers, alone[-1]) == [at for at in merged(schedule, 1, alone[-1]) if at < alone[-1]]
    assert schedule.mean_rate == pytest.approx(len(intervals) / (sum(intervals) / 1e6))


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    times = merged(SendSchedule(POISSON, 1000.0), 3, 20_000_000_000)
    gaps = [late - early for early, late in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1e6, rel=0.05)
    # of a Poisson process the gaps deviate by their mean
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert times == merged(SendSchedule(POISSON, 1000.0), 3, 20_000_000_000)
