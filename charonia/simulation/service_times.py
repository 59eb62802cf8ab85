"""Fits how long batches take, by rows, and how long requests are on the way, to what was recorded; draws from the fit.

Pure, with a generator of random numbers that its caller seeds. Of each batch size there is a typical time: the median
of its executions, or where there are few of them, a time nearer to the line of least squares through all medians
(`_pooled`). A size without any lies on the line between its neighbours, beyond them on that line. What an execution
differs by from the typical time of its size grows with that time as far as the recording shows it (`_growth`). These
deviations are drawn in runs, as they followed one another, so that what slows several batches in a row does so in the
simulation as well, and each as often as it was recorded. The few executions that took far longer (`_stalled`) are not
drawn: they are pauses of what the model runs on, during which arrivals may have paused as well, so they stay where they
were among the arrivals (`machine_pauses`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log, sqrt
from statistics import median
from typing import TypeVar

from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface

from .machine_pauses import Pause, PausedTime, Stall, pauses_of, placed
from .recorded_requests import Outcome, RecordedBatch, RecordedRequest, Recording, batches_of

_RUN = 16
"""Mean length of the runs that are drawn."""
_Number = TypeVar("_Number", int, float)
_NORMAL = 1.4826
"""Of a normal distribution: its standard deviation by the median of the distances from its middle."""
_MEDIAN = 1.5708
"""The variance of a median by that of the mean of as many values of a normal distribution."""
_FAR = 8.0
"""A stall exceeds its size's typical time by more than so many standard deviations."""
_FEW = 0.05
"""If more than this share of the executions would be stalls, none is: then the model itself is so."""
_OFTEN = 30
"""So many executions of a size tell how far they spread."""
_APART = 0.5
"""What it costs that batcher and executor are two processes, which hand batches and reports over through the log, as a
share of what a passage through the log costs otherwise: a slow machine is slow in both. Measured: ADR 0057.
"""
_MIN_SEEN = 8
"""A delay on the way with fewer observations is taken as none."""


@dataclass(frozen=True, slots=True)
class SizeFit:
    """The executions of one size: how many, their median and 99th percentile, and what is taken as typical (ns)."""

    rows: int
    count: int
    median_ns: float
    p99_ns: float
    typical_ns: float


