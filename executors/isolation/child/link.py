"""The model process's end of a socket of frames, in its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgpack

from charonia.backend import ModelResponse
from executors.backends.python.frame_content import whole_content
from executors.backends.python.protocol.frames import Buffer, Frame, FrameReader, Kind, pack, pack_described

_TOGETHER_BYTES = 4096
"""Responses of at most this size share a frame: larger ones are not to be copied once more."""
_FULL_BYTES = 1 << 20
"""With so much unsent, those that send wait."""


class Link(asyncio.BufferedProtocol):
    """Sends frames, and calls `received` for each that comes and `ended` at the end of the stream."""

    def __init__(self, received: Callable[[Frame], None], ended: Callable[[], None]) -> None:
        self._received = received
        self._ended = ended
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._held: list[Buffer] | None = None
        """Frames of a context of `hold`; None outside of one."""
        self._responses: list[Any] = []
        """Responses of that context that share a frame, after those frames."""
        self._writable = asyncio.Event()
        self._writable.set()

    async def connect(self, connection: socket.socket) -> None:
        """Take a connected socket over."""
        connection.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def send(self, kind: Kind, call: int, content: Any, data: Iterable[Buffer] = ()) -> None:
        """Send a frame. Does nothing once the stream has ended."""
        self.send_packed(kind, call, msgpack.packb(content), data)

    def send_packed(self, kind: Kind, call: int, meta: bytes, data: Iterable[Buffer] = ()) -> None:
        """The same with a content that is packed already."""
        if self._transport is None or self._transport.is_closing():
            return
        buffers = pack_described(kind, call, meta, data)
        self._frame_responses()
        if self._held is not None and len(buffers) == 1:  # a copy: larger ones are views of what may change
            self._held += buffers
            return
        self._write_held()
        for buffer in buffers:
            self._transport.write(buffer)

    def respond(self, call: int, index: int, response: ModelResponse | None, *, final: bool) -> bool:
        """Send a response in one frame with the others of a context of `hold`, in order. False outside of one, and for
        a response that is large or has parameters: that one has to be sent alone.
        """
        if self._held is None or self._transport is None or self._transport.is_closing():
            return False
        if response is None:
            self._responses.append((call, index, final, None))
            return True
        size = len(response.progress)
        for tensor in response.outputs:
            size += len(tensor.data)
        if size > _TOGETHER_BYTES or response.parameters:
            return False
        self._responses.append((call, index, final, whole_content(response)))
        return True

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Send small frames at the end of the context, with one write: the executor wakes up once for all of them."""
        if self._held is not None:
            yield
            return
        self._held = []
        try:
            yield
        finally:
            self._frame_responses()
            self._write_held()
            self._held = None

    def _frame_responses(self) -> None:
        """Make one frame of the responses so far, behind the frames that are held."""
        if self._responses and self._held is not None:
            responses, self._responses = self._responses, []
            self._held += pack(Kind.RESPONSES, 0, responses)

    def _write_held(self) -> None:
        if self._held:
            held, self._held = self._held, []
            assert self._transport is not None
            self._transport.write(b"".join(held))

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
