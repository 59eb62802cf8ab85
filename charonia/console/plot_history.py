"""What plots show of a quarter of an hour: a few numbers of each model at each reading, kept small. Pure.

A reading as it was read, labels and overview, takes about 2 kB for each version and family: kept 450 times that was
hundreds of megabytes on servers with hundreds of models.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping

Row = tuple[float | None, float | None, float | None, float | None]
"""Answers/s, errors/s, latency (ms), pending requests; None: not known."""

_WIDTH = 4


class PlotHistory:
    """The rows of the last `most` readings, by the name of their model, "" for the whole server."""

    def __init__(self, most: int) -> None:
        self._readings: deque[tuple[float, Mapping[str, int], array[float]]] = deque(maxlen=most)

    def add(self, wall_s: float, rows: Mapping[str, Row]) -> None:
        """One reading, at a time in seconds since the epoch."""
        names: Mapping[str, int] = {name: place for place, name in enumerate(rows)}
        if self._readings and self._readings[-1][1] == names:
            names = self._readings[-1][1]  # one of them for all readings, until models come or go
        values = array("d", (math.nan if value is None else value for row in rows.values() for value in row))
        self._readings.append((wall_s, names, values))

    def keep(self, most: int) -> None:
        """Forget all but the last ones."""
        while len(self._readings) > most:
            self._readings.popleft()

    def columns(self, name: str) -> list[list[float | None]]:
        """Time, and the values of each row; of readings that did not know a model they are None."""
        rows = [_row(reading, name) for reading in self._readings]
        return [[row[at] for row in rows] for at in range(1 + _WIDTH)]

    def last(self, name: str) -> list[float | None]:
        """The last row of `columns`."""
        return _row(self._readings[-1], name)


def _row(reading: tuple[float, Mapping[str, int], array[float]], name: str) -> list[float | None]:
    wall_s, names, values = reading
    place = names.get(name)
    if place is None:
        return [wall_s, *[None] * _WIDTH]
    found = values[place * _WIDTH : (place + 1) * _WIDTH]
    return [wall_s, *(None if math.isnan(value) else value for value in found)]