@dataclass(frozen=True, slots=True)
class ServiceFit:
    """How long batches take. `sizes` ascend by rows, `base_ns` and `row_ns` are the line through their medians.

    `r_squared` is the share of the variance that the sizes explain. `deviations` has a value for each execution that is
    no stall, in order of time: its time less the typical time t of its size, in nanoseconds divided by t ** `growth`.
    `stalls` are the executions that took far longer.
    """

    sizes: tuple[SizeFit, ...]
    base_ns: float
    row_ns: float
    r_squared: float
    growth: float
    deviations: tuple[float, ...]
    stalls: tuple[Stall, ...] = ()

    def typical_ns(self, rows: int) -> float:
        """The typical time of a batch of so many rows, in nanoseconds."""
        below = [size for size in self.sizes if size.rows <= rows]
        above = [size for size in self.sizes if size.rows >= rows]
        if below and below[-1].rows == rows:
            return below[-1].typical_ns
        if below and above:
            low, high = below[-1], above[0]
            return low.typical_ns + (high.typical_ns - low.typical_ns) * (rows - low.rows) / (high.rows - low.rows)
        nearest = below[-1] if below else above[0]
        return max(1.0, nearest.typical_ns + self.row_ns * (rows - nearest.rows))

    @property
    def mean_ns(self) -> float:
        """The mean of the typical times, each as often as its size was seen."""
        return sum(size.typical_ns * size.count for size in self.sizes) / sum(size.count for size in self.sizes)

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

    def with_batcher(self, factor: float, in_service_ns: float = 0.0) -> WayFit:
        """The way with the batcher elsewhere, so that from an arrival to the beginning of its batch it takes `factor`
        times as long where an instance is free: a lead and half a turn. Orders and reports, halves of a turn, both take
        as much longer, or shorter. So much of the turn was recorded as part of executions as `in_service_ns` says.
        """
        begins_after_ns = median(self.lead_ns) + (median(self.turn_ns) + in_service_ns) / 2
        more_ns = round(2 * (factor - 1) * begins_after_ns)
        if more_ns >= 0 or any(self.turn_ns):
            return replace(self, turn_ns=tuple(max(0, ns + more_ns) for ns in self.turn_ns))
        # of no turn anything is known: the leads have in them what an order takes
        return replace(self, lead_ns=tuple(max(0, ns + more_ns // 2) for ns in self.lead_ns))


@dataclass(frozen=True, slots=True)
class Fit:
    """All of a model. `first_ns` and `last_ns` are the first and the last arrival that is simulated: of those whose end
    the recording has. `pauses` are those that the stalls of executions and of the way show, in order of time.
    `journalled` is the share of requests whose attempt was written to the log before they ran.
    """

    service: ServiceFit
    way: WayFit
    first_ns: int = 0
    last_ns: int = 0
    pauses: tuple[Pause, ...] = ()
    journalled: float = 0.0

    @property
    def apart(self) -> float:
        """How many times as long it takes until a batch begins, and as much of the processors the server uses for it,
        with the batcher in a process of its own as with it in the executor's. There a request passes the log with its
        arrival, and once more if it is journalled.
        """
        return 1 + _APART / (1 + self.journalled)

    @property
    def requests_per_batch(self) -> float:
        """Each request that ran has a tail."""
        return max(1.0, len(self.way.tail_ns) / sum(size.count for size in self.service.sizes))


class Draws:
    """Draws times from a fit, in nanoseconds."""

    def __init__(self, fit: Fit, chance: random.Random, arrivals: Sequence[RecordedRequest] = ()) -> None:
        """`arrivals` are the recorded ones, perhaps in another time than the recorded one, to place pauses."""
        times = [one.arrived_ns for one in arrivals]
        ends = (min(times), max(times)) if times else (0, 0)
        self._paused = PausedTime(placed(fit.pauses, (fit.first_ns, fit.last_ns), ends) if times else ())
        self._service = fit.service
        self._chance = chance
        self._typical: dict[int, tuple[float, float]] = {}
        """By rows: the typical time, and what a deviation is multiplied by."""
        self._deviations = self._runs(fit.service.deviations)
        self._leads = self._runs(fit.way.lead_ns)
        self._turns = self._runs(fit.way.turn_ns)
        self._tails = self._runs(fit.way.tail_ns)

    def service_ns(self, rows: int, now_ns: int = 0) -> tuple[int, int]:
        """How long a batch of so many rows that begins now works, at least 1, and what pauses add; `now_ns` never
        falls."""
        if rows not in self._typical:
            typical_ns = self._service.typical_ns(rows)
            self._typical[rows] = typical_ns, typical_ns**self._service.growth
        typical_ns, factor = self._typical[rows]
        drawn = max(1, round(typical_ns + factor * next(self._deviations)))
        return drawn, self._paused.taken_ns(now_ns, drawn) - drawn

    def lead_ns(self) -> int:
        return next(self._leads)

    def half_turn_ns(self) -> int:
        """Draws how long an order takes to an executor, or a report from there: half of a turn."""
        return max(0, next(self._turns)) // 2

    def tail_ns(self) -> int:
        return max(0, next(self._tails))

    def _runs(self, values: Sequence[_Number]) -> Iterator[_Number]:
        """Values in runs of the recorded order; endless. The runs come in random order, each once before any comes
        again: what was rare in the recording, as a pause of the machine, is as rare here.
        """
        while True:
            cuts = [0, *(place for place in range(1, len(values)) if self._chance.random() < 1 / _RUN), len(values)]
            runs = list(pairwise(cuts))
            self._chance.shuffle(runs)
            for begin, end in runs:
                yield from values[begin:end]


def fitted(recorded: Recording, interface: ModelInterface, slots: int) -> Fit:
    """The fit to a recording of a model that had `slots` instances in all. Its arrivals are those with an end, as
    only they are simulated. Raises `InvalidArgument` without batches or such arrivals."""
    batches = batches_of(recorded.requests)
    arrivals = [one.arrived_ns for one in recorded.requests if one.outcome is not Outcome.LOST]
    if not batches or not arrivals:
        raise InvalidArgument(f"the recording of '{recorded.model}' has no batch whose times are known")
    tails = tuple(one.ended_ns - one.computed_ns for one in recorded.requests if one.ran and one.computed_ns)
    # each end of an interval lies anywhere in its unit, and is taken to lie anywhere in it
    clock_ns2 = recorded.resolution_ns**2 / 3
    service = service_fit(batches, clock_ns2)
    leads, turns, stalls = _way(batches, interface, slots, clock_ns2)
    pauses = pauses_of((*service.stalls, *stalls), batches)
    tails = tuple(map(round, _sharpened(tails, clock_ns2)))
    ran = [one.journalled for one in recorded.requests if one.ran]
    journalled = sum(ran) / max(1, len(ran))
    return Fit(service, WayFit(leads, turns, tails or (0,)), min(arrivals), max(arrivals), pauses, journalled)


def service_fit(batches: Sequence[RecordedBatch], clock_ns2: float = 0.0) -> ServiceFit:
    """The fit of execution times of batches in order of time, at least one. `clock_ns2` is the variance of a recorded
    interval that comes of the resolution of its times alone."""
    times: dict[int, list[int]] = {}
    for batch in batches:
        times.setdefault(batch.rows, []).append(batch.service_ns)
    sizes = []
    for rows, of in sorted(times.items()):
        middle = max(1.0, float(median(of)))
        sizes.append(SizeFit(rows, len(of), middle, float(sorted(of)[int(0.99 * (len(of) - 1))]), middle))
    base_ns, row_ns = _line(sizes)
    sizes = _pooled(sizes, times, base_ns, row_ns)
    everything = [batch.service_ns for batch in batches]
    mean = sum(everything) / len(everything)
    medians = {size.rows: size.median_ns for size in sizes}
    whole = sum((ns - mean) ** 2 for ns in everything)
    rest = sum((batch.service_ns - medians[batch.rows]) ** 2 for batch in batches)
    growth = _growth(sizes, times, clock_ns2)
    typical = {size.rows: size.typical_ns for size in sizes}
    stalled = _stalled(batches, typical)
    stalls = [
        Stall(one.started_ns + round(typical[one.rows] / 2), round(one.service_ns - typical[one.rows]))
        for one in stalled
    ]
    names = {one.name for one in stalled}
    usual = [one for one in batches if one.name not in names]
    over = _sharpened([one.service_ns - typical[one.rows] for one in usual], clock_ns2)
    deviations = tuple(ns / typical[one.rows] ** growth for one, ns in zip(usual, over, strict=True))
    r_squared = max(0.0, 1 - rest / whole) if whole else 1.0
    return ServiceFit(tuple(sizes), base_ns, row_ns, r_squared, growth, deviations, tuple(stalls))


def _stalled(batches: Sequence[RecordedBatch], typical: Mapping[int, float]) -> list[RecordedBatch]:
    """The executions that took at least twice their size's typical time, and were far outside of what the others take.
    None if they are many: then the model itself is so.
    """
    over = [one.service_ns - typical[one.rows] for one in batches]
    far_ns = _FAR * _spread_ns(over)
    found = [one for one, ns in zip(batches, over, strict=True) if ns > typical[one.rows] and ns > far_ns]
    return found if len(found) <= _FEW * len(batches) else []


def _pooled(
    sizes: Sequence[SizeFit], times: Mapping[int, Sequence[int]], base_ns: float, row_ns: float
) -> list[SizeFit]:
    """The sizes with their typical times. A median of few executions is mostly chance, and large batches are few where
    the load was low: the more of a median's distance from the line chance explains, the nearer to the line is what is
    taken (empirical Bayes, with the between-size variance of DerSimonian and Laird).
    """
    line = {size.rows: base_ns + row_ns * size.rows for size in sizes}
    free = len(sizes) - 2
    chance_ns2 = _MEDIAN * _spread_ns([ns - size.median_ns for size in sizes for ns in times[size.rows]]) ** 2
    if free <= 0 or not chance_ns2:
        return list(sizes)
    weights = [size.count / chance_ns2 for size in sizes]
    whole = sum(weights)
    excess = sum(w * (size.median_ns - line[size.rows]) ** 2 for w, size in zip(weights, sizes, strict=True)) - free
    between_ns2 = max(0.0, excess / (whole - sum(w * w for w in weights) / whole))
    found = []
    for size in sizes:
        own = between_ns2 / (between_ns2 + chance_ns2 / size.count)
        found.append(replace(size, typical_ns=max(1.0, line[size.rows] + own * (size.median_ns - line[size.rows]))))
    return found


def _growth(sizes: Sequence[SizeFit], times: Mapping[int, Sequence[int]], clock_ns2: float) -> float:
    """How what executions differ by grows with their typical time: as its power 1 where a slower machine multiplies
    all, 0 where pauses add to all alike. The slope of the spreads of sizes that were often seen; 1 without. Where most
    of the spread is the clock's, nothing shows that it grows.
    """
    points = []
    for size in sizes:
        if size.count >= _OFTEN:
            spread_ns2 = _spread_ns([ns - size.median_ns for ns in times[size.rows]]) ** 2
            if clock_ns2 and spread_ns2 < 2 * clock_ns2:
                return 0.0
            if spread_ns2:
                points.append((log(size.typical_ns), log(spread_ns2 - clock_ns2) / 2, size.count))
    count = sum(weight for _, _, weight in points)
    mean_x = sum(x * weight for x, _, weight in points) / count if count else 0.0
    mean_y = sum(y * weight for _, y, weight in points) / count if count else 0.0
    width = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    if len(points) < 2 or not width:
        return 1.0
    return min(1.0, max(0.0, sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / width))


def _sharpened(values: Sequence[float], clock_ns2: float) -> tuple[float, ...]:
    """Intervals without what the resolution of the clock adds to their spread: those that it may have put where they
    are move towards their mean. Longer ones, which it cannot have made, stay: they are what decides high percentiles.
    """
    if not values or not clock_ns2:
        return tuple(values)
    far_ns = 2 * sqrt(clock_ns2)
    middle = median(values)
    spread_ns2 = _spread_ns([ns - middle for ns in values]) ** 2
    share = sqrt(max(0.0, 1 - clock_ns2 / spread_ns2)) if spread_ns2 else 1.0
    near = [ns for ns in values if abs(ns - middle) <= far_ns] or values
    mean = sum(near) / len(near)

    def moved(ns: float) -> float:
        off_ns = ns - mean
        return mean + off_ns * (1 - (1 - share) * min(1.0, (far_ns / max(abs(off_ns), 1.0)) ** 3))

    return tuple(map(moved, values))


def _spread_ns(differences: Sequence[float]) -> float:
    """The standard deviation that half of the differences tell, which the other half, of outliers, does not change."""
    return _NORMAL * median([abs(ns) for ns in differences])


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
    batches: Sequence[RecordedBatch], interface: ModelInterface, slots: int, clock_ns2: float
) -> tuple[tuple[int, ...], tuple[int, ...], list[Stall]]:
    """Leads and turns. A batch that could begin earlier than an instance was free shows a turn: from that end to its
    beginning. One that found an instance free shows a lead: from the arrival that made it due to its beginning, less
    the half turn that the order to the executor takes."""
    block = interface.dynamic_batching
    delay_ns = block.max_queue_delay_us * 1000 if block is not None else 0
    full = max((*(block.preferred_batch_sizes if block is not None else ()),), default=max(1, interface.max_batch_size))
    turned: list[tuple[int, int]] = []
    waited: list[tuple[int, int]] = []
    """When it was due, and how long after that it began."""
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
            turned.append((last_end_ns, batch.started_ns - last_end_ns))
        elif last_end_ns <= due_ns and (not delay_ns or batch.rows >= full):
            waited.append((due_ns, batch.started_ns - due_ns))
        running.append(batch.computed_ns)
    usual_ns = median([batch.service_ns for batch in batches])
    turns, stalls = _without_stalls(turned, usual_ns)
    waits, more = _without_stalls(waited, usual_ns)
    turn_ns = tuple(map(round, _sharpened(turns, clock_ns2))) if len(turns) >= _MIN_SEEN else (0,)
    order_ns = round(median(turn_ns)) // 2
    leads = tuple(max(0, round(ns) - order_ns) for ns in _sharpened(waits, clock_ns2))
    return (leads if len(leads) >= _MIN_SEEN else (0,)), turn_ns, [*stalls, *more]


def _without_stalls(timed: Sequence[tuple[int, int]], usual_ns: float) -> tuple[list[int], list[Stall]]:
    """Times on the way, each with when it began, as those that are drawn and the pauses among them: what took longer
    than the others by more than an execution takes."""
    if not timed:
        return [], []
    middle = median([ns for _, ns in timed])
    far_ns = max(usual_ns, _FAR * _spread_ns([ns - middle for _, ns in timed]))
    found = [Stall(at_ns, round(ns - middle)) for at_ns, ns in timed if ns - middle > far_ns]
    if len(found) > _FEW * len(timed):
        return [ns for _, ns in timed], []
    return [ns for _, ns in timed if ns - middle <= far_ns], found
