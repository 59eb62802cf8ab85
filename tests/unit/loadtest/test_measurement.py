"""Percentiles are order statistics, and merging loses nothing."""

from __future__ import annotations

import io
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.closed_loop import Gate, Plan, Recorder
from loadtest.fleet import decode, encode
from loadtest.measurement import Tally, median, merge, percentile, summarise


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 5), (90, 9), (95, 10), (99, 10), (100, 10)])
def test_percentile_is_the_nearest_rank(percent: float, expected: int) -> None:
    assert percentile(range(1, 11), percent) == expected


@given(st.lists(st.integers(0, 1 << 40), min_size=1), st.floats(0, 100))
def test_percentile_leaves_its_share_at_or_below(values: list[int], percent: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= len(ordered) * percent / 100


def test_percentile_refuses_nothing_and_nonsense() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="within"):
        percentile([1], 101)


def test_median_of_even_and_odd_counts() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5


def test_summary_counts_and_rates() -> None:
    tally = Tally(array("q", [3000, 1000, 2000, 4000]), Counter({"boom": 2}), 6, 2_000_000_000, 80_000)
    summary = summarise(tally)
    assert summary["requests"] == 4
    assert summary["throughput_per_s"] == 2.0
    assert summary["latency_us"] == {"mean": 2.5, "p50": 2.0, "p90": 4.0, "p95": 4.0, "p99": 4.0, "max": 4.0}
    assert summary["errors"] == {"boom": 2}
    assert summary["generator_cpu_us_per_request"] == 10.0  # 80 us over 6 right and 2 wrong answers


def test_summary_of_nothing_has_no_latency() -> None:
    summary = summarise(Tally())
    assert summary["latency_us"]["p99"] is None
    assert summary["throughput_per_s"] == 0.0


def test_merge_adds_counts_and_keeps_the_longest_window() -> None:
    one = Tally(array("q", [1]), Counter(a=1), 2, 10, 100)
    two = Tally(array("q", [2, 3]), Counter(a=1, b=5), 3, 20, 50)
    assert merge([one, two]) == Tally(array("q", [1, 2, 3]), Counter(a=2, b=5), 5, 20, 150)


def test_a_worker_hands_its_tally_over_whole() -> None:
    tally = Tally(array("q", [10, 1 << 40]), Counter({"HTTP 503: no": 3}), 7, 99, 12)
    assert decode(io.BytesIO(encode(tally))) == tally


@pytest.mark.parametrize("cut", [1, 8, 100])
def test_half_a_report_is_noticed(cut: int) -> None:
    whole = encode(Tally(array("q", range(5))))
    with pytest.raises(ValueError):
        decode(io.BytesIO(whole[:-cut]))


def test_a_number_of_requests_is_sent_exactly_and_after_the_warm_up() -> None:
    gate = Gate(Plan(concurrency=1, duration_s=None, requests=3, warmup_s=1e-6))
    gate.open(0)
    assert gate.may_send(0)
    assert [gate.may_send(2000) for _ in range(5)] == [True, True, True, False, False]
    assert not gate.measures(500, 3000)
    assert gate.measures(1000, 3000)


def test_a_duration_measures_answers_inside_the_window() -> None:
    gate = Gate(Plan(concurrency=1, duration_s=1e-6, requests=None, warmup_s=1e-6))
    gate.open(0)
    assert gate.may_send(1999)
    assert not gate.may_send(2000)
    recorder = Recorder(gate)
    for end_ns in (999, 1000, 2000, 2001):
        recorder.right(500, end_ns)
    tally = recorder.finish()
    assert list(tally.latencies_ns) == [500, 1500]
    assert (tally.completed_total, tally.window_ns) == (4, 1000)
