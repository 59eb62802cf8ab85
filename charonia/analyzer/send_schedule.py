"""When the requests of an open loop are to leave, whatever the server does. Pure; `load_loop` keeps to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

CONSTANT, POISSON, TRACE = "constant", "poisson", "trace"
_DRAWN = 1024


@dataclass(frozen=True, slots=True)
class SendSchedule:
    """How far requests are apart: `rate` a second (constant or Poisson), or the `intervals_us`, again and again."""

    kind: str
    rate: float = 0.0
    intervals_us: tuple[int, ...] = ()

    @property
    def mean_rate(self) -> float:
        """Requests a second."""
        if self.kind != TRACE:
            return self.rate
        return len(self.intervals_us) * 1e6 / max(1, sum(self.intervals_us))


def send_times(schedule: SendSchedule, worker: int, workers: int, seed: int) -> Iterator[int]:
    """The times in nanoseconds since the start at which one of several workers sends; together they send all.

    Of Poisson arrivals each worker has a process of its own with its part of the rate: their sum is the whole one.
    """
    if schedule.kind == POISSON:
        yield from _poisson(schedule.rate / workers, np.random.default_rng((seed, worker)))
    elif schedule.kind == TRACE:
        yield from _trace(schedule.intervals_us, worker, workers)
    else:
        for number in count(worker, workers):
            yield round(number * 1e9 / schedule.rate)


def _poisson(rate: float, random: np.random.Generator) -> Iterator[int]:
    at_ns = 0.0
    while True:
        for gap_s in random.exponential(1 / rate, _DRAWN).tolist():
            at_ns += gap_s * 1e9
            yield round(at_ns)


def _trace(intervals_us: Sequence[int], worker: int, workers: int) -> Iterator[int]:
    at_us, number = 0, 0
    while True:
        for gap_us in intervals_us:
            at_us += gap_us
            if number % workers == worker:
                yield at_us * 1000
            number += 1
