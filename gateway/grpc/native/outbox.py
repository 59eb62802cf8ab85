"""The streams of a client, and the frames to it: one write per tick of the loop, data within the client's windows.

Flow control is RFC 9113, section 5.2.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from struct import Struct
from typing import Protocol

from charonia.clock import monotonic_ns
from charonia.tensors import Buffer
from gateway.grpc.calling import Reply
from gateway.grpc.statuses import Status

from .codec.call_headers import CallHeaders, answer_block, status_block
from .codec.grpc_messages import PREFIX_BYTES, Assembler, Packed
from .codec.http2_frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADERS,
    LARGEST_WINDOW,
    ConnectionFault,
    ErrorCode,
    StreamFault,
)

ANSWER = answer_block()
DONE = status_block(Status.OK, "", alone=False)
_BEFORE = Struct(f">HBBBL{len(ANSWER)}sHBBBLBL")
_AFTER = Struct(f">HBBBL{len(DONE)}s")
_MAX_AT_ONCE_BYTES = 1 << 20
_NOT_JOINED_BYTES = 1 << 13
"""Larger parts are passed to the transport unjoined, with the others in one system call."""
ENDS = END_STREAM | END_HEADERS


ENDED_WELL, ENDED_SILENTLY, REFUSED = 0, 1, 2
"""How a call ended: with a message and OK, with OK alone, with another status."""


class Owner(Protocol):
    """The calls of the stream's connection (`connection_calls.Calls`), as its messages use them."""

    def took(self, stream: Stream) -> None: ...

    async def unpack(self, stream: Stream, message: Packed) -> bytes | memoryview | None: ...

    async def send(self, stream: Stream, message: Reply) -> None: ...


