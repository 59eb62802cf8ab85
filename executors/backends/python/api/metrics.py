"""Custom metrics of model code: `pb_utils.MetricFamily` and its metrics (P16).

A process has one family per name, and one metric per family and set of labels: objects with equal names share them, and
they end with the last such object. Values are on the process's board (`metric_board`), so a change costs about as much
as setting a Python attribute. A process sees only its own values.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

from executors.backends.python.protocol.metric_board import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    BoardFull,
    BoardWriter,
    Slot,
    names_are_valid,
)

from .errors import TritonModelException, refused

_KINDS = {COUNTER: "COUNTER", GAUGE: "GAUGE", HISTOGRAM: "HISTOGRAM"}
_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object should "
    "be deleted AFTER its corresponding 'Metric' objects have been deleted."
)

_NO_FAMILY = "Error when creating MetricFamily"
_NO_METRIC = "Error when creating Metric"
_CANNOT = "Failed to create metric."


class _Family:
    """A family that is in use. `users` counts its `MetricFamily` objects."""

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.users = 0
        self.deleted = False
        self.series: dict[tuple[tuple[str, str], ...], _Series] = {}


class _Series:
    """A metric that is in use."""

    def __init__(self, slot: Slot, bounds: tuple[float, ...]) -> None:
        self.slot, self.bounds = slot, bounds
        self.users = 0


_board: BoardWriter | None = None
_families: dict[str, _Family] = {}
_lock = threading.RLock()


def write_to(descriptor: int) -> None:
    """Set the descriptor of this process's board; -1: none is read. Call it once, before the first family."""
    global _board
    _board = BoardWriter(descriptor)


class Metric:
    """One series, made by `MetricFamily.Metric`. Methods raise `TritonModelException`."""

    def __init__(self, family: _Family, key: tuple[tuple[str, str], ...], series: _Series) -> None:
        self._family, self._key, self._series = family, key, series

    def increment(self, value: float) -> None:
        """Add a value to a counter (at least 0) or to a gauge."""
        with _lock:
            self._check("increment", COUNTER, GAUGE)
            if self._family.kind == COUNTER and not value >= 0:
                raise refused(
                    "Failed to increment metric value",
                    "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
                )
            self._series.slot.values[0 if self._family.kind == COUNTER else 2] += value

    def set(self, value: float) -> None:
        """Set a gauge."""
        with _lock:
            self._check("set", GAUGE)
            values = self._series.slot.values
            values[0], values[1], values[2] = value, time.monotonic_ns(), 0.0

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        self.observe_times(value, 1)

    def observe_times(self, value: float, times: int) -> None:
        """Count a value several times in a histogram. Triton's metrics do not have this: for backends of ours."""
        with _lock:
            self._check("observe", HISTOGRAM)
            values = self._series.slot.values
            values[len(values) - 1] += value * times  # first: it raises for a value of another type
            values[bisect_left(self._series.bounds, value)] += times

    def value(self) -> float:
        """Return this process's value of a counter or gauge."""
        with _lock:
            self._check("get", COUNTER, GAUGE)
            values = self._series.slot.values
            return values[0] if self._family.kind == COUNTER else values[0] + values[2]

    def _check(self, verb: str, *kinds: int) -> None:
        if self._family.deleted:
            raise TritonModelException(f"Failed to {verb} metric value: {_DELETED}")
        if self._family.kind not in kinds:
            kind = f"TRITONSERVER_METRIC_KIND_{_KINDS[self._family.kind]}"
            operation = "Value" if verb == "get" else verb.capitalize()
            raise refused(f"Failed to {verb} metric value", f"{kind} does not support {operation}")

    def __del__(self) -> None:
        series = getattr(self, "_series", None)
        if series is None:
            return
        with _lock:
            series.users -= 1
            if series.users == 0 and self._family.series.pop(self._key, None) is not None and _board is not None:
                _board.drop(series.slot)


class MetricFamily:
    """The metrics with one name. `kind` is COUNTER, GAUGE or HISTOGRAM. Methods raise `TritonModelException`."""

    COUNTER = COUNTER
    GAUGE = GAUGE
    HISTOGRAM = HISTOGRAM

    _owned = ""
    """A reserved prefix that its names may begin with."""

    def __init__(self, name: str, description: str, kind: int) -> None:
        if not isinstance(name, str) or kind not in _KINDS:
            raise TypeError(f"a MetricFamily needs a name of type str and a kind, found {name!r} and {kind!r}.")
        if not names_are_valid(name, (), self._owned):
            raise refused(_NO_FAMILY, "Invalid metric name")
        with _lock:
            family = _families.get(name)
            if family is None:
                family = _families[name] = _Family(name, str(description), kind)
            elif family.kind != kind:
                raise refused(_NO_FAMILY, "Family name already exists with different type")
            family.users += 1
            self._family = family

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:  # noqa: N802
        """Return the series with these labels. `buckets` are the ascending upper bounds of a HISTOGRAM."""
        family = self._family
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException(f"{_CANNOT} Labels must be a dictionary.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException(f"{_CANNOT} Buckets must be a list.")
        if buckets is not None and family.kind != HISTOGRAM:
            raise TritonModelException(f"{_CANNOT} Unexpected buckets found.")
        if buckets is None and family.kind == HISTOGRAM:
            raise TritonModelException(f"{_CANNOT} Missing required buckets.")
        labels = labels or {}
        if not all(isinstance(value, str) for value in labels.values()):
            raise refused(_NO_METRIC, "attempt to access JSON non-string as string")
        if not all(isinstance(name, str) for name in labels) or not names_are_valid(family.name, labels, self._owned):
            raise refused(_NO_METRIC, "Invalid label name")
        bounds = tuple(float(bound) for bound in buckets or ())
        if any(not low < high for low, high in pairwise(bounds)):
            raise refused(_NO_METRIC, "Bucket Boundaries must be strictly sorted")
        key = tuple(sorted(labels.items()))
        with _lock:
            series = family.series.get(key)
            if series is None:
                series = family.series[key] = _Series(_slot(family, dict(key), bounds), bounds)
            elif series.bounds != bounds:
                raise refused(_NO_METRIC, f"the metric of family '{family.name}' exists with other buckets")
            series.users += 1
            return Metric(family, key, series)

    def __del__(self) -> None:
        family = getattr(self, "_family", None)
        if family is None:
            return
        with _lock:
            family.users -= 1
            if family.users:
                return
            family.deleted = True
            _families.pop(family.name, None)
            for series in family.series.values():
                if _board is not None:
                    _board.drop(series.slot)
            family.series.clear()


def _slot(family: _Family, labels: dict[str, str], bounds: tuple[float, ...]) -> Slot:
    global _board
    if _board is None:
        _board = BoardWriter(-1)
    values = {COUNTER: 1, GAUGE: 3, HISTOGRAM: len(bounds) + 2}[family.kind]
    try:
        return _board.add(family.kind, values, [family.name, family.description, labels, bounds])
    except BoardFull as error:
        raise refused(_NO_METRIC, str(error)) from None
