"""When requests of a queue leave: at once, or together.

A request leaves at once if no wave of its queue is in flight. Requests of several clients gather while waves are being
answered. The clients of answered waves may or may not send their next requests at once. As long as they recently did,
the next waves wait for them, for at most two milliseconds. Requests at all doors of the queue leave together, as
several waves: then each process downstream wakes up once for all of them (docs/adr/0015).

The queues of quick models share one `Round`, so that requests for several models leave together as well. A queue waits
for another queue's answers at most twice as long as those usually take, or 2 ms if that is longer, and never more than
10 ms. A queue that is late repeatedly leaves alone for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sized
from typing import Protocol

from charonia.clock import monotonic_ns

SLOW_NS = 5_000_000
"""A model that takes longer for a wave gains little, and its requests could no longer be cancelled one by one."""
_CLOSED_NS = (1_000_000_000, 30_000_000_000)
"""How long a slow model gets no waves: at first, and at most. On a busy machine quick models look slow."""
_MEASURED = 4
"""A model's time is the smallest of this many: a busy machine prolongs single ones."""
_PARALLEL_NS = 500_000
"""A model that takes longer for a wave should use all its instances."""
_MAX_UNDER_WAY = 8
"""Max full waves of one queue in flight."""
_MAX_UNPROVEN = 1024
"""Max waves in flight of a model that is not known to be quick: its requests leave at once."""
_MAX_WAITING = 8192
"""With more requests at a door all of them take the full way, which enforces the bounds."""
_LONE = 1.5
"""With fewer requests per departure on average, a request leaves in the same tick if nothing is in flight. With more it
leaves when no further ones arrive."""
_HOLD_S = 0.002
"""The longest wait for clients that were just answered."""
_EXPECTED = 0.9
"""Waves wait until this share of the clients just answered has asked again."""
_HOLDS = 0.5
"""Waves wait for clients if at least this share of the recent waits ended because the clients asked again in time."""
_PROBES = 32
"""Otherwise every 32nd wave waits, to notice when waiting succeeds again."""
_WEIGHT = 8
"""Averages move by an eighth of the difference to each new value."""
_STALL_S = 0.01
"""A quick model that does not answer a wave for this long counts as slow: the requests that wait behind the wave
leave. This is also the only bound on that wait."""
_SHARED_NS = 1_000_000
"""A model with one instance and at most this time for a wave may share a round: it runs waves one by one."""
_ALONE_NS = 1_000_000_000
"""How long a queue leaves alone after the others waited for it in vain."""
_PATIENCE_S = (0.002, 0.01)
"""Requests wait for answers of other queues for twice a round's usual time, clamped to these."""


class Door(Protocol):
    """Where requests that may share a wave wait (`door.Door`). `most` requests are a full wave."""

    most: int

    @property
    def waiting(self) -> Sized: ...

    @property
    def gathering(self) -> Gathering: ...

    def send(self, *, full_only: bool = False) -> int: ...

    def leave_all(self) -> None: ...


class WaveFlusher(Protocol):
    """Passes the waves that were sent to the log (`pending_waves.Waves`)."""

    def flush(self) -> None: ...


class Round:
    """Queues whose requests leave in one write: a single queue, or those of all quick models (`is_shared`)."""

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

    def __init__(self, waves: WaveFlusher, *, is_shared: bool) -> None:
        self._waves = waves
        self._loop = asyncio.get_running_loop()
        self.is_shared = is_shared
        """Partly filled waves leave when none of any queue is in flight, else when their own queue `has_turn`:
        otherwise they would queue behind others."""
        self._queues: dict[Gathering, None] = {}
        self._doors: dict[Door, None] = {}
        """Doors with waiting requests."""
        self.under_way = 0
        self._answered = 0
        """Requests answered since nothing was in flight."""
        self._scheduled = False
        self._seen = 0
        self._usual = 1.0
        """Average number of requests that left together."""
        self._expected = 0
        """Number of requests that the next waves wait for."""
        self._holds = 1.0
        """Recent share of waits that succeeded."""
        self._hold_timer: asyncio.TimerHandle | None = None
        self._number = 0
        self._patience_timer: asyncio.TimerHandle | None = None
        """Runs while requests that could leave wait for other queues' answers."""
        self._started_ns = 0
        """When waves left while none was in flight."""
        self._usual_s = 0.0
        """Average time from then until all were answered."""

    def add(self, queue: Gathering) -> None:
        """Add a queue with its waves in flight."""
        self._queues[queue] = None
        self.under_way += queue.under_way

    def remove(self, queue: Gathering) -> list[Door]:
        """Remove a queue; returns its doors with waiting requests."""
        del self._queues[queue]
        self.under_way -= queue.under_way
        doors = [door for door in self._doors if door.gathering is queue]
        for door in doors:
            del self._doors[door]
        return doors

    def came(self, door: Door) -> None:
        """Requests have arrived at a door: send them now, soon, or when others are answered."""
        self._doors[door] = None
        queue = door.gathering
        if self._hold_timer is not None:
            if self._count() >= self._expected:
                self._end_hold(1.0)
        elif self._scheduled:
            pass
        elif not self.under_way if self.is_shared else queue.has_turn:
            if self._usual < _LONE and not self.under_way:
                self._flush()
            else:
                self._scheduled = True
                self._loop.call_soon(self._send_when_quiet)
        elif queue.under_way:
            queue.watch()
        elif self.is_shared and self._patience_timer is None:
            least_s, most_s = _PATIENCE_S
            patience_s = min(most_s, max(least_s, 2 * self._usual_s))
            self._patience_timer = self._loop.call_later(patience_s, self._stop_waiting)
        if len(door.waiting) >= door.most:
            queue.send_full(door)

    def _count(self) -> int:
        count = 0
        for door in self._doors:
            count += len(door.waiting)
        return count

    def _send_when_quiet(self) -> None:
        """Send the waiting requests, unless the last tick added some: then the next one may, too."""
        count = self._count()
        if count > self._seen:
            self._seen = count
            self._loop.call_soon(self._send_when_quiet)
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
        """Send the waiting requests, with those that arrive in this tick."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._send_when_quiet)

    def _stop_waiting(self) -> None:
        """Others' answers take too long: send the waiting requests of queues with nothing in flight."""
        self._patience_timer = None
        for queue in list(self._queues):
            if queue.under_way:
                queue.was_late()
        doors = [door for door in self._doors if not door.gathering.under_way]
        for door in doors:
            del self._doors[door]
        self._send(doors)

    def ended(self, queue: Gathering, count: int) -> None:
        """A wave with `count` requests of a queue has ended: the next may leave."""
        self._answered += count
        if self._hold_timer is not None or self._scheduled:
            return
        if self.is_shared:
            if self.under_way:
                return
            self._all_answered()
        elif not queue.has_turn:
            return
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
            self._loop.call_soon(self._send_when_quiet)

    def _all_answered(self) -> None:
        took_s = (monotonic_ns() - self._started_ns) / 1e9
        self._usual_s += (took_s - self._usual_s) / _WEIGHT
        if self._patience_timer is not None:
            self._patience_timer.cancel()
            self._patience_timer = None
            for queue in self._queues:
                queue.was_in_time()


