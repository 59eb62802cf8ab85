"""A log-linear histogram of durations in nanoseconds: the form of HDR histograms, at three significant digits. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, sqrt
from typing import Any, Self

import numpy as np

_PIECE = 512
"""So many durations are counted in a fifth of a millisecond; all of a window at once would stop the load for 30."""
_SUB_BITS = 10
_HALF = 1 << _SUB_BITS
"""Values of one power of two share 1024 cells, so that a cell is at most 1/1024 of its values wide."""


def bounds_of(cell: int) -> tuple[int, int]:
    """The lowest and the highest value of a cell."""
    if cell < 2 * _HALF:
        return cell, cell
    shift = cell // _HALF - 1
    lowest = (cell - shift * _HALF) << shift
    return lowest, lowest + (1 << shift) - 1


class LatencyHistogram:
    """Counts of durations. Count, mean, deviation, smallest and largest are exact, percentiles within 0.1 %."""

    __slots__ = ("_cells", "count", "max_ns", "min_ns", "squares_us2", "total_ns")

    def __init__(self) -> None:
        self._cells: dict[int, int] = {}
        self.count = 0
        self.total_ns = 0
        self.squares_us2 = 0.0
        self.min_ns = 0
        self.max_ns = 0

    @classmethod
    def of(cls, values_ns: Sequence[int]) -> Self:
        """The histogram of some durations. Negative ones count as zero."""
        made = cls()
        if not values_ns:
            return made
        values = np.maximum(np.asarray(values_ns, dtype=np.int64), 0)
        shifts = np.maximum(np.frexp(values.astype(np.float64))[1] - (_SUB_BITS + 1), 0)
        cells, counts = np.unique(shifts * _HALF + (values >> shifts), return_counts=True)
        made._cells = dict(zip(cells.tolist(), counts.tolist(), strict=True))
        made.count = len(values)
        made.total_ns = int(values.sum())
        made.squares_us2 = float(np.square(values / 1000.0).sum())
        made.min_ns, made.max_ns = int(values.min()), int(values.max())
        return made

    def add(self, other: LatencyHistogram) -> None:
        """Count what another histogram has counted."""
        if not other.count:
            return
        self.min_ns = min(self.min_ns, other.min_ns) if self.count else other.min_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        self.count += other.count
        self.total_ns += other.total_ns
        self.squares_us2 += other.squares_us2
        for cell, count in other._cells.items():
            self._cells[cell] = self._cells.get(cell, 0) + count

    @property
    def mean_ns(self) -> float:
        return self.total_ns / self.count if self.count else 0.0

    @property
    def deviation_ns(self) -> float:
        """The standard deviation of the values, as of a sample."""
        if self.count < 2:
            return 0.0
        mean_us = self.mean_ns / 1000
        return sqrt(max(0.0, self.squares_us2 - self.count * mean_us * mean_us) / (self.count - 1)) * 1000

    def percentile_ns(self, percent: float) -> int:
        """The value that `percent` of the values do not exceed, 0 without values."""
        if not self.count:
            return 0
        rank = max(1, ceil(self.count * percent / 100 - 1e-9))
        for cell, seen in self.cumulative():
            if seen >= rank:
                lowest, highest = bounds_of(cell)
                return min(max((lowest + highest) // 2, self.min_ns), self.max_ns)
        return self.max_ns

    def cumulative(self) -> Iterator[tuple[int, int]]:
        """Each cell that has values, ascending, with how many values are in it and below."""
        seen = 0
        for cell in sorted(self._cells):
            seen += self._cells[cell]
            yield cell, seen

    def packed(self) -> dict[str, Any]:
        """The histogram as a worker sends it."""
        return {
            "cells": self._cells, "total": self.total_ns, "squares": self.squares_us2, "min": self.min_ns,
            "max": self.max_ns,
        }  # fmt: skip

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> Self:
        """The histogram that `packed` gave."""
        made = cls()
        made._cells = {int(cell): int(count) for cell, count in packed["cells"].items()}
        made.count = sum(made._cells.values())
        made.total_ns, made.squares_us2 = packed["total"], packed["squares"]
        made.min_ns, made.max_ns = packed["min"], packed["max"]
        return made


class Durations:
    """Durations in nanoseconds that are counted in pieces as they come."""

    __slots__ = ("_counted", "_fresh")

    def __init__(self) -> None:
        self._counted = LatencyHistogram()
        self._fresh: list[int] = []

    def __len__(self) -> int:
        return self._counted.count + len(self._fresh)

    def append(self, duration_ns: int) -> None:
        self._fresh.append(duration_ns)
        if len(self._fresh) >= _PIECE:
            self.histogram()

    def histogram(self) -> LatencyHistogram:
        """The histogram of all of them."""
        self._counted.add(LatencyHistogram.of(self._fresh))
        self._fresh.clear()
        return self._counted
