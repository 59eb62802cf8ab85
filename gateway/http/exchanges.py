"""Requests of one HTTP/1.1 connection and their responses as ASGI: `receive`, `send`, flow control and order.

`protocol` parses the requests. An `Exchange` has shortcuts for the commonest requests: `received` returns a body that
has arrived whole, `respond` writes a whole response, `whole` returns the bytes that the express lane learns from.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import select
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Protocol

from charonia.errors import Unavailable
from charonia.offload.handed_memory import part_of
from charonia.offload.pool import Offload
from charonia.offload.transfers import move, sends, sends_file
from charonia.tensors import Buffer

from .bodies import CLIENT_LEFT, AsgiApp, Message, Scope
from .codec.response_codec import LargeReply, status_line

logger = logging.getLogger("charonia.gateway.http")

HIGH_WATER_BYTES = 65_536
"""Reading pauses when this much of a body has not been received by the application."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_JOIN_BYTES = 65_536
"""Up to this size copying a body behind its head is cheaper than a second write."""

_SLICE_BYTES = 1 << 16
"""Encrypting this much takes 0.2 ms; of larger bodies that the loop has to write itself slices are written, and other
connections are served between. A small call waits for some of them, one each time that its gateway reads or writes."""

_MAX_ENCRYPTED_BYTES = 1 << 20
_MAX_WHOLE_BYTES = 4 << 20
"""A socket takes up to 4 MB at once, and the transport writes on for as long as the client reads as fast."""

_NO_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
MAX_WAITING = 8
"""Requests that may wait behind the one being answered; with so many, reading pauses."""


