"""A synchronous request's way into the log and its answer's way back.

Sending requests and knowing who waits for which answer is `charonia.calls.requester`'s; requests that outlive their
callers are `jobs`'.

A `Coalescer` lets requests wait, so that they share log entries. The first request of a quiet queue leaves at the end
of the loop tick; while an append is outstanding the next ones wait and join. Where the model answers quickly
(`Turnaround`), an entry leaves with the first tick that brings no other request. Behind a front that delivers one call
at a time flushes are limited by rate instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from math import exp
from typing import Any
from weakref import WeakValueDictionary

from charonia import failpoints, keys
from charonia.calls.admission import Admitted
from charonia.calls.payload_transfer import Payloads
from charonia.calls.queue_entrance import AppendCounts, QueueEntrance, Spawn, Terms
from charonia.calls.request_endings import EXPIRED, end_requests
from charonia.calls.requester import Requester
from charonia.calls.waiters import OpenRequest, StreamWaiter, Visible, Waiter
from charonia.catalog.catalog import ServedVersion
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import (
    DEADLINE_EXCEEDED,
    OUTCOME_UNKNOWN,
    CharoniaError,
    DeadlineExceeded,
    LogUnavailable,
    shed,
)
from charonia.eventlog.port import RequestLog, Work
from charonia.inference import InferenceRequest
from charonia.options.settings import GatewaySettings
from charonia.wire import FLAG_JOURNALLED, ResponseRecord

from .access.terms import JOURNAL_ALL, JOURNAL_OFF, TermsBook
from .requests.delivery import AS_USUAL, DeliveryOptions

_MOST_DOORS = 10_000


@dataclass(slots=True)
class AdmittedRequest:
    """A request that may enter the log, the version it is for, and how its caller wants it delivered.

    `min_interval_s` > 0 limits the flushes of its queue by rate.
    """

    request: InferenceRequest
    served: ServedVersion
    admitted: Admitted
    level: int
    options: DeliveryOptions = AS_USUAL
    min_interval_s: float = 0.0


_AT_ONCE: AbstractAsyncContextManager[None] = nullcontext()


class SequenceTurns:
    """Keeps the requests of a sequence in their order while one of them waits for a thread, as its tensors are large.

    A turn is taken before the first wait of a request, and left when nothing of it waits any more:
    what follows its end without a wait comes before the next request's. True while there are turns.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, int | str], asyncio.Lock] = WeakValueDictionary()

    def __bool__(self) -> bool:
        return bool(self._locks)

    def of(self, request: InferenceRequest) -> AbstractAsyncContextManager[None]:
        """The turn of a request; one that is of no sequence has it at once."""
        if not request.sequence_id:
            return _AT_ONCE
        key = request.model, request.sequence_id
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock


