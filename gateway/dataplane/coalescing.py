"""Joins requests of one queue into shared log entries.

The first request of a quiet queue leaves at the end of the loop tick; while an append is outstanding the next ones
wait and join. Where the model answers quickly (`turnaround`), an entry leaves with the first tick that brings no other
request. Behind a front that delivers one call at a time flushes are limited by rate instead.

An entry never mixes model, level or terms; all-or-none is the log's promise for an entry, so an entry refused for its
bound is split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from charonia import failpoints
from charonia.catalog.catalog import ServedVersion
from charonia.clock import monotonic_ns
from charonia.errors import CharoniaError, InternalError, ResourceExhausted
from charonia.eventlog.port import Work
from charonia.wire import record_fields
from gateway.access.terms import Terms

from .entry_ids import EntryIds
from .turnaround import Turnaround

_SHARED = 2
"""Below this no other request could share the entry."""
_STRETCH = 1.5
_MOST_STRETCH = 8
_MOST_STRETCH_QUICK = 16
_ENOUGH = 8
"""So many may leave as soon as no other is under way; fewer wait for the interval, which is short for them."""


class Outgoing(Protocol):
    """One packed request on its way into the log; `failed` is called with the reason when it was not accepted.

    `sent` is true once it is on its way, `accepted` once the log has it, `withdrawn` when its caller has gone before
    it was sent.
    """

    id: bytes
    record: bytes
    size_bytes: int
    withdrawn: bool
    sent: bool
    accepted: bool

    def failed(self, error: CharoniaError) -> None: ...


@dataclass(slots=True)
class AppendCounts:
    """Requests and entries appended: their quotient is the coalescing that the bench gates."""

    requests: int = 0
    entries: int = 0
    lanes: set[tuple[str, int, int]] = field(default_factory=set)
    """Model, level and lane of the queues that took any: those are open."""


class Coalescer:
    """One queue's door: a model's level, for requests that are accepted on the same terms."""

    def __init__(
        self,
        log: Work,
        model: str,
        level: int,
        terms: Terms,
        *,
        max_requests: int,
        max_size_bytes: int,
        counts: AppendCounts,
        draw: Callable[[], bytes] | None = None,
    ) -> None:
        self._log = log
        self._model = model
        self._level = level
        self._terms = terms
        self.is_durable = terms.durability not in ("", "memory")
        self._counts = counts
        self.open_requests = 0
        """Requests of this queue whose callers wait; raised by the data plane."""
        self._callers = 0
        """How many were lately open at once: so many may come together again."""
        self.served: ServedVersion | None = None
        """The incarnation that `max_requests` was last computed for; kept by the data plane."""
        self._ids = EntryIds(draw) if draw is not None else EntryIds()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[Outgoing] = []
        self._waiting_bytes = 0
        self._seen = 0
        """How many waited at the end of the tick before, when this one was let bring more."""
        self._outstanding = 0
        self._scheduled = False
        self._loop = asyncio.get_running_loop()
        self._last_flush_s = 0.0
        self._turnaround = Turnaround()
        self._probe: Outgoing | None = None
        self._probe_sent_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.max_requests = max_requests
        self.max_quick_requests = max_requests
        """The same while answers are quick."""
        self.in_order = False
        """Whether entries must be accepted in the order of their requests, for the sake of sequences."""
        self.turn = asyncio.Lock()
        """For who must not be overtaken between `next_id` and `submit`."""
        self._max_size_bytes = max_size_bytes

    @property
    def most(self) -> int:
        """Requests of an entry."""
        return self.max_quick_requests if self._turnaround.is_quick else self.max_requests

    def next_id(self) -> bytes:
        """An id for a request that is submitted soon, of the same group as those it may share an entry with."""
        return self._ids.next(self.most)

    def submit(self, outgoing: Outgoing, min_interval_s: float) -> None:
        """Take one request; it leaves with this tick, with the next append, or after the interval at the latest.

        A request waits only where several are usually under way, whose callers may soon ask again. The interval is
        taken one and a half times for each of them, at most eight times in all (sixteen where answers are quick): each
        entry saved spares every process behind a wake-up. It ends as soon as as many wait as were lately open at once
        (docs/adr/0003).
        """
        self._waiting.append(outgoing)
        self._waiting_bytes += outgoing.size_bytes
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

    def ended(self, outgoing: Outgoing) -> None:
        """A request that was counted as open has its answer, or its caller has gone."""
        self.open_requests -= 1
        if outgoing is self._probe:
            self._probe = None
            if outgoing.accepted and not outgoing.withdrawn:
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
        waiting, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        self._ids.turn()
        entries: list[list[Outgoing]] = []
        entry: list[Outgoing] = []
        size = 0
        most = self.most
        for outgoing in waiting:
            if outgoing.withdrawn:
                continue
            if entry and (len(entry) >= most or size + outgoing.size_bytes > self._max_size_bytes):
                entries.append(entry)
                entry, size = [], 0
            outgoing.sent = True
            entry.append(outgoing)
            size += outgoing.size_bytes
        if entry:
            entries.append(entry)
        if entries and self._probe is None:
            self._probe, self._probe_sent_ns = entries[0][0], monotonic_ns()
        if self.in_order:
            if entries:
                self._append(entries)
        else:
            for one in entries:
                self._append([one])

    def _append(self, entries: list[list[Outgoing]]) -> None:
        self._outstanding += 1
        task = self._loop.create_task(self._accept(entries))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, entries: list[list[Outgoing]]) -> None:
        try:
            for entry in entries:
                await self._accept_or_split(entry)
        finally:
            self._outstanding -= 1
            if self._waiting and not self._scheduled and not self._outstanding:
                self._flush_when_quiet()

    async def _accept_or_split(self, entry: list[Outgoing]) -> None:
        fields = record_fields([outgoing.record for outgoing in entry])
        terms = self._terms
        failpoints.hit("gateway.parsed")
        try:
            await self._log.accept(
                self._model,
                self._level,
                terms.lane,
                [(o.id, o.size_bytes) for o in entry],
                fields,
                terms.limits,
                tenant=terms.tenant,
                journalled=terms.journalled,
                durability=terms.durability,
            )
            failpoints.hit("gateway.stored")
            if self._probe is entry[0]:
                self._turnaround.accepted(monotonic_ns() - self._probe_sent_ns)
            for outgoing in entry:
                outgoing.accepted = True
            self._counts.entries += 1
            self._counts.requests += len(entry)
            self._counts.lanes.add((self._model, self._level, terms.lane))
        except ResourceExhausted as error:
            if len(entry) == 1:
                entry[0].failed(error)
                return
            half = len(entry) // 2
            await self._accept_or_split(entry[:half])
            await self._accept_or_split(entry[half:])
        except CharoniaError as error:
            for outgoing in entry:
                outgoing.failed(error)
        except Exception as error:
            for outgoing in entry:
                outgoing.failed(InternalError(f"request could not be written to the log: {error}"))
