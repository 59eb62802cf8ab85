"""When windows agree, and which levels a search visits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from charonia.analyzer.latency_histogram import LatencyHistogram
from charonia.analyzer.stability import Levels, bisected, is_stable, linear
from charonia.analyzer.window_figures import WindowFigures, joined


def window(requests: int, latency_us: int) -> WindowFigures:
    latency = LatencyHistogram.of([latency_us * 1000] * requests)
    return WindowFigures(duration_ns=1_000_000_000, completed=requests, due=requests + 1, latency=latency)


@pytest.mark.parametrize(
    ("windows", "stable"),
    [
        ([(100, 10)] * 2, False),
        ([(100, 10)] * 3, True),
        ([(100, 10), (105, 10), (109, 10)], True),
        ([(100, 10), (105, 10), (112, 10)], False),
        ([(100, 1000), (100, 1050), (100, 1120)], False),
        ([(10, 10), (100, 10), (100, 10), (100, 10)], True),
        ([(0, 0)] * 3, False),
        ([(100, 10), (0, 0), (100, 10)], False),
    ],
)
def test_three_windows_agree(windows: list[tuple[int, int]], stable: bool) -> None:
    assert is_stable([window(*figures) for figures in windows], 10, None) is stable


def test_a_percentile_is_judged_in_place_of_the_mean() -> None:
    windows = [window(100, 10) for _ in range(3)]
    windows[-1].latency = LatencyHistogram.of([10_000] * 98 + [90_000] * 2)
    assert is_stable(windows, 20, 50)
    assert not is_stable(windows, 20, 99)


def visited(search: Levels, within: Callable[[float], bool]) -> list[float]:
    found = [next(search)]
    try:
        while True:
            found.append(search.send(within(found[-1])))
    except StopIteration:
        return found


@pytest.mark.parametrize(
    ("levels", "limit", "expected"),
    [
        ((1, 1, 1), 99, [1]),
        ((1, 7, 2), 99, [1, 3, 5, 7]),
        ((1, 8, 2), 99, [1, 3, 5, 7]),
        ((1, 7, 2), 3, [1, 3, 5]),
        ((2, 0, 2), 5, [2, 4, 6]),
        ((0.5, 1.0, 0.1), 9, [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
    ],
)
def test_linear(levels: tuple[float, float, float], limit: float, expected: list[float]) -> None:
    assert visited(linear(*levels), lambda level: level <= limit) == pytest.approx(expected)


@pytest.mark.parametrize("limit", range(1, 17))
def test_bisection_finds_the_last_level_within_the_limit(limit: int) -> None:
    found = visited(bisected(1, 16, 1, whole=True), lambda level: level <= limit)
    assert max(level for level in found if level <= limit) == limit
    assert len(found) <= 2 + 4
    assert all(level == int(level) for level in found)


def test_bisection_ends() -> None:
    assert visited(bisected(4, 16, 1, whole=True), lambda _: False) == [4]
    assert visited(bisected(4, 4, 1, whole=True), lambda _: True) == [4]
    assert visited(bisected(1, 2, 1, whole=True), lambda level: level < 2) == [1, 2]


def test_windows_are_joined() -> None:
    whole = joined([window(100, 10), window(300, 30)])
    assert (whole.completed, whole.due, whole.rate, whole.latency.count) == (400, 402, 200, 400)
    assert whole.latency.mean_ns == pytest.approx(25_000)
