"""A request's way into the log and its answer's way back: the pending map of one gateway (design section 2).

The pending map is the single place where a synchronous request gets its one visible outcome: whoever takes a request
out of it first (a reply, an error, the caller's cancellation) decides; later replies find nothing and are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InvalidRecord, LogUnavailable, ResourceExhausted, Unavailable
from charonia.eventlog.port import Entry, EventLog, Limits
from charonia.events import FIELD_FACT, RequestCancelled, pack_fact
from charonia.inference import InferenceRequest
from charonia.models.catalog import ServedVersion
from charonia.settings import GatewaySettings
from charonia.wire import ResponseRecord, pack_request, records_of, unpack_response

from .admission import Admission, Admitted
from .coalescing import AppendCounts, Coalescer, Outgoing
from .request_rules import SERVER_EXITING

_log = logging.getLogger(__name__)

OUTCOME_UNKNOWN = "the request or its reply was lost while it was in flight: its outcome is unknown"
_RECHECK_S = 1.0
_RECHECK_IDS = 1000


class _Pending:
    """One caller waiting; `model` tells where to ask."""

    __slots__ = ("future", "model", "outgoing")

    def __init__(self, model: str, outgoing: Outgoing, future: asyncio.Future[ResponseRecord]) -> None:
        self.model = model
        self.outgoing = outgoing
        self.future = future


class _Ids:
    """Unguessable 128-bit request ids, drawn from the system 256 at a time: one system call less per request."""

    def __init__(self) -> None:
        self._block = b""
        self._at = 0

    def next(self) -> bytes:
        if self._at >= len(self._block):
            self._block = os.urandom(16 * 256)
            self._at = 0
        at = self._at
        self._at = at + 16
        return self._block[at : at + 16]


class DataPlane:
    """Sends admitted requests and awaits their replies. One per gateway."""

    def __init__(self, log: EventLog, settings: GatewaySettings) -> None:
        self._log = log
        self._settings = settings
        self._endpoint = settings.incarnation.encode()
        self._stream = keys.replies(settings.incarnation)
        self._limits = Limits(settings.max_pending_requests, settings.max_pending_bytes)
        self._reader = log.reader()
        self._pending: dict[bytes, _Pending] = {}
        self._pending_size_bytes = 0
        self._coalescers: dict[tuple[str, int], Coalescer] = {}
        self._ids = _Ids()
        self._tasks: set[asyncio.Task[None]] = set()
        self._up = True
        self._unanswered: set[bytes] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.counts = AppendCounts()
        self.duplicates = 0

    async def start(self) -> None:
        self._reader.start(self._on_replies, self._on_log_state)
        self._reader.add(self._stream, consume=True)
        self._spawn(self._watch())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiter in self._pending.values():
            if not waiter.future.done():
                waiter.future.set_exception(Unavailable(SERVER_EXITING))
        await self._reader.close()
        with contextlib.suppress(CharoniaError):
            await self._log.delete_stream(self._stream)

    async def wait_idle(self) -> None:
        """Returns when no request is pending (drain)."""
        await self._idle.wait()

    @property
    def pending_requests(self) -> int:
        return len(self._pending)

    async def infer(
        self,
        request: InferenceRequest,
        admitted: Admitted,
        admission: Admission,
        served: ServedVersion,
        min_interval_s: float,
    ) -> ResponseRecord:
        """Record the request and await its response record. Cancelling the caller cancels the request.

        `min_interval_s` > 0 limits this queue's flushes by rate. Raises `LogUnavailable`, `ResourceExhausted`.
        """
        data = [t.data for t in request.inputs]
        request_id = self._ids.next()
        level = admission.level(request.priority)
        record = pack_request(
            request_id,
            self._endpoint,
            request.id.encode() if request.id else b"",
            admitted.meta,
            data,
            rows=admitted.rows,
            signature=admitted.signature,
            level=level,
            accepted_ns=wall_ns(),
            deadline_ns=request.deadline_ns,
            timeout_us=request.timeout_us,
        )
        size = len(record)
        if self._pending_size_bytes + size > self._settings.max_pending_per_gateway_bytes:
            raise ResourceExhausted(
                f"this gateway holds {self._pending_size_bytes} bytes of unanswered requests, its bound is "
                f"{self._settings.max_pending_per_gateway_bytes}; retry later"
            )
        future: asyncio.Future[ResponseRecord] = asyncio.get_running_loop().create_future()
        self._pending_size_bytes += size
        self._idle.clear()

        def failed(error: CharoniaError) -> None:
            if not future.done():
                future.set_exception(error)

        outgoing = Outgoing(request_id, record, size, failed)
        self._pending[request_id] = _Pending(served.model, outgoing, future)
        coalescer = self._coalescer(served, level)
        coalescer.open_requests += 1
        coalescer.submit(outgoing, min_interval_s)
        try:
            return await future
        except asyncio.CancelledError:
            outgoing.withdrawn = True
            if request_id in self._pending:
                self._cancel(request.model, request_id)
            raise
        except CharoniaError as error:
            # The future keeps what it raised, and with a traceback that would be a cycle: the request's bytes would
            # stay until the garbage collector comes by, which it seldom does.
            error.__traceback__ = None
            raise type(error)(error.message) from None
        finally:
            coalescer.open_requests -= 1
            if self._pending.pop(request_id, None) is not None:
                self._pending_size_bytes -= size
            if not self._pending:
                self._idle.set()

    def _coalescer(self, served: ServedVersion, level: int) -> Coalescer:
        key = (served.model, level)
        found = self._coalescers.get(key)
        most = max(1, min(self._settings.coalesce_requests, served.interface.max_batch_size // 2))
        if found is None:
            if len(self._coalescers) > 10_000:  # hostile variety of levels; idle ones hold nothing
                self._coalescers.clear()
            found = self._coalescers[key] = Coalescer(
                self._log,
                served.model,
                level,
                limits=self._limits,
                max_requests=most,
                max_size_bytes=self._settings.coalesce_size_bytes,
                counts=self.counts,
            )
        found.max_requests = most
        return found

    def _cancel(self, model: str, request_id: bytes) -> None:
        async def tell_owner() -> None:
            with contextlib.suppress(CharoniaError):
                await self._log.append(keys.facts(model), [FIELD_FACT, pack_fact(RequestCancelled(request_id))])

        self._spawn(tell_owner())

    def _on_replies(self, _stream: bytes, entries: list[Entry]) -> None:
        pending = self._pending
        for entry in entries:
            try:
                records = records_of(entry.fields)
            except InvalidRecord as error:
                _log.error("dropped unreadable replies in entry %s: %s", entry.id.decode(errors="replace"), error)
                continue
            for record in records:
                try:
                    response = unpack_response(record)
                except InvalidRecord as error:
                    # its neighbours are other callers' answers
                    _log.error("dropped an unreadable reply in entry %s: %s", entry.id.decode(errors="replace"), error)
                    continue
                waiter = pending.get(response.id)
                if waiter is None or waiter.future.done():
                    self.duplicates += 1
                    continue
                waiter.future.set_result(response)

    def _on_log_state(self, up: bool) -> None:
        self._up = up
        self._unanswered.clear()

    async def _watch(self) -> None:
        """No caller waits for ever: the log may lose requests (a flush, a power cut) and a dying executor a reply."""
        before: set[bytes] = set()
        while True:
            await asyncio.sleep(_RECHECK_S)
            try:
                await self._recheck(before)
            except CharoniaError:
                self._unanswered.clear()
            except Exception:
                _log.exception("pending requests could not be checked")
            before = set(self._pending)

    async def _recheck(self, before: set[bytes]) -> None:
        """Fail requests that two looks in a row find settled or unknown, with no reply in between."""
        if not self._up:
            return
        suspects: dict[str, list[bytes]] = {}
        for request_id in before:
            waiter = self._pending.get(request_id)
            if waiter is not None and waiter.outgoing.accepted:
                suspects.setdefault(waiter.model, []).append(request_id)
        unanswered: set[bytes] = set()
        for model, ids in suspects.items():
            for at in range(0, len(ids), _RECHECK_IDS):
                part = ids[at : at + _RECHECK_IDS]
                attempts = await self._log.unsettled(model, part)
                unanswered.update(i for i, attempt in zip(part, attempts, strict=True) if attempt < 0)
        for request_id in unanswered & self._unanswered:
            waiter = self._pending.get(request_id)
            if waiter is not None and not waiter.future.done():
                waiter.future.set_exception(LogUnavailable(OUTCOME_UNKNOWN))
        self._unanswered = unanswered

    def _spawn(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
