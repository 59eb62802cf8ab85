"""When the requests of one queue leave: at once, or together.

A lone request leaves at once. Of several callers the requests gather while waves are under way. When those are
answered, their callers ask again at once or not at all: as long as they lately did, the next waves wait for them, for
two milliseconds at most. Requests of all forms leave together, as several waves: one wake-up of every process behind
serves them all (docs/adr/0015).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from charonia.clock import monotonic_ns

if TYPE_CHECKING:
    from .door import Door
    from .waves import Waves

SLOW_NS = 5_000_000
"""A model that takes longer for a wave gains little by it, and its requests could no longer be cancelled one by one."""
_CLOSED_NS = 30_000_000_000
_MEASURED = 4
"""The least of so many times is what a model takes: a busy machine adds to single ones."""
_PARALLEL_NS = 500_000
"""A model that takes so long for a wave had better use all its instances."""
_MOST_UNDER_WAY = 8
_MOST_UNPROVEN = 1024
_MOST_WAITING = 8192
_LONE = 1.5
_HOLD_S = 0.002
_EXPECTED = 0.9
"""The part of the callers answered last that is waited for."""
_HOLDS = 0.5
"""Waiting goes on while it was worth it so often."""
_PROBES = 32
"""Else it is tried with each so manieth wave."""
_WEIGHT = 8
_PATIENCE_S = 0.01
"""A model that was quick and does not answer a wave for so long: what gathers goes to the log, for all to see."""


class Gathering:
    """The doors of one queue stream. `instances` run at once; `may_gather` is false where requests must wait in the
    log and not here, as its queue is bounded (S7).
    """

    __slots__ = (
        "_answered",
        "_doors",
        "_ended",
        "_expected",
        "_hold_timer",
        "_holds",
        "_infer_ns",
        "_instances",
        "_is_proven",
        "_least_ns",
        "_loop",
        "_may_gather",
        "_measured",
        "_number",
        "_patience_timer",
        "_scheduled",
        "_seen",
        "_under_way",
        "_usual",
        "_waves",
        "closed_until_ns",
        "stream",
    )

    def __init__(self, waves: Waves, stream: bytes, instances: int, *, may_gather: bool) -> None:
        self._waves = waves
        self._loop = asyncio.get_running_loop()
        self.stream = stream
        self._instances = max(1, min(_MOST_UNDER_WAY, instances))
        self._may_gather = may_gather
        self._doors: dict[Door, None] = {}
        """Those where requests wait."""
        self._under_way = 0
        self._answered = 0
        """Requests answered since nothing was under way."""
        self._scheduled = False
        self._seen = 0
        self._usual = 1.0
        """How many requests left together lately."""
        self._expected = 0
        """How many requests the next waves wait for."""
        self._holds = 1.0
        """How often all came that were waited for, of late."""
        self._hold_timer: asyncio.TimerHandle | None = None
        self._patience_timer: asyncio.TimerHandle | None = None
        self._ended = 0
        """Waves that are over."""
        self._number = 0
        self._is_proven = False
        """The model was seen to be quick; until then every request goes to the log at once."""
        self._infer_ns = self._least_ns = self._measured = 0
        self.closed_until_ns = 0

    def came(self, door: Door) -> None:
        """Requests came to a door, and no more are there to read: send them now, soon, or when others are answered."""
        self._doors[door] = None
        if self._hold_timer is not None:
            if self._count() >= self._expected:
                self._end_hold(1.0)
        elif not self._scheduled and self._has_turn:
            if self._usual < _LONE and not self._under_way:
                self._flush()
            else:
                self._scheduled = True
                self._loop.call_soon(self._quiet)
        elif self._patience_timer is None and self._under_way:
            self._patience_timer = self._loop.call_later(_PATIENCE_S, self._stalled, self._ended)
        own = len(door.waiting)
        if own >= door.most:
            if own > _MOST_WAITING:
                door.leave_all()  # the full way counts and bounds them
            elif self._under_way < max(_MOST_UNDER_WAY, self._instances):
                self._under_way += door.send(full_only=True)
                self._waves.flush()

    def _count(self) -> int:
        return sum([len(door.waiting) for door in self._doors])

    @property
    def _has_turn(self) -> bool:
        """Whether waves that are not full may leave: others would be behind them."""
        if not (self._may_gather and self._is_proven):
            return self._under_way < _MOST_UNPROVEN
        return self._under_way < (self._instances if self._infer_ns > _PARALLEL_NS else 1)

    def _quiet(self) -> None:
        """Send what waits, unless the last tick brought more requests: then the next one may, too."""
        count = self._count()
        if count > self._seen:
            self._seen = count
            self._loop.call_soon(self._quiet)
            return
        self._scheduled = False
        self._flush()

    def _flush(self) -> None:
        self._seen = 0
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        doors, self._doors = self._doors, {}
        count = 0
        for door in doors:
            count += len(door.waiting)
            self._under_way += door.send()
        if count:
            self._usual += (count - self._usual) / _WEIGHT
            self._waves.flush()

    def _end_hold(self, came: float) -> None:
        self._holds += (came - self._holds) / _WEIGHT
        self._flush()

    def _stalled(self, ended: int) -> None:
        """Requests have waited for an answer for a while: wait on if one came, else in the log, as for a slow model."""
        self._patience_timer = None
        if not self._count():
            return
        if self._ended > ended:
            self._patience_timer = self._loop.call_later(_PATIENCE_S, self._stalled, self._ended)
            return
        self._is_proven = False
        self._flush()

    def ended(self, count: int) -> None:
        """A wave of so many requests is over: the next may leave."""
        self._under_way -= 1
        self._ended += 1
        self._answered += count
        if self._hold_timer is not None or self._scheduled or not self._has_turn:
            return
        waiting = self._count()
        answered, self._answered = self._answered, 0
        self._number += 1
        if (
            self._is_proven
            and self._may_gather
            and answered > 1
            and self._infer_ns <= _PARALLEL_NS
            and (self._holds >= _HOLDS or not self._number % _PROBES)
        ):
            self._expected = int(_EXPECTED * (answered + waiting))
            self._hold_timer = self._loop.call_later(_HOLD_S, self._end_hold, 0.0)
        elif waiting:
            self._scheduled = True
            self._loop.call_soon(self._quiet)

    def measured(self, infer_ns: int) -> bool:
        """The model took so long for a wave; False when it is too slow for waves."""
        self._least_ns = min(infer_ns, self._least_ns or infer_ns)
        self._measured += 1
        if self._measured < _MEASURED:
            return True
        self._infer_ns, self._least_ns, self._measured = self._least_ns, 0, 0
        if self._infer_ns <= SLOW_NS:
            self._is_proven = True
            return True
        self._is_proven = False
        self.closed_until_ns = monotonic_ns() + _CLOSED_NS
        return False
