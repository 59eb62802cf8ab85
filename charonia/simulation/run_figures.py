"""Computes the figures of recorded or simulated requests, and how far a prediction is off. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from .recorded_requests import Outcome, RecordedRequest, batches_of

COMPARED = ("rate", "p50_us", "p99_us", "batch_rows")
"""What the error of a simulation is said of, always."""
_SHARES = 100
_PLACES = 60


def figures(requests: Sequence[RecordedRequest]) -> dict[str, Any]:
    """Of requests in order of arrival, as plain data: times in microseconds, rates by second.

    `rate` is answered requests by the time from the first arrival to the last end; latency is from arrival to end,
    `queue_us` from arrival to the beginning of the batch, `busy` how many batches ran at once on average.
    """
    answered = [one for one in requests if one.outcome is Outcome.ANSWERED]
    batches = batches_of(answered)
    begin = min((one.arrived_ns for one in requests), default=0)
    end = max((one.ended_ns for one in requests), default=begin)
    seconds = max(1e-9, (end - begin) / 1e9)
    latencies = sorted((one.ended_ns - one.arrived_ns) / 1000 for one in answered)
    queued = sorted((one.started_ns - one.arrived_ns) / 1000 for one in answered if one.started_ns)
    sizes: dict[int, int] = {}
    for batch in batches:
        sizes[batch.rows] = sizes.get(batch.rows, 0) + 1
    return {
        "requests": len(requests),
        "answered": len(answered),
        "refused": sum(one.outcome is Outcome.REFUSED for one in requests),
        "seconds": seconds,
        "rate": len(answered) / seconds,
        "mean_us": sum(latencies) / len(latencies) if latencies else 0.0,
        **{f"p{share}_us": percentile(latencies, share) for share in (50, 90, 95, 99)},
        "max_us": latencies[-1] if latencies else 0.0,
        "queue_p50_us": percentile(queued, 50),
        "queue_p99_us": percentile(queued, 99),
        "batches": len(batches),
        "batch_rows": sum(batch.rows for batch in batches) / len(batches) if batches else 0.0,
        "busy": sum(batch.service_ns for batch in batches) / 1e9 / seconds,
        "sizes": {str(rows): sizes[rows] for rows in sorted(sizes)},
        "latency_shares": [[share, percentile(latencies, share)] for share in range(1, _SHARES)],
        "over_time": _over_time(answered, begin, end),
        "levels": _levels(answered),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` percent of the ascending values do not exceed; 0 without any."""
    return float(ordered[max(0, ceil(share / 100 * len(ordered)) - 1)]) if ordered else 0.0


def errors(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float | None]:
    """By how many percent each compared figure is above the measured one; None where nothing was measured."""
    return {name: (predicted[name] / measured[name] - 1) * 100 if measured[name] else None for name in COMPARED}


def _over_time(answered: Sequence[RecordedRequest], begin: int, end: int) -> list[list[float]]:
    """Seconds since the beginning, the mean latency in microseconds and the rate, of the arrivals of equal parts."""
    width = max(1, (end - begin) // _PLACES)
    parts: dict[int, list[int]] = {}
    for one in answered:
        parts.setdefault((one.arrived_ns - begin) // width, []).append(one.ended_ns - one.arrived_ns)
    return [
        [place * width / 1e9, sum(of) / len(of) / 1000, len(of) / (width / 1e9)] for place, of in sorted(parts.items())
    ]


def _levels(answered: Sequence[RecordedRequest]) -> dict[str, dict[str, float]]:
    """p50 and p99 by priority as sent, where there are several."""
    by_level: dict[int, list[float]] = {}
    for one in answered:
        by_level.setdefault(one.level, []).append((one.ended_ns - one.arrived_ns) / 1000)
    if len(by_level) < 2:
        return {}
    return {
        str(level): {"answered": len(of), "p50_us": percentile(sorted(of), 50), "p99_us": percentile(sorted(of), 99)}
        for level, of in sorted(by_level.items())
    }
