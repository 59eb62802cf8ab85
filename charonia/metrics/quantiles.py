"""Quantiles of values that were counted by ranges, of one process and of several together. Pure.

The supervisor of `serve` imports it, so it needs nothing but the standard library. What is measured: `latencies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log, nan

_GROWTH = 1.02
"""Each range ends this much above its beginning: a quantile is within 1 % of a measured value."""
_PER_LOG = 1 / log(_GROWTH)

WITHIN = "_within"
"""Suffix of the series from which quantiles are computed; only between the parts of one server."""


def range_of(value: int) -> int:
    """The number of the range that holds a value; 0 holds what is below 1."""
    return int(log(value) * _PER_LOG) + 1 if value >= 1 else 0


def middle_of(number: int) -> float:
    """The value that represents a range: the middle of its whole numbers."""
    return (ceil(_GROWTH ** (number - 1)) + ceil(_GROWTH**number) - 1) / 2 if number else 0.0


def quantile(within: Mapping[int, int], wanted: float) -> float:
    """The `wanted` quantile of values, given their number in each range; NaN without any."""
    rank = max(1, ceil(wanted * sum(within.values())))
    for number in sorted(within):
        rank -= within[number]
        if rank <= 0:
            return middle_of(number)
    return nan


def joint_quantiles(family: str, values: Mapping[str, float]) -> dict[str, float]:
    """A summary's series, added over parts: quantiles are computed again, and the series they come from are dropped."""
    within: dict[str, dict[int, int]] = {}
    prefix = f"{family}{WITHIN}{{"
    for series, count in values.items():
        if series.startswith(prefix):
            labels, _, number = series[len(prefix) :].rpartition(',range="')
            within.setdefault(labels, {})[int(number.removesuffix('"}'))] = int(count)
    joint: dict[str, float] = {}
    for series, value in values.items():
        if series.startswith(prefix):
            continue
        labels, found, wanted = series.removeprefix(f"{family}{{").rpartition(',quantile="')
        if found and series.startswith(f"{family}{{"):
            value = quantile(within.get(labels, {}), float(wanted.removesuffix('"}')))
        joint[series] = value
    return joint
