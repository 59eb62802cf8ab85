"""Quantiles of values that were counted by ranges, of one process and of several together. Pure.

The supervisor of `serve` imports it, so it needs nothing but the standard library. What is measured: `latencies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log, nan

_GROWTH = 1.02
"""Each range of values ends so much higher than it begins: a quantile is within 1 % of a value that was measured."""
_PER_LOG = 1 / log(_GROWTH)

WITHIN = "_within"
"""Suffix of the series from which quantiles are made; between the parts of one server only."""


def range_of(value: int) -> int:
    """The number of the range that holds a value; 0 holds what is below 1."""
    return int(log(value) * _PER_LOG) + 1 if value >= 1 else 0


def middle_of(number: int) -> float:
    """What stands for the values of a range: the middle of the whole numbers it holds."""
    return (ceil(_GROWTH ** (number - 1)) + ceil(_GROWTH**number) - 1) / 2 if number else 0.0


def quantile(within: Mapping[int, int], wanted: float) -> float:
    """The `wanted` quantile of values of which so many were within each range; NaN without any."""
    rank = max(1, ceil(wanted * sum(within.values())))
    for number in sorted(within):
        rank -= within[number]
        if rank <= 0:
            return middle_of(number)
    return nan


def joint_quantiles(family: str, values: Mapping[str, float]) -> dict[str, float]:
    """A summary's series, added up over parts: quantiles computed again from all, without the series they come from."""
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
