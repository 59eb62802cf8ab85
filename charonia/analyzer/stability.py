"""When a level's windows agree, and which levels are measured next. Pure: `benching` measures."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from .window_figures import WindowFigures

AGREEING = 3
"""Windows in a row that have to agree, as perf_analyzer's."""


def is_stable(windows: Sequence[WindowFigures], percent: float, percentile: int | None) -> bool:
    """Whether the last three windows have rates, and latencies, of which the largest is at most `percent` above the
    smallest. A window without answers agrees with none."""
    last = windows[-AGREEING:]
    if len(last) < AGREEING or not all(window.completed for window in last):
        return False
    rates = [window.rate for window in last]
    latencies = [window.judged_ns(percentile) for window in last]
    return all(max(values) <= min(values) * (1 + percent / 100) for values in (rates, latencies))


Levels = Generator[float, bool, None]
"""Yields the next level; is sent whether its latency was within the limit (and it was measured at all)."""


def linear(start: float, end: float, step: float) -> Levels:
    """From `start` to `end` (without end for 0) in steps, until a level is not within the limit."""
    number, level = 0, start
    while end == 0 or level <= end * (1 + 1e-12):
        if not (yield level):
            return
        number += 1
        level = start + number * step


def bisected(start: float, end: float, precision: float, *, whole: bool) -> Levels:
    """The ends first; then the middle of the part in which the limit is met, until that is shorter than `precision`.

    Levels of a `whole` search are integers.
    """
    if not (yield start):
        return
    if end <= start or (yield end):
        return
    while end - start > precision:
        middle = (start + end) // 2 if whole else (start + end) / 2
        if middle in (start, end):
            return
        if (yield middle):
            start = middle
        else:
            end = middle