class FlowControl:
    """Flow control of one connection, in both directions. Reading stays paused while `max_waiting` requests wait.
    Large bodies are sent in threads of `offload`.
    """

    __slots__ = (
        "_is_held",
        "_max_waiting",
        "_offload",
        "_transport",
        "_waiting",
        "_writable",
        "encrypts",
        "read_paused",
        "write_paused",
    )

    def __init__(self, transport: asyncio.Transport, waiting: Sized, max_waiting: int, offload: Offload) -> None:
        self._transport = transport
        self._waiting = waiting
        self._max_waiting = max_waiting
        self._offload = offload
        self._writable = asyncio.Event()
        self.encrypts = bool(transport.get_extra_info("sslcontext"))
        """Writing takes time in proportion to the size, even when the client does not read."""
        self.read_paused = False
        self.write_paused = False
        self._is_held = False

    def hold_reading(self) -> None:
        """Stop reading: until `release_reading` a thread reads from the connection, over its own `descriptor`. The
        client may send meanwhile, so reading does not count as paused.
        """
        self._transport.pause_reading()
        self._is_held, self.read_paused = True, False

    def release_reading(self) -> None:
        """Read again, unless reading was paused meanwhile."""
        self._is_held = False
        if not self.read_paused:
            self._transport.resume_reading()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            if not self._is_held:
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless enough requests wait."""
        if self.read_paused and len(self._waiting) < self._max_waiting:
            self.read_paused = False
            if not self._is_held:
                self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()

    def descriptor(self) -> int | None:
        """A descriptor of the connection for threads, to be closed by the caller: loops refuse to watch those of their
        transports. None where there is none, or as many as there may be.
        """
        connection = self._transport.get_extra_info("socket")
        try:
            return None if connection is None else os.dup(connection.fileno())
        except OSError:
            return None

    async def drain(self) -> None:
        """Wait until the transport accepts more, or the connection is lost."""
        while self.write_paused:
            await self._writable.wait()

    async def write(self, data: Buffer) -> None:
        """Write data of any size, as fast as the client reads it."""
        if len(data) <= (_MAX_ENCRYPTED_BYTES if self.encrypts else _MAX_WHOLE_BYTES):
            self._transport.write(data)
            return
        view = memoryview(data)
        sent = 0 if self.encrypts else await self._write_apart(view)
        for at in range(sent, len(view), _SLICE_BYTES):
            await self.drain()
            if self._transport.is_closing():
                return
            self._transport.write(view[at : at + _SLICE_BYTES])
            await asyncio.sleep(0)

    async def _write_apart(self, view: memoryview) -> int:
        """Have threads send this; a file in memory by its pages, without a copy. Returns how much needs no more
        sending, all of it also when the connection is lost.
        """
        loop, client = asyncio.get_running_loop(), self.descriptor()
        if client is None:
            return 0
        sent, waits = 0, False
        try:
            await self._write_all_before()
            part = part_of(view)
            step = sends(client, view) if part is None else sends_file(client, *part)
            while sent < len(view) and not self._transport.is_closing():
                if waits:
                    self.pause_writing()
                    loop.add_writer(client, self.resume_writing)
                    try:
                        await self.drain()
                    finally:
                        loop.remove_writer(client)
                        self.resume_writing()
                    waits = False
                    continue
                sent, waits = await self._offload.transfer(move, step, sent, len(view), client, select.POLLOUT)
        except Unavailable:  # the event loop sends the rest
            return sent
        except (OSError, EOFError) as error:
            if not isinstance(error, ConnectionError):
                logger.error("a response of %d bytes cannot be sent: %s", len(view), error)
            self._transport.abort()
        finally:
            os.close(client)
        return len(view)

    async def _write_all_before(self) -> None:
        """Wait until the transport has nothing left to write."""
        await asyncio.sleep(0)  # what was written leaves at the end of a turn
        if self._transport.is_closing() or not self._transport.get_write_buffer_size():
            return
        self._transport.set_write_buffer_limits(0)
        try:
            await self.drain()
        finally:
            if not self._transport.is_closing():  # uvloop raises for a closed transport
                self._transport.set_write_buffer_limits()


class Connection(Protocol):
    """A connection, as an exchange uses it."""

    transport: asyncio.Transport
    flow: FlowControl

    def answered(self) -> None:
        """A response is complete."""

    def close_when_written(self) -> None:
        """Close the connection once all written bytes are sent."""

    def whole_request(self) -> bytes | None:
        """All bytes of the request being answered, if it arrived by itself and is not large."""


class Exchange:
    """One request and its response.

    `keep_alive`: the connection stays open after it; `expects_continue`: the client waits for `100 Continue`;
    `is_1_0`: the request is of HTTP/1.0, whose clients keep a connection only if the response says so, and whose
    responses of unknown length end with the connection (RFC 9112, section 6.1).
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_is_1_0",
        "_is_head",
        "_left_bytes",
        "_readable",
        "body",
        "disconnected",
        "expects_continue",
        "keep_alive",
        "large",
        "more_body",
        "response_complete",
        "response_started",
    )

    def __init__(
        self, connection: Connection, *, is_head: bool, keep_alive: bool, expects_continue: bool, is_1_0: bool
    ) -> None:
        self._connection = connection
        self._is_head = is_head
        self._is_1_0 = is_1_0
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        self._readable = asyncio.Event()
        """Set when there is something to receive."""
        self.body = bytearray()
        """The part that has arrived and that the application has not received."""
        self.large: memoryview | None = None
        """The memory of a body that is received past the parser."""
        self.more_body = True
        self.disconnected = False
        self.response_started = self.response_complete = False
        self._chunked: bool | None = None
        self._left_bytes: int | None = 0
        """The unsent rest of the Content-Length; None where the connection's end is that of the body."""

    # -- the request ---------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """More of the body has arrived."""
        if not self.response_complete:
            self.body += data
            if len(self.body) > HIGH_WATER_BYTES:
                self._connection.flow.pause_reading()
            self._readable.set()

    def end_body(self) -> None:
        """The body is complete."""
        if not self.response_complete:
            self.more_body = False
            self._readable.set()

    def receive_into(self, view: memoryview) -> bytearray:
        """Receive the body into `view`, past the parser. Returns the part that has arrived already."""
        received, self.body = self.body, bytearray()
        self.large = view
        self._readable.clear()
        return received

    def disconnect(self) -> None:
        """The client has left."""
        if not self.response_complete:
            self.disconnected = True
        self.large = None
        self._readable.set()

    async def receive(self) -> Message:
        """The next ASGI message."""
        connection = self._connection
        if self.expects_continue and not self.disconnected and not connection.transport.is_closing():
            connection.transport.write(CONTINUE)
            self.expects_continue = False
        if not self.disconnected and not self.response_complete:
            connection.flow.resume_reading()
            await self._readable.wait()
            self._readable.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    def received(self) -> bytes | memoryview | None:
        """The body, if it has arrived whole and none of it was received yet; a large one as a view of its memory."""
        if self.more_body or self.disconnected or self.expects_continue:
            return None
        view, self.large = self.large, None
        if view is not None:
            return view
        body, self.body = bytes(self.body), bytearray()
        return body

    def whole(self) -> bytes | None:
        """All bytes of the request, headers included, if they were kept, and if nothing but an answer follows it: the
        lane neither closes a connection nor says that it stays open.
        """
        return self._connection.whole_request() if self.keep_alive and not self._is_1_0 else None

    # -- the response --------------------------------------------------------------------------------------------------

    def respond(self, head: bytes, body: bytes | LargeReply) -> bool:
        """Write a whole response at once: as two ASGI messages, at a third of their cost.

        `head` is the status line and all headers. Returns False when that is not possible (the client reads slowly, or
        a header says what becomes of the connection); then the caller sends ASGI messages.
        """
        connection = self._connection
        flow = connection.flow
        if flow.write_paused or self.response_started or not self.keep_alive or self._is_1_0:
            return False
        if len(body) > _MAX_ENCRYPTED_BYTES and (flow.encrypts or len(body) > _MAX_WHOLE_BYTES):
            return False
        if self.disconnected:
            return True
        self.response_started = True
        if isinstance(body, LargeReply):
            connection.transport.writelines([head, *body.parts])
        elif len(body) <= _JOIN_BYTES:
            connection.transport.write(head + body)
        else:
            connection.transport.writelines([head, body])
        self._complete()
        return True

    async def send(self, message: Message) -> None:
        """Send an ASGI message. Raises RuntimeError for one out of order."""
        if self._connection.flow.write_paused and not self.disconnected:
            await self._connection.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if self.response_complete:
            raise RuntimeError(f"unexpected ASGI message {kind!r} after the response was complete")
        expected = "http.response.body" if self.response_started else "http.response.start"
        if kind != expected:
            raise RuntimeError(f"expected ASGI message {expected!r}, got {kind!r}")
        if self.response_started:
            body, more_body = message.get("body", b""), message.get("more_body", False)
            if more_body and self._chunked and len(body) <= _JOIN_BYTES and not self._is_head:
                if body:  # as `_send_body`, without a coroutine for each event of a stream
                    self._connection.transport.write(b"%x\r\n%b\r\n" % (len(body), bytes(body)))
                return
            await self._send_body(body, more_body)
        else:
            self._send_head(message["status"], list(message.get("headers", [])))

    def _send_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        self.expects_continue = False
        lines = [status_line(status)]
        says_close = False
        for name, value in map(checked_header, headers):
            if name == b"content-length" and self._chunked is None:
                self._left_bytes = int(value)
                self._chunked = False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self._left_bytes = 0
                self._chunked = True
            elif name == b"connection" and b"close" in [token.strip() for token in value.lower().split(b",")]:
                self.keep_alive = False
                says_close = True
            lines.append(b"%b: %b\r\n" % (name, value))
        if self._chunked is None and not self._is_head and status not in (204, 304):
            self._chunked = not self._is_1_0
            if self._chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self._left_bytes, self.keep_alive = None, False
        if not self.keep_alive:
            if not says_close:
                lines.append(b"connection: close\r\n")
        elif self._is_1_0:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        self._connection.transport.write(b"".join(lines))

    async def _send_body(self, body: Buffer, more_body: bool) -> None:
        transport, flow = self._connection.transport, self._connection.flow
        if self._is_head:
            self._left_bytes = 0
        elif self._chunked:
            end = b"" if more_body else b"0\r\n\r\n"
            if len(body) > _JOIN_BYTES:
                transport.write(b"%x\r\n" % len(body))
                await flow.write(body)
                transport.write(b"\r\n" + end)
            else:
                transport.write((b"%x\r\n%b\r\n" % (len(body), bytes(body)) if body else b"") + end)
        else:
            if self._left_bytes is not None:
                if len(body) > self._left_bytes:
                    raise RuntimeError("response content longer than Content-Length")
                self._left_bytes -= len(body)
            if body:
                await flow.write(body)
        if self.disconnected:
            return
        if not more_body:
            if self._left_bytes:
                raise RuntimeError("response content shorter than Content-Length")
            if not self.keep_alive:
                self._connection.close_when_written()
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self._readable.set()
        self._connection.answered()