class DataPlane:
    """Sends admitted requests and awaits their replies. One per gateway."""

    def __init__(
        self,
        log: RequestLog,
        settings: GatewaySettings,
        terms: TermsBook | None = None,
        payloads: Payloads | None = None,
    ) -> None:
        self._log = log
        self._settings = settings
        self._terms = terms or TermsBook(settings)
        self._flags = FLAG_JOURNALLED if settings.journal == JOURNAL_ALL else 0
        self._doors: dict[tuple[str, int, Terms], Coalescer] = {}
        self.requester: Requester[Waiter] = Requester(
            *(log, settings.incarnation, payloads),
            max_size_bytes=settings.max_pending_per_gateway_bytes,
            max_stream_bytes=settings.stream_buffer_size_bytes,
        )
        self.spawn = self.requester.spawn
        self.deadlines = Deadlines(
            log,
            self.spawn,
            journal_jobs=settings.journal != JOURNAL_OFF,
            journal_all=settings.journal == JOURNAL_ALL,
        )
        self.counts = AppendCounts()
        self.turns = SequenceTurns()

    @property
    def pending_requests(self) -> int:
        return len(self.requester.requests)

    @property
    def duplicates(self) -> int:
        return self.requester.duplicates

    async def start(self) -> None:
        await self.requester.start()
        if self.requester.payloads is not None:
            self.spawn(self.requester.payloads.watch())

    async def close(self) -> None:
        await self.requester.close()

    async def infer(self, one: AdmittedRequest) -> ResponseRecord:
        """Record the request and await its response record. Cancelling the caller cancels the request.

        Raises `LogUnavailable`, `ResourceExhausted` and, at the request's deadline, `DeadlineExceeded`.
        """
        waiter = await self._begin(one)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._withdraw(waiter, one.options)
            raise
        except CharoniaError as error:
            raise shed(error) from None
        finally:
            self.requester.end(waiter)

    async def stream(self, one: AdmittedRequest) -> AsyncGenerator[ResponseRecord]:
        """Record the request and give its response records as they come. Closing the generator cancels the request.

        Raises as `infer`, and `StreamInterrupted`: whatever is raised ends the request.
        """
        waiter = await self._begin(one, Visible(repeatable=one.served.interface.repeatable))
        assert isinstance(waiter, StreamWaiter)
        complete = False
        try:
            while (record := await waiter.next()) is not None:
                complete = record.final
                # it is in the log and under way: its tensors may be large, and the stream long
                one.request.inputs = []
                yield record
                del record  # the next one may be long in coming
        except CharoniaError:
            complete = waiter.ended_by_reply
            raise
        finally:
            if not complete:
                self._withdraw(waiter, one.options)
            self.requester.end(waiter)
            waiter.close()

    def _begin(self, one: AdmittedRequest, visible: Visible | None = None) -> Coroutine[Any, Any, Waiter]:
        """Send a request on its way into the log; with `visible` its waiter reads a stream. `Requester.end` it."""
        served, options = one.served, one.options
        terms = self._terms.default if options is AS_USUAL else self._terms.of(options)
        door = self._doors.get((served.model, one.level, terms))
        if door is None or door.served is not served:
            door = self._door(served, one.level, terms)
        return self._send_in_turn(door, one, visible) if one.admitted.sequential else self._send(door, one, visible)

    async def _send_in_turn(self, door: Coalescer, one: AdmittedRequest, visible: Visible | None) -> Waiter:
        """A large request takes time on its way: the next one of its sequence must not overtake it."""
        async with door.turn:
            return await self._send(door, one, visible)

    async def _send(self, door: Coalescer, one: AdmittedRequest, visible: Visible | None) -> Waiter:
        request, served, options, requester = one.request, one.served, one.options, self.requester
        if visible is None:
            waiter = Waiter(served.model, door.next_id())
        else:
            waiter = StreamWaiter(served.model, door.next_id(), visible, requester.held)
        try:
            await requester.pack(
                *(waiter, request, one.admitted, one.level, served, self._flags),
                tenant=options.caller.tenant,
                is_durable=door.is_durable,
            )
            requester.add(waiter, waiter.size_bytes)
        except BaseException:
            requester.end(waiter)
            raise
        waiter.entrance = door
        door.open_requests += 1
        door.submit(waiter, one.min_interval_s)
        if request.deadline_ns:
            waiter.timer = self.deadlines.arm(waiter, request.deadline_ns, served)
        return waiter

    def _withdraw(self, waiter: Waiter, options: DeliveryOptions) -> None:
        """Its caller has gone."""
        if options.on_disconnect != "keep":
            self.requester.withdraw(waiter)
        else:
            waiter.withdrawn = True

    def _door(self, served: ServedVersion, level: int, terms: Terms) -> Coalescer:
        key = (served.model, level, terms)
        door = self._doors.get(key)
        if door is None:
            # hostile variety of levels and tenants; idle doors hold nothing
            if len(self._doors) >= _MOST_DOORS:
                self._doors.clear()
            door = self._doors[key] = Coalescer(
                *(self._log, served.model, level, terms, self.spawn, self.requester.ids.next),
                max_requests=1,
                max_size_bytes=self._settings.coalesce_size_bytes,
                counts=self.counts,
            )
        door.served = served
        door.in_order = served.interface.sequence_batching is not None
        cap, batch = self._settings.coalesce_requests, served.interface.max_batch_size
        # a batch takes requests of sequences from anywhere in the queue, so an entry need not be like a batch;
        # half of one lets two instances share what comes together, which matters where a batch takes its time
        door.max_requests = max(1, min(cap // 2, cap if door.in_order else batch // 2))
        door.max_quick_requests = door.max_requests if door.in_order else max(1, min(cap, batch))
        return door


_LOG_PATIENCE_S = 1.0
_ASK_AGAIN_S = 0.02


class Deadlines:
    """The timers of one gateway's waiting callers, who are answered at their deadline however busy the executors are.

    At the instant the request is settled as expired; only when that is won is the caller told so. When a completion was
    first, its reply is on its way and is the answer. When the log cannot say, the outcome is unknown.
    """

    def __init__(self, log: Work, spawn: Spawn, *, journal_jobs: bool, journal_all: bool) -> None:
        self._log = log
        self._spawn = spawn
        self._journal_jobs = journal_jobs
        self._journal_all = journal_all
        self.expired = 0
        """Requests this gateway ended at their deadline."""

    def arm(self, waiter: Waiter, deadline_ns: int, served: ServedVersion) -> asyncio.TimerHandle:
        """A timer, to be cancelled once the waiter has its answer."""
        armed_ns = wall_ns()
        delay_s = max(0.0, (deadline_ns - armed_ns) / 1e9)
        return asyncio.get_running_loop().call_later(delay_s, self._fire, waiter, served, armed_ns)

    def _fire(self, waiter: Waiter, served: ServedVersion, armed_ns: int) -> None:
        if not waiter.sent or waiter.follows:
            waiter.withdrawn = True
            self._answer_expired(waiter)
            return
        statistics = keys.statistics(served.model, served.version, served.content_hash)
        self._spawn(self._expire(waiter, statistics, armed_ns))

    async def _expire(self, waiter: Waiter, statistics: bytes, armed_ns: int) -> None:
        journalled = self._journal_jobs if waiter.is_job else self._journal_all
        increments = {"fail_count": 1, "fail_ns": max(0, wall_ns() - armed_ns), "fail_REJECTED": 1}
        try:
            async with asyncio.timeout(_LOG_PATIENCE_S):
                while not waiter.future.done():
                    won = await end_requests(
                        self._log,
                        waiter.model,
                        [waiter.id],
                        EXPIRED.state,
                        journalled=[journalled],
                        ends=EXPIRED.of_jobs([waiter.id]) if waiter.is_job else None,
                        statistics=(statistics, increments),
                    )
                    if won[0] or waiter.follows:
                        self._answer_expired(waiter)
                    elif waiter.accepted:
                        return  # a completion was first: its reply is the answer
                    else:
                        await asyncio.sleep(_ASK_AGAIN_S)  # still on its way into the log
        except (CharoniaError, TimeoutError):
            waiter.failed(LogUnavailable(OUTCOME_UNKNOWN))

    def _answer_expired(self, waiter: Waiter) -> None:
        if not waiter.future.done():
            self.expired += 1
            waiter.failed(DeadlineExceeded(DEADLINE_EXCEEDED))


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