class Gathering:
    """The doors of one queue stream.

    `instances` run at once. `may_gather` is False for a bounded queue (S7): its requests must wait in the log, not
    here. `shared` is the round of quick models.
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
        "came",
        "closed_until_ns",
        "stream",
        "under_way",
    )

    def __init__(self, waves: WaveFlusher, stream: bytes, instances: int, shared: Round, *, may_gather: bool) -> None:
        self._waves = waves
        self.stream = stream
        self._instances = max(1, min(_MAX_UNDER_WAY, instances))
        self._may_gather = may_gather
        self.under_way = 0
        """Waves in flight."""
        self._ended = 0
        """Waves that have ended."""
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_proven = False
        """The model is known to be quick; until then no request waits for the answers to others."""
        self._infer_ns = self._least_ns = self._measured = 0
        self.closed_until_ns = 0
        self._closed_ns, _ = _CLOSED_NS
        self._in_time = 1.0
        """Recent share of its answers that arrived before the others stopped waiting."""
        self._alone_until_ns = 0
        self._shared = shared
        self._own = self._round = Round(waves, is_shared=False)
        self._own.add(self)
        self.came: Callable[[Door], None] = self._own.came
        """Requests have arrived at a door: send them now, soon, or when others are answered."""

    def send_full(self, door: Door) -> None:
        """Send the full waves that wait at a door, which has one at least."""
        if len(door.waiting) > _MAX_WAITING:
            door.leave_all()  # it enforces the bounds
        elif self.under_way < _MAX_UNDER_WAY:
            self.sent(door.send(full_only=True))
            self._waves.flush()

    @property
    def has_turn(self) -> bool:
        """Whether partly filled waves may leave, ignoring other queues."""
        if not (self._may_gather and self._is_proven):
            return self.under_way < _MAX_UNPROVEN
        return self.under_way < (self._instances if self._infer_ns > _PARALLEL_NS else 1)

    @property
    def may_hold(self) -> bool:
        """Whether the next waves may wait for clients that were just answered."""
        return self._is_proven and self._may_gather and self._infer_ns <= _PARALLEL_NS

    @property
    def _may_share(self) -> bool:
        most_ns = _SHARED_NS if self._instances == 1 else _PARALLEL_NS
        return self._is_proven and self._may_gather and self._infer_ns <= most_ns

    def sent(self, count: int) -> None:
        """`count` waves have left."""
        self.under_way += count
        self._round.under_way += count

    def ended(self, count: int) -> None:
        """A wave with `count` requests has ended."""
        self.under_way -= 1
        self._ended += 1
        self._round.under_way -= 1
        self._round.ended(self, count)

    def watch(self) -> None:
        """Bound the time that requests wait here for an answer."""
        if self._stall_timer is None:
            self._stall_timer = asyncio.get_running_loop().call_later(_STALL_S, self._check_stall, self._ended)

    def _check_stall(self, ended: int) -> None:
        """If no wave was answered since, the model counts as slow: its requests leave and wait for answers no more."""
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
        """Others waited for it in vain; after several times it leaves alone for a while."""
        self._in_time -= self._in_time / _WEIGHT
        if self._in_time < _HOLDS:
            self._in_time = (1.0 + _HOLDS) / 2  # detects the next lateness sooner
            self._alone_until_ns = monotonic_ns() + _ALONE_NS
            self._go_to(self._own)

    def _go_to(self, other: Round) -> None:
        """Leave with the queues of another round from now on."""
        if other is self._round:
            return
        doors = self._round.remove(self)
        self._round, self.came = other, other.came
        other.add(self)
        for door in doors:
            other.came(door)

    def measured(self, infer_ns: int) -> bool:
        """Record the model's time for a wave; returns False if it is too slow for waves."""
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
