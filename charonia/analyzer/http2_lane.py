"""gRPC calls over HTTP/2 as the generator needs them: a lane has one request in flight, six lanes share a connection.

Only a client's part of RFC 9113 is here. The server is asked to keep no table of headers (RFC 7541, 4.2), so that
equal header blocks have equal meanings and are decoded once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Any, cast
from urllib.parse import unquote

from hpack import Decoder, HPACKError

from protos import grpc_service_pb2 as pb

from .http1_lane import Destination

LANES_PER_CONNECTION = 6
"""As many as perf_analyzer's client library has share one."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_HEADER_TABLE, _ENABLE_PUSH, _INITIAL_WINDOW, _MAX_FRAME = 1, 2, 4, 5
_LARGEST_WINDOW = 2**31 - 1
_LARGEST_FRAME = 1 << 20
_FIRST_WINDOW = 65_535
_FIRST_FRAME = 16_384
_FIRST_TABLE = 4096
_NO_TABLE = b"\x20"
"""Begins the next header block after a server has asked for a smaller table (RFC 7541, 4.2); none is used here."""
_LAST_STREAM = 2**31 - 1
_TOP_UP_BYTES = 1 << 29
_BLOCKS_KEPT = 1024
_FINAL = "triton_final_response"
_FRAME_HEAD = Struct(">HBBBI")
_SETTING = Struct(">HI")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    length = len(payload)
    return _FRAME_HEAD.pack(length >> 8, length & 255, kind, flags, stream) + payload


