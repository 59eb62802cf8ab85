"""One call on a connection: what came of it, what is to go, and its context."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from charonia.clock import monotonic_ns

from .codec.call_headers import CallHeaders
from .codec.grpc_messages import Assembler, Packed


class Owner(Protocol):
    """The calls of the stream's connection (`connection_calls.Calls`), as far as messages need them."""

    def took(self, stream: Stream) -> None: ...

    async def unpack(self, stream: Stream, message: Packed) -> bytes | None: ...

    async def send(self, stream: Stream, message: bytes) -> None: ...


class Stream:
    """The state of a call. As a context (`calling.Context`) and as the messages of a streaming method it is given to
    methods; all else is `connection_calls`'.
    """

    __slots__ = (
        "_arrived",
        "_calls",
        "assembler",
        "closed",
        "deadline_ns",
        "ended",
        "expires",
        "headers",
        "held_bytes",
        "id",
        "messages",
        "pending",
        "receive_window",
        "send_window",
        "sent",
        "started",
        "tail",
        "task",
        "uncredited",
    )

    def __init__(
        self, calls: Owner, stream_id: int, headers: CallHeaders, receive_window: int, send_window: int
    ) -> None:
        self._calls = calls
        self.id = stream_id
        self.headers = headers
        self.receive_window = receive_window
        self.send_window = send_window
        """May be negative, after the client has made its windows smaller."""
        self.uncredited = 0
        """Bytes received that the client was not given back."""
        self.held_bytes = 0
        """Bytes it was given back for, of a message that is not whole."""
        self.assembler: Assembler | None = None
        self.messages: deque[bytes | memoryview | Packed] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.pending: deque[memoryview] = deque()
        """Data that waits for windows or the transport."""
        self.tail: bytes | None = None
        """What ends the stream, once nothing is pending."""
        self.sent: asyncio.Future[None] | None = None
        """A writer waits until nothing is pending."""
        self.started = self.ended = self.closed = False
        """An answer was begun; the client has ended its side; nothing more is sent or received."""
        self.deadline_ns = 0 if headers.timeout_ns is None else monotonic_ns() + headers.timeout_ns
        self.expires: asyncio.TimerHandle | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.headers.metadata

    def time_remaining(self) -> float | None:
        return max(0.0, (self.deadline_ns - monotonic_ns()) / 1e9) if self.deadline_ns else None

    # -- messages of a streaming method -------------------------------------------------------------------------------

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes:
        while not self.messages:
            if self.ended or self.closed:
                raise StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        message = self.messages.popleft()
        if not self.messages:
            self._calls.took(self)
        if not isinstance(message, Packed):
            return bytes(message)
        unpacked = await self._calls.unpack(self, message)
        if unpacked is None:
            raise StopAsyncIteration
        return unpacked

    def arrived(self) -> None:
        """A message or the end of them is here."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        self._arrived = None

    async def write(self, data: bytes) -> None:
        """Send a message of a streaming method (`calling.Write`)."""
        await self._calls.send(self, data)
