"""Merges the custom metrics of all python models of an executor, from the boards of their processes (P16).

Equal series of several instances are merged: counters and histograms are summed; a gauge has the last value that was
set, plus what instances that never set it have added. The counts of an ended process are kept while the model has other
instances or gets a new one, so that no counter decreases; they are dropped when the last one ends in order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

from charonia.backend import ModelSource

from .protocol import metric_board
from .protocol.metric_board import COUNTER, GAUGE, HISTOGRAM, Series

_log = logging.getLogger(__name__)

_TYPES = {COUNTER: "counter", GAUGE: "gauge", HISTOGRAM: "histogram"}

Key = tuple[str, tuple[tuple[str, str], ...]]
Model = tuple[str, int]


class Board:
    """The board of one model process, which inherits `descriptor`. Made by `CustomMetrics.open`."""

    def __init__(self, model: Model, metrics: CustomMetrics) -> None:
        self.model = model
        self.descriptor = metric_board.create()
        self._metrics = metrics

    def close(self, *, died: bool) -> None:
        """Close the board when its process has ended or could not start. A second call does nothing."""
        self._metrics.close(self, died=died)


class CustomMetrics:
    """The boards of an executor. Used in the event loop only."""

    def __init__(self, owned: str = "") -> None:
        """`owned`: the prefix of families that only the models of this backend may have, see `names_are_valid`."""
        self._owned = owned
        self._boards: list[Board] = []
        self._carried: dict[Model, dict[Key, Series]] = {}
        self._complained: set[str] = set()

    def open(self, source: ModelSource) -> Board:
        """Make a board for a new process of a model."""
        board = Board((source.name, source.version), self)
        self._boards.append(board)
        return board

    def close(self, board: Board, *, died: bool) -> None:
        """Implements `Board.close`."""
        if board not in self._boards:
            return
        self._boards.remove(board)
        counted = [series for series in metric_board.read(board.descriptor, self._owned) if series.kind != GAUGE]
        os.close(board.descriptor)
        if not died and all(other.model != board.model for other in self._boards):
            self._carried.pop(board.model, None)
        elif counted:
            carried = self._carried.setdefault(board.model, {})
            for series in counted:
                _add(carried, series)

    def render(self) -> bytes:
        """Return all series in the text format. Of two differing families with one name, the first is kept."""
        merged: dict[Key, Series] = {}
        for series in self._all():
            known = merged.get((series.family, series.labels))
            if known is None or _alike(known, series):
                _add(merged, series)
            else:
                self._complain(series.family)
        families: dict[str, list[Series]] = {}
        for series in merged.values():
            family = families.setdefault(series.family, [])
            if family and (family[0].kind, family[0].description) != (series.kind, series.description):
                self._complain(series.family)
            else:
                family.append(series)
        return "".join(_exposition(name, family) for name, family in families.items()).encode()

    def _all(self) -> Iterator[Series]:
        for board in self._boards:
            yield from metric_board.read(board.descriptor, self._owned)
        for carried in self._carried.values():
            yield from carried.values()

    def _complain(self, family: str) -> None:
        if family not in self._complained:
            self._complained.add(family)
            _log.error("custom metrics: models disagree about the kind, description or buckets of '%s'", family)


def _alike(one: Series, other: Series) -> bool:
    return (one.kind, one.description, one.bounds) == (other.kind, other.description, other.bounds)


def _add(merged: dict[Key, Series], series: Series) -> None:
    key = (series.family, series.labels)
    known = merged.get(key)
    if known is None:
        merged[key] = series
    elif _alike(known, series):
        values = _latest(known, series) if series.kind == GAUGE else _sum(known.values, series.values)
        merged[key] = replace(known, values=values)


def _sum(one: Iterable[float], other: Iterable[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _latest(one: Series, other: Series) -> tuple[float, ...]:
    """Merge gauges: the last set value wins, and includes no earlier additions; gauges that were never set add up."""
    (value, at, added), (other_value, other_at, other_added) = one.values, other.values
    if not at or not other_at:
        return (value + other_value, max(at, other_at), added + other_added)
    return one.values if at >= other_at else other.values


def _exposition(name: str, family: list[Series]) -> str:
    first = family[0]
    lines = [f"# HELP {name} {_escaped(first.description)}", f"# TYPE {name} {_TYPES[first.kind]}"]
    for series in family:
        if series.kind == HISTOGRAM:
            lines += _histogram(name, series)
        else:
            value = series.values[0] if series.kind == COUNTER else series.values[0] + series.values[2]
            lines.append(f"{name}{_labels(series.labels)} {_number(value)}")
    return "\n".join(lines) + "\n"


def _histogram(name: str, series: Series) -> Iterator[str]:
    below = 0.0
    for bound, count in zip((*map(_number, series.bounds), "+Inf"), series.values[:-1], strict=True):
        below += count
        yield f"{name}_bucket{_labels((*series.labels, ('le', bound)))} {_number(below)}"
    yield f"{name}_sum{_labels(series.labels)} {_number(series.values[-1])}"
    yield f"{name}_count{_labels(series.labels)} {_number(below)}"


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    text = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels)
    return f"{{{text}}}" if text else ""


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
