"""A synchronous request's way into the log and its answer's way back.

Sending requests and knowing who waits for which answer is `charonia.calls.requester`'s; how long requests wait to share
entries `coalescing`'s; requests that outlive their callers are `jobs`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any

from charonia import keys
from charonia.calls.admission import Admitted
from charonia.calls.payload_transfer import Payloads
from charonia.calls.queue_entrance import AppendCounts, Spawn, Terms
from charonia.calls.request_endings import EXPIRED, end_requests
from charonia.calls.requester import Requester
from charonia.calls.waiters import StreamWaiter, Visible, Waiter
from charonia.catalog.catalog import ServedVersion
from charonia.clock import wall_ns
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
from gateway.access.terms import JOURNAL_ALL, JOURNAL_OFF, TermsBook
from gateway.requests.delivery import AS_USUAL, DeliveryOptions

from .coalescing import Coalescer

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
