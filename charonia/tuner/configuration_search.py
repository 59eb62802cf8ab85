"""The searches: which point is measured next, given the scores of those before. Pure: `tuning` measures.

A point has an index into the values of each dimension. The same search with the same scores takes the same way, which
is how a run goes on where another was: the scores that are known already are given again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from .verdict import Score, improves

Point = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension as a search sees it: how many values, and whether neighbours are alike."""

    size: int
    is_ordered: bool


class Search(Protocol):
    """Gives points. `point` is to be measured next, None when the search is over."""

    @property
    def point(self) -> Point | None: ...

    def observe(self, score: Score) -> None:
        """The score of `point`, which becomes the next one."""

    def left(self) -> int:
        """How many more points it will ask for, as far as it can know: of a quick search those of this pass."""


class BruteSearch:
    """Every point, the start first."""

    def __init__(self, axes: Sequence[Axis], start: Point) -> None:
        self._points: Iterator[Point] = iter(
            [start, *(point for point in product(*(range(axis.size) for axis in axes)) if point != start)]
        )
        self._left = 1
        for axis in axes:
            self._left *= axis.size
        self.point: Point | None = next(self._points)

    def observe(self, _score: Score) -> None:
        self.point = next(self._points, None)
        self._left -= 1

    def left(self) -> int:
        return self._left


class QuickSearch:
    """Climbs from the start, one dimension after the other, until a pass over all of them finds nothing better.

    Of an ordered dimension it goes up as long as that is better, and down if up was not; of others it tries each
    value. Better is what `verdict.improves` says with `gain` (a part, 0.03). Each accepted point is better than all
    before, and points are finite, so it ends.
    """

    def __init__(self, axes: Sequence[Axis], start: Point, gain: float) -> None:
        self._axes, self._gain = tuple(axes), gain
        self._best = start
        self._pending = 0
        self._way = self._climb(start)
        self.point: Point | None = next(self._way)

    @property
    def best(self) -> Point:
        """The point that was accepted last."""
        return self._best

    def observe(self, score: Score) -> None:
        try:
            self.point = self._way.send(score)
        except StopIteration:
            self.point = None

    def left(self) -> int:
        return 0 if self.point is None else max(1, self._pending)

    def _climb(self, start: Point) -> Generator[Point, Score, None]:
        self._pending = 1 + sum(self._neighbours(at) for at in range(len(self._axes)))
        best_score = yield start
        without_gain = 0
        at = 0
        while without_gain < len(self._axes):
            self._pending = sum(self._neighbours(at + ahead) for ahead in range(len(self._axes) - without_gain))
            before = self._best
            best_score = yield from self._along(at % len(self._axes), best_score)
            without_gain = without_gain + 1 if self._best == before else 1
            at += 1

    def _along(self, at: int, best_score: Score) -> Generator[Point, Score, Score]:
        size, start = self._axes[at].size, self._best[at]
        if not self._axes[at].is_ordered:
            for value in range(size):
                if value != start:
                    best_score, _ = yield from self._try(at, value, best_score)
            return best_score
        for direction in (1, -1):
            moved = False
            while 0 <= self._best[at] + direction < size:
                best_score, better = yield from self._try(at, self._best[at] + direction, best_score)
                if not better:
                    break
                moved = True
            if moved:
                break
        return best_score

    def _try(self, at: int, value: int, best_score: Score) -> Generator[Point, Score, tuple[Score, bool]]:
        point = (*self._best[:at], value, *self._best[at + 1 :])
        score = yield point
        self._pending -= 1
        if not improves(score, best_score, self._gain):
            return best_score, False
        self._best = point
        return score, True

    def _neighbours(self, at: int) -> int:
        at %= len(self._axes)
        axis, here = self._axes[at], self._best[at]
        return (here > 0) + (here < axis.size - 1) if axis.is_ordered else axis.size - 1
