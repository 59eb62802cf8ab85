"""Calls models from a process that is no gateway: an executor whose models call others, a batcher that runs ensembles.

A request is checked against the model as a client's is, enters the model's queue, and is answered in a stream of the
caller's own (`r:<endpoint>`; the endpoint is the incarnation of the process, so that every process knows when it is
gone: then its requests are dropped before dispatch and its stream is deleted, as a gateway's are). No caller waits for
ever: what the log lost, and what was not answered by its deadline, ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from charonia import keys
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import wall_ns
from charonia.errors import (
    CharoniaError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    LogUnavailable,
    ResourceExhausted,
    Unavailable,
)
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.eventlog.port import Entry, EventLog, Limits
from charonia.facts.events import FIELD_FACT, RequestCancelled, pack_fact
from charonia.inference import InferenceRequest
from charonia.wire import FLAG_JOURNALLED, Lineage, ResponseRecord, record_fields

from .admission import Admission, Admitted
from .call import Call, HeldBytes
from .payload_transfer import Payloads
from .replies import OUTCOME_UNKNOWN, answers_in, no_longer_open, without_held
from .request_packing import request_record

_log = logging.getLogger(__name__)

DEADLINE_EXCEEDED = "request deadline exceeded"
SERVER_EXITING = "Server exiting"
EPOCH_CHANGED = "the log epoch changed while the request was in flight: its outcome is unknown"

MAX_DEPTH = 32
"""Requests that wait for one another in a row; more than any design needs, and a loop without end stops there."""

DEFAULT_LIMITS = Limits(requests=100_000, size_bytes=4 * 1024**3)
MAX_HELD_BYTES = 1024**3

_RECHECK_S = 1.0
_DEADLINE_SLACK_S = 1.0
"""The callee's owner answers at the deadline; this long after it the caller no longer waits for that."""


_NO_LINEAGE = Lineage()


@dataclass(frozen=True, slots=True)
class Origin:
    """On whose behalf a request is made: `lineage` begins with who waits for it, `journalled` as that one was."""

    lineage: Lineage = _NO_LINEAGE
    journalled: bool = False


NOBODY = Origin()


