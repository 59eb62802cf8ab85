"""Chooses batch size and delay so that requests are done within a target at the least cost (`parameters:
charonia.target_p99_ms`). Pure: it is given batches and instants, and never waits or draws random numbers.

It measures the duration of batches of each size and the rate of arriving rows. Of the sizes whose requests would still
be in time, it picks the one with the least time per row. A size is in time when collecting it, waiting for an instance
and running it take less than the target times a margin. The margin shrinks when more than 1 % of requests are late and
grows back slowly, which accounts for effects outside the model (other load, another host).

Until enough is known it sets neither delay nor limit, as `dynamic_batching { }`. It tries new sizes in steps of two,
and only when they would be in time at the current cost per row. It reviews the choice ten times a second and changes it
only by a clear gain, to avoid oscillation.

A delay is always below the target: no request starves. When no size is in time, it sets no delay either: batches grow
with the queue, which shortens it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import exp
from typing import Literal

from .dynamic_batching import BatchRules

State = Literal["learning", "in reach", "out of reach"]

_REVIEW_NS = 100_000_000
_RATE_TIME_NS = 1_000_000_000
"""The period over which the rate of arrivals is measured."""
_FORGET_NS = 30_000_000_000
"""Measured durations older than this are dropped."""
_FIRST_BATCHES = 4
"""Batches to be measured before anything is chosen."""
_BUSY = 0.9
"""Share of the instances' time; beyond it queues grow."""
_WORTH = 0.03
"""A larger size must save this share of a row's cost."""
_KEEP = 0.05
"""A choice in time stays unless another one saves this share of a row's cost."""
_SLACK = 1.15
"""Tolerances: the current size may exceed the available time by this share, another size must stay below it by this
share.
"""
_FIRST_PATIENCE_NS = 1_000_000_000
_LONGEST_PATIENCE_NS = 30_000_000_000
"""How long a delay must look useful before it begins; doubled each time that requests were late because of it."""
_LEAST_MARGIN, _MOST_MARGIN = 0.3, 0.9
_LATE = 0.01
_JUDGED = 200
"""Requests to observe before their lateness counts."""
_JUDGE_NS = 1_000_000_000


