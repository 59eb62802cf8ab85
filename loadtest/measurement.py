"""Turns recorded latencies into exact figures; it leaves recording to the drivers and printing to `__main__`.

All latencies are kept (8 bytes each), so percentiles are order statistics, never estimates from buckets.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def percentile(ordered: Sequence[int], percent: float) -> int:
    """Nearest-rank percentile of values in ascending order: the smallest one with `percent` % at or below it.

    Raises ValueError for no values or a percent outside 0..100.
    """
    if not ordered:
        raise ValueError("percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be within 0..100, got {percent}")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median(values: Iterable[float]) -> float:
    """Median, the mean of the middle two for an even count. Raises ValueError for no values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("median of no values")
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass
class Tally:
    """What one driver saw. `completed_total` counts every right answer, those of warm-up and drain included;
    `latencies_ns` holds those of the measured window, which lasted `window_ns`."""

    latencies_ns: array[int] = field(default_factory=lambda: array("q"))
    errors: Counter[str] = field(default_factory=Counter)
    completed_total: int = 0
    window_ns: int = 0
    cpu_ns: int = 0

    @property
    def answered(self) -> int:
        """Requests that ended, right or wrong."""
        return self.completed_total + self.errors.total()


def merge(tallies: Iterable[Tally]) -> Tally:
    """One tally of drivers that ran at the same time: counts and CPU add up, the window is the longest."""
    merged = Tally()
    for tally in tallies:
        merged.latencies_ns.extend(tally.latencies_ns)
        merged.errors.update(tally.errors)
        merged.completed_total += tally.completed_total
        merged.window_ns = max(merged.window_ns, tally.window_ns)
        merged.cpu_ns += tally.cpu_ns
    return merged


def summarise(tally: Tally) -> dict[str, Any]:
    """The figures of a run: counts, requests per second, latencies in microseconds, generator CPU per request.

    Latency fields are None when nothing was measured.
    """
    ordered = sorted(tally.latencies_ns)
    latency_us: dict[str, float | None] = {"mean": sum(ordered) / len(ordered) / 1e3 if ordered else None}
    for percent in PERCENTILES:
        latency_us[f"p{percent:g}"] = percentile(ordered, percent) / 1e3 if ordered else None
    latency_us["max"] = ordered[-1] / 1e3 if ordered else None
    return {
        "requests": len(ordered),
        "completed_total": tally.completed_total,
        "errors_total": tally.errors.total(),
        "errors": dict(tally.errors.most_common()),
        "window_s": tally.window_ns / 1e9,
        "throughput_per_s": len(ordered) / (tally.window_ns / 1e9) if tally.window_ns else 0.0,
        "latency_us": latency_us,
        "generator_cpu_us_per_request": tally.cpu_ns / 1e3 / tally.answered if tally.answered else None,
    }
