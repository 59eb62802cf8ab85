"""A synchronous request's way into the log and its answer's way back.

Who waits for what is `pending`'s; how requests share entries `coalescing`'s; requests that outlive their callers are
`jobs`'.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from charonia import keys
from charonia.calls.admission import Admitted
from charonia.calls.payload_transfer import Payloads
from charonia.calls.request_packing import request_record
from charonia.calls.shedding import shed
from charonia.calls.splicing import Visible
from charonia.catalog.catalog import ServedVersion
from charonia.errors import CharoniaError
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.eventlog.port import RequestLog
from charonia.facts.events import FIELD_FACT, RequestCancelled, pack_fact
from charonia.inference import InferenceRequest
from charonia.options.settings import GatewaySettings
from charonia.wire import FLAG_JOURNALLED, Reference, ResponseRecord
from gateway.access.terms import JOURNAL_ALL, JOURNAL_OFF, Terms, TermsBook
from gateway.requests.delivery import DeliveryOptions

from .coalescing import AppendCounts, Coalescer
from .deadlines import Deadlines
from .pending import Ids, PendingMap
from .waiters import StreamWaiter, Waiter

_MOST_DOORS = 10_000


@dataclass(slots=True)
class _Underway:
    """A request that its caller waits for, and what is given back when it ends."""

    waiter: Waiter
    door: Coalescer
    reference: Reference | None
    timer: asyncio.TimerHandle | None


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
        self._endpoint = settings.incarnation.encode()
        self._stream = keys.replies(settings.incarnation)
        self._reader = log.reader()
        self._terms = terms or TermsBook(settings)
        self._flags = FLAG_JOURNALLED if settings.journal == JOURNAL_ALL else 0
        self._doors: dict[tuple[str, int], Coalescer] = {}
        self._other_doors: dict[tuple[str, int, Terms], Coalescer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.ids = Ids()
        self._payloads = payloads
        take = payloads.take if payloads is not None else None
        self.pending = PendingMap(
            log, settings.max_pending_per_gateway_bytes, take, max_stream_bytes=settings.stream_buffer_size_bytes
        )
        self.deadlines = Deadlines(
            log,
            self.spawn,
            journal_jobs=settings.journal != JOURNAL_OFF,
            journal_all=settings.journal == JOURNAL_ALL,
        )
        self.counts = AppendCounts()

    @property
    def pending_requests(self) -> int:
        return len(self.pending)

    @property
    def duplicates(self) -> int:
        return self.pending.duplicates

    async def start(self) -> None:
        self._reader.start(self.pending.on_replies, self.pending.on_log_state)
        self._reader.add(self._stream, consume=True)
        self.spawn(self.pending.watch())
        if self._payloads is not None:
            self.spawn(self._payloads.watch())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.pending.refuse_all()
        await self._reader.close()
        with contextlib.suppress(CharoniaError):
            await self._log.delete_stream(self._stream)

    async def infer(
        self,
        request: InferenceRequest,
        admitted: Admitted,
        level: int,
        served: ServedVersion,
        min_interval_s: float,
        options: DeliveryOptions | None = None,
    ) -> ResponseRecord:
        """Record the request and await its response record. Cancelling the caller cancels the request.

        `min_interval_s` > 0 limits this queue's flushes by rate. Raises `LogUnavailable`, `ResourceExhausted` and, at
        the request's deadline, `DeadlineExceeded`.
        """
        underway = await self._begin(request, admitted, level, served, min_interval_s, options)
        waiter = underway.waiter
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._withdraw(waiter, options)
            raise
        except CharoniaError as error:
            raise shed(error) from None
        finally:
            self._end(underway)

    async def stream(
        self,
        request: InferenceRequest,
        admitted: Admitted,
        level: int,
        served: ServedVersion,
        min_interval_s: float,
        options: DeliveryOptions | None,
    ) -> AsyncGenerator[ResponseRecord]:
        """Record the request and give its response records as they come. Closing the generator cancels the request.

        Raises as `infer`, and `StreamInterrupted`: whatever is raised ends the request.
        """
        visible = Visible(repeatable=served.interface.repeatable)
        underway = await self._begin(request, admitted, level, served, min_interval_s, options, visible)
        waiter = underway.waiter
        assert isinstance(waiter, StreamWaiter)
        complete = False
        try:
            while (record := await waiter.read()) is not None:
                complete = record.final
                # it is in the log and under way: its tensors may be large, and the stream long
                request.inputs, waiter.record = [], b""
                yield record
                del record  # the next one may be long in coming
        except CharoniaError as error:
            complete = waiter.ended_by_reply
            raise shed(error) from None
        finally:
            if not complete:
                self._withdraw(waiter, options)
            waiter.close()
            self._end(underway)

    async def _begin(
        self,
        request: InferenceRequest,
        admitted: Admitted,
        level: int,
        served: ServedVersion,
        min_interval_s: float,
        options: DeliveryOptions | None,
        visible: Visible | None = None,
    ) -> _Underway:
        """Send a request on its way into the log; with `visible` its waiter reads a stream. `_end` it."""
        door = self._doors.get((served.model, level)) if options is None else None
        if door is None or door.served is not served:
            door = self._door(served, level, options)
        if not admitted.sequential:
            return await self._send(door, request, admitted, level, served, min_interval_s, options, visible)
        # a large request takes time on its way: the next one of its sequence must not overtake it
        async with door.turn:
            return await self._send(door, request, admitted, level, served, min_interval_s, options, visible)

    async def _send(
        self,
        door: Coalescer,
        request: InferenceRequest,
        admitted: Admitted,
        level: int,
        served: ServedVersion,
        min_interval_s: float,
        options: DeliveryOptions | None,
        visible: Visible | None,
    ) -> _Underway:
        request_id = door.next_id()
        flags, reference = self._flags, None
        if self._payloads is not None:
            flags |= self._payloads.flags(served)
            if admitted.meta.size_bytes >= BY_REFERENCE_BYTES:
                buffers = [t.data for t in request.inputs]
                with self.pending.coming():
                    reference = await self._payloads.lend(buffers, flags, served, durable=door.is_durable)
        tenant = options.caller.tenant if options is not None else ""
        record = request_record(request_id, self._endpoint, request, admitted, level, flags, reference, tenant=tenant)
        beside_bytes = reference.size_bytes if reference is not None else 0
        waiter: Waiter
        try:
            if visible is None:
                waiter = self.pending.add(served.model, request_id, record, beside_bytes=beside_bytes)
            else:
                waiter = self.pending.add_stream(served.model, request_id, record, visible, beside_bytes=beside_bytes)
        except CharoniaError:  # there is no room for it
            self._take_back(reference)
            raise
        door.open_requests += 1
        door.submit(waiter, min_interval_s)
        timer = self.deadlines.arm(waiter, request.deadline_ns, served) if request.deadline_ns else None
        return _Underway(waiter, door, reference, timer)

    def _end(self, underway: _Underway) -> None:
        if underway.timer is not None:
            underway.timer.cancel()
        underway.door.ended(underway.waiter)
        self.pending.remove(underway.waiter)
        self._take_back(underway.reference)

    def _take_back(self, reference: Reference | None) -> None:
        """Releases the payloads of a request that no reader needs any more."""
        if reference is not None and self._payloads is not None:
            self.spawn(self._payloads.end(reference))

    def _withdraw(self, waiter: Waiter, options: DeliveryOptions | None) -> None:
        """Its caller has gone."""
        waiter.withdrawn = True
        if waiter.sent and (options is None or options.on_disconnect != "keep"):
            self.spawn(self._tell_owner(waiter))

    def _door(self, served: ServedVersion, level: int, options: DeliveryOptions | None) -> Coalescer:
        terms = self._terms.default if options is None else self._terms.of(options)
        key = (served.model, level, terms)
        door = self._other_doors.get(key) if terms is not self._terms.default else self._doors.get(key[:2])
        if door is None:
            door = Coalescer(
                self._log,
                served.model,
                level,
                terms,
                max_requests=1,
                max_size_bytes=self._settings.coalesce_size_bytes,
                counts=self.counts,
                draw=self.ids.next,
            )
            # hostile variety of levels and tenants; idle doors hold nothing
            if len(self._doors) + len(self._other_doors) > _MOST_DOORS:
                self._doors.clear()
                self._other_doors.clear()
            if terms is self._terms.default:
                self._doors[key[:2]] = door
            else:
                self._other_doors[key] = door
        door.served = served
        door.in_order = served.interface.sequence_batching is not None
        cap, batch = self._settings.coalesce_requests, served.interface.max_batch_size
        # a batch takes requests of sequences from anywhere in the queue, so an entry need not be like a batch;
        # half of one lets two instances share what comes together, which matters where a batch takes its time
        door.max_requests = max(1, min(cap // 2, cap if door.in_order else batch // 2))
        door.max_quick_requests = door.max_requests if door.in_order else max(1, min(cap, batch))
        return door

    async def _tell_owner(self, waiter: Waiter) -> None:
        with contextlib.suppress(CharoniaError):
            await self._log.append(keys.facts(waiter.model), [FIELD_FACT, pack_fact(RequestCancelled(waiter.id))])

    def spawn(self, coroutine: object) -> None:
        """Run something that ends with this gateway at the latest."""
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
