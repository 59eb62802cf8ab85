"""Fits how long batches take, by rows, and how long requests are on the way, to what was recorded; draws from the fit.

Pure, with a generator of random numbers that its caller seeds. Of each batch size: the median of its executions and
their ratios to it. A size with few executions borrows the ratios of all; one without any lies on the line between its
neighbours, beyond them on the line of least squares through all medians.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from charonia.errors import InvalidArgument
from charonia.models.interface import ModelInterface

from .recorded_requests import RecordedBatch, Recording, batches_of

MIN_OF_SIZE = 20
"""With fewer executions of a size, the ratios of all sizes are drawn from."""
_MIN_SEEN = 8
"""A delay on the way with fewer observations is taken as none."""
_MAX_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class SizeFit:
    """The executions of one size: how many, their median, and their ratios to it in order."""

    rows: int
    count: int
    median_ns: float
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ServiceFit:
    """How long batches take: `sizes` ascend by rows; `base_ns` and `row_ns` are the line through the medians, and
    `r_squared` how much of what the executions differ by is due to their size, as the medians have it."""

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

    def draw_ns(self, rows: int, chance: random.Random) -> int:
        """The time of one batch, in nanoseconds, at least 1."""
        of_size = next((size for size in self.sizes if size.rows == rows), None)
        ratios = of_size.ratios if of_size is not None and of_size.count >= MIN_OF_SIZE else self.ratios
        return max(1, round(self.median_ns(rows) * chance.choice(ratios)))

    def knows(self, rows: int) -> bool:
        """Whether such a batch lies within what was recorded."""
        return self.sizes[0].rows <= rows <= self.sizes[-1].rows


@dataclass(frozen=True, slots=True)
class WayFit:
    """Times on the way in nanoseconds, each as observed: from a request's arrival to the scheduler (`lead_ns`), from
    the end of a batch to the beginning of the next one that waited for its instance (`turn_ns`), and from the end of
    a batch to the arrival of the answer (`tail_ns`)."""

    lead_ns: tuple[int, ...] = (0,)
    turn_ns: tuple[int, ...] = (0,)
    tail_ns: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Fit:
    """All of a model."""

    service: ServiceFit
    way: WayFit


def fitted(recorded: Recording, interface: ModelInterface, slots: int) -> Fit:
    """The fit to a recording of a model that had `slots` instances in all. Raises `InvalidArgument` without batches."""
    batches = batches_of(recorded.requests)
    if not batches:
        raise InvalidArgument(f"the recording of '{recorded.model}' has no batch whose times are known")
    tails = tuple(one.ended_ns - one.computed_ns for one in recorded.requests if one.ran and one.computed_ns)
    leads, turns = _way(batches, interface, slots)
    return Fit(service_fit(batches), WayFit(leads, turns, tails or (0,)))


def service_fit(batches: Sequence[RecordedBatch]) -> ServiceFit:
    """The fit of execution times. Needs at least one batch."""
    times: dict[int, list[int]] = {}
    for batch in batches:
        times.setdefault(batch.rows, []).append(batch.service_ns)
    sizes = []
    for rows, of in sorted(times.items()):
        middle = max(1.0, float(median(of)))
        sizes.append(SizeFit(rows, len(of), middle, tuple(sorted(min(_MAX_RATIO, ns / middle) for ns in of))))
    base_ns, row_ns = _line(sizes)
    everything = [batch.service_ns for batch in batches]
    mean = sum(everything) / len(everything)
    medians = {size.rows: size.median_ns for size in sizes}
    whole = sum((ns - mean) ** 2 for ns in everything)
    rest = sum((batch.service_ns - medians[batch.rows]) ** 2 for batch in batches)
    ratios = tuple(sorted(ratio for size in sizes for ratio in size.ratios))
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
    turn_ns = tuple(sorted(turns)) if len(turns) >= _MIN_SEEN else (0,)
    order_ns = round(median(turn_ns)) // 2
    leads = tuple(sorted(max(0, ns - order_ns) for ns in waits))
    return (leads if len(leads) >= _MIN_SEEN else (0,)), turn_ns