class Http2Connection(asyncio.Protocol):
    """A connection and the streams on it. Raises `OSError` from `open`."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._transport: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self._streams: dict[int, Http2Lane] = {}
        self._reset()

    def _reset(self) -> None:
        self._next_stream = 1
        self._block_start = b""
        self._pieces: list[bytes] = []
        self._missing_bytes = 0
        self._counted: tuple[int, int, int] | None = None
        self._blocks: dict[bytes, dict[str, str]] = {}
        self._headers: tuple[int, int, bytearray] | None = None
        self._max_frame, self._first_window = _FIRST_FRAME, _FIRST_WINDOW
        self._window = _FIRST_WINDOW
        self._received = 0
        self._held: deque[tuple[Http2Lane, memoryview]] = deque()
        self._corked: list[bytes] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def open(self) -> None:
        """Connects unless that is done; callers at the same time share the attempt."""
        if self._transport is not None:
            return
        if self._opening is None or self._opening.done():
            self._reset()
            self._opening = asyncio.ensure_future(self._destination.connect(self))
        await asyncio.shield(self._opening)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        wanted = (
            (_HEADER_TABLE, 0),
            (_ENABLE_PUSH, 0),
            (_INITIAL_WINDOW, _LARGEST_WINDOW),
            (_MAX_FRAME, _LARGEST_FRAME),
        )
        settings = b"".join(_SETTING.pack(name, value) for name, value in wanted)
        window = (_LARGEST_WINDOW - _FIRST_WINDOW).to_bytes(4, "big")
        self._transport.write(_PREFACE + frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW, 0, 0, window))

    # -- sending -------------------------------------------------------------------------------------------------------

    def begin(self, lane: Http2Lane, header_block: bytes, message: bytes, *, ends: bool) -> None:
        """Opens a stream for a lane and sends its first message, the only one if the stream `ends` with it."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        lane.stream, lane.window, lane.ends = stream, self._first_window, ends
        self._streams[stream] = lane
        if self._block_start:
            header_block, self._block_start = self._block_start + header_block, b""
        head = frame(_HEADERS, _END_HEADERS, stream, header_block)
        if len(message) <= min(self._max_frame, self._window, lane.window) and not self._held:
            self._window -= len(message)
            lane.window -= len(message)
            self._write(head + frame(_DATA, _END_STREAM if ends else 0, stream, message))
        else:
            self._write(head)
            self.send(lane, message)

    def send(self, lane: Http2Lane, message: bytes) -> None:
        """Sends a message on a lane's stream, as far as the server's windows allow; the rest when they do."""
        self._held.append((lane, memoryview(message)))
        self._flush()

    def _flush(self) -> None:
        for _ in range(len(self._held)):
            lane, rest = self._held.popleft()
            while len(rest) and lane.stream and self._transport is not None:
                size = min(len(rest), self._max_frame, self._window, lane.window)
                if size <= 0:
                    break
                self._window -= size
                lane.window -= size
                last = lane.ends and size == len(rest)
                self._write(frame(_DATA, _END_STREAM if last else 0, lane.stream, bytes(rest[:size])))
                rest = rest[size:]
            if len(rest) and lane.stream:
                self._held.append((lane, rest))

    def cancel(self, lane: Http2Lane) -> None:
        """Ends a lane's stream."""
        if lane.stream and self._streams.pop(lane.stream, None) is not None:
            self._write(frame(_RESET, 0, lane.stream, (8).to_bytes(4, "big")))
        lane.stream = 0

    def close(self) -> None:
        """Closes it. Streams end with their connection: the next one counts them from 1 again."""
        for lane in self._streams.values():
            lane.stream = 0
        self._streams.clear()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # -- receiving -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Reads frames. What they make lanes send is written at once: several answers often come together."""
        now_ns = time.perf_counter_ns()
        self._corked = []
        self._read_frames(data, now_ns)
        written, self._corked = self._corked, None
        if written and self._transport is not None:
            self._transport.write(b"".join(written))

    def _read_frames(self, data: bytes, now_ns: int) -> None:
        start = 0
        if self._missing_bytes:
            self._missing_bytes -= len(data)
            if self._counted is None:
                self._pieces.append(data)
            if self._missing_bytes > 0:  # joining once per frame keeps frames of a megabyte linear
                return
            if self._counted is None:
                data = b"".join(self._pieces)
                self._pieces.clear()
            else:
                start = len(data) + self._missing_bytes
                flags, stream, length = self._counted
                self._counted = None
                self._take_data(flags, stream, length, b"", now_ns)
            self._missing_bytes = 0
        at, end, after = start, len(data), start + _FRAME_HEAD.size
        while after <= end:
            high, low, kind, flags, stream = _FRAME_HEAD.unpack_from(data, at)
            stream &= _LAST_STREAM
            length = high << 8 | low
            after += length
            counted = kind == _DATA and self._is_counted(stream)
            if after > end:
                if counted:
                    self._counted, self._missing_bytes = (flags, stream, length), after - end
                    return
                break
            if counted:
                self._take_data(flags, stream, length, b"", now_ns)
            else:
                self._take(kind, flags, stream, data[at + _FRAME_HEAD.size : after], now_ns)
            if self._transport is None:
                return
            at, after = after, after + _FRAME_HEAD.size
        if at < end:
            self._pieces.append(data[at:])
            self._missing_bytes = after - end

    def _is_counted(self, stream: int) -> bool:
        """Whether a stream's data are only counted: a call has one message, whose status is in the trailers."""
        lane = self._streams.get(stream)
        return lane is None or not lane.streaming

    def _take(self, kind: int, flags: int, stream: int, payload: bytes, now_ns: int) -> None:
        if kind == _DATA:
            self._take_data(flags, stream, len(payload), payload, now_ns)
        elif kind in (_HEADERS, _CONTINUATION):
            self._take_headers(kind, flags, stream, payload)
        elif kind == _WINDOW:
            added = int.from_bytes(payload, "big") & _LARGEST_WINDOW
            if not stream:
                self._window += added
            elif stream in self._streams:
                self._streams[stream].window += added
            self._flush()
        elif kind == _SETTINGS and not flags & _ACK:
            self._take_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._write(frame(_PING, _ACK, 0, payload))
        elif kind == _RESET:
            lane = self._streams.pop(stream, None)
            if lane is not None:
                lane.ended(f"the stream was reset with code {int.from_bytes(payload, 'big')}")
        elif kind == _GOAWAY:
            self._lose(f"the server is going away: {payload[8:].decode(errors='replace')}".rstrip(": "))

    def _take_data(self, flags: int, stream: int, length: int, payload: bytes, now_ns: int) -> None:
        """A DATA frame of `length` bytes; `payload` is empty where they are only counted."""
        self._received += length
        if self._received >= _TOP_UP_BYTES:
            self._write(frame(_WINDOW, 0, 0, self._received.to_bytes(4, "big")))
            self._received = 0
        lane = self._streams.get(stream)
        if lane is None:
            return
        lane.received += length
        if lane.received >= _TOP_UP_BYTES:
            self._write(frame(_WINDOW, 0, stream, lane.received.to_bytes(4, "big")))
            lane.received = 0
        lane.took(payload[1 : len(payload) - payload[0]] if payload and flags & _PADDED else payload, now_ns)
        if flags & _END_STREAM and self._streams.pop(stream, None) is not None:
            lane.ended("the stream ended without a status")

    def _take_headers(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _HEADERS:
            if flags & _PADDED:
                payload = payload[1 : len(payload) - payload[0]]
            if flags & _PRIORITY:
                payload = payload[5:]
            self._headers = (stream, flags, bytearray(payload))
        elif self._headers is not None:
            self._headers[2].extend(payload)
        if not flags & _END_HEADERS or self._headers is None:
            return
        stream, first_flags, block = self._headers
        self._headers = None
        fields = self._decoded(bytes(block))
        if fields is None:
            self._lose("headers that cannot be read")
            return
        if first_flags & _END_STREAM and (lane := self._streams.pop(stream, None)) is not None:
            lane.ended(_fault(fields))

    def _decoded(self, block: bytes) -> dict[str, str] | None:
        fields = self._blocks.get(block)
        if fields is None:
            decoder = Decoder()
            decoder.header_table_size = 0
            decoder.max_allowed_table_size = 0
            try:
                fields = {str(name): str(value) for name, value in decoder.decode(block)}
            except HPACKError:
                return None
            if len(self._blocks) >= _BLOCKS_KEPT:
                self._blocks.clear()
            self._blocks[block] = fields
        return fields

    def _take_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload) - 5, 6):
            name, value = _SETTING.unpack_from(payload, at)
            if name == _INITIAL_WINDOW:
                for lane in self._streams.values():
                    lane.window += value - self._first_window
                self._first_window = value
            elif name == _MAX_FRAME:
                self._max_frame = value
            elif name == _HEADER_TABLE and value < _FIRST_TABLE:
                self._block_start = _NO_TABLE
        self._write(frame(_SETTINGS, _ACK, 0, b""))
        self._flush()

    def _write(self, data: bytes) -> None:
        if self._corked is not None:
            self._corked.append(data)
        elif self._transport is not None:
            self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._lose(f"the connection was closed by the server{f': {exc}' if exc else ''}")

    def _lose(self, text: str) -> None:
        lanes = list(self._streams.values())
        self.close()
        for lane in lanes:
            lane.ended(text)


