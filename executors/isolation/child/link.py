"""The model process's end of a socket of frames, in its event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Any

from executors.backends.python.protocol.frames import Buffer, Frame, FrameReader, Kind, pack

_FULL_BYTES = 1 << 20
"""With so much unsent, those that send wait."""


class Link(asyncio.BufferedProtocol):
    """Sends frames, and calls `received` for each that comes and `ended` at the end of the stream."""

    def __init__(self, received: Callable[[Frame], None], ended: Callable[[], None]) -> None:
        self._received = received
        self._ended = ended
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    async def connect(self, connection: socket.socket) -> None:
        """Take a connected socket over."""
        connection.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def send(self, kind: Kind, call: int, content: Any, data: Iterable[Buffer] = ()) -> None:
        """Send a frame. Does nothing once the stream has ended."""
        if self._transport is not None and not self._transport.is_closing():
            for buffer in pack(kind, call, content, data):
                self._transport.write(buffer)

    @property
    def full(self) -> bool:
        """Whether `drained` would wait."""
        return not self._writable.is_set()

    async def drained(self) -> None:
        """Wait until most of what was sent is read."""
        await self._writable.wait()

    def close(self) -> None:
        """Close the socket, once all is sent."""
        if self._transport is not None:
            self._transport.close()

    # -- asyncio's calls -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(_FULL_BYTES)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self._reader.received(nbytes):
            self._received(frame)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self._ended()
