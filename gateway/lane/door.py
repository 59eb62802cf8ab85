"""Where requests of one kind gather and leave as waves.

A lone request leaves at once. Of several callers the requests gather while a wave is under way. When it is answered,
those callers ask again at once or not at all: as long as they lately did, the next wave waits for them, for a
millisecond at most. Each wave saved spares every process behind it a wake-up (docs/adr/0015).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from charonia import failpoints
from charonia.clock import monotonic_ns, wall_ns
from charonia.models.served import ServedVersion
from charonia.wire import MAX_WAVE_REQUESTS, WaveReply, wave_head

from .calls import Call

if TYPE_CHECKING:
    from charonia.calls.admission import Admitted
    from gateway.metrics import RequestCounts

    from .waves import PendingWave, Waves

MOST_WAVE_BYTES = 262_144
SLOW_NS = 5_000_000
"""A model that takes longer for a wave gains little by it, and its requests could no longer be cancelled one by one."""
_CLOSED_NS = 30_000_000_000
_LONE = 1.5
_WEIGHT = 8
_MOST_UNDER_WAY = 8
_HOLD_S = 0.001
_EXPECTED = 0.9
"""The part of the callers answered last that is waited for."""
_HOLDS = 0.5
"""Waiting goes on while it was worth it so often."""
_PROBES = 32
"""Else it is tried with each so manieth wave."""
_MEASURED = 16
_PARALLEL_NS = 500_000
"""A model that takes so long for a wave had better use all its instances."""


class Door:
    """The requests of one signature, level and version on their way into the log."""

    __slots__ = (
        "_admitted",
        "_expected",
        "_hold_timer",
        "_holds",
        "_infer_ns",
        "_least_ns",
        "_level",
        "_loop",
        "_measured",
        "_meta",
        "_most",
        "_most_under_way",
        "_number",
        "_scheduled",
        "_seen",
        "_stream",
        "_timeout_us",
        "_under_way",
        "_usual",
        "_waiting",
        "_waves",
        "closed_until_ns",
        "counts",
        "is_closed",
        "key",
        "served",
        "touched",
        "used_ns",
    )

    def __init__(
        self,
        waves: Waves,
        key: object,
        served: ServedVersion,
        admitted: Admitted,
        counts: RequestCounts,
        *,
        level: int,
        stream: bytes,
        timeout_us: int,
    ) -> None:
        self._waves = waves
        self._loop = asyncio.get_running_loop()
        self.key = key
        self.served = served
        self.counts = counts
        self._admitted = admitted
        self._meta = admitted.meta
        self._level = level
        self._stream = stream
        self._timeout_us = timeout_us
        self._waiting: list[Call] = []
        self._under_way = 0
        self._scheduled = False
        self._seen = 0
        self._usual = 1.0
        """How many requests a wave had lately."""
        self._expected = 0
        """How many requests the next wave waits for; 0: for none."""
        self._holds = 1.0
        """How often all came that were waited for, of late."""
        self._hold_timer: asyncio.TimerHandle | None = None
        self._number = 0
        self._infer_ns = self._least_ns = self._measured = 0
        self.closed_until_ns = 0
        self.is_closed = False
        self.used_ns = 0
        self.touched = False
        most = 1
        if served.interface.dynamic_batching is not None:
            most = min(MAX_WAVE_REQUESTS, served.interface.max_batch_size // admitted.rows)
        self._most = max(1, min(most, MOST_WAVE_BYTES // max(1, admitted.meta.size_bytes)))
        self._most_under_way = max(1, min(_MOST_UNDER_WAY, sum(served.slots.values())))

    @property
    def request_bytes(self) -> int:
        """The tensor bytes of a request."""
        return self._meta.size_bytes

    @property
    def most(self) -> int:
        """Requests of a wave."""
        return self._most

    def add(self, call: Call) -> None:
        """Take a recognised request; `Waves.ready` follows when the front has read what there is."""
        self._waiting.append(call)
        if not self.touched:
            self.touched = True
            self._waves.touched.append(self)

    def ready(self) -> None:
        """The front has read what there was: send a wave now, soon, or when one of those under way is answered."""
        count = len(self._waiting)
        if count >= self._most:
            self._flush()
        elif self._hold_timer is not None:
            if count >= self._expected:
                self._end_hold(1.0)
        elif not self._scheduled and self._has_turn:
            if self._usual < _LONE:
                self._flush()
            else:
                self._schedule()

    @property
    def _has_turn(self) -> bool:
        """Whether a wave that is not full may leave: another one would be behind it."""
        return self._under_way < (self._most_under_way if self._infer_ns > _PARALLEL_NS else 1)

    def _hold(self, answered: int) -> None:
        """Callers were answered who may ask again: let the next wave wait for them, if that is worth it."""
        self._number += 1
        self._expected = min(self._most, int(_EXPECTED * (answered + len(self._waiting))))
        self._hold_timer = self._loop.call_later(_HOLD_S, self._end_hold, 0.0)

    def _end_hold(self, came: float) -> None:
        assert self._hold_timer is not None
        self._hold_timer.cancel()
        self._hold_timer = None
        self._holds += (came - self._holds) / _WEIGHT
        if self._waiting:
            self._flush()

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._quiet)

    def _quiet(self) -> None:
        """Send what waits, unless the last tick brought more requests: then the next one may, too."""
        count = len(self._waiting)
        if self._seen < count < self._most:
            self._seen = count
            self._loop.call_soon(self._quiet)
            return
        self._scheduled = False
        self._flush()

    def _flush(self) -> None:
        self._seen = 0
        waiting = self._waiting
        while waiting and (self._has_turn or (len(waiting) >= self._most and self._under_way < _MOST_UNDER_WAY)):
            if self._hold_timer is not None:
                self._hold_timer.cancel()
                self._hold_timer = None
            calls = waiting[: self._most]
            del waiting[: self._most]
            self._send(calls)

    def _send(self, calls: list[Call]) -> None:
        count = len(calls)
        self._usual += (count - self._usual) / _WEIGHT
        waves = self._waves
        wave = waves.begin(self, calls)
        if wave is None:
            for call in calls:
                call.signature.leave(call)
            return
        meta = self._meta
        client_ids = [call.client_id for call in calls]
        head = wave_head(
            wave.prefix,
            count,
            waves.endpoint,
            meta,
            rows=self._admitted.rows,
            signature=self._admitted.signature,
            level=self._level,
            accepted_ns=wall_ns(),
            timeout_us=self._timeout_us,
            client_ids=client_ids if any(client_ids) else (),
        )
        if len(meta.inputs) == 1:
            pieces = [head, *[call.data[0] for call in calls]]
        else:
            pieces = [head]
            for column in zip(*[call.data for call in calls], strict=True):
                pieces += column
        self._under_way += 1
        self.used_ns = wave.sent_ns
        if not waves.send(wave, self._stream, pieces):
            self._under_way -= 1
            for call in calls:
                call.wave = None
                call.signature.leave(call)

    def abandoned(self, call: Call) -> None:
        """A caller has gone."""
        self.counts.failures["CANCELED"] += 1
        if call.wave is None:
            if call in self._waiting:
                self._waiting.remove(call)
        else:
            self._waves.abandoned(call)

    def answered(self, wave: PendingWave, reply: WaveReply) -> None:
        """A wave has its answers."""
        self._measure(reply.infer_ns)
        calls = wave.calls
        now_ns = monotonic_ns()
        self.counts.succeeded_together(len(calls) - wave.gone, now_ns - wave.sent_ns)
        if self._infer_ns > SLOW_NS:
            self.closed_until_ns = now_ns + _CLOSED_NS
            self._infer_ns = 0
            self._waves.close_door(self)
        if failpoints.is_on() and len(calls) > 1:
            half = len(calls) // 2
            self._answer(calls[:half], 0, reply)
            failpoints.hit("gateway.answering")
            self._answer(calls[half:], half, reply)
        else:
            self._answer(calls, 0, reply)

    @staticmethod
    def _answer(calls: list[Call], at: int, reply: WaveReply) -> None:
        """Give calls that are neighbours in a wave, the first at index `at`, their answers."""
        first = calls[0].signature
        if not any(True for call in calls if call.signature is not first):
            first.answer(calls, at, reply)
            return
        start = 0
        for end in range(1, len(calls) + 1):
            if end == len(calls) or calls[end].signature is not calls[start].signature:
                calls[start].signature.answer(calls[start:end], at + start, reply)
                start = end

    def _measure(self, infer_ns: int) -> None:
        """Note what the model took for a wave: the least of several, as a busy machine adds to single ones."""
        self._least_ns = min(infer_ns, self._least_ns or infer_ns)
        self._measured += 1
        if self._measured >= _MEASURED:
            self._infer_ns, self._least_ns, self._measured = self._least_ns, 0, 0

    def ended(self, count: int) -> None:
        """A wave of so many requests is over: the next may leave."""
        self._under_way -= 1
        if self._hold_timer is not None or self._scheduled or not self._has_turn:
            return
        if count > 1 and self._infer_ns <= _PARALLEL_NS and (self._holds >= _HOLDS or not self._number % _PROBES):
            self._hold(count)
        elif self._waiting:
            self._number += 1
            self._schedule()

    def leave_all(self) -> None:
        """Send what waits the full way."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.signature.leave(call)