def _fault(fields: dict[str, str]) -> str | None:
    status = fields.get("grpc-status")
    if status == "0":
        return None
    if status is None:
        return f"HTTP {fields.get(':status', '?')} without a status of gRPC"
    return f"gRPC status {status}: {unquote(fields.get('grpc-message', ''))}"


class Http2Lane:
    """One call at a time, or one stream of calls with one request at a time.

    `on_end` is called with the lane and what went wrong, None for a right answer, `on_response` with the lane and a
    time for each response of a stream. `call` is the caller's.
    """

    def __init__(
        self, connection: Http2Connection, header_block: bytes, *, streaming: bool, decoupled: bool,
        on_end: Callable[[Any, str | None], None], on_response: Callable[[Any, int], None],
    ) -> None:  # fmt: skip
        self._connection, self._block = connection, header_block
        self.streaming, self._decoupled = streaming, decoupled
        self._on_end, self._on_response = on_end, on_response
        self._buffer = b""
        self._waits = False
        self.stream = 0
        self.window = 0
        self.ends = False
        self.received = 0
        self.call: Any = None
        self.first_ns = 0

    @property
    def is_open(self) -> bool:
        return self._connection.is_open

    async def open(self) -> None:
        await self._connection.open()

    def send(self, message: bytes) -> None:
        """Sends one request; the lane is open and has none in flight."""
        self._waits, self.first_ns = True, 0
        if self.streaming and self.stream:
            self._connection.send(self, message)
        else:
            self._buffer, self.received = b"", 0
            self._connection.begin(self, self._block, message, ends=not self.streaming)

    def close(self) -> None:
        self._waits = False
        self._connection.cancel(self)
        self._connection.close()

    def took(self, payload: bytes, now_ns: int) -> None:
        """Data of the stream came."""
        if not self.first_ns:
            self.first_ns = now_ns
        if not payload:
            return
        buffer = self._buffer + payload if self._buffer else payload
        while len(buffer) >= 5:
            after = 5 + int.from_bytes(buffer[1:5], "big")
            if len(buffer) < after:
                break
            message, buffer = buffer[5:after], buffer[after:]
            self._take_message(message, now_ns)
        self._buffer = buffer

    def _take_message(self, message: bytes, now_ns: int) -> None:
        if not self._waits:
            return
        answer = pb.ModelStreamInferResponse.FromString(message)
        if answer.error_message:
            self._waits = False
            self._on_end(self, answer.error_message)
            return
        response = answer.infer_response
        final = response.parameters[_FINAL].bool_param if _FINAL in response.parameters else not self._decoupled
        if len(response.outputs) or not final:
            self._on_response(self, now_ns)
        if final:
            self._waits = False
            self._on_end(self, None)

    def ended(self, error: str | None) -> None:
        """The stream is over: for a call that is its answer."""
        self.stream = 0
        if not self._waits:
            return
        self._waits = False
        if self.streaming and error is None:
            error = "the stream ended before the request's last response"
        self._on_end(self, error)
