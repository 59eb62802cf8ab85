"""The searches of `charonia tune`, for any landscape: they end, ask nothing outside, and find what they promise."""

from __future__ import annotations

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.tuner.configuration_search import Axis, BruteSearch, Point, QuickSearch, Search
from charonia.tuner.verdict import Score, improves

AXES = st.lists(st.builds(Axis, st.integers(1, 5), st.booleans()), min_size=1, max_size=4)


@st.composite
def landscapes(draw: st.DrawFn) -> tuple[list[Axis], Point, dict[Point, Score]]:
    axes = draw(AXES)
    start = tuple(draw(st.integers(0, axis.size - 1)) for axis in axes)
    points: list[Point] = [()]
    for axis in axes:
        points = [(*point, value) for point in points for value in range(axis.size)]
    few = st.builds(Score, st.integers(0, 2), st.sampled_from([-2.0, -1.0, 0.0, 1.0, 1.01, 1.1, 2.0]))
    scores = draw(st.lists(few, min_size=len(points), max_size=len(points)))
    return axes, start, dict(zip(points, scores, strict=True))


def walked(search: Search, scores: dict[Point, Score]) -> list[Point]:
    asked = []
    while (point := search.point) is not None:
        assert point in scores
        assert search.left() >= 1
        asked.append(point)
        assert len(asked) < 20_000
        search.observe(scores[point])
    return asked


@settings(max_examples=examples(200))
@given(landscapes(), st.sampled_from([0.0, 0.03, 0.2]))
def test_a_quick_search_ends_where_no_neighbour_is_better(
    landscape: tuple[list[Axis], Point, dict[Point, Score]], gain: float
) -> None:
    axes, start, scores = landscape
    search = QuickSearch(axes, start, gain)
    asked = walked(search, scores)
    assert asked[0] == start
    best = search.best
    assert best in asked
    assert best == start or improves(scores[best], scores[start], gain)
    for at, axis in enumerate(axes):
        near = (best[at] - 1, best[at] + 1) if axis.is_ordered else range(axis.size)
        for value in near:
            point = (*best[:at], value, *best[at + 1 :])
            if 0 <= value < axis.size:
                assert point in asked
                assert not improves(scores[point], scores[best], gain)


@settings(max_examples=examples(100))
@given(landscapes())
def test_a_brute_search_asks_for_every_point_once(landscape: tuple[list[Axis], Point, dict[Point, Score]]) -> None:
    axes, start, scores = landscape
    search = BruteSearch(axes, start)
    assert search.left() == len(scores)
    asked = walked(search, scores)
    assert asked[0] == start
    assert sorted(asked) == sorted(scores)


@settings(max_examples=examples(100))
@given(landscapes())
def test_the_same_scores_lead_the_same_way(landscape: tuple[list[Axis], Point, dict[Point, Score]]) -> None:
    axes, start, scores = landscape
    ways = [walked(QuickSearch(axes, start, 0.03), scores) for _ in range(2)]
    assert ways[0] == ways[1]
