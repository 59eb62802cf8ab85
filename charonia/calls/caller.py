"""Calls models from an executor whose models call others.

A call is checked against the model as a client's request is, enters the model's queue, and is answered in the caller's
own stream (`r:<endpoint>`). The endpoint is the process incarnation, so every process knows when it has left: then its
requests are dropped before dispatch and its stream is deleted, as a gateway's is. No caller waits for ever: lost
requests and those past their deadline end with an error.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from charonia import keys
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.clock import wall_ns
from charonia.errors import (
    DEADLINE_EXCEEDED,
    SERVER_EXITING,
    CharoniaError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    Unavailable,
    class_of_failure,
)
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import EventLog, Limits
from charonia.inference import InferenceRequest
from charonia.wire import FLAG_JOURNALLED, Lineage, ResponseRecord

from .admission import Admissions, Admitted
from .entry_packer import EntryPacker
from .payload_transfer import Payloads
from .requester import Requester
from .waiters import StreamWaiter, Visible

_log = logging.getLogger(__name__)

MAX_DEPTH = 32
"""Max depth of a call chain; more than any design needs, and it ends an infinite recursion."""

DEFAULT_LIMITS = Limits(requests=100_000, size_bytes=4 * 1024**3)
MAX_HELD_BYTES = 1024**3

_FULL = "this process holds {} bytes of its models' calls"
_DEADLINE_SLACK_S = 1.0
"""The callee's owner answers at the deadline; the caller stops waiting this long after it."""

_NO_LINEAGE = Lineage()


@dataclass(frozen=True, slots=True)
class Origin:
    """The caller context of a request: `lineage` has the requests that wait for it, `journalled` is as for that
    caller's request.
    """

    lineage: Lineage = _NO_LINEAGE
    journalled: bool = False


NOBODY = Origin()


class Caller:
    """The calls of one process; `endpoint` is its incarnation. `start` first, `close` at the end, in one event loop.

    `directory` is the process's, if it shares large payloads; another part keeps `catalog` up to date. Requests may
    hold `max_held_bytes`, unread answers half as much.
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
        self._catalog = catalog
        self.payloads = Payloads(log, directory, catalog.processes, endpoint) if directory is not None else None
        self.requester: Requester[StreamWaiter] = Requester(
            *(log, endpoint, self.payloads),
            limits=limits,
            max_size_bytes=max_held_bytes,
            max_stream_bytes=max_held_bytes,
            full=_FULL,
        )
        self._admissions = Admissions()
        self._closed = False

    @property
    def open_calls(self) -> int:
        return len(self.requester.requests)

    async def start(self) -> None:
        await self.requester.start()

    async def close(self) -> None:
        """End the open calls and delete the stream."""
        self._closed = True
        await self.requester.close(_DEADLINE_SLACK_S)

    def find(self, model: str, version: int) -> ServedVersion:
        """The version a call would use. Raises E5's `NotFound` or `Unavailable`."""
        return self._catalog.find(model, version)

    def check(self, request: InferenceRequest, served: ServedVersion) -> None:
        """Raise what `open` would raise for the request itself, before anything enters the log."""
        if self._closed:
            raise Unavailable(SERVER_EXITING)
        self._admissions.of(served).admit(request)

    async def infer(self, request: InferenceRequest, origin: Origin = NOBODY) -> ResponseRecord:
        """Call a model that answers once. Cancelling the awaiting task cancels the request.

        Raises what `open` and `StreamWaiter.next` raise.
        """
        call = self.open(request, origin)
        try:
            answer = await call.next()
        finally:
            call.cancel()
        if answer is None:
            raise InternalError(f"model '{request.model}' did not answer")
        return answer

    def open(self, request: InferenceRequest, origin: Origin = NOBODY) -> StreamWaiter:
        """Send a request. Read its answers to the end, or `cancel` it: otherwise they are held for ever.

        The `deadline_ns` and `priority` of the request are inherited from the caller's. Raises the errors that reject
        it before anything enters the log: E5's errors, admission's, `DeadlineExceeded`, `ResourceExhausted`.
        """
        if self._closed:
            raise Unavailable(SERVER_EXITING)
        served = self._catalog.find(request.model, request.version)
        if len(origin.lineage.ancestors) > MAX_DEPTH:
            raise InvalidArgument(
                f"more than {MAX_DEPTH} models wait for one another: {origin.lineage.path(served.model)}"
            )
        if 0 < request.deadline_ns <= wall_ns():
            raise DeadlineExceeded(DEADLINE_EXCEEDED)
        admission = self._admissions.of(served)
        admitted = admission.admit(request)
        level, tenant = admission.level(request.priority), origin.lineage.tenant
        requester = self.requester
        packer = requester.packer(served.model, level, keys.lane_of(tenant), tenant, journalled=origin.journalled)
        visible = Visible(repeatable=served.interface.repeatable)
        call = StreamWaiter(served.model, packer.next_id(), visible, requester.held)
        requester.add(call, admitted.meta.size_bytes)
        call.future.add_done_callback(lambda _: self._ended(call))
        requester.spawn(self._send(call, request, admitted, level, served, origin, packer))
        return call

    async def _send(
        self,
        call: StreamWaiter,
        request: InferenceRequest,
        admitted: Admitted,
        level: int,
        served: ServedVersion,
        origin: Origin,
        packer: EntryPacker,
    ) -> None:
        requester, lineage = self.requester, origin.lineage
        try:
            await requester.pack(
                *(call, request, admitted, level, served, FLAG_JOURNALLED if origin.journalled else 0),
                lineage=lineage if lineage.ancestors or lineage.tenant else None,
                tenant=lineage.tenant,
            )
            if call.has_ended:
                requester.end(call)  # to release payloads that were allocated in the meantime
                return
            if request.deadline_ns:
                left_s = (request.deadline_ns - wall_ns()) / 1e9 + _DEADLINE_SLACK_S
                late = DeadlineExceeded(DEADLINE_EXCEEDED)
                call.timer = asyncio.get_running_loop().call_later(max(0.0, left_s), call.failed, late)
            call.packer = packer
            packer.open_requests += 1
            packer.submit(call)
        except CharoniaError as error:
            call.failed(error)
        except Exception as error:
            _log.exception("a call of model '%s' could not be sent", call.model)
            call.failed(class_of_failure(error)(f"request could not be written to the log: {error}"))

    def _ended(self, call: StreamWaiter) -> None:
        if not call.ended_by_reply:
            self.requester.withdraw(call)
        self.requester.end(call)
        call.future.exception()  # retrieved, so that asyncio does not report it