def checked_header(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """A response header, its name in lower case. Raises RuntimeError for characters that a header must not hold."""
    name, value = header
    if _NO_NAME.search(name) or _NO_VALUE.search(value):
        raise RuntimeError(f"invalid HTTP header {name!r}")
    return name.lower(), value


Request = tuple[Exchange, Scope]


class Pipeline:
    """Answers the requests of one connection in order, in one task: a task for each request would cost more.

    `serving` is the request being answered; iteration yields the waiting ones. `tasks` holds the server's tasks.
    `emptied` is called when a request has ended and none waits.
    """

    def __init__(
        self,
        app: AsgiApp,
        transport: asyncio.Transport,
        tasks: set[asyncio.Task[None]],
        emptied: Callable[[], None],
        offload: Offload,
    ) -> None:
        self._app = app
        self._transport = transport
        self._tasks = tasks
        self._emptied = emptied
        self._waiting: deque[Request] = deque()
        self.flow = FlowControl(transport, self._waiting, MAX_WAITING, offload)
        self.serving: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[None] | None = None
        """Set while the task is idle: it waits for the next request, or the end of the connection."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, exchange: Exchange, scope: Scope) -> None:
        """Answer a request after those before it."""
        if self.serving is None:
            self._begin((exchange, scope))
            return
        self._waiting.append((exchange, scope))
        if len(self._waiting) >= MAX_WAITING:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def withdraw(self, exchange: Exchange) -> None:
        """Remove this request if it was added last and still waits."""
        if self._waiting and self._waiting[-1][0] is exchange:
            self._waiting.pop()

    def disconnect(self) -> None:
        """The client has left: end the request being answered and those that wait."""
        for exchange, _ in self._waiting:
            exchange.disconnect()
        self._waiting.clear()
        self._emptied = _nothing  # it holds the connection
        if self.serving is None:
            if self._next is not None and not self._next.done():
                self._next.set_result(None)
            return
        exchange, scope = self.serving
        if not exchange.response_complete and self._task is not None:  # if complete, the application finishes by itself
            scope["state"][CLIENT_LEFT] = True
            exchange.disconnect()
            self._task.cancel()

    def _begin(self, request: Request) -> None:
        self.serving = request
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        else:
            task = self._task = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        task = self._task
        assert task is not None
        while self.serving is not None:
            await self._answer(*self.serving)
            self.serving = None
            if not self._waiting:
                self._emptied()
            if self._transport.is_closing():
                return
            if self._waiting:
                following = self._waiting.popleft()
                self.flow.resume_reading()
                if task.cancelling():  # only this request was cancelled: a new task answers the next ones
                    self._begin(following)
                    return
                self.serving = following
            elif task.cancelling():
                return
            else:
                self._next = asyncio.get_running_loop().create_future()
                await self._next

    async def _answer(self, exchange: Exchange, scope: Scope) -> None:
        """Have the application answer one request; if it fails, answer 500 or close."""
        try:
            await self._app(scope, exchange.receive, exchange.send)
            if exchange.response_complete or exchange.disconnected:
                return
            logger.error("a request of %s ended without a response", scope["path"][:256])
        except (Exception, asyncio.CancelledError):
            logger.exception("unexpected failure of %s", scope["path"][:256])
        finally:
            exchange.large = None  # not taken when the request was refused for another reason
        if exchange.response_started:
            self._transport.close()
        else:
            body = b"Internal Server Error"
            headers = [
                (b"content-type", b"text/plain; charset=utf-8"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            await exchange.send({"type": "http.response.start", "status": 500, "headers": headers})
            await exchange.send({"type": "http.response.body", "body": body})


def _nothing() -> None: ...
