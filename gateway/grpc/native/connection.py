"""One HTTP/2 connection: frames to calls, calls' ends to frames (RFC 9113; gRPC over HTTP/2, G17-G31).

The state machine of a stream is in three flags of `Stream`. Whatever the peer does wrong ends its stream or its
connection with the code the RFC has for it; what is merely too much of it ends the connection (`limits`, faults H18).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from gateway.grpc.calling import Streaming, Unary
from gateway.grpc.errors import INTERNAL, Refusal, Status

from .call_headers import MOST_HEADER_BYTES, CallHeaders, HeaderReader, answer_block, http_block, status_block
from .frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_ID,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFault,
    ErrorCode,
    StreamFault,
    frame,
    goaway,
    read_settings,
    read_word,
    rst_stream,
    settings,
    window_update,
    without_padding,
)
from .life import Life
from .limits import MOST_BLOCKED_BYTES, MOST_STREAMS, Patience, PingStrikes
from .messages import PREFIX, PREFIX_BYTES, Assembler, MessageFault, framed
from .outbox import Outbox
from .serving import Serving
from .stream import Stream

_log = logging.getLogger(__name__)

STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 1 << 24
FRAME_BYTES = 1 << 17
"""The longest frame that is taken."""

_MOST_WRITTEN_BYTES = 1 << 20
"""With so much unsent a client is not read from: it does not read either."""
_MOST_CONTINUATIONS = 64
_EXPIRY_GRACE_S = 0.05
"""The gateway answers what is late by itself, and says more."""
_CLOSING_S = 20.0
_TOLD_BYTES = 16 * 1024

_OPENING = settings(
    {
        HEADER_TABLE_SIZE: 0,
        MAX_CONCURRENT_STREAMS: MOST_STREAMS,
        INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        MAX_FRAME_SIZE: FRAME_BYTES,
        MAX_HEADER_LIST_SIZE: _TOLD_BYTES,
    }
) + window_update(0, CONNECTION_WINDOW - 65_535)


class Connection(asyncio.Protocol):
    """One client's. `serving` is what all of a front's connections share."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._loop = asyncio.get_running_loop()
        self._reader = HeaderReader(serving.known_headers)
        self._out = Outbox(self._loop, self._closed)
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._preface_left = PREFACE
        self._settled = False
        """The client's first settings came."""
        self.streams: dict[int, Stream] = {}
        self._last_id = 0
        self._window = CONNECTION_WINDOW
        self._uncredited = 0
        self._block: tuple[int, bool, bytearray, int] | None = None
        """Headers whose continuation is awaited: stream, whether they end it, what there is of them, in how many."""
        self._patience = Patience(self._loop.time())
        self._strikes = PingStrikes(serving.keep_alive)
        self._leaving = False
        self._life = Life(self, serving.keep_alive)

    @property
    def is_open(self) -> bool:
        """Whether the client has said that it speaks HTTP/2."""
        return self._settled

    # -- transport ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._transport.close()  # as gRPC's own servers: it would be another protocol
            return
        self._transport.set_write_buffer_limits(high=_MOST_WRITTEN_BYTES)
        self._out.connect(self._transport)
        self._serving.connections.add(self)
        self._out.put(_OPENING)
        self._life.begin()

    def connection_lost(self, _exc: Exception | None) -> None:
        serving = self._serving
        serving.connections.discard(self)
        if not serving.connections and serving.left is not None:
            serving.left.set()
        self._out.disconnect()
        self._life.end()
        self._transport = None
        for stream in list(self.streams.values()):
            self._abandon(stream)

    def pause_writing(self) -> None:
        self._out.pause()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._out.resume()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._life.heard = True
        if self._rest:
            data = self._rest + data
            self._rest = b""
        try:
            at = self._read_preface(data) if self._preface_left else 0
            self._read(data, at)
        except ConnectionFault as fault:
            self.give_up(fault.code, str(fault))
        except Exception:
            _log.exception("a connection failed")
            self.give_up(ErrorCode.INTERNAL_ERROR, INTERNAL)

    def eof_received(self) -> bool:
        return False

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read_preface(self, data: bytes) -> int:
        wanted = self._preface_left
        come = data[: len(wanted)]
        if not wanted.startswith(come):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "expected the preface of HTTP/2, which gRPC needs")
        self._preface_left = wanted[len(come) :]
        return len(come)

    def _read(self, data: bytes, at: int) -> None:
        size = len(data)
        while size - at >= HEAD_BYTES:
            high, low, kind, flags, number = HEAD.unpack_from(data, at)
            length = high << 8 | low
            if length > FRAME_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes, expected {FRAME_BYTES}")
            start = at + HEAD_BYTES
            at = start + length
            if at > size:
                self._rest = data[start - HEAD_BYTES :]
                return
            number &= LARGEST_ID
            try:
                self._frame(kind, flags, number, data, start, at)
            except StreamFault as fault:
                self._reset(fault)
            if self._transport is None or self._transport.is_closing():
                return
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        if self._block is not None and (kind != CONTINUATION or number != self._block[0]):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "expected the continuation of headers")
        if not self._settled and kind != SETTINGS:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "expected the client's settings first")
        if kind == HEADERS:
            payload = data[start:end]
            if flags & ~(END_STREAM | END_HEADERS):
                payload = without_padding(flags, payload, "HEADERS")
            if flags & END_HEADERS:
                self._headers(number, bool(flags & END_STREAM), payload)
            else:
                self._block = (number, bool(flags & END_STREAM), bytearray(payload), 0)
        elif kind == DATA:
            self._data(flags, number, data, start, end)
        elif kind == WINDOW_UPDATE:
            self._widen(number, read_word(data[start:end], "WINDOW_UPDATE") & LARGEST_ID)
        elif kind == CONTINUATION:
            self._continue(flags, number, data[start:end])
        else:
            self._rare(kind, flags, number, data[start:end])

    def _spend(self, cost: int) -> None:
        if not self._patience.spend(cost, self._loop.time()):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring no call further")

    def _rare(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == RST_STREAM:
            self._spend(Patience.RESET)
            self._on_reset(number, read_word(payload, "RST_STREAM"))
            return
        self._spend(Patience.SETTINGS if kind == SETTINGS else Patience.FRAME)
        if kind in (SETTINGS, PING, GOAWAY) and number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"frame of type {kind} on stream {number}, expected 0")
        if kind == SETTINGS:
            self._on_settings(flags, payload)
        elif kind == PING:
            self._on_ping(flags, payload)
        elif kind == GOAWAY:
            if len(payload) < 8:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        elif kind == PRIORITY:
            if not number:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
            if len(payload) != 5:
                raise StreamFault(number, ErrorCode.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes, expected 5")
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client cannot push")

    # -- headers ------------------------------------------------------------------------------------------------------

    def _continue(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, ends, block, count = self._block
        if len(block) + len(payload) > MOST_HEADER_BYTES or count == _MOST_CONTINUATIONS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {MOST_HEADER_BYTES} bytes")
        block += payload
        if flags & END_HEADERS:
            self._block = None
            self._headers(number, ends, bytes(block))
        else:
            self._block = (number, ends, block, count + 1)

    def _headers(self, number: int, ends: bool, block: bytes) -> None:
        if number <= self._last_id:
            self._trailers(number, ends, block)
            return
        if not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a client's stream cannot be {number}")
        self._last_id = number
        headers = self._reader.read(block)
        if self._leaving or len(self.streams) >= MOST_STREAMS:
            self._spend(Patience.FRAME)
            self._out.put(rst_stream(number, ErrorCode.REFUSED_STREAM))
            return
        if self._out.blocked_bytes > MOST_BLOCKED_BYTES:
            self._spend(Patience.FRAME)
            self._out.put(rst_stream(number, ErrorCode.ENHANCE_YOUR_CALM))
            return
        if headers.malformed:
            self._spend(Patience.FRAME)
            raise StreamFault(number, ErrorCode.PROTOCOL_ERROR, headers.malformed)
        stream = Stream(self, number, headers, STREAM_WINDOW, self._out.initial_window)
        stream.ended = ends
        self.streams[number] = stream
        self._begin(stream, headers)

    def _trailers(self, number: int, ends: bool, block: bytes) -> None:
        self._reader.skip(block)
        stream = self.streams.get(number)
        if stream is None:
            self._spend(Patience.FRAME)  # it was reset, or has its answer, and the client did not know
        elif stream.ended:
            raise StreamFault(number, ErrorCode.STREAM_CLOSED, "HEADERS after the end of the stream")
        elif not ends:
            raise StreamFault(number, ErrorCode.PROTOCOL_ERROR, "HEADERS in the middle of the stream")
        else:
            self._end(stream)

    def _begin(self, stream: Stream, headers: CallHeaders) -> None:
        method = self._serving.methods.get(headers.path)
        if headers.http_status != 200:
            block = http_block(headers.http_status)
            self._out.end(stream, frame(HEADERS, END_STREAM | END_HEADERS, stream.id, block))
        elif headers.refusal is not None:
            self.refuse(stream, (*headers.refusal, ()))
        elif method is None:
            self.refuse(stream, (Status.UNIMPLEMENTED, "Method not found!", ()))
        else:
            if (remaining_s := stream.time_remaining()) is not None:
                stream.expires = self._loop.call_later(remaining_s + _EXPIRY_GRACE_S, self._expire, stream)
            if isinstance(method, Streaming):
                stream.task = self._loop.create_task(self._serve_stream(stream, method))
            elif stream.ended:
                self._end(stream)

    # -- data ---------------------------------------------------------------------------------------------------------

    def _data(self, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        size = end - start
        self._window -= size
        if self._window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window of the connection")
        self._uncredited += size
        if self._uncredited >= CONNECTION_WINDOW // 2:
            self._out.put(window_update(0, self._uncredited))
            self._window += self._uncredited
            self._uncredited = 0
        stream = self.streams.get(number)
        if stream is None:
            if not number or number > self._last_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"DATA of stream {number}, which was not begun")
            self._spend(Patience.FRAME)
            return
        if stream.ended:
            raise StreamFault(number, ErrorCode.STREAM_CLOSED, "DATA after the end of the stream")
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise StreamFault(number, ErrorCode.FLOW_CONTROL_ERROR, "more data than the window of the stream")
        ends = bool(flags & END_STREAM)
        if flags & PADDED:
            payload = without_padding(flags & PADDED, data[start:end], "DATA")
        elif ends and stream.assembler is None and size >= PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(data, start)
            if not flag and length == size - PREFIX_BYTES:  # the whole message of most calls
                stream.messages.append(data[start + PREFIX_BYTES : end])
                self._end(stream)
                return
            payload = data[start:end]
        else:
            payload = data[start:end]
        if not payload and not ends:
            self._spend(Patience.FRAME)
        stream.uncredited += size
        self._feed(stream, payload)
        if ends and not stream.closed:
            self._end(stream)
        elif not stream.closed:
            self._credit(stream)

    def _feed(self, stream: Stream, payload: bytes) -> None:
        if stream.assembler is None:
            stream.assembler = Assembler(stream.headers.encoding, self._serving.most_decompressed_bytes)
        try:
            messages = stream.assembler.feed(payload)
        except MessageFault as fault:
            self.refuse(stream, (fault.status, str(fault), ()))
            return
        if messages:
            stream.messages.extend(messages)
            stream.arrived()

    def _credit(self, stream: Stream) -> None:
        """Let the client send more, unless there are messages that nobody has taken."""
        if stream.uncredited >= STREAM_WINDOW // 2 and not stream.messages:
            self._strikes.sent_data()
            self._out.put(window_update(stream.id, stream.uncredited))
            stream.receive_window += stream.uncredited
            stream.uncredited = 0

    def took(self, stream: Stream) -> None:
        """The last message that had come was taken."""
        if not stream.ended and not stream.closed:
            self._credit(stream)

    def _end(self, stream: Stream) -> None:
        """The client has sent all it has to send."""
        stream.ended = True
        method = self._serving.methods.get(stream.headers.path)
        if stream.assembler is not None and not stream.assembler.is_between:
            self.refuse(stream, (Status.INTERNAL, "the stream ended within a message", ()))
        elif isinstance(method, Unary) and stream.task is None:
            if len(stream.messages) != 1:
                self.refuse(stream, (Status.UNIMPLEMENTED, f"expected one message, got {len(stream.messages)}", ()))
                return
            stream.task = self._loop.create_task(self._serve_unary(stream, method, stream.messages.popleft()))
        else:
            stream.arrived()

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _serve_unary(self, stream: Stream, method: Unary, message: bytes) -> None:
        reply: bytes | Refusal
        call = method.call(message, stream)
        del message  # it may be large, and the call long
        try:
            reply = await call
        except asyncio.CancelledError:
            reply = Status.CANCELLED, "the call was cancelled", ()
        except Exception:
            _log.exception("a call failed")
            reply = Status.INTERNAL, INTERNAL, ()
        stream.task = None
        if stream.closed:
            return
        self._strikes.sent_data()
        if not isinstance(reply, bytes):
            self.refuse(stream, reply)
        elif not self._compression(stream) and self._out.answer(stream, reply):
            pass
        else:
            self._send(stream, reply)
            self._out.end(stream, self._tail(stream, (Status.OK, "", ())))

    async def _serve_stream(self, stream: Stream, method: Streaming) -> None:
        refusal: Refusal | None
        try:
            refusal = await method.call(stream, stream.write, stream)
        except asyncio.CancelledError:
            refusal = Status.CANCELLED, "the call was cancelled", ()
        except Exception:
            _log.exception("a call failed")
            refusal = Status.INTERNAL, INTERNAL, ()
        stream.task = None
        if not stream.closed:
            self._strikes.sent_data()
            self.refuse(stream, refusal or (Status.OK, "", ()))

    async def send(self, stream: Stream, message: bytes) -> None:
        """Send a message of a streaming method, and wait until the transport took it."""
        if stream.closed or stream.tail is not None:
            raise asyncio.CancelledError
        self._strikes.sent_data()
        stream.sent = sent = self._loop.create_future()
        self._send(stream, message)
        await sent
        if stream.closed and stream.tail is None:
            raise asyncio.CancelledError

    def _send(self, stream: Stream, message: bytes) -> None:
        level = self._compression(stream)
        if not stream.started:
            stream.started = True
            block = answer_block("gzip" if level else "")
            self._out.put(frame(HEADERS, END_HEADERS, stream.id, block))
        self._out.data(stream, framed(message, level))

    def _compression(self, stream: Stream) -> int:
        return self._serving.compression_level if stream.headers.accepts_gzip else 0

    def _tail(self, stream: Stream, refusal: Refusal) -> bytes:
        status, details, metadata = refusal
        block = status_block(status, details, metadata, alone=not stream.started)
        return frame(HEADERS, END_STREAM | END_HEADERS, stream.id, block)

    def refuse(self, stream: Stream, refusal: Refusal) -> None:
        """End a call with a status, once what it has answered is sent."""
        if stream.tail is None and not stream.closed:
            self._out.end(stream, self._tail(stream, refusal))

    def _expire(self, stream: Stream) -> None:
        """Its deadline has passed and it was not answered: its client has given up."""
        stream.expires = None
        self._cut(stream, (Status.DEADLINE_EXCEEDED, "Deadline Exceeded", ()))

    def _cut(self, stream: Stream, refusal: Refusal) -> None:
        """End a call now; where an answer is half sent nothing can be said any more."""
        if stream.pending or stream.tail is not None:
            self._out.put(rst_stream(stream.id, ErrorCode.CANCEL))
        else:
            self.refuse(stream, refusal)
        self._abandon(stream)

    def _closed(self, stream: Stream) -> None:
        """The last frame of a stream is on its way."""
        if stream.closed:
            return
        self._forget(stream)
        if not stream.ended:
            self._out.put(rst_stream(stream.id, ErrorCode.NO_ERROR))
            stream.arrived()
        if stream.task is not None:
            stream.task.cancel()

    def _abandon(self, stream: Stream) -> None:
        """Nobody waits for the answer of a call any more."""
        self._forget(stream)
        self._out.drop(stream)
        stream.messages.clear()
        stream.arrived()
        if stream.task is not None:
            stream.task.cancel()

    def _forget(self, stream: Stream) -> None:
        stream.closed = True
        self.streams.pop(stream.id, None)
        if stream.expires is not None:
            stream.expires.cancel()
        if self._leaving and not self.streams:
            self.close()

    # -- the client's words about streams and the connection ----------------------------------------------------------

    def _on_reset(self, number: int, _code: int) -> None:
        if not number or number > self._last_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM of stream {number}, which was not begun")
        stream = self.streams.get(number)
        if stream is not None:
            self._abandon(stream)

    def _reset(self, fault: StreamFault) -> None:
        self._out.put(rst_stream(fault.stream_id, fault.code))
        stream = self.streams.get(fault.stream_id)
        if stream is not None:
            self._abandon(stream)

    def _widen(self, number: int, size: int) -> None:
        if not number:
            if not size:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
            self._out.widen(size)
            return
        if number > self._last_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE of stream {number}, which was not begun")
        stream = self.streams.get(number)
        if stream is not None:
            if not size:
                raise StreamFault(number, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
            self._out.widen_stream(stream, size)

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "acknowledgement of settings with a payload")
            return
        values = read_settings(payload)
        self._settled = True
        self._out.put(frame(SETTINGS, ACK, 0))  # before data that a wider window lets go
        for name, value in values:
            if name == INITIAL_WINDOW_SIZE:
                self._out.resize(self.streams.values(), value)
            elif name == MAX_FRAME_SIZE:
                self._out.frame_bytes = value

    def _on_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes, expected 8")
        if flags & ACK:
            return
        if self._strikes.is_enough(self._loop.time(), has_calls=bool(self.streams)):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._out.put(frame(PING, ACK, 0, payload))

    # -- the end ------------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Ask the client for a sign of life."""
        self._out.put(frame(PING, 0, 0, b"charonia"))

    def leave(self) -> None:
        """Take no more calls; the connection is closed when those there are have ended."""
        if self._leaving or self._transport is None:
            return
        self._leaving = True
        self._out.put(goaway(self._last_id, ErrorCode.NO_ERROR))
        if not self.streams:
            self.close()

    def give_up(self, code: ErrorCode, text: str) -> None:
        """Close the connection because of what the client did."""
        _log.debug("a connection is closed: %s, %s", code.name, text)
        if self._transport is not None:
            self._out.put(goaway(self._last_id, code, text))
            self.close()

    def close(self) -> None:
        """Close after what is on its way."""
        if self._transport is not None:
            self._out.flush()
            self._transport.close()
            self._loop.call_later(_CLOSING_S, self.abort)  # it may never read what is on its way

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()

    def end_calls(self, refusal: Refusal) -> list[asyncio.Task[Any]]:
        """End all calls with this; their tasks, which are being cancelled."""
        tasks = [stream.task for stream in self.streams.values() if stream.task is not None]
        for stream in list(self.streams.values()):
            self._cut(stream, refusal)
        return [task for task in tasks if not task.done()]