@dataclass(slots=True)
class _Cost:
    """Measured durations of batches of about one size, `rows` on average."""

    rows: float
    mean_ns: float
    deviation_ns: float
    seen_ns: int
    count: int = 1

    @property
    def high_ns(self) -> float:
        """A duration that hardly any batch exceeds."""
        return self.mean_ns + 3 * self.deviation_ns

    def add(self, rows: int, duration_ns: int, now_ns: int) -> None:
        weight = max(0.1, 1 / (self.count + 1))
        self.rows += weight * (rows - self.rows)
        # One very long batch is an accident; otherwise others follow, and lateness shows it too.
        bound_ns = 5 * self.deviation_ns + 0.3 * self.mean_ns
        off = min(bound_ns, max(-bound_ns, duration_ns - self.mean_ns))
        self.deviation_ns += weight * (abs(off) - self.deviation_ns)
        self.mean_ns += weight * off
        self.count += 1
        self.seen_ns = now_ns


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule for batches: dispatch `size` rows at once, fewer after `delay_ns`, never more than `most`."""

    state: State
    size: int
    delay_ns: int
    most: int
    row_ns: float = 0.0


class AdaptiveBatching:
    """The choice for one model version. `rules` are its configured limits, with a target."""

    def __init__(self, rules: BatchRules) -> None:
        self._configured = rules
        self._costs: dict[int, _Cost] = {}
        self._batches = 0
        self._rate = 0.0
        """Rows per ns."""
        self._rows = 0
        self._counted_from_ns = 0
        self._reviewed_ns = 0
        self.margin = 0.8
        self._failed_margin = 1.0
        """The margin at which requests were late last; the margin grows faster up to near it."""
        self._missed = False
        self._patience_ns = _FIRST_PATIENCE_NS
        self._wanted_since_ns = 0
        self._waits_since_ns = 0
        self._finished = self._late = 0
        self._judged_ns = 0
        self.choice = Choice("learning", 1, 0, rules.max_rows)
        self.rules = rules
        """The current choice."""

    @property
    def target_ns(self) -> int:
        return self._configured.target_p99_ns

    @property
    def rate_per_s(self) -> float:
        """Recent arrival rate in rows per second."""
        return self._rate * 1e9

    def adopt(self, rules: BatchRules) -> None:
        """The model has a new configuration; measurements are kept."""
        if rules != self._configured:
            self._configured = rules
            self.choice = Choice("learning", 1, 0, rules.max_rows)
            self.rules = rules
            self._reviewed_ns = 0

    def dispatched(self, rows: int, now_ns: int) -> None:
        """Rows left the queue; over time as many arrived."""
        if not self._counted_from_ns:
            self._counted_from_ns = now_ns
        self._rows += rows

    def finished(self, rows: int, duration_ns: int, now_ns: int) -> None:
        """A batch of `rows` took `duration_ns` on its instance."""
        self._batches += 1
        size = _rounded(rows)
        cost = self._costs.get(size)
        if cost is None:
            self._costs[size] = _Cost(float(rows), float(duration_ns), duration_ns * 0.1, now_ns)
        else:
            cost.add(rows, duration_ns, now_ns)

    def answered(self, requests: int, late: int) -> None:
        """`requests` ended, `late` of them after the target."""
        self._finished += requests
        self._late += late

    def is_due(self, now_ns: int) -> bool:
        return now_ns - self._reviewed_ns >= _REVIEW_NS

    def review(self, slots: int, now_ns: int) -> None:
        """Review the choice; `slots` batches can run at once."""
        elapsed_ns = now_ns - self._counted_from_ns
        if self._counted_from_ns and elapsed_ns >= _REVIEW_NS:
            kept = exp(-elapsed_ns / _RATE_TIME_NS)
            self._rate = kept * self._rate + (1 - kept) * self._rows / elapsed_ns
            self._rows = 0
            self._counted_from_ns = now_ns
        self._reviewed_ns = now_ns
        self._judge(now_ns)
        for size in [size for size, cost in self._costs.items() if now_ns - cost.seen_ns > _FORGET_NS]:
            if len(self._costs) > 1:
                del self._costs[size]
        if self._batches < _FIRST_BATCHES or not self._rate or slots <= 0:
            return
        chosen = self._patient(self._choose(slots), now_ns)
        if chosen != self.choice:
            self.choice = chosen
            # all waiting requests go together, once they are enough or the delay has passed
            self.rules = replace(
                self._configured,
                preferred=frozenset(range(chosen.size, chosen.most + 1)),
                largest_preferred=chosen.most,
                delay_ns=chosen.delay_ns,
                max_rows=chosen.most,
            )

    def _patient(self, chosen: Choice, now_ns: int) -> Choice:
        """A delay is dropped at once, and begins only after it has looked useful for a while."""
        if not chosen.delay_ns:
            self._wanted_since_ns = self._waits_since_ns = 0
            return chosen
        if self.choice.delay_ns:
            if now_ns - self._waits_since_ns > _LONGEST_PATIENCE_NS:
                self._patience_ns = _FIRST_PATIENCE_NS
            return chosen
        self._wanted_since_ns = self._wanted_since_ns or now_ns
        if now_ns - self._wanted_since_ns < self._patience_ns:
            return self.choice
        self._waits_since_ns = now_ns
        return chosen

    def _judge(self, now_ns: int) -> None:
        """Adapt the margin to late requests."""
        if not self._judged_ns:
            self._judged_ns = now_ns
        if self._finished < _JUDGED and now_ns - self._judged_ns < 5 * _JUDGE_NS:
            return
        if now_ns - self._judged_ns < _JUDGE_NS and self._late <= _LATE * _JUDGED:
            return
        if self._finished:
            share = self._late / self._finished
            self._missed = share > _LATE
            if not self._missed:
                if share < _LATE / 3:
                    near = self.margin > 0.9 * self._failed_margin
                    self.margin = min(_MOST_MARGIN, self.margin * (1.01 if near else 1.05))
            elif self.choice.delay_ns:  # without a delay, waiting is not why they are late
                self._failed_margin = self.margin
                self._patience_ns = min(_LONGEST_PATIENCE_NS, 2 * self._patience_ns)
                self._waits_since_ns = now_ns
                self.margin = max(_LEAST_MARGIN, self.margin * 0.85)
        self._finished = self._late = 0
        self._judged_ns = now_ns

    # -- choosing ------------------------------------------------------------------------------------------------------

    def _choose(self, slots: int) -> Choice:
        known = sorted(self._costs)
        configured = self._configured.max_rows
        budget_ns = self.target_ns * self.margin
        natural = self._natural(known, slots)
        sizes = _candidates(min(configured, 2 * known[-1]), self.choice.size)
        most = max((size for size in sizes if self._cost(known, size)[1] <= budget_ns), default=0)
        best: Choice | None = None
        held: Choice | None = None
        _, natural_ns = self._cost(known, natural)
        if 2 * natural_ns <= budget_ns and natural <= most:  # arrivals during a batch wait for its end, then run
            state: State = "out of reach" if self._missed and not self.choice.delay_ns else "in reach"
            best = Choice(state, 1, 0, most, self._row_ns(known, natural))
            held = best if self.choice.size == 1 else None
        for size in sizes:
            mean_ns, high_ns = self._cost(known, size)
            busy = self._rate * mean_ns / (size * slots)
            slack = _SLACK if size == self.choice.size else 1 / _SLACK
            allowed_ns = min(budget_ns * slack, _MOST_MARGIN * self.target_ns) if slack > 1 else budget_ns
            spare_ns = allowed_ns - high_ns * (1 + min(1.0, busy) ** slots)
            if size <= natural or busy > _BUSY or spare_ns <= 0 or size - 1 > self._rate * spare_ns * slack:
                continue
            choice = Choice("in reach", size, int(spare_ns), max(size, most), self._row_ns(known, size))
            if best is None or choice.row_ns < best.row_ns * (1 - _WORTH):
                best = choice
            if size == self.choice.size:
                held = choice
        if best is None:
            # Greedy batches grow with the queue, up to the size with the most rows per second.
            return Choice("out of reach", 1, 0, configured, self._row_ns(known, natural))
        if held is not None and self._keeps(held, best):
            best = held
        if best.size == self.choice.size and abs(best.delay_ns - self.choice.delay_ns) < self.target_ns * 0.05:
            best = replace(best, delay_ns=self.choice.delay_ns)  # a change too small to matter
        return best

    def _keeps(self, held: Choice, best: Choice) -> bool:
        """Whether a choice that is still in time stays: a smaller one need not save anything, only cost no more."""
        needed = -_WORTH / 2 if best.size < held.size else _KEEP
        return best.row_ns > held.row_ns * (1 - needed)

    def _natural(self, known: list[int], slots: int) -> int:
        """The size that batches reach without a delay: the rows that arrive while one runs."""
        size = 1
        while size < self._configured.max_rows:
            coming = self._rate * self._cost(known, size)[0] / slots
            if coming <= size:
                break
            size = min(self._configured.max_rows, max(size + 1, int(coming)))
        return size

    def _row_ns(self, known: list[int], size: int) -> float:
        """Cost of a row; a size beyond the known ones is assumed to be cheaper, so that it is tried."""
        mean_ns, _ = self._cost(known, size)
        hope = 1.0 if _rounded(size) <= known[-1] else 0.9 if len(known) == 1 or self._still_falling(known) else 1.0
        return hope * mean_ns / size

    def _still_falling(self, known: list[int]) -> bool:
        """Whether the largest known size costs less per row than the one before."""
        last, before = known[-1], known[-2]
        last_ns, before_ns = (self._costs[size].mean_ns / self._costs[size].rows for size in (last, before))
        return last_ns < before_ns * (1 - _WORTH)

    def _cost(self, known: list[int], size: int) -> tuple[float, float]:
        """(mean, high) duration of a batch: measured, interpolated between sizes, proportional beyond the largest."""
        cost = self._costs.get(_rounded(size))
        if cost is not None:
            return cost.mean_ns, cost.high_ns
        if size < known[0]:
            cost = self._costs[known[0]]
            return cost.mean_ns, cost.high_ns
        if size > known[-1]:
            cost = self._costs[known[-1]]
            return cost.mean_ns * size / cost.rows, cost.high_ns * size / cost.rows
        position = bisect_left(known, size)
        below, above = known[position - 1], known[position]
        part = (size - below) / (above - below)
        one, other = self._costs[below], self._costs[above]
        return (
            one.mean_ns + part * (other.mean_ns - one.mean_ns),
            one.high_ns + part * (other.high_ns - one.high_ns),
        )


def _rounded(rows: int) -> int:
    """Groups large sizes that cost about the same: eight groups between a power of two and the next."""
    step = 1 << max(0, rows.bit_length() - 4)
    return rows if rows <= 16 else rows // step * step


def _candidates(limit: int, current: int) -> list[int]:
    """Sizes to compare, ascending: all small ones, then fewer and fewer, the limit and the current one."""
    sizes = set(range(1, min(limit, 16) + 1)) | {limit}
    size = 16
    while size < limit:
        sizes.add(size)
        size += max(1, size // 6)
    if current <= limit:
        sizes.add(current)
    return sorted(sizes)
