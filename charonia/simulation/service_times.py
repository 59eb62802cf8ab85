"""Fits how long batches take, by rows, and how long requests are on the way, to what was recorded; draws from the fit.

Pure, with a generator of random numbers that its caller seeds. Of each batch size there is the median of its
executions. A size without any lies on the line between its neighbours, beyond them on the line of least squares through
all medians. What an execution differs by from the median of its size is a ratio. Ratios are drawn in runs, as they
followed one another in the recording, so that what slows several batches in a row does so in the simulation as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface

from .recorded_requests import RecordedBatch, Recording, batches_of

_RUN = 16
"""Mean length of the runs that are drawn."""
_Number = TypeVar("_Number", int, float)
_MIN_SEEN = 8
"""A delay on the way with fewer observations is taken as none."""


@dataclass(frozen=True, slots=True)
class SizeFit:
    """The executions of one size: how many, and their median and 99th percentile in nanoseconds."""

    rows: int
    count: int
    median_ns: float
    p99_ns: float


@dataclass(frozen=True, slots=True)
class ServiceFit:
    """How long batches take. `sizes` ascend by rows, `base_ns` and `row_ns` are the line through their medians.

    `r_squared` is how much of what the executions differ by is due to their size. `ratios`, of each execution to the
    median of its size, are in order of time.
    """

    sizes: tuple[SizeFit, ...]
    base_ns: float
    row_ns: float
    r_squared: float
    ratios: tuple[float, ...]

    def median_ns(self, rows: int) -> float:
        """The median time of a batch of so many rows, in nanoseconds."""
        below = [size for size in self.sizes if size.rows <= rows]
        above = [size for size in self.sizes if size.rows >= rows]
        if below and below[-1].rows == rows:
            return below[-1].median_ns
        if below and above:
            low, high = below[-1], above[0]
            return low.median_ns + (high.median_ns - low.median_ns) * (rows - low.rows) / (high.rows - low.rows)
        nearest = below[-1] if below else above[0]
        return max(1.0, nearest.median_ns + self.row_ns * (rows - nearest.rows))

    def knows(self, rows: int) -> bool:
        """Whether such a batch lies within what was recorded."""
        return self.sizes[0].rows <= rows <= self.sizes[-1].rows


@dataclass(frozen=True, slots=True)
class WayFit:
    """Times on the way in nanoseconds, each as observed, in order of time.

    `lead_ns` is from a request's arrival to the scheduler, `turn_ns` from the end of a batch to the beginning of the
    next one that waited for its instance, `tail_ns` from the end of a batch to the arrival of the answer.
    """

    lead_ns: tuple[int, ...] = (0,)
    turn_ns: tuple[int, ...] = (0,)
    tail_ns: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Fit:
    """All of a model."""

    service: ServiceFit
    way: WayFit


class Draws:
    """Draws times from a fit, in nanoseconds."""

    def __init__(self, fit: Fit, chance: random.Random) -> None:
        self._service = fit.service
        self._chance = chance
        self._medians: dict[int, float] = {}
        self._ratios = self._runs(fit.service.ratios)
        self._leads = self._runs(fit.way.lead_ns)
        self._turns = self._runs(fit.way.turn_ns)
        self._tails = self._runs(fit.way.tail_ns)

    def service_ns(self, rows: int) -> int:
        """How long a batch of so many rows takes, at least 1."""
        if rows not in self._medians:
            self._medians[rows] = self._service.median_ns(rows)
        return max(1, round(self._medians[rows] * next(self._ratios)))

    def lead_ns(self) -> int:
        return next(self._leads)

    def half_turn_ns(self) -> int:
        """Of the order to an executor, or of the news from there."""
        return max(0, next(self._turns)) // 2

    def tail_ns(self) -> int:
        return max(0, next(self._tails))

    def _runs(self, values: Sequence[_Number]) -> Iterator[_Number]:
        """Values in runs of the recorded order, each from a place drawn at random; endless."""
        place = len(values)
        while True:
            if place >= len(values) or self._chance.random() < 1 / _RUN:
                place = self._chance.randrange(len(values))
            yield values[place]
            place += 1


def fitted(recorded: Recording, interface: ModelInterface, slots: int) -> Fit:
    """The fit to a recording of a model that had `slots` instances in all. Raises `InvalidArgument` without batches."""
    batches = batches_of(recorded.requests)
    if not batches:
        raise InvalidArgument(f"the recording of '{recorded.model}' has no batch whose times are known")
    tails = tuple(one.ended_ns - one.computed_ns for one in recorded.requests if one.ran and one.computed_ns)
    leads, turns = _way(batches, interface, slots)
    return Fit(service_fit(batches), WayFit(leads, turns, tails or (0,)))


def service_fit(batches: Sequence[RecordedBatch]) -> ServiceFit:
    """The fit of execution times of batches in order of time, at least one."""
    times: dict[int, list[int]] = {}
    for batch in batches:
        times.setdefault(batch.rows, []).append(batch.service_ns)
    sizes = []
    for rows, of in sorted(times.items()):
        middle = max(1.0, float(median(of)))
        sizes.append(SizeFit(rows, len(of), middle, float(sorted(of)[int(0.99 * (len(of) - 1))])))
    base_ns, row_ns = _line(sizes)
    everything = [batch.service_ns for batch in batches]
    mean = sum(everything) / len(everything)
    medians = {size.rows: size.median_ns for size in sizes}
    whole = sum((ns - mean) ** 2 for ns in everything)
    rest = sum((batch.service_ns - medians[batch.rows]) ** 2 for batch in batches)
    ratios = tuple(batch.service_ns / medians[batch.rows] for batch in batches)
    return ServiceFit(tuple(sizes), base_ns, row_ns, max(0.0, 1 - rest / whole) if whole else 1.0, ratios)


def _line(sizes: Sequence[SizeFit]) -> tuple[float, float]:
    """The line of least squares through the medians, each as often as it was seen; it does not fall."""
    count = sum(size.count for size in sizes)
    mean_rows = sum(size.rows * size.count for size in sizes) / count
    mean_ns = sum(size.median_ns * size.count for size in sizes) / count
    spread = sum(size.count * (size.rows - mean_rows) ** 2 for size in sizes)
    if not spread:
        return mean_ns, 0.0
    slope = sum(size.count * (size.rows - mean_rows) * (size.median_ns - mean_ns) for size in sizes) / spread
    slope = max(0.0, slope)
    return max(0.0, mean_ns - slope * mean_rows), slope


def _way(
    batches: Sequence[RecordedBatch], interface: ModelInterface, slots: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leads and turns. A batch that could begin earlier than an instance was free shows a turn: from that end to its
    beginning. One that found an instance free shows a lead: from the arrival that made it due to its beginning, less
    the half turn that the order to the executor takes."""
    block = interface.dynamic_batching
    delay_ns = block.max_queue_delay_us * 1000 if block is not None else 0
    full = max((*(block.preferred_batch_sizes if block is not None else ()),), default=max(1, interface.max_batch_size))
    turns: list[int] = []
    waits: list[int] = []
    running: list[int] = []
    last_end_ns = 0
    for batch in batches:
        over = [end for end in running if end <= batch.started_ns]
        was_full = len(running) >= slots
        running = [end for end in running if end > batch.started_ns]
        last_end_ns = max((last_end_ns, *over))
        due_ns = batch.arrivals[-1] if batch.rows >= full or not delay_ns else batch.arrivals[0] + delay_ns
        if not delay_ns:
            due_ns = batch.arrivals[0]
        if was_full and due_ns < last_end_ns:
            turns.append(batch.started_ns - last_end_ns)
        elif last_end_ns <= due_ns and (not delay_ns or batch.rows >= full):
            waits.append(batch.started_ns - due_ns)
        running.append(batch.computed_ns)
    turn_ns = tuple(turns) if len(turns) >= _MIN_SEEN else (0,)
    order_ns = round(median(turn_ns)) // 2
    leads = tuple(max(0, ns - order_ns) for ns in waits)
    return (leads if len(leads) >= _MIN_SEEN else (0,)), turn_ns