class Caller:
    """The calls of one process; `endpoint` is its incarnation. `start` first, `close` at the end, in one event loop.

    `directory` is the process's, if it shares large payloads; `catalog` is kept up to date elsewhere. Requests and
    unread answers may hold `max_held_bytes`.
    """

    def __init__(
        self,
        log: EventLog,
        catalog: Catalog,
        endpoint: str,
        *,
        directory: PayloadDirectory | None = None,
        limits: Limits = DEFAULT_LIMITS,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._log = log
        self._catalog = catalog
        self._endpoint = endpoint.encode()
        self._stream = keys.replies(endpoint)
        self.payloads = Payloads(log, directory, catalog.processes, endpoint) if directory is not None else None
        self._limits = limits
        self._max_held_bytes = max_held_bytes
        self._held = HeldBytes()
        self._open: dict[bytes, Call] = {}
        self._admissions: dict[tuple[str, int], tuple[ServedVersion, Admission]] = {}
        self._reader = log.reader()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._up = True
        self._lost: set[bytes] = set()
        self._closed = False
        self.repetitions = 0
        """Answers that no caller waited for any more."""

    @property
    def open_calls(self) -> int:
        return len(self._open)

    async def start(self) -> None:
        self._reader.start(self._on_replies, self._on_log_state)
        self._reader.add(self._stream, consume=True)
        self._watching = asyncio.create_task(self._watch(), name="calls without an answer")

    async def close(self) -> None:
        """Give up what is open, and the stream."""
        self._closed = True
        for call in list(self._open.values()):
            call.fail(Unavailable(SERVER_EXITING), unwanted=True)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_DEADLINE_SLACK_S)
        tasks = [*self._tasks, *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reader.close()
        with contextlib.suppress(CharoniaError):
            await self._log.delete_stream(self._stream)

    def begin_anew(self) -> None:
        """The log is another one: it knows none of these requests."""
        for call in list(self._open.values()):
            call.fail(LogUnavailable(EPOCH_CHANGED))

    # -- calling ------------------------------------------------------------------------------------------------------

    def find(self, model: str, version: int) -> ServedVersion:
        """The version a call would use. Raises E5's `NotFound` or `Unavailable`."""
        return self._catalog.find(model, version)

    def check(self, request: InferenceRequest, served: ServedVersion) -> None:
        """Raise what `open` would, of the request itself, before anything enters the log."""
        if self._closed:
            raise Unavailable(SERVER_EXITING)
        self._admission(served).admit(request)

    async def infer(self, request: InferenceRequest, origin: Origin = NOBODY) -> ResponseRecord:
        """Call a model that answers once. Cancelling the awaiting task cancels the request.

        Raises what `open` and `Call.next` raise.
        """
        call = self.open(request, origin)
        try:
            answer = await call.next()
        except BaseException:
            call.cancel()
            raise
        if answer is None:
            raise InternalError(f"model '{request.model}' did not answer")
        return answer

    def open(self, request: InferenceRequest, origin: Origin = NOBODY, *, version: ServedVersion | None = None) -> Call:
        """Send a request on its way; its answers come through the `Call`.

        The `deadline_ns` and `priority` of the request are those of the one it is made for. Raises what refuses it
        before anything enters the log: E5's errors, admission's, `DeadlineExceeded`, `ResourceExhausted`.
        """
        if self._closed:
            raise Unavailable(SERVER_EXITING)
        served = version or self._catalog.find(request.model, request.version)
        if len(origin.lineage.ancestors) > MAX_DEPTH:
            raise InvalidArgument(
                f"more than {MAX_DEPTH} models wait for one another: {origin.lineage.path(served.model)}"
            )
        if 0 < request.deadline_ns <= wall_ns():
            raise DeadlineExceeded(DEADLINE_EXCEEDED)
        admission = self._admission(served)
        admitted = admission.admit(request)
        size = admitted.meta.size_bytes
        if self._held.count + size > self._max_held_bytes:
            raise self._full()
        repeatable = served.interface.repeatable
        call = Call(served.model, os.urandom(16), size, self._held, self._ended, repeatable=repeatable)
        self._open[call.id] = call
        self._spawn(self._send(call, request, admitted, admission.level(request.priority), served, origin))
        return call

    def _admission(self, served: ServedVersion) -> Admission:
        key = (served.model, served.version)
        known = self._admissions.get(key)
        if known is None or known[0].content_hash != served.content_hash:
            admission = Admission(served.interface, served.version, served.content_hash)
            known = self._admissions[key] = (served, admission)
        return known[1]

    def _full(self) -> ResourceExhausted:
        return ResourceExhausted(
            f"this process holds {self._held.count} bytes of its models' calls, its bound is {self._max_held_bytes}; "
            "retry later"
        )

    async def _send(
        self,
        call: Call,
        request: InferenceRequest,
        admitted: Admitted,
        level: int,
        served: ServedVersion,
        origin: Origin,
    ) -> None:
        try:
            flags = FLAG_JOURNALLED if origin.journalled else 0
            if self.payloads is not None:
                flags |= self.payloads.flags(served)
                if call.size_bytes >= BY_REFERENCE_BYTES:
                    call.lent = await self.payloads.lend([t.data for t in request.inputs], flags, served)
            lineage = origin.lineage if origin.lineage.ancestors or origin.lineage.tenant else None
            tenant = origin.lineage.tenant
            record = request_record(
                call.id, self._endpoint, request, admitted, level, flags, call.lent, lineage, tenant=tenant
            )
            if not call.ended:
                if request.deadline_ns:
                    left_s = (request.deadline_ns - wall_ns()) / 1e9 + _DEADLINE_SLACK_S
                    call.timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._expire, call)
                await self._accept(call, record, level, origin)
        except CharoniaError as error:
            call.fail(error, unwanted=True)
        except Exception as error:
            _log.exception("a call of model '%s' could not be sent", call.model)
            call.fail(InternalError(f"request could not be written to the log: {error}"))
        finally:
            call.on_its_way = False
        if call.ended:
            await self._finish(call)

    async def _accept(self, call: Call, record: bytes, level: int, origin: Origin) -> None:
        tenant = origin.lineage.tenant
        size = len(record) if call.lent is None else len(record) + call.lent.size_bytes
        try:
            await self._log.accept(
                call.model,
                level,
                keys.lane_of(tenant),
                [(call.id, size)],
                record_fields([record]),
                self._limits,
                tenant=tenant,
                journalled=origin.journalled,
            )
        except LogUnavailable:
            call.accepted = True  # perhaps
            raise
        call.accepted = True

    def _expire(self, call: Call) -> None:
        call.fail(DeadlineExceeded(DEADLINE_EXCEEDED), unwanted=True)

    def _ended(self, call: Call) -> None:
        del self._open[call.id]
        if not call.on_its_way and (call.unwanted or call.lent is not None):
            self._spawn(self._finish(call))

    async def _finish(self, call: Call) -> None:
        """Tell the owner of a call that was given up, and release its payloads."""
        if call.unwanted and call.accepted:
            with contextlib.suppress(CharoniaError):  # its deadline, or our end, is what remains
                await self._log.append(keys.facts(call.model), [FIELD_FACT, pack_fact(RequestCancelled(call.id))])
        if call.lent is not None and self.payloads is not None:
            await self.payloads.end(call.lent)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _on_replies(self, _stream: bytes, entries: list[Entry]) -> None:
        take = self.payloads.take if self.payloads is not None else None
        for answer, size in answers_in(entries, take):
            self._on_answer(answer, size)

    def _on_answer(self, answer: ResponseRecord, size: int) -> None:
        call = self._open.get(answer.id)
        if call is None or not call.answered(answer, size):
            self.repetitions += 1
        elif not call.ended and self._held.count > self._max_held_bytes:
            call.fail(self._full(), unwanted=True)

    # -- lost answers -------------------------------------------------------------------------------------------------

    def _on_log_state(self, up: bool) -> None:
        self._up = up
        self._lost.clear()

    async def _watch(self) -> None:
        before: set[bytes] = set()
        while True:
            await asyncio.sleep(_RECHECK_S)
            try:
                await self._recheck(before)
            except CharoniaError:
                self._lost.clear()
            except Exception:
                _log.exception("open calls could not be checked")
            before = set(self._open)

    async def _recheck(self, before: set[bytes]) -> None:
        """End calls that the log does not know any more, when two looks in a row find no answer in between."""
        if not self._up:
            return
        asked: dict[str, list[bytes]] = {}
        for call_id in before:
            call = self._open.get(call_id)
            if call is not None and call.accepted:
                asked.setdefault(call.model, []).append(call_id)
        lost = await no_longer_open(self._log, asked)
        again = lost & self._lost
        for call_id in await without_held(self._log, again, asked) if again else again:
            call = self._open.get(call_id)
            if call is not None:
                call.fail(LogUnavailable(OUTCOME_UNKNOWN))
        self._lost = lost
