"""The requests of one HTTP/2 connection and their responses as ASGI, each in its own task.

`gateway.grpc.native` handles frames, windows and limits. This module receives bodies, within the same bounds as
HTTP/1.1 (H16, H24), and sends responses as fast as the client reads.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import httptools
from uvicorn.server import ServerState

from gateway.grpc.native.codec.call_headers import CallHeaders
from gateway.grpc.native.codec.grpc_messages import Assembler
from gateway.grpc.native.codec.http2_frames import (
    DATA,
    END_STREAM,
    ErrorCode,
    StreamFault,
    frame,
    rst_stream,
    window_update,
)
from gateway.grpc.native.connection_calls import STREAM_WINDOW, Calls
from gateway.grpc.native.outbox import Outbox, Stream
from gateway.grpc.native.serving import Serving
from gateway.http.bodies import CLIENT_LEFT, AsgiApp, Message, Scope
from gateway.http.codec.error_replies import JSON_CONTENT_TYPE, error_body
from gateway.http.exchanges import checked_header
from gateway.http.protocol import (
    ASGI,
    BODY_MIN_BYTES,
    BODY_STALL_S,
    CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_HEADERS,
    TOO_SLOW,
    address,
    split_target,
)

from .request_headers import RequestHeaders, response_frames

_NO_MESSAGES = Assembler("identity", 0)
"""Bodies are not divided into messages, as gRPC's are."""
_OTHER_LENGTH = "the body is not as long as was said"
_TOO_MUCH = "request bodies that have not come whole take too much memory"

logger = logging.getLogger("charonia.gateway.http")


class RequestStream(Stream):
    """One request, with `receive` and `send` of ASGI."""

    __slots__ = ("body", "came_bytes", "expects_continue", "lately_bytes", "pieces", "request", "scope", "stalled_s")

    def __init__(self, requests: Requests, number: int, request: RequestHeaders, send_window: int) -> None:
        super().__init__(requests, number, request, STREAM_WINDOW, send_window)
        self.assembler = _NO_MESSAGES
        self.request = request
        self.scope: Scope = {}
        self.body = bytearray()
        """The part that has arrived and that the application has not received."""
        self.came_bytes = self.lately_bytes = self.pieces = 0
        self.stalled_s = 0.0
        self.expects_continue = any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in request.fields
        )

    async def receive(self) -> Message:
        """The next ASGI message."""
        requests = cast(Requests, self._calls)
        if self.expects_continue and not self.started and not self.closed:
            requests.say_continue(self)
        told_end = self.assembler is None
        while not self.closed and (told_end or not (self.body or self.ended)):
            if self._arrived is None or self._arrived.done():
                self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        if self.closed:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        if self.ended:
            self.assembler = None  # the application has received the end
        else:
            requests.took(self)
        return {"type": "http.request", "body": body, "more_body": not self.ended}

    async def send(self, message: Message) -> None:
        """Send an ASGI message; returns when the client's windows have let it go."""
        if not self.closed and self.tail is None:
            await cast(Requests, self._calls).respond(self, message)