class Stream:
    """The state of a call. Methods get it as `calling.Context`, and as the messages of a streaming method."""

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
        "outcome",
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
        """Negative after the client has reduced its windows."""
        self.uncredited = 0
        """Received bytes for which the client has no credit yet."""
        self.held_bytes = 0
        """Bytes of an incomplete message for which the client has got credit."""
        self.assembler: Assembler | None = None
        self.messages: deque[bytes | memoryview | Packed] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.pending: deque[memoryview] = deque()
        """Data that waits for windows or the transport."""
        self.tail: bytes | None = None
        """The last frame, sent when nothing is pending."""
        self.sent: asyncio.Future[None] | None = None
        """Set when nothing is pending."""
        self.started = self.ended = self.closed = False
        """The answer has begun; the client has ended its side; nothing more is sent or received."""
        self.outcome = ENDED_WELL
        self.deadline_ns = 0 if headers.timeout_ns is None else monotonic_ns() + headers.timeout_ns
        self.expires: asyncio.TimerHandle | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.headers.metadata

    def time_remaining(self) -> float | None:
        return max(0.0, (self.deadline_ns - monotonic_ns()) / 1e9) if self.deadline_ns else None

    # -- messages of a streaming method -------------------------------------------------------------------------------

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes | memoryview:
        while not self.messages:
            if self.ended or self.closed:
                raise StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        message = self.messages.popleft()
        if not self.messages:
            self._calls.took(self)
        if not isinstance(message, Packed):
            return message
        unpacked = await self._calls.unpack(self, message)
        if unpacked is None:
            raise StopAsyncIteration
        return unpacked

    def arrived(self) -> None:
        """A message has arrived, or the last one has."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        self._arrived = None

    def write(self, data: Reply) -> Awaitable[None]:
        """Send a message of a streaming method (`calling.Write`)."""
        return self._calls.send(self, data)


class Windowed(Protocol):
    """A call with a send window, ordinary or in the lane."""

    id: int
    send_window: int


class Outbox:
    """Frames to one client. `on_closed` is called with each stream whose last frame is passed to the transport."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.sent_data = False
        """Headers or data were sent since the client's last ping."""
        self.on_closed: Callable[[Stream], None] = lambda _: None
        self._transport: asyncio.Transport | None = None
        self._frames: list[bytes | memoryview] = []
        self._bytes = 0
        self._scheduled = False
        self._large = False
        """There is a large part among the frames."""
        self.is_paused = False
        self._waiting: dict[Stream, None] = {}
        """Streams that wait for the connection's window or the transport, the longest waiting first. Those that wait
        for their own window are not included, so that a change of the connection's costs little.
        """
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.frame_bytes = DEFAULT_FRAME_BYTES
        """The largest frame that the client accepts."""
        self.blocked_bytes = 0

    def connect(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def disconnect(self) -> None:
        """Nothing can be sent any more."""
        self._transport = None
        self._frames.clear()

    # -- frames -------------------------------------------------------------------------------------------------------

    def put(self, frame: bytes) -> None:
        """Send a frame that is not under flow control."""
        self._frames.append(frame)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._scheduled = False
        if self._transport is not None and self._frames:
            if self._large:
                self._large = False
                self._transport.writelines(self._frames)
            else:
                self._transport.write(b"".join(self._frames))
        self._frames.clear()
        self._bytes = 0

    # -- answers ------------------------------------------------------------------------------------------------------

    def answer(self, stream: Stream, reply: bytes) -> bool:
        """Send a whole answer of one uncompressed message; False if windows or the transport do not allow it now."""
        size = len(reply) + PREFIX_BYTES
        if size > stream.send_window or size > self.window or size > self.frame_bytes or self.is_paused:
            return False
        self.window -= size
        self.sent_data = True
        number = stream.id
        self._frames += (
            _BEFORE.pack(
                *(len(ANSWER) >> 8, len(ANSWER) & 0xFF, HEADERS, END_HEADERS, number, ANSWER),
                *(size >> 8, size & 0xFF, DATA, 0, number, 0, len(reply)),
            ),
            reply,
            _AFTER.pack(len(DONE) >> 8, len(DONE) & 0xFF, HEADERS, ENDS, number, DONE),
        )
        self._schedule()
        self.on_closed(stream)
        return True

    def put_answer(self, packed: bytes, size: int) -> None:
        """Add a whole answer as frames, `size` bytes of them within the windows; call `answered` afterwards."""
        self.window -= size
        self._frames.append(packed)

    def answered(self, *, at_once: bool) -> None:
        """Send the answers that were added, now or with this tick."""
        self.sent_data = True
        if at_once:
            self.flush()
        else:
            self._schedule()

    def data(self, stream: Stream, parts: Iterable[Buffer]) -> None:
        """Send data of a stream within the windows."""
        for part in parts:
            if part:
                stream.pending.append(memoryview(part))
                self.blocked_bytes += len(part)
        self._pump(stream)

    def end(self, stream: Stream, tail: bytes) -> None:
        """Send the last frame of a stream once nothing is pending."""
        stream.tail = tail
        self._pump(stream)

    def drop(self, stream: Stream) -> None:
        """Drop the pending data of a stream that was reset."""
        self.blocked_bytes -= sum(map(len, stream.pending))
        stream.pending.clear()
        self._waiting.pop(stream, None)
        _tell(stream)

    def _pump(self, stream: Stream) -> None:
        before = stream.send_window
        while stream.pending and not self.is_paused:
            size = min(stream.send_window, self.window, self.frame_bytes, _MAX_AT_ONCE_BYTES)
            if size <= 0:
                break
            if len(stream.pending[0]) > 2 * size:
                size = self._take_many(stream, size)
            else:
                size = self._take(stream, size)
            stream.send_window -= size
            self.window -= size
            self.blocked_bytes -= size
            self._bytes += size
            if self._bytes >= _MAX_AT_ONCE_BYTES:
                self.flush()  # if the transport is full it pauses the outbox
        if stream.pending and stream.send_window <= 0:
            self._waiting.pop(stream, None)
        elif stream.pending or (self.is_paused and stream.tail is None):
            if stream.send_window < before:
                self._waiting.pop(stream, None)  # to the end of the line
            self._waiting[stream] = None
        else:
            self._waiting.pop(stream, None)
            if stream.tail is not None:
                self.sent_data = True
                self.put(stream.tail)
                self.on_closed(stream)
            _tell(stream)

    def _take_many(self, stream: Stream, each: int) -> int:
        """Take as many frames of `each` bytes from one large part as the windows allow and one write should have."""
        self.sent_data = True
        part = stream.pending[0]
        count = min(len(part), stream.send_window, self.window, _MAX_AT_ONCE_BYTES) // each
        head = HEAD.pack(each >> 8, each & 0xFF, DATA, 0, stream.id)
        size = count * each
        frames = self._frames
        for at in range(0, size, each):
            frames += (head, part[at : at + each])
        stream.pending[0] = part[size:]
        if not stream.pending[0]:
            stream.pending.popleft()
        self._large = self._large or each >= _NOT_JOINED_BYTES
        self._schedule()
        return size

    def _take(self, stream: Stream, most: int) -> int:
        """Take one frame of at most `most` bytes of the pending data."""
        self.sent_data = True  # with each frame: clients measure the connection while they receive
        pending = stream.pending
        at = len(self._frames)
        size = 0
        while pending and size < most:
            part = pending[0]
            if len(part) <= most - size:
                pending.popleft()
            else:
                pending[0] = part[most - size :]
                part = part[: most - size]
            self._frames.append(part)
            size += len(part)
            if len(part) >= _NOT_JOINED_BYTES:
                self._large = True
        self._frames.insert(at, HEAD.pack(size >> 8, size & 0xFF, DATA, 0, stream.id))
        self._schedule()
        return size

    # -- room ---------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """The transport is full."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        for stream in list(self._waiting):
            if self.is_paused:
                break
            self._pump(stream)

    def widen(self, size: int) -> None:
        """Enlarge the connection's window. Raises `ConnectionFault`."""
        self.window += size
        if self.window > LARGEST_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection is too large")
        while self._waiting and self.window > 0 and not self.is_paused:
            self._pump(next(iter(self._waiting)))

    def widen_stream(self, stream: Windowed, size: int) -> None:
        """Enlarge a stream's window. Raises `StreamFault`."""
        stream.send_window += size
        if stream.send_window > LARGEST_WINDOW:
            raise StreamFault(stream.id, ErrorCode.FLOW_CONTROL_ERROR, "the window of the stream is too large")
        if isinstance(stream, Stream) and stream.pending:
            self._pump(stream)

    def resize(self, streams: Iterable[Windowed], window: int) -> None:
        """Apply the client's new initial window, to open streams too. Raises `ConnectionFault`."""
        change, self.initial_window = window - self.initial_window, window
        if not change:
            return
        waiting = []
        for stream in streams:
            stream.send_window += change
            if stream.send_window > LARGEST_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream is too large")
            if isinstance(stream, Stream) and stream.pending:
                waiting.append(stream)
        for stream in waiting:
            self._pump(stream)


def _tell(stream: Stream) -> None:
    if stream.sent is not None and not stream.sent.done():
        stream.sent.set_result(None)
    stream.sent = None
