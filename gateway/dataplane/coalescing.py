"""Decides how long requests wait at a gateway's queue entrances, so that they share log entries.

The first request of a quiet queue leaves at the end of the loop tick; while an append is outstanding the next ones
wait and join. Where the model answers quickly (`Turnaround`), an entry leaves with the first tick that brings no other
request. Behind a front that delivers one call at a time flushes are limited by rate instead.
"""

from __future__ import annotations

import asyncio
from math import exp
from typing import Any

from charonia import failpoints
from charonia.calls.queue_entrance import QueueEntrance
from charonia.calls.waiters import OpenRequest
from charonia.catalog.catalog import ServedVersion
from charonia.clock import monotonic_ns

_SHARED = 2
"""Below this no other request could share the entry."""
_STRETCH = 1.5
_MOST_STRETCH = 8
_MOST_STRETCH_QUICK = 16
_ENOUGH = 8
"""So many may leave as soon as no other is under way; fewer wait for the interval, which is short for them."""


class Coalescer(QueueEntrance):
    """An entrance that lets requests wait where they may be joined by others."""

    def __init__(self, *arguments: Any, **bounds: Any) -> None:
        """As of `QueueEntrance`."""
        super().__init__(*arguments, **bounds)
        self._callers = 0
        """How many were lately open at once: so many may come together again."""
        self.served: ServedVersion | None = None
        """The incarnation that `max_requests` was last computed for; kept by the data plane."""
        self._timer: asyncio.TimerHandle | None = None
        self._seen = 0
        """How many waited at the end of the tick before, when this one was let bring more."""
        self._outstanding = 0
        self._last_flush_s = 0.0
        self._turnaround = Turnaround()
        self._probe: OpenRequest | None = None
        self._probe_sent_ns = 0
        self.max_quick_requests = self.max_requests
        """Requests of an entry while answers are quick."""
        self.in_order = False
        """Whether entries must be accepted in the order of their requests, for the sake of sequences."""
        self.turn = asyncio.Lock()
        """For who must not be overtaken between `next_id` and `submit`."""

    @property
    def most(self) -> int:
        """Requests of an entry."""
        return self.max_quick_requests if self._turnaround.is_quick else self.max_requests

    def next_id(self) -> bytes:
        return self._ids.next(self.most)

    def submit(self, request: OpenRequest, min_interval_s: float = 0.0) -> None:
        """Take one request; it leaves with this tick, with the next append, or after the interval at the latest.

        A request waits only where several are usually under way, whose callers may soon ask again. It waits one
        and a half intervals for each request that is usually under way, eight intervals at most (sixteen where answers
        are quick): each entry saved spares every process behind a wake-up. The wait ends as soon as the requests that
        wait are as many as were lately open at once (docs/adr/0003).
        """
        self._waiting.append(request)
        self._waiting_bytes += request.size_bytes
        if self.open_requests > self._callers:
            self._callers = self.open_requests
        if self._outstanding and self.in_order:
            return
        if self._timer is not None and len(self._waiting) >= min(self.most, max(self._callers, _ENOUGH)):
            self._timer.cancel()
            self._timer = None
            self._loop.call_soon(self._flush)
            return
        if self._scheduled or (self._outstanding and not min_interval_s):
            return
        self._scheduled = True
        wait_s = 0.0
        usual = self._turnaround.under_way
        if min_interval_s and usual >= _SHARED:
            most = _MOST_STRETCH_QUICK if self._turnaround.is_quick else _MOST_STRETCH
            wait_s = self._last_flush_s + min_interval_s * min(most, _STRETCH * usual) - self._loop.time()
        if wait_s > 0:
            self._timer = self._loop.call_later(wait_s, self._flush_late)
        else:
            self._loop.call_soon(self._flush if min_interval_s else self._flush_when_quiet)

    def ended(self, request: OpenRequest, /) -> None:
        self.open_requests -= 1
        if request is self._probe:
            self._probe = None
            if request.accepted and not request.withdrawn:
                self._turnaround.answered(monotonic_ns() - self._probe_sent_ns)

    def _flush_when_quiet(self) -> None:
        """Let the ticks that bring more requests pass, where a model answers so fast that entries cost more than it.

        No time is lost meanwhile: what there is to read is being read.
        """
        count = len(self._waiting)
        more = count > self._seen and count < self.most and self._waiting_bytes < self._max_size_bytes
        if more and self.open_requests > 1 and self._turnaround.is_quick:
            self._seen = count
            self._scheduled = True
            self._loop.call_soon(self._flush_when_quiet)
        else:
            self._flush()

    def _flush_late(self) -> None:
        """The interval passed before as many came as were open at once: fewer callers may be left."""
        gone = self._callers - self.open_requests
        self._callers = max(self.open_requests, self._callers - 1 - max(self._callers // 8, gone // 2))
        self._flush()

    def _flush(self) -> None:
        self._scheduled = False
        self._timer = None
        self._seen = 0
        now_s = self._loop.time()
        self._turnaround.sent(len(self._waiting), round((now_s - self._last_flush_s) * 1e9))
        self._last_flush_s = now_s
        entries = self._take(self.most)
        if entries and self._probe is None:
            self._probe, self._probe_sent_ns = entries[0][0], monotonic_ns()
        if self.in_order:
            if entries:
                self._append(entries)
        else:
            for one in entries:
                self._append([one])

    def _append(self, entries: list[list[OpenRequest]]) -> None:
        self._outstanding += 1
        self._spawn(self._accept_all(entries))

    async def _accept_all(self, entries: list[list[OpenRequest]]) -> None:
        try:
            for entry in entries:
                failpoints.hit("gateway.parsed")
                await self._accept(entry)
                if entry[0].accepted:
                    failpoints.hit("gateway.stored")
                    if self._probe is entry[0]:
                        self._turnaround.accepted(monotonic_ns() - self._probe_sent_ns)
        finally:
            self._outstanding -= 1
            if self._waiting and not self._scheduled and not self._outstanding:
                self._flush_when_quiet()


_QUICK = 6
"""Answers that come within so many times what the log takes to accept an entry. With a model that does nothing it is
two or three: two more of the log's round trips, and the executor's work."""
_WEIGHT = 8
"""The newest measurement counts for an eighth."""
_MEMORY_NS = 25_000_000
"""What was sent so long ago counts for a third."""


class Turnaround:
    """How a queue is used, as its gateway sees it: moving averages of what is sent, and of the times, in ns, from
    sending an entry to its acceptance and to its first answer. Knows no clock.

    How many requests are under way at once is Little's law: requests in a time, times the time of an answer. Requests
    that still wait in the gateway are not counted, as waiting would then be a reason to wait.

    Where a model's own time is small compared with the way to it and back, its requests travel together, because an
    entry costs more than the requests in it. Where the model takes long they do not, because entries that come one
    after the other keep several instances busy.
    """

    __slots__ = ("_accepted_ns", "_answered_ns", "_sent_per_ns", "is_quick")

    def __init__(self) -> None:
        self._sent_per_ns = 0.0
        self._accepted_ns = 0
        self._answered_ns = 0
        self.is_quick = False

    @property
    def under_way(self) -> float:
        """Requests that are usually sent and not answered."""
        return self._sent_per_ns * self._answered_ns

    def sent(self, count: int, past_ns: int) -> None:
        """So many left, so long after those before them."""
        self._sent_per_ns = self._sent_per_ns * exp(-past_ns / _MEMORY_NS) + count / _MEMORY_NS

    def accepted(self, taken_ns: int) -> None:
        """An entry was accepted after so long."""
        self._accepted_ns = _mixed(self._accepted_ns, taken_ns)

    def answered(self, taken_ns: int) -> None:
        """Its first answer was there after so long."""
        self._answered_ns = _mixed(self._answered_ns, taken_ns)
        self.is_quick = self._answered_ns <= _QUICK * self._accepted_ns


def _mixed(average_ns: int, newest_ns: int) -> int:
    return average_ns + (newest_ns - average_ns) // _WEIGHT if average_ns else newest_ns