class Requests(Calls):
    """The requests of one connection. `app` answers them, in tasks that `state` holds too."""

    def __init__(self, serving: Serving, out: Outbox, app: AsgiApp, state: ServerState) -> None:
        super().__init__(serving, out)
        self._app = app
        self._state = state
        self.transport: asyncio.BaseTransport | None = None

    # -- what the client sends ----------------------------------------------------------------------------------------

    def begin(self, number: int, headers: CallHeaders, ended: bool) -> None:
        request = cast(RequestHeaders, headers)
        stream = RequestStream(self, number, request, self._out.initial_window)
        self.streams[number] = stream
        self._state.total_requests += 1
        if len(request.fields) > MAX_HEADERS:
            stream.ended = ended
            self._refuse(stream, 431, f"request has more than {MAX_HEADERS} headers")
            return
        try:
            path, raw_path, query = split_target(request.target)
        except (httptools.HttpParserError, ValueError, AttributeError):
            stream.ended = ended
            self._refuse(stream, 400, "Invalid HTTP request received.")
            return
        transport = self.transport
        stream.scope = {
            "type": "http",
            "asgi": ASGI,
            "http_version": "2",
            "server": None if transport is None else address(transport, "sockname"),
            "client": None if transport is None else address(transport, "peername"),
            "scheme": "http" if transport is None or not transport.get_extra_info("sslcontext") else "https",
            "root_path": "",
            "method": request.method,
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": list(request.fields),
            "state": {},
        }
        if ended:
            self.end(stream)
        task = stream.task = self._loop.create_task(self._serve(stream))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def feed(self, stream: Stream, payload: bytes | memoryview) -> None:
        assert isinstance(stream, RequestStream)
        if stream.tail is not None:
            return  # it is refused
        size = len(payload)
        stream.came_bytes += size
        if stream.request.length is not None and stream.came_bytes > stream.request.length:
            raise StreamFault(stream.id, ErrorCode.PROTOCOL_ERROR, _OTHER_LENGTH)
        stream.body += payload
        stream.lately_bytes += size
        stream.pieces += 1
        stream.held_bytes += size
        self._serving.held_bytes += size
        if stream.pieces > MAX_CHUNKS + stream.came_bytes // CHUNK_BYTES:
            self._refuse(stream, 400, f"request body has more than {MAX_CHUNKS} chunks")
        elif self._serving.held_bytes > self._serving.max_held_bytes:
            self._refuse(stream, 429, _TOO_MUCH)
        else:
            stream.arrived()

    def credit(self, stream: Stream) -> None:
        """Let the client send more once the application has received the data."""
        assert isinstance(stream, RequestStream)
        if stream.tail is None and not stream.body and stream.uncredited >= STREAM_WINDOW // 2:
            self._out.put(window_update(stream.id, stream.uncredited))
            stream.receive_window += stream.uncredited
            stream.uncredited = 0

    def end(self, stream: Stream) -> None:
        assert isinstance(stream, RequestStream)
        if stream.request.length is not None and stream.request.length != stream.came_bytes and stream.tail is None:
            raise StreamFault(stream.id, ErrorCode.PROTOCOL_ERROR, _OTHER_LENGTH)
        stream.ended = True
        self._release(stream)
        stream.arrived()

    def say_continue(self, stream: RequestStream) -> None:
        """Ask the client for the body."""
        stream.expects_continue = False
        self._out.put(response_frames(stream.id, 100, ()))

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _serve(self, stream: RequestStream) -> None:
        """Have the application answer a request; if it fails, answer 500 or reset the stream."""
        path = stream.scope["path"][:256]
        try:
            await self._app(stream.scope, stream.receive, stream.send)
            if stream.closed or stream.tail is not None:
                return
            logger.error("a request of %s ended without a response", path)
        except (Exception, asyncio.CancelledError):
            logger.exception("unexpected failure of %s", path)
        if stream.started:
            self._cut(stream, (0, "", ()))
        elif not stream.closed:
            self._refuse(stream, 500, "internal server error")

    async def respond(self, stream: RequestStream, message: Message) -> None:
        """Send an ASGI message. Raises RuntimeError for one out of order."""
        expected = "http.response.body" if stream.started else "http.response.start"
        if message["type"] != expected:
            raise RuntimeError(f"expected ASGI message {expected!r}, got {message['type']!r}")
        if not stream.started:
            self._begin_answer(stream, message["status"], [checked_header(one) for one in message.get("headers", [])])
            return
        body = b"" if stream.request.method == "HEAD" else message.get("body", b"")
        sent = stream.sent = self._loop.create_future()
        self._out.data(stream, [body])
        if not message.get("more_body", False):
            self._out.end(stream, frame(DATA, END_STREAM, stream.id))
        await sent  # the task lasts until then, so that a shutdown waits for it

    def _begin_answer(self, stream: RequestStream, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        stream.started = True
        stream.expects_continue = False
        self._out.put(response_frames(stream.id, status, headers))

    def _refuse(self, stream: RequestStream, status: int, message: str) -> None:
        """Answer a request instead of the application; the rest of its body is dropped."""
        self._release(stream)
        if stream.started:
            self._cut(stream, (0, "", ()))
            return
        body = error_body(message)
        self._begin_answer(stream, status, [JSON_CONTENT_TYPE, (b"content-length", b"%d" % len(body))])
        self._out.data(stream, [body])
        self._out.end(stream, frame(DATA, END_STREAM, stream.id))
        self._left(stream)

    def _closed(self, stream: Stream) -> None:
        """The last frame of a response is passed to the transport; its task ends by itself."""
        if not stream.closed:
            if not stream.ended:
                self._out.put(rst_stream(stream.id, ErrorCode.NO_ERROR))
            self._forget(stream)
            stream.arrived()

    def _cut(self, stream: Stream, _refusal: Any) -> None:
        """End a response that cannot be completed."""
        if not stream.closed:
            self._out.put(rst_stream(stream.id, ErrorCode.INTERNAL_ERROR))
            self.abandon(stream)

    def abandon(self, stream: Any) -> None:
        """The client has left, or gets no answer."""
        super().abandon(stream)
        self._left(stream)

    def _left(self, stream: RequestStream) -> None:
        if stream.scope:
            stream.scope["state"][CLIENT_LEFT] = True
        if stream.task is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()

    # -- stalling -----------------------------------------------------------------------------------------------------

    def sweep(self, elapsed_s: float) -> None:
        """Refuse requests whose bodies have stalled, unless they wait for the application."""
        for stream in list(self.streams.values()):
            assert isinstance(stream, RequestStream)
            if stream.ended or stream.body or stream.tail is not None or stream.lately_bytes >= BODY_MIN_BYTES:
                stream.lately_bytes = 0
                stream.stalled_s = 0.0
                continue
            stream.stalled_s += elapsed_s
            if stream.stalled_s >= BODY_STALL_S:
                self._refuse(stream, 408, TOO_SLOW)
