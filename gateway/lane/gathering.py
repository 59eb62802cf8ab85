"""When the requests of a queue leave: at once, or together.

A lone request leaves at once. Of several callers the requests gather while waves are under way. When those are
answered, their callers either ask again at once or do not. While callers have lately asked again, the next waves wait
for them, for two milliseconds at most. Requests of all forms leave together, as several waves: one wake-up of every
process behind serves them all (docs/adr/0015).

The queues of quick models share one `Round`, so that requests for several models leave together as well. None waits
for another's answers much longer than these usually take, and a queue that is late again and again goes alone for a
while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sized
from typing import Protocol

from charonia.clock import monotonic_ns

SLOW_NS = 5_000_000
"""A model that takes longer for a wave gains little by it, and its requests could no longer be cancelled one by one."""
_CLOSED_NS = (1_000_000_000, 30_000_000_000)
"""For how long a slow model gets no waves: at first, and at most. A busy machine makes quick ones look slow."""
_MEASURED = 4
"""The least of so many times is what a model takes: a busy machine adds to single ones."""
_PARALLEL_NS = 500_000
"""A model that takes so long for a wave had better use all its instances."""
_MOST_UNDER_WAY = 8
"""Full waves of one queue that may be under way at once."""
_MOST_UNPROVEN = 1024
"""The same of a model that was not yet seen to be quick: its requests leave at once."""
_MOST_WAITING = 8192
"""With more requests at a door all of them go the full way, which counts and refuses."""
_LONE = 1.5
"""With fewer requests together on average, a request that finds nothing under way leaves within the same tick."""
_HOLD_S = 0.002
"""The longest wait for callers that were just answered."""
_EXPECTED = 0.9
"""The share of the callers answered last that is waited for."""
_HOLDS = 0.5
"""Waves wait for callers while at least this share of the lately waited-for ones came in time."""
_PROBES = 32
"""Otherwise every 32nd wave waits, to find out whether callers come in time again."""
_WEIGHT = 8
"""Averages move by an eighth of the difference to each new value."""
_STALL_S = 0.01
"""A model that was quick and does not answer a wave for so long: what gathers goes to the log, for all to see."""
_SHARED_NS = 1_000_000
"""A model of one instance that takes no longer for a wave may share a round: it runs one wave after the other."""
_APART_NS = 1_000_000_000
"""For so long a queue goes alone after the others waited for it in vain."""
_PATIENCE_S = (0.002, 0.01)
"""How long requests wait at least and at most for the answers of other queues; between these twice as long as usual."""


class Door(Protocol):
    """Where requests of one signature wait (`door.Door`). `most` are a full wave."""

    most: int

    @property
    def waiting(self) -> Sized: ...

    @property
    def gathering(self) -> Gathering: ...

    def send(self, *, full_only: bool = False) -> int: ...

    def leave_all(self) -> None: ...


class Waves(Protocol):
    """Takes waves to the log (`pending_waves.Waves`)."""

    def flush(self) -> None: ...


class Round:
    """Queues whose requests leave in one write: one queue, or those of all quick models (`is_shared`)."""

    __slots__ = (
        "_answered",
        "_doors",
        "_expected",
        "_hold_timer",
        "_holds",
        "_loop",
        "_number",
        "_patience_timer",
        "_queues",
        "_scheduled",
        "_seen",
        "_started_ns",
        "_usual",
        "_usual_s",
        "_waves",
        "is_shared",
        "under_way",
    )

    def __init__(self, waves: Waves, *, is_shared: bool) -> None:
        self._waves = waves
        self._loop = asyncio.get_running_loop()
        self.is_shared = is_shared
        self._queues: dict[Gathering, None] = {}
        self._doors: dict[Door, None] = {}
        """Those where requests wait."""
        self.under_way = 0
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
        self._number = 0
        self._patience_timer: asyncio.TimerHandle | None = None
        """Runs while requests that could leave wait for other queues' answers."""
        self._started_ns = 0
        """When waves left and none was under way."""
        self._usual_s = 0.0
        """How long it lately took from then until all were answered."""

    def add(self, queue: Gathering) -> None:
        """A queue with all that waits and is under way of it."""
        self._queues[queue] = None
        self.under_way += queue.under_way

    def remove(self, queue: Gathering) -> list[Door]:
        """The doors of a queue that is not of this round any more, where requests wait."""
        del self._queues[queue]
        self.under_way -= queue.under_way
        doors = [door for door in self._doors if door.gathering is queue]
        for door in doors:
            del self._doors[door]
        return doors

    def came(self, door: Door) -> None:
        """Requests came to a door, and no more are there to read: send them now, soon, or when others are answered."""
        self._doors[door] = None
        queue = door.gathering
        if self._hold_timer is not None:
            if self._count() >= self._expected:
                self._end_hold(1.0)
        elif self._scheduled:
            pass
        elif self._has_turn(queue):
            if self._usual < _LONE and not self.under_way:
                self._flush()
            else:
                self._scheduled = True
                self._loop.call_soon(self._quiet)
        elif queue.under_way:
            queue.watch()
        elif self.is_shared and self._patience_timer is None:
            least_s, most_s = _PATIENCE_S
            patience_s = min(most_s, max(least_s, 2 * self._usual_s))
            self._patience_timer = self._loop.call_later(patience_s, self._be_impatient)
        queue.send_full(door)

    def _count(self) -> int:
        return sum([len(door.waiting) for door in self._doors])

    def _has_turn(self, queue: Gathering) -> bool:
        """Whether waves that are not full may leave: others would be behind them."""
        return not self.under_way if self.is_shared else queue.has_turn

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
        for timer in (self._hold_timer, self._patience_timer):
            if timer is not None:
                timer.cancel()
        self._hold_timer = self._patience_timer = None
        doors, self._doors = self._doors, {}
        self._send(doors)

    def _send(self, doors: Iterable[Door]) -> None:
        count, before = 0, self.under_way
        for door in doors:
            count += len(door.waiting)
            door.gathering.sent(door.send())
        if count:
            if self.is_shared and not before:
                self._started_ns = monotonic_ns()
            self._usual += (count - self._usual) / _WEIGHT
            self._waves.flush()

    def _end_hold(self, came: float) -> None:
        self._holds += (came - self._holds) / _WEIGHT
        self._flush()

    def has(self, queue: Gathering) -> bool:
        """Whether requests of a queue wait."""
        return any(door.gathering is queue for door in self._doors)

    def go_on(self) -> None:
        """Send what waits, with what comes in this tick."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._quiet)

    def _be_impatient(self) -> None:
        """Others' answers take too long: send what waits of queues with nothing under way."""
        self._patience_timer = None
        for queue in list(self._queues):
            if queue.under_way:
                queue.was_late()
        doors = [door for door in self._doors if not door.gathering.under_way]
        for door in doors:
            del self._doors[door]
        self._send(doors)

    def ended(self, queue: Gathering, count: int) -> None:
        """A wave of so many requests of a queue is over: the next may leave."""
        self._answered += count
        if self._hold_timer is not None or self._scheduled or not self._has_turn(queue):
            return
        if self.is_shared:
            self._all_answered()
        waiting = self._count()
        answered, self._answered = self._answered, 0
        self._number += 1
        if (
            answered > 1
            and (self.is_shared or queue.may_hold)
            and (self._holds >= _HOLDS or not self._number % _PROBES)
        ):
            self._expected = int(_EXPECTED * (answered + waiting))
            self._hold_timer = self._loop.call_later(_HOLD_S, self._end_hold, 0.0)
        elif waiting:
            self._scheduled = True
            self._loop.call_soon(self._quiet)

    def _all_answered(self) -> None:
        took_s = (monotonic_ns() - self._started_ns) / 1e9
        self._usual_s += (took_s - self._usual_s) / _WEIGHT
        if self._patience_timer is not None:
            self._patience_timer.cancel()
            self._patience_timer = None
            for queue in self._queues:
                queue.was_in_time()


