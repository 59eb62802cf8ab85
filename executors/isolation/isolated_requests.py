"""Instances over requests in another process: a link of frames, and the shapes that an instance may have there.

The frames are the python backend's, so `PythonInstance` makes the calls and answers those of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from charonia.backend import InstanceDied, ModelRequest, ModelResponse, ResponseStream
from executors.backends.python.frame_calls import FrameCalls
from executors.backends.python.protocol.frames import Buffer, Frame, FrameError, Kind
from executors.backends.python.protocol.shared_slots import ExecutorSlots
from executors.backends.python.python_instance import PythonInstance

from .forms import MAX_FRAME_BYTES
from .process_handle import ModelProcess

_END_S = 1.0


class InstanceLink(FrameCalls):
    """The socket of one instance in a process that it shares with others."""

    def __init__(self, process: ModelProcess, name: str, slots: ExecutorSlots | None) -> None:
        super().__init__(name, slots)
        self.streams = False
        """Whether its requests go to `execute_stream`."""
        self._process = process
        self._allowed: set[int] = set()
        """The output slots that the process may fill."""
        self._stored: memoryview | None = None
        self._closing = False
        process.on_end.add(self._process_ended)
        process.busy[self] = lambda: bool(self._streams)

    async def connect(self, connection: socket.socket) -> None:
        """Take a connected socket over."""
        await self._connect(connection, MAX_FRAME_BYTES)

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_lines(self) -> str:
        return self._process.last_lines()

    def kill(self, reason: str) -> None:
        self._process.kill_for(self, reason)

    def begin(
        self,
        kind: Kind,
        meta: bytes,
        data: Iterable[Buffer] = (),
        *,
        ceiling_s: float = 0,
        ceiling: str = "",
        replied: Callable[[], None] | None = None,
    ) -> tuple[int, asyncio.Future[Frame]]:
        """As of `FrameCalls`, with the data of an EXECUTE in a slot, if it is large."""
        if kind is Kind.EXECUTE and self.dead is None:
            columns = list(data)
            data = columns
            self._allow_slots()
            taken = self.slots.put(columns) if self.slots is not None else None
            if taken is not None:
                self.answer(Kind.STORED, 0, [*taken, [len(column) for column in columns]])
                data = ()
            kind = Kind.EXECUTE_STREAM if self.streams else kind
        return super().begin(kind, meta, data, ceiling_s=ceiling_s, ceiling=ceiling, replied=replied)

    def frame_received(self, frame: Frame) -> None:
        if frame.kind is Kind.STORED:
            index, size = frame.content()
            if index not in self._allowed or self.slots is None:
                raise FrameError("data is in a slot that was not meant for it")
            self._allowed.discard(index)
            (self._stored,) = self.slots.take(index, [size])
            self.slots.drop(index)
            return
        stored, self._stored = self._stored, None
        super().frame_received(frame if stored is None else replace(frame, data=stored))

    async def close(self, finalize_timeout_s: float) -> None:
        """Close the instance; its process goes on. One that takes longer has its process ended."""
        if self._closing or self.dead is not None:
            return
        self._closing = True
        timer = self._loop.call_later(finalize_timeout_s, self.kill, f"it did not close in {finalize_timeout_s:g} s")
        try:
            with contextlib.suppress(InstanceDied):
                await self.call(Kind.FINALIZE, None)
        finally:
            timer.cancel()
            self._process.on_end.discard(self._process_ended)
            self._process.busy.pop(self, None)
            self._transport.close()

    def connection_ended(self) -> None:
        if not self._closing and self.dead is None:
            self._loop.call_later(_END_S, self.kill, "it closed its connection")

    def _print_tracebacks(self, reason: str) -> None:
        self._process.blame(self, reason)

    def _withdraw_reason(self) -> None:
        self._process.excuse(self)

    def _process_ended(self) -> None:
        self._end(self._process.death_of(self))
        self._transport.abort()

    def _allow_slots(self) -> None:
        while self.slots is not None and (found := self.slots.expect()) is not None:
            self._allowed.add(found[0])
            self.answer(Kind.SLOT, 0, found)


class _Isolated:
    """What all shapes have."""

    def __init__(self, link: InstanceLink, instance: PythonInstance, *, reports_responses: bool) -> None:
        self._link = link
        self._instance = instance
        self.reports_responses = reports_responses

    @property
    def pid(self) -> int:
        """The id of the model's process."""
        return self._link.pid

    @property
    def checks_health(self) -> bool:
        """See `SelfCheckingInstance`."""
        return self._instance.checks_health

    async def check_health(self) -> bool:
        """See `SelfCheckingInstance`."""
        return await self._instance.check_health()

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        """See `CancellableInstance`."""
        self._instance.cancel_requests(requests)

    async def close_instance(self) -> None:
        """Close the instance. A second call does nothing."""
        await self._instance.close_instance()


class IsolatedRequests(_Isolated):
    """A `RequestInstance`."""

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        """See `RequestInstance`."""
        self._link.streams = False
        return await self._instance.execute_requests(requests)


class IsolatedStreams(_Isolated):
    """A `StreamingInstance` that heeds windows: the process waits in its name."""

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        """See `StreamingInstance`."""
        self._link.streams = True
        await self._instance.execute_stream(requests, responses)

    def allow_responses(self, request: ModelRequest, count: int) -> None:
        """See `WindowedInstance`."""
        self._instance.allow_responses(request, count)


class IsolatedEither(IsolatedRequests, IsolatedStreams):
    """Both, as the model's transaction policy wants it."""

    answers_later = False
