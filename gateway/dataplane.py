"""Sends the synchronous requests of the full way to the log, each with its own record, and waits for their answers.

`charonia.calls.requester` sends entries and matches answers to callers; `lane` sends waves; `jobs` handles requests
that outlive their call.

A `Coalescer` holds requests back so that they share log entries. The first request of an idle queue leaves at the end
of the loop tick; while an append is outstanding the next ones wait and join. If the model answers quickly
(`Turnaround`), an entry leaves with the first tick that brings no other request. Behind a front that delivers calls
one by one, flushes are limited by rate instead.
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
from charonia.calls.entry_packer import AppendCounts, EntryPacker, Spawn, Terms
from charonia.calls.payload_transfer import Payloads
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
from charonia.facts import counters
from charonia.inference import InferenceRequest
from charonia.options.settings import GatewaySettings
from charonia.wire import FLAG_JOURNALLED, ResponseRecord

from .access.terms import JOURNAL_ALL, JOURNAL_OFF, TermsBook
from .requests.delivery import AS_USUAL, DeliveryOptions

_MAX_COALESCERS = 10_000


@dataclass(slots=True)
class AdmittedRequest:
    """An admitted request: the version it is for, and how its caller wants it delivered.

    `min_interval_s` > 0 limits the flush rate of its queue.
    """

    request: InferenceRequest
    served: ServedVersion
    admitted: Admitted
    level: int
    options: DeliveryOptions = AS_USUAL
    min_interval_s: float = 0.0
    fallback: ServedVersion | None = None
    """The version to run it again on when this one, a candidate of a release, fails it."""
    shadow: ServedVersion | None = None
    """The version that gets a copy of it."""


_AT_ONCE: AbstractAsyncContextManager[None] = nullcontext()


class SequenceTurns:
    """Keeps requests of a sequence in order while one of them waits for a thread, because its tensors are large.

    A request takes its turn before its first wait and leaves it after its last: what it does afterwards without waiting
    comes before the next request. True while there are turns.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, int | str], asyncio.Lock] = WeakValueDictionary()

    def __bool__(self) -> bool:
        return bool(self._locks)

    def of(self, request: InferenceRequest) -> AbstractAsyncContextManager[None]:
        """The turn of a request, to be entered; empty for a request without sequence."""
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
        self._coalescers: dict[tuple[str, int, Terms], Coalescer] = {}
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
        """Record the request and yield its response records as they come. Closing the generator cancels the request.

        Raises as `infer`, and `StreamInterrupted`; any error ends the request.
        """
        waiter = await self._begin(one, Visible(repeatable=one.served.interface.repeatable))
        assert isinstance(waiter, StreamWaiter)
        complete = False
        try:
            while (record := await waiter.next()) is not None:
                complete = record.final
                # it is in the log: free its memory, as the stream may take long
                one.request.inputs = []
                yield record
                del record  # free its memory while waiting for the next one
        except CharoniaError:
            complete = waiter.ended_by_reply
            raise
        finally:
            if not complete:
                self._withdraw(waiter, one.options)
            self.requester.end(waiter)
            waiter.close()

    def _begin(self, one: AdmittedRequest, visible: Visible | None = None) -> Coroutine[Any, Any, Waiter]:
        """Start sending a request; with `visible` its waiter reads a stream. The caller must call `Requester.end`."""
        served, options = one.served, one.options
        terms = self._terms.default if options is AS_USUAL else self._terms.of(options)
        coalescer = self._coalescers.get((served.model, one.level, terms))
        if coalescer is None or coalescer.served is not served:
            coalescer = self._coalescer(served, one.level, terms)
        return (
            self._send_in_turn(coalescer, one, visible)
            if one.admitted.sequential
            else self._send(coalescer, one, visible)
        )

    async def _send_in_turn(self, coalescer: Coalescer, one: AdmittedRequest, visible: Visible | None) -> Waiter:
        """Send a request of a sequence: the next one must not overtake it while a large one is packed."""
        async with coalescer.turn:
            return await self._send(coalescer, one, visible)

    async def _send(self, coalescer: Coalescer, one: AdmittedRequest, visible: Visible | None) -> Waiter:
        request, served, options, requester = one.request, one.served, one.options, self.requester
        if visible is None:
            waiter = Waiter(served.model, coalescer.next_id())
        else:
            waiter = StreamWaiter(served.model, coalescer.next_id(), visible, requester.held)
        try:
            await requester.pack(
                *(waiter, request, one.admitted, one.level, served, self._flags),
                tenant=options.caller.tenant,
                is_durable=coalescer.is_durable,
            )
            requester.add(waiter, waiter.size_bytes)
        except BaseException:
            requester.end(waiter)
            raise
        waiter.packer = coalescer
        coalescer.open_requests += 1
        coalescer.submit(waiter, one.min_interval_s)
        if request.deadline_ns:
            waiter.timer = self.deadlines.arm(waiter, request.deadline_ns, served)
        return waiter

    def _withdraw(self, waiter: Waiter, options: DeliveryOptions) -> None:
        """The client has left."""
        if options.on_disconnect != "keep":
            self.requester.withdraw(waiter)
        else:
            waiter.withdrawn = True

    def _coalescer(self, served: ServedVersion, level: int, terms: Terms) -> Coalescer:
        key = (served.model, level, terms)
        coalescer = self._coalescers.get(key)
        if coalescer is None:
            # bounds hostile variety of levels and tenants; idle coalescers hold nothing
            if len(self._coalescers) >= _MAX_COALESCERS:
                self._coalescers.clear()
            coalescer = self._coalescers[key] = Coalescer(
                *(self._log, served.model, level, terms, self.spawn, self.requester.ids.next),
                max_requests=1,
                max_size_bytes=self._settings.coalesce_size_bytes,
                counts=self.counts,
            )
        coalescer.served = served
        coalescer.in_order = served.interface.sequence_batching is not None
        cap, batch = self._settings.coalesce_requests, served.interface.max_batch_size
        # a batch takes requests of sequences from anywhere in the queue, so entries may be larger than batches;
        # otherwise half a batch, so that two instances share what arrives together, which pays for slow models
        coalescer.max_requests = max(1, min(cap // 2, cap if coalescer.in_order else batch // 2))
        coalescer.max_quick_requests = coalescer.max_requests if coalescer.in_order else max(1, min(cap, batch))
        return coalescer


_LOG_PATIENCE_S = 1.0
_ASK_AGAIN_S = 0.02


class Deadlines:
    """The deadlines of one gateway's waiting callers, who are answered on time however busy the executors are.

    At its deadline a request is settled as expired, and if that settlement wins, the caller gets the error. If a
    completion came first, its reply is the answer. If the log cannot be reached, the outcome is unknown.
    """

    def __init__(self, log: Work, spawn: Spawn, *, journal_jobs: bool, journal_all: bool) -> None:
        self._log = log
        self._spawn = spawn
        self._journal_jobs = journal_jobs
        self._journal_all = journal_all
        self.expired = 0
        """Number of requests that this gateway ended at their deadline."""

    def arm(self, waiter: Waiter, deadline_ns: int, served: ServedVersion) -> asyncio.TimerHandle:
        """Start a timer, to be cancelled once the waiter has its answer."""
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
        increments = counters.of_failures(1, wall_ns() - armed_ns, "REJECTED")
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
                        await asyncio.sleep(_ASK_AGAIN_S)  # it is still on its way into the log
        except (CharoniaError, TimeoutError):
            waiter.failed(LogUnavailable(OUTCOME_UNKNOWN))

    def _answer_expired(self, waiter: Waiter) -> None:
        if not waiter.future.done():
            self.expired += 1
            waiter.failed(DeadlineExceeded(DEADLINE_EXCEEDED))


_MIN_IN_FLIGHT = 2
"""Below this no other request shares the entry: send at once."""
_STRETCH = 1.5
_MAX_STRETCH = 8
_MAX_STRETCH_QUICK = 16
_ENOUGH = 8
"""An interval ends early once this many requests wait, and as many as were recently open at once. Fewer wait until its
end, which comes soon if few are in flight."""


class Coalescer(EntryPacker):
    """An `EntryPacker` that holds requests back when others may join them."""

    def __init__(self, *arguments: Any, **bounds: Any) -> None:
        """Takes the arguments of `EntryPacker`."""
        super().__init__(*arguments, **bounds)
        self._callers = 0
        """Recent maximum of open requests: so many may arrive together again."""
        self.served: ServedVersion | None = None
        """The loaded version that `max_requests` was computed for; set by the `DataPlane`."""
        self._timer: asyncio.TimerHandle | None = None
        self._seen = 0
        """Number of waiting requests at the end of the previous tick."""
        self._outstanding = 0
        self._last_flush_s = 0.0
        self._turnaround = Turnaround()
        self._probe: OpenRequest | None = None
        self._probe_sent_ns = 0
        self.max_quick_requests = self.max_requests
        """Max requests of an entry while answers are quick."""
        self.in_order = False
        """Whether entries must be accepted in the order of their requests, for sequences."""
        self.turn = asyncio.Lock()
        """Held by requests that must not be overtaken between `next_id` and `submit`."""

    @property
    def most(self) -> int:
        """Max requests of an entry."""
        return self.max_quick_requests if self._turnaround.is_quick else self.max_requests

    def next_id(self) -> bytes:
        return self._ids.next(self.most)

    def submit(self, request: OpenRequest, min_interval_s: float = 0.0) -> None:
        """Add a request; it leaves with this tick, with the next append, or after the interval at the latest.

        It waits only if several requests are usually in flight, whose clients may soon send the next ones. The wait is
        one and a half intervals per request usually in flight, at most eight intervals (sixteen if answers are quick):
        each entry saved spares a wake-up of every process downstream. It ends once as many requests wait as were
        recently open at once (docs/adr/0003).
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
        if min_interval_s and usual >= _MIN_IN_FLIGHT:
            most = _MAX_STRETCH_QUICK if self._turnaround.is_quick else _MAX_STRETCH
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
        """Flush, unless this tick brought more requests and the model answers so fast that entries cost more than it
        does.

        This costs no time: another tick means that there was data to read.
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
        """Flush at the end of the interval. Fewer requests arrived than were recently open at once, so lower
        `_callers`.
        """
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
"""Answers within this many times the log's acceptance time are quick. A model that does nothing takes two or three
times: two more round trips to the log, and the executor's work.
"""
_WEIGHT = 8
"""The newest measurement counts for an eighth."""
_MEMORY_NS = 25_000_000
"""Requests sent this long ago count for a third."""


class Turnaround:
    """Measures a queue: moving averages of requests sent, and of the times from sending an entry to its acceptance and
    to its first answer, in ns. Has no clock.

    The number of requests in flight follows from Little's law: request rate times answer time. Requests that wait in
    the gateway are not counted, because waiting would then be a reason to wait.

    If a model's own time is small compared with the way there and back, its requests travel together, as an entry
    costs more than the requests in it. Requests for a slow model do not, as consecutive entries keep several instances
    busy.
    """

    __slots__ = ("_accepted_ns", "_answered_ns", "_sent_per_ns", "is_quick")

    def __init__(self) -> None:
        self._sent_per_ns = 0.0
        self._accepted_ns = 0
        self._answered_ns = 0
        self.is_quick = False

    @property
    def under_way(self) -> float:
        """Average number of requests in flight."""
        return self._sent_per_ns * self._answered_ns

    def sent(self, count: int, past_ns: int) -> None:
        """`count` requests were sent, `past_ns` after those before."""
        self._sent_per_ns = self._sent_per_ns * exp(-past_ns / _MEMORY_NS) + count / _MEMORY_NS

    def accepted(self, taken_ns: int) -> None:
        """An entry was accepted after this time."""
        self._accepted_ns = _mixed(self._accepted_ns, taken_ns)

    def answered(self, taken_ns: int) -> None:
        """Its first answer arrived after this time."""
        self._answered_ns = _mixed(self._answered_ns, taken_ns)
        self.is_quick = self._answered_ns <= _QUICK * self._accepted_ns


def _mixed(average_ns: int, newest_ns: int) -> int:
    return average_ns + (newest_ns - average_ns) // _WEIGHT if average_ns else newest_ns