class Gathering:
    """The doors of one queue stream. `instances` run at once; `may_gather` is false where requests must wait in the
    log and not here, as its queue is bounded (S7). `shared` is the round of quick models.
    """

    __slots__ = (
        "_alone_until_ns",
        "_closed_ns",
        "_ended",
        "_in_time",
        "_infer_ns",
        "_instances",
        "_is_proven",
        "_least_ns",
        "_may_gather",
        "_measured",
        "_own",
        "_round",
        "_shared",
        "_stall_timer",
        "_waves",
        "closed_until_ns",
        "stream",
        "under_way",
    )

    def __init__(self, waves: Waves, stream: bytes, instances: int, shared: Round, *, may_gather: bool) -> None:
        self._waves = waves
        self.stream = stream
        self._instances = max(1, min(_MOST_UNDER_WAY, instances))
        self._may_gather = may_gather
        self.under_way = 0
        """Waves."""
        self._ended = 0
        """Waves that are over."""
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_proven = False
        """The model was seen to be quick; until then every request goes to the log at once."""
        self._infer_ns = self._least_ns = self._measured = 0
        self.closed_until_ns = 0
        self._closed_ns, _ = _CLOSED_NS
        self._in_time = 1.0
        """How often its answers came before others' patience ended, of late."""
        self._alone_until_ns = 0
        self._shared = shared
        self._own = self._round = Round(waves, is_shared=False)
        self._own.add(self)

    def came(self, door: Door) -> None:
        """Requests came to a door, and no more are there to read: send them now, soon, or when others are answered."""
        self._round.came(door)

    def send_full(self, door: Door) -> None:
        """Send the full waves that wait at a door."""
        waiting = len(door.waiting)
        if waiting < door.most:
            return
        if waiting > _MOST_WAITING:
            door.leave_all()  # the full way counts and bounds them
        elif self.under_way < max(_MOST_UNDER_WAY, self._instances):
            self.sent(door.send(full_only=True))
            self._waves.flush()

    @property
    def has_turn(self) -> bool:
        """Whether waves that are not full may leave, were there no other queue."""
        if not (self._may_gather and self._is_proven):
            return self.under_way < _MOST_UNPROVEN
        return self.under_way < (self._instances if self._infer_ns > _PARALLEL_NS else 1)

    @property
    def may_hold(self) -> bool:
        """Whether the next waves may wait for callers who were just answered."""
        return self._is_proven and self._may_gather and self._infer_ns <= _PARALLEL_NS

    @property
    def _may_share(self) -> bool:
        most_ns = _SHARED_NS if self._instances == 1 else _PARALLEL_NS
        return self._is_proven and self._may_gather and self._infer_ns <= most_ns

    def sent(self, count: int) -> None:
        """So many waves left."""
        self.under_way += count
        self._round.under_way += count

    def ended(self, count: int) -> None:
        """A wave of so many requests is over."""
        self.under_way -= 1
        self._ended += 1
        self._round.under_way -= 1
        self._round.ended(self, count)

    def watch(self) -> None:
        """Requests wait for an answer: see to it that they do not wait for long."""
        if self._stall_timer is None:
            self._stall_timer = asyncio.get_running_loop().call_later(_STALL_S, self._look, self._ended)

    def _look(self, ended: int) -> None:
        """Wait on if a wave was answered since; else this is a slow model, whose requests wait in the log."""
        self._stall_timer = None
        if not (self.under_way and self._round.has(self)):
            return
        if self._ended > ended:
            self.watch()
            return
        self._is_proven = False
        self._go_to(self._own)
        self._own.go_on()

    def was_in_time(self) -> None:
        self._in_time += (1.0 - self._in_time) / _WEIGHT

    def was_late(self) -> None:
        """Others waited for it in vain: after some times it goes alone for a while."""
        self._in_time -= self._in_time / _WEIGHT
        if self._in_time < _HOLDS:
            self._in_time = (1.0 + _HOLDS) / 2  # if it is late once more, that is found out sooner
            self._alone_until_ns = monotonic_ns() + _APART_NS
            self._go_to(self._own)

    def _go_to(self, other: Round) -> None:
        """Leave with another round's queues from now on."""
        if other is self._round:
            return
        doors = self._round.remove(self)
        self._round = other
        other.add(self)
        for door in doors:
            other.came(door)

    def measured(self, infer_ns: int) -> bool:
        """The model took so long for a wave; False when it is too slow for waves."""
        self._least_ns = min(infer_ns, self._least_ns or infer_ns)
        self._measured += 1
        if self._measured < _MEASURED:
            return True
        self._infer_ns, self._least_ns, self._measured = self._least_ns, 0, 0
        self._is_proven = self._infer_ns <= SLOW_NS
        now_ns = monotonic_ns()
        self._go_to(self._shared if self._may_share and now_ns >= self._alone_until_ns else self._own)
        least_ns, most_ns = _CLOSED_NS
        if self._is_proven:
            self._closed_ns = least_ns
            return True
        self.closed_until_ns = now_ns + self._closed_ns
        self._closed_ns = min(most_ns, 2 * self._closed_ns)
        return False
