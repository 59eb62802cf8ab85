"""The calls of one connection, from a stream's first headers to its end by either side (G17-G26).

Three flags of `Stream` hold a call's state: the answer has begun, the client has ended its side, the call is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError, ResourceExhausted
from charonia.tensors import Buffer
from gateway.grpc.calling import Reply, Streaming, Unary
from gateway.grpc.statuses import INTERNAL, Refusal, Status
from gateway.requests.decompression import DecompressionFault, inflate

from .codec.call_headers import CallHeaders, answer_block, http_block, status_block
from .codec.grpc_messages import Assembler, MessageFault, Packed, fault_of, framed
from .codec.http2_frames import END_HEADERS, END_STREAM, HEADERS, ErrorCode, frame, rst_stream, window_update
from .grpc_lane import LaneCall
from .outbox import ENDED_SILENTLY, REFUSED, Outbox, Stream
from .serving import Serving, Tally

_log = logging.getLogger(__name__)

STREAM_WINDOW = 1 << 20
_DEFLATED_IN_LOOP_BYTES = 64 * 1024
"""Compressing this much takes a millisecond."""
_EXPIRY_GRACE_S = 0.05
"""The gateway ends late requests itself, with a better message, a little before."""
_DONE: Refusal = (Status.OK, "", ())
_CANCELLED: Refusal = (Status.CANCELLED, "the call was cancelled", ())
_NOT_ONE: Refusal = (Status.UNIMPLEMENTED, "the method takes exactly one message", ())
_TOO_MUCH: Refusal = (Status.RESOURCE_EXHAUSTED, "messages that have not come whole take too much memory", ())
_EXPIRED: Refusal = (Status.DEADLINE_EXCEEDED, "Deadline Exceeded", ())
_FAILED: Refusal = (Status.INTERNAL, INTERNAL, ())


class Calls:
    """The calls of one connection, by stream number. `on_end` is called after a call has ended."""

    def __init__(self, serving: Serving, out: Outbox) -> None:
        self._serving = serving
        self._loop = asyncio.get_running_loop()
        self._out = out
        out.on_closed = self._closed
        self.streams: dict[int, Stream | LaneCall] = {}
        self.tally = Tally()
        self.on_end: Callable[[], None] = lambda: None

    def begin(self, number: int, headers: CallHeaders, ended: bool) -> None:
        """Begin a call with these headers; `ended` if nothing follows them."""
        stream = self.streams[number] = Stream(self, number, headers, STREAM_WINDOW, self._out.initial_window)
        stream.ended = ended
        self.tally.started += 1
        self.tally.last_started_ns = monotonic_ns()
        method = self._serving.methods.get(headers.path)
        if headers.http_status != 200:
            stream.outcome = REFUSED
            block = http_block(headers.http_status)
            self._out.end(stream, frame(HEADERS, END_STREAM | END_HEADERS, stream.id, block))
        elif headers.refusal is not None:
            self.refuse(stream, (*headers.refusal, ()))
        elif method is None:
            self.refuse(stream, (Status.UNIMPLEMENTED, "Method not found!", ()))
        elif headers.timeout_ns == 0:
            self.refuse(stream, _EXPIRED)
        else:
            if (remaining_s := stream.time_remaining()) is not None:
                stream.expires = self._loop.call_later(remaining_s + _EXPIRY_GRACE_S, self._expire, stream)
            if isinstance(method, Streaming):
                stream.task = self._loop.create_task(self._serve_stream(stream, method))
            elif stream.ended:
                self.end(stream)

    def adopt(self, call: LaneCall, *, ended: bool) -> Stream:
        """Make an ordinary call of a call of the lane that nothing has been done for yet."""
        stream = self.streams[call.id] = Stream(self, call.id, call.headers, STREAM_WINDOW, call.send_window)
        stream.ended = ended
        self.tally.received -= not call.ended
        if call.deadline_ns or call.headers.timeout_ns is not None:
            remaining_s = max(0.0, (call.deadline_ns - wall_ns()) / 1e9)
            stream.deadline_ns = monotonic_ns() + int(remaining_s * 1e9)
            stream.expires = self._loop.call_later(remaining_s + _EXPIRY_GRACE_S, self._expire, stream)
        return stream

    def ordinary(self, number: int) -> Stream | None:
        """A call by its number, unless it is in the lane: those have no large messages."""
        stream = self.streams.get(number)
        return stream if isinstance(stream, Stream) else None

    # -- what the client sends ----------------------------------------------------------------------------------------

    def feed(self, stream: Stream, payload: bytes | memoryview) -> None:
        if stream.tail is not None:
            return  # it is refused, and its answer not sent yet
        if stream.assembler is None:
            method = self._serving.methods[stream.headers.path]
            allocate = self._serving.allocate_message if method.takes_views else None
            limit = self._serving.max_decompressed_bytes
            stream.assembler = Assembler(stream.headers.encoding, limit, allocate, method.largest_bytes)
        try:
            messages = stream.assembler.feed(payload)
        except MessageFault as fault:
            self.refuse(stream, (fault.status, str(fault), ()))
            return
        if messages:
            self.came(stream, messages)

    def came(self, stream: Stream, messages: Iterable[bytes | memoryview | Packed]) -> None:
        """Add complete messages."""
        self._release(stream)
        before = len(stream.messages)
        stream.messages.extend(messages)
        self.tally.received += len(stream.messages) - before
        self.tally.last_received_ns = monotonic_ns()
        stream.arrived()
        if len(stream.messages) > 1 and isinstance(self._serving.methods.get(stream.headers.path), Unary):
            self.refuse(stream, _NOT_ONE)

    def credit(self, stream: Stream) -> None:
        """Let the client send more, unless messages wait or the call is refused."""
        if stream.tail is not None:
            return  # its data is dropped, so it must not be counted as held
        if stream.uncredited >= STREAM_WINDOW // 2 and not stream.messages:
            if stream.assembler is not None and not stream.assembler.is_between:
                stream.held_bytes += stream.uncredited
                self._serving.held_bytes += stream.uncredited
                if self._serving.held_bytes > self._serving.max_held_bytes:
                    self.refuse(stream, _TOO_MUCH)
                    return
            self._out.sent_data = True
            self._out.put(window_update(stream.id, stream.uncredited))
            stream.receive_window += stream.uncredited
            stream.uncredited = 0

    def _release(self, stream: Stream) -> None:
        """The parts of a message no longer count as held: it is complete, or dropped."""
        self._serving.held_bytes -= stream.held_bytes
        stream.held_bytes = 0

    def took(self, stream: Stream) -> None:
        """The last waiting message was taken."""
        if not stream.ended and not stream.closed:
            self.credit(stream)

    def end(self, stream: Stream) -> None:
        """The client has ended its side."""
        stream.ended = True
        method = self._serving.methods.get(stream.headers.path)
        if stream.assembler is not None and not stream.assembler.is_between:
            self.refuse(stream, (Status.INTERNAL, "the stream ended within a message", ()))
        elif isinstance(method, Unary) and stream.task is None:
            if len(stream.messages) != 1:
                self.refuse(stream, _NOT_ONE)
                return
            message = stream.messages.popleft()
            if isinstance(message, Packed):
                stream.task = self._loop.create_task(self._serve_packed(stream, method, message))
            else:
                stream.task = self._loop.create_task(self._serve_unary(stream, method, message))
        else:
            stream.arrived()

    async def unpack(self, stream: Stream, message: Packed) -> bytes | memoryview | None:
        """The decompressed message; None if it is broken, and the call is refused."""
        try:
            offload = self._serving.offload
            return await inflate(offload, message.encoding, message.data, message.limit_bytes, several=False)
        except DecompressionFault as error:
            fault = fault_of(error, message.limit_bytes)
            status, text = fault.status, str(fault)
        except CharoniaError as error:
            full = isinstance(error, ResourceExhausted)
            status, text = Status.RESOURCE_EXHAUSTED if full else Status.UNAVAILABLE, error.message
        stream.messages.clear()
        self.refuse(stream, (status, text, ()))
        return None

    async def _serve_packed(self, stream: Stream, method: Unary, message: Packed) -> None:
        unpacked = await self.unpack(stream, message)
        if unpacked is not None and not stream.closed:
            await self._serve_unary(stream, method, unpacked)

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _serve_unary(self, stream: Stream, method: Unary, message: bytes | memoryview) -> None:
        reply: Reply | Refusal
        call = method.call(message, stream)
        del message  # free its memory: the call may take long
        try:
            reply = await call
        except asyncio.CancelledError:
            reply = _CANCELLED
        except Exception:
            _log.exception("a call failed")
            reply = _FAILED
        stream.task = None
        if stream.closed:
            return
        if isinstance(reply, tuple):
            self.refuse(stream, reply)
        elif isinstance(reply, bytes) and not self._compression(stream):
            self.answer(stream, reply)
        else:
            packed = await self._framed(stream, reply)
            del reply  # the outbox frees each part once the client has received it
            if not stream.closed:
                self._send(stream, packed)
                self._out.end(stream, self._tail(stream, _DONE))

    def answer(self, stream: Stream, reply: bytes) -> None:
        """Answer a unary call."""
        self.tally.last_sent_ns = monotonic_ns()
        if self._compression(stream) or not self._out.answer(stream, reply):
            self._send(stream, framed((reply,), self._compression(stream)))
            self._out.end(stream, self._tail(stream, _DONE))

    async def _serve_stream(self, stream: Stream, method: Streaming) -> None:
        refusal: Refusal | None
        try:
            refusal = await method.call(stream, stream.write, stream)
        except asyncio.CancelledError:
            refusal = _CANCELLED
        except Exception:
            _log.exception("a call failed")
            refusal = _FAILED
        stream.task = None
        if not stream.closed:
            stream.outcome = ENDED_SILENTLY
            self.refuse(stream, refusal or _DONE)

    async def send(self, stream: Stream, message: Reply) -> None:
        """Send a message of a streaming method; returns when the transport has accepted it."""
        _raise_if_over(stream)
        packed = await self._framed(stream, message)
        del message
        _raise_if_over(stream)
        stream.sent = sent = self._loop.create_future()
        self.tally.streamed += 1
        self._send(stream, packed)
        del packed
        await sent
        if stream.closed and stream.tail is None:
            raise asyncio.CancelledError

    async def _framed(self, stream: Stream, message: Reply) -> list[Buffer]:
        """The message with its prefix, compressed if the client accepts that."""
        level = self._compression(stream)
        parts = (message,) if isinstance(message, bytes) else message.parts
        if not level or len(message) <= _DEFLATED_IN_LOOP_BYTES:
            return framed(parts, level)
        return await self._serving.offload.in_thread(len(message), framed, parts, level, may_refuse=False)

    def _send(self, stream: Stream, packed: list[Buffer]) -> None:
        self.tally.last_sent_ns = monotonic_ns()
        self._start(stream, "gzip" if self._compression(stream) else "")
        self._out.data(stream, packed)

    def _start(self, stream: Stream, encoding: str) -> None:
        if not stream.started:
            stream.started = True
            self._out.sent_data = True
            self._out.put(frame(HEADERS, END_HEADERS, stream.id, answer_block(encoding)))

    def _compression(self, stream: Stream) -> int:
        return self._serving.compression_level if stream.headers.accepts_gzip else 0

    def _tail(self, stream: Stream, refusal: Refusal) -> bytes:
        status, details, metadata = refusal
        block = status_block(status, details, metadata, alone=not stream.started)
        return frame(HEADERS, END_STREAM | END_HEADERS, stream.id, block)  # details are cut, so this fits one frame

    def refuse(self, stream: Stream, refusal: Refusal) -> None:
        """End a call with a status, after the data that is already sent for it."""
        if stream.tail is None and not stream.closed:
            if refusal[0] != Status.OK:
                stream.outcome = REFUSED
            self._out.end(stream, self._tail(stream, refusal))

    def _expire(self, stream: Stream) -> None:
        """The deadline has passed without an answer: the client has given up."""
        stream.expires = None
        self._cut(stream, _EXPIRED)

    def _cut(self, stream: Stream, refusal: Refusal) -> None:
        """End a call now. A partly sent answer cannot have a status: the stream is reset."""
        if stream.pending or stream.tail is not None:
            self._out.put(rst_stream(stream.id, ErrorCode.CANCEL))
        else:
            self.refuse(stream, refusal)
        self.abandon(stream)

    def _closed(self, stream: Stream) -> None:
        """The last frame of a stream is passed to the transport."""
        if stream.closed:
            return
        if stream.outcome:
            self.tally.refused += stream.outcome == REFUSED
            self.tally.silent += stream.outcome == ENDED_SILENTLY
        if not stream.ended:
            self._out.put(rst_stream(stream.id, ErrorCode.NO_ERROR))
        self._forget(stream)  # this may close the connection
        stream.arrived()
        if stream.task is not None:
            stream.task.cancel()

    def abandon(self, stream: Stream | LaneCall) -> None:
        """End a call whose client does not wait any more."""
        if isinstance(stream, LaneCall):
            if self.streams.pop(stream.id, None) is not None:
                self.tally.reset += 1
                self.tally.received -= not stream.ended
            if stream.ended:
                stream.abandon()
            self.on_end()
            return
        self.tally.reset += not stream.closed
        self._forget(stream)
        self._out.drop(stream)
        stream.messages.clear()
        stream.arrived()
        if stream.task is not None:
            stream.task.cancel()

    def _forget(self, stream: Stream) -> None:
        stream.closed = True
        self.streams.pop(stream.id, None)
        self._release(stream)
        stream.assembler = None  # frees the memory of an incomplete message
        if stream.expires is not None:
            stream.expires.cancel()
        self.on_end()

    def cut_all(self, refusal: Refusal) -> list[asyncio.Task[Any]]:
        """End all calls with this status; returns their tasks, which are being cancelled."""
        tasks = [stream.task for stream in self.streams.values() if stream.task is not None]
        for stream in list(self.streams.values()):
            if isinstance(stream, LaneCall):
                ordinary = self.adopt(stream, ended=stream.ended)
                if stream.ended:
                    stream.abandon()
                stream = ordinary
            self._cut(stream, refusal)
        return [task for task in tasks if not task.done()]


def _raise_if_over(stream: Stream) -> None:
    if stream.closed or stream.tail is not None:
        raise asyncio.CancelledError
