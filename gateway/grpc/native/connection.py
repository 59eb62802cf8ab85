"""One HTTP/2 connection: checks the client's frames and passes them to its calls (RFC 9113; G17-G31).

`connection_calls` serves the calls, `outbox` writes to the client. A violation of the protocol ends the stream or the
connection with the RFC's error code; exceeding a limit ends the connection (`limits`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from charonia.clock import monotonic_ns
from gateway.grpc.statuses import INTERNAL, Refusal

from .codec.call_headers import MAX_HEADER_BYTES, HeaderReader, Meaning, uses_no_table
from .codec.grpc_messages import PREFIX, PREFIX_BYTES
from .codec.http2_frames import (
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
    MAX_FRAME_BYTES,
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
    checked_length,
    frame,
    read_settings,
    read_word,
    rst_stream,
    settings,
    window_update,
    without_padding,
)
from .codec.limits import MANY_FIELDS, MAX_BLOCKED_BYTES, Patience, PingStrikes
from .connection_calls import STREAM_WINDOW, Calls
from .grpc_lane import LANE_HEAD_BYTES, LaneCall
from .life import Ending, Life
from .outbox import Outbox, Stream
from .receiving import WORTH_SWITCHING_BYTES, LargeReader
from .serving import Serving, Tally

_log = logging.getLogger(__name__)

CONNECTION_WINDOW = 1 << 24
_MAX_WRITTEN_BYTES = 1 << 20
"""With so much unsent data reading pauses: the client does not read."""
_MAX_CONTINUATIONS = 64
_JOINED_BYTES = 32_768
"""An incomplete frame of at most this size is joined with the next data; a larger one is collected."""
_TOLD_BYTES = 16 * 1024

MakeCalls = Callable[[Serving, Outbox], Calls]


class Connection(asyncio.Protocol):
    """One client's connection.

    `serving` is shared by the connections of a front, `calls` keeps the streams, and `of` interprets headers that are
    not gRPC's (`gateway.http2`).
    """

    def __init__(self, serving: Serving, calls: MakeCalls = Calls, of: Meaning | None = None) -> None:
        self._serving = serving
        self._lane = serving.lane
        self._loop = asyncio.get_running_loop()
        self._reader = HeaderReader(serving.known_headers, of)
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()
        self._preface_left = PREFACE
        self._settled = False
        """The client's first SETTINGS frame was received."""
        self.last_id = 0
        self.window = CONNECTION_WINDOW
        self._uncredited = 0
        self._block: tuple[int, bool, bytearray, int] | None = None
        """A header block that awaits CONTINUATION: stream, whether it ends the stream, bytes, number of frames."""
        self._patience = Patience(self._loop.time())
        self._strikes = PingStrikes(serving.keep_alive)
        self.out = Outbox(self._loop)
        self.calls = calls(serving, self.out)
        self.ending = Ending(self.out, self.calls, lambda: self.last_id)
        self._life = Life(self, serving.keep_alive)
        self._large: Stream | None = None
        """The call whose large message is being received; `LargeReader` reads until it is complete."""
        self._is_plain = False
        """Not encrypted: data may be read straight to its destination."""
        self.id = serving.next_id()

    @property
    def is_open(self) -> bool:
        """Whether the client has sent its HTTP/2 settings."""
        return self._settled

    @property
    def has_calls(self) -> bool:
        return bool(self.calls.streams)

    # -- transport ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            self._transport.close()  # as gRPC's own servers do: another protocol was negotiated
            return
        self._is_plain = tls is None
        self._transport.set_write_buffer_limits(high=_MAX_WRITTEN_BYTES)
        self.out.connect(self._transport)
        self.ending.connect(self._transport)
        self._serving.connections.add(self)
        self.out.put(_opening(self._serving.max_streams))
        self._life.begin()

    def connection_lost(self, _exc: Exception | None) -> None:
        serving = self._serving
        serving.connections.discard(self)
        if not serving.connections and serving.left is not None:
            serving.left.set()
        self.out.disconnect()
        self._life.end()
        self.ending.lost()
        self._transport = None
        for stream in list(self.calls.streams.values()):
            self.calls.abandon(stream)
        past, mine = serving.past, self.calls.tally
        past.started += mine.started
        past.refused += mine.refused
        past.reset += mine.reset
        past.last_started_ns = max(past.last_started_ns, mine.last_started_ns)

    def tally(self) -> Tally:
        """The counts of this connection (channelz)."""
        streams = self.calls.streams.values()
        silent = sum(isinstance(stream, LaneCall) and not stream.ended for stream in streams)
        counted = self.calls.tally
        return replace(counted, open=len(streams), received=counted.received - silent)

    def extra(self, name: str) -> Any:
        """The transport's extra information of this name, or None."""
        return self._transport.get_extra_info(name) if self._transport is not None else None

    def pause_writing(self) -> None:
        self.out.pause()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._life.heard = True  # it has read, which proves that it lives
        self.out.resume()
        if self._transport is not None and not self._transport.is_closing() and not self.out.is_paused:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._life.heard = True
        if self.ending.is_closing:
            return
        try:
            at = self._read_preface(data) if self._preface_left else 0
            if self._rest:
                if (
                    self._lane is not None
                    and self._lane.count
                    and self._large is None
                    and len(self._rest) < _JOINED_BYTES
                ):
                    data, self._rest = bytes(self._rest) + data, bytearray()
                else:
                    at = self._complete(data)
                    if self._large is not None and not self._rest:
                        self._read_large_from_now(memoryview(data)[at:])
                        return
            self._read(data, at)
            if self._lane is not None and self._lane.touched:
                self._lane.ready()
        except ConnectionFault as fault:
            self.ending.give_up(fault.code, str(fault))
        except Exception:
            _log.exception("a connection failed")
            self.ending.give_up(ErrorCode.INTERNAL_ERROR, INTERNAL)

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
            lane = self._lane
            if lane is not None and lane.count and data[at : at + LANE_HEAD_BYTES] in lane.by_head and self._may_ride:
                at = lane.read(self, data, at)
                if size - at < HEAD_BYTES:
                    break
            high, low, kind, flags, number = HEAD.unpack_from(data, at)
            start = at + HEAD_BYTES
            end = start + checked_length(high << 8 | low)
            if end > size:
                break
            self._one(kind, flags, number & LARGEST_ID, data, start, end)
            if self._transport is None or self.ending.is_closing:
                return
            at = end
            if self._large is not None:
                self._read_large_from_now(memoryview(data)[at:])
                return
        self._rest += data[at:]

    # -- the express lane ---------------------------------------------------------------------------------------------

    @property
    def _may_ride(self) -> bool:
        """Whether the lane may recognise frames: none is incomplete, and header blocks depend on no earlier ones."""
        return self._settled and self._block is None and self._reader.is_free and not self.ending.takes_no_calls

    @property
    def has_table(self) -> bool:
        """Whether the client may use a table of headers: then a block is recognised only if it uses none."""
        return self._reader.has_table

    def took(self, last_id: int, size: int, begun: int) -> None:
        """The lane has taken frames up to call `last_id`: `begun` new calls, and `size` bytes of data."""
        self.last_id = last_id
        tally = self.calls.tally
        tally.started += begun
        tally.received += begun
        tally.last_started_ns = tally.last_received_ns = monotonic_ns()
        self.window -= size
        self._credit(size)

    def answered(self, *, at_once: bool) -> None:
        """Calls of the lane were answered."""
        self.calls.tally.last_sent_ns = monotonic_ns()
        self.out.answered(at_once=at_once)
        if self.ending.takes_no_calls:
            self.calls.on_end()

    def answer_slowly(self, call: LaneCall, message: bytes) -> None:
        """Answer a call of the lane within the client's windows."""
        if not call.gone:
            self.calls.answer(self.calls.adopt(call, ended=True), message)

    def refuse_call(self, call: LaneCall, reason: Refusal) -> None:
        """End a call of the lane with a status, also one that was adopted and could not be answered or served then."""
        if not call.gone:
            stream = self.calls.ordinary(call.id) or self.calls.adopt(call, ended=True)
            self.calls.refuse(stream, reason)

    def serve_fully(self, call: LaneCall, message: bytes) -> None:
        """Serve a call of the lane on the full way."""
        if not call.gone:
            stream = self.calls.adopt(call, ended=True)
            stream.messages.append(message)
            self.calls.end(stream)

    def _stream(self, number: int) -> Stream | None:
        """The stream of a number; a call of the lane that has not left becomes an ordinary one."""
        stream = self.calls.streams.get(number)
        if isinstance(stream, LaneCall):
            return None if stream.ended else self.calls.adopt(stream, ended=False)
        return stream

    def _complete(self, data: bytes) -> int:
        """Complete the incomplete frame with `data`; returns where the next frame begins."""
        rest = self._rest
        at = min(max(0, HEAD_BYTES - len(rest)), len(data))
        rest += data[:at]
        if len(rest) < HEAD_BYTES:
            return at
        high, low, kind, flags, number = HEAD.unpack_from(rest)
        size = HEAD_BYTES + checked_length(high << 8 | low)
        end = min(at + size - len(rest), len(data))
        rest += data[at:end]
        if len(rest) == size:
            self._rest = bytearray()
            self._one(kind, flags, number & LARGEST_ID, bytes(rest), HEAD_BYTES, size)
        return end

    def _one(self, kind: int, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        try:
            self._frame(kind, flags, number, data, start, end)
        except StreamFault as fault:
            self._reset(fault)

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
            read_word(payload, "RST_STREAM")
            self._on_reset(number)
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
        if len(block) + len(payload) > MAX_HEADER_BYTES or count == _MAX_CONTINUATIONS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {MAX_HEADER_BYTES} bytes")
        block += payload
        if flags & END_HEADERS:
            self._block = None
            self._headers(number, ends, bytes(block))
        else:
            self._block = (number, ends, block, count + 1)

    def _headers(self, number: int, ends: bool, block: bytes) -> None:
        if not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a client's stream cannot be {number}")
        if number <= self.last_id:
            self._trailers(number, ends, block)
            return
        self.last_id = number
        headers = self._reader.read(block)
        if self._lane is not None and self._reader.is_free and (not self.has_table or uses_no_table(block)):
            self._lane.learn_block(block, headers)
        if self._reader.decoded_fields > MANY_FIELDS:
            self._spend(self._reader.decoded_fields)
        if self.ending.takes_no_calls or len(self.calls.streams) >= self._serving.max_streams:
            self._spend(Patience.FRAME)
            self.out.put(rst_stream(number, ErrorCode.REFUSED_STREAM))
            return
        if self.out.blocked_bytes > MAX_BLOCKED_BYTES:
            self._spend(Patience.FRAME)
            self.out.put(rst_stream(number, ErrorCode.ENHANCE_YOUR_CALM))
            return
        if headers.malformed:
            raise StreamFault(number, ErrorCode.PROTOCOL_ERROR, headers.malformed)
        self.calls.begin(number, headers, ends)

    def _trailers(self, number: int, ends: bool, block: bytes) -> None:
        is_call = self._reader.skip(block)
        stream = self._stream(number)
        if stream is None and number in self.calls.streams:
            raise StreamFault(number, ErrorCode.STREAM_CLOSED, "HEADERS after the end of the stream")
        if stream is None:
            if is_call:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {number} is not a new one")
            self._spend(Patience.FRAME)  # the client did not know that it was reset or answered
        elif stream.ended:
            raise StreamFault(number, ErrorCode.STREAM_CLOSED, "HEADERS after the end of the stream")
        elif is_call or not ends:
            raise StreamFault(number, ErrorCode.PROTOCOL_ERROR, "HEADERS in the middle of the stream")
        else:
            self.calls.end(stream)

    # -- data ---------------------------------------------------------------------------------------------------------

    def _data(self, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        size = end - start
        self.window -= size
        if self.window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window of the connection")
        self._credit(size)
        stream = self._stream(number)
        if stream is None:
            if number in self.calls.streams:
                raise StreamFault(number, ErrorCode.STREAM_CLOSED, "DATA after the end of the stream")
            self._check_begun(number, "DATA")
            self._spend(Patience.FRAME)
            return
        if stream.ended:
            raise StreamFault(number, ErrorCode.STREAM_CLOSED, "DATA after the end of the stream")
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise StreamFault(number, ErrorCode.FLOW_CONTROL_ERROR, "more data than the window of the stream")
        ends = bool(flags & END_STREAM)
        payload: bytes | memoryview
        if flags & PADDED:
            payload = without_padding(PADDED, data[start:end], "DATA")
        else:
            if ends and stream.assembler is None and size >= PREFIX_BYTES:
                flag, length = PREFIX.unpack_from(data, start)
                if not flag and length == size - PREFIX_BYTES:  # the whole message, as in most calls
                    stream.messages.append(data[start + PREFIX_BYTES : end])
                    tally = self.calls.tally
                    tally.received += 1
                    tally.last_received_ns = monotonic_ns()
                    self.calls.end(stream)
                    return
            payload = memoryview(data)[start:end]
        if not payload and not ends:
            self._spend(Patience.FRAME)
        stream.uncredited += size
        self.calls.feed(stream, payload)
        if ends and not stream.closed:
            self.calls.end(stream)
        elif not stream.closed:
            self.calls.credit(stream)
            if self._is_plain and _is_large(stream):
                self._large = stream

    # -- large messages (`receiving`) ---------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing more is read."""
        return self._transport is None or self.ending.is_closing

    def _read_large_from_now(self, come: memoryview) -> None:
        """Read a large message straight to its memory; `come` is the data behind the frame that it begins in."""
        reader = LargeReader(self)
        reader.begin(come)
        if self.is_over or self._transport is None:
            return
        if reader.is_within or self._awaits_large():
            self._transport.set_protocol(reader)
        else:  # all of it was in the data
            self._rest = bytearray(reader.end())

    def _awaits_large(self) -> bool:
        """Whether a large part of a message is missing."""
        if self._large is None or not _is_large(self._large):
            ordinary = (stream for stream in self.calls.streams.values() if isinstance(stream, Stream))
            self._large = next(filter(_is_large, ordinary), None)
        return self._large is not None

    def read_large(self, reader: LargeReader, size: int) -> None:
        """`size` bytes were received for the reader."""
        self._life.heard = True
        if self.ending.is_closing:
            return
        try:
            reader.came(size)
            if self.is_over or self._transport is None or reader.is_within or self._awaits_large():
                return
            self._rest = bytearray(reader.end())
            self._transport.set_protocol(self)
        except ConnectionFault as fault:
            self.ending.give_up(fault.code, str(fault))
        except Exception:
            _log.exception("a connection failed")
            self.ending.give_up(ErrorCode.INTERNAL_ERROR, INTERNAL)

    def comes_large(self, number: int, size: int) -> bool:
        """Whether a DATA frame is only of a large message, and within all windows; if so, counts it against them."""
        stream = self.calls.ordinary(number)
        if stream is None or not 0 < size <= self.allows_large(stream):
            return False
        self.count_large(stream, size)
        return True

    def allows_large(self, stream: Stream) -> int:
        """How many bytes of a large message may be received now; 0 if none is expected."""
        if stream.ended or stream.tail is not None or stream.assembler is None or self._block is not None:
            return 0
        target = stream.assembler.target
        return 0 if target is None else max(0, min(len(target), self.window, stream.receive_window))

    def count_large(self, stream: Stream, size: int) -> None:
        """Count `size` bytes of it, in whole frames, against the windows."""
        self.window -= size
        stream.receive_window -= size

    def count_data(self, number: int, size: int, *, ends: bool) -> None:
        """Frames counted by `comes_large` or `count_large` were received whole."""
        self._credit(size)
        stream = self.calls.ordinary(number)
        if stream is None:  # it has ended in the meantime
            return
        stream.uncredited += size
        if ends:
            self.calls.end(stream)
            return
        target = stream.assembler.target if stream.assembler is not None else None
        if target is None or stream.receive_window < len(target):  # the window is large enough: no credit yet
            self.calls.credit(stream)

    def one(self, kind: int, flags: int, number: int, frame: bytes) -> None:
        """Handle a whole frame of any type."""
        self._one(kind, flags, number, frame, HEAD_BYTES, len(frame))

    def _credit(self, size: int) -> None:
        """Count received data, and enlarge the connection's window again from time to time."""
        self._uncredited += size
        if self._uncredited >= CONNECTION_WINDOW // 2:
            self.out.put(window_update(0, self._uncredited))
            self.window += self._uncredited
            self._uncredited = 0

    # -- the client's words about streams and the connection ----------------------------------------------------------

    def _check_begun(self, number: int, what: str) -> None:
        if number > self.last_id or not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{what} of stream {number}, which was not begun")

    def _on_reset(self, number: int) -> None:
        self._check_begun(number, "RST_STREAM")
        stream = self.calls.streams.get(number)
        if stream is not None:
            self.calls.abandon(stream)

    def _reset(self, fault: StreamFault) -> None:
        self._spend(Patience.RESET)  # a client may make the server reset streams on purpose
        self.out.put(rst_stream(fault.stream_id, fault.code))
        stream = self.calls.streams.get(fault.stream_id)
        if stream is not None:
            self.calls.abandon(stream)

    def _widen(self, number: int, size: int) -> None:
        if not number:
            if not size:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
            self.out.widen(size)
            return
        self._check_begun(number, "WINDOW_UPDATE")
        stream = self.calls.streams.get(number)
        if stream is not None:
            if not size:
                raise StreamFault(number, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
            self.out.widen_stream(stream, size)

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "acknowledgement of settings with a payload")
            return
        values = read_settings(payload)
        self._settled = True
        self.out.put(frame(SETTINGS, ACK, 0))  # before data that a larger window releases
        for name, value in dict(values).items():  # the last value of each: a frame may repeat one thousands of times
            if name == INITIAL_WINDOW_SIZE:
                self.out.resize(self.calls.streams.values(), value)
            elif name == MAX_FRAME_SIZE:
                self.out.frame_bytes = value

    def _on_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes, expected 8")
        if flags & ACK:
            self.ending.answered(payload)
            return
        sent_data, self.out.sent_data = self.out.sent_data, False
        if self._strikes.is_enough(self._loop.time(), has_calls=self.has_calls, sent_data=sent_data):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self.out.put(frame(PING, ACK, 0, payload))

    # -- the end ------------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Ask the client for a sign of life."""
        self.calls.tally.keep_alives += 1
        self.out.put(frame(PING, 0, 0, b"charonia"))

    def leave(self) -> None:
        """Accept no more calls than those on their way, and close after them."""
        self.ending.leave(has_client=self._settled)

    def cut_all(self, reason: Refusal) -> list[asyncio.Task[Any]]:
        """End all calls with this status; returns the tasks that are ending."""
        return self.calls.cut_all(reason)

    def close(self) -> None:
        """Close once all written data is sent."""
        self.ending.close()

    def abort(self) -> None:
        """Close immediately."""
        self.ending.abort()


def _opening(max_streams: int) -> bytes:
    """The first frames to a client."""
    wanted = {
        HEADER_TABLE_SIZE: 0,
        MAX_CONCURRENT_STREAMS: max_streams,
        INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        MAX_FRAME_SIZE: MAX_FRAME_BYTES,
        MAX_HEADER_LIST_SIZE: _TOLD_BYTES,
    }
    return settings(wanted) + window_update(0, CONNECTION_WINDOW - 65_535)


def _is_large(stream: Stream) -> bool:
    """Whether a large part of a message is missing."""
    assembler = stream.assembler
    target = assembler.target if assembler is not None and not stream.closed and stream.tail is None else None
    return target is not None and len(target) >= WORTH_SWITCHING_BYTES
