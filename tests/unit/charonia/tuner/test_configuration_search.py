"""The ways that the searches take."""

from __future__ import annotations

from collections.abc import Callable

from charonia.tuner.configuration_search import Axis, BruteSearch, Point, QuickSearch, Search
from charonia.tuner.verdict import Score


def walked(search: Search, value: Callable[[Point], float]) -> list[Point]:
    asked = []
    while (point := search.point) is not None:
        asked.append(point)
        search.observe(Score(2, value(point)))
    return asked


def test_a_quick_search_climbs_each_dimension_in_turn() -> None:
    search = QuickSearch([Axis(4, True), Axis(3, False)], (1, 0), 0.03)
    asked = walked(search, lambda point: 10 * point[0] + (5 if point[1] == 2 else 0) + 1)
    assert asked[:3] == [(1, 0), (2, 0), (3, 0)]  # up, as long as that is better
    assert asked[3:5] == [(3, 1), (3, 2)]  # each value of a dimension without order
    assert search.best == (3, 2)
    assert (0, 2) not in asked  # down was not tried where up was better


def test_what_is_better_by_less_than_the_gain_is_not_accepted() -> None:
    search = QuickSearch([Axis(3, True)], (0,), 0.1)
    walked(search, lambda point: 100 + 5 * point[0])
    assert search.best == (0,)


def test_a_search_without_dimensions_to_move_in_measures_the_start() -> None:
    assert walked(QuickSearch([Axis(1, True)], (0,), 0.03), lambda _: 1.0) == [(0,)]
    assert walked(BruteSearch([Axis(1, True)], (0,)), lambda _: 1.0) == [(0,)]


def test_how_many_are_left() -> None:
    brute = BruteSearch([Axis(2, True), Axis(3, True)], (1, 1))
    seen = []
    while brute.point is not None:
        seen.append(brute.left())
        brute.observe(Score(2, 1.0))
    assert seen == [6, 5, 4, 3, 2, 1]
    quick = QuickSearch([Axis(2, True), Axis(3, True)], (1, 1), 0.03)
    assert quick.left() == 4
    walked(quick, lambda _: 1.0)
    assert quick.left() == 0
