"""One HTTP connection without a socket: a transport in memory, and applications that answer on it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

import h11
from uvicorn import Config
from uvicorn.server import ServerState
from virtual_time import settle

from charonia.offload.pool import Offload
from charonia.tasks import Tasks
from gateway.http.bodies import EXCHANGE, Message, Receive, Scope, Send
from gateway.http.codec.response_codec import response_head
from gateway.http.protocol import BoundedHttpProtocol

TURNS = 50
"""Turns of the loop in which a connection does all that it can do."""

Answer = Callable[[Scope, Receive, Send], Awaitable[None]]


class MemoryTransport(asyncio.Transport):
    """Keeps what is written. `closing`: nothing more may be; it may still be read until `closed`."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.1", 40000)})
        self.written = bytearray()
        self.closing = self.closed = self.paused = False
        self.written_late = 0
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.written_late += self.closing
        if not self.closing:
            self.written += data

    def writelines(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.write(part)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closing = True

    def close(self) -> None:
        self.closing = self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol


class App:
    """What the protocol asks of the application, around any ASGI callable."""

    lane = None
    http2 = None

    def __init__(self, answer: Answer, *, forwards_headers: bool = False, has_room: bool = False) -> None:
        self._answer = answer
        self.config = Config(
            cast("Any", self), http=BoundedHttpProtocol, log_config=None, lifespan="off", interface="asgi3"
        )
        self.config.proxy_headers = False
        self.config.load()
        self.forwards_headers = forwards_headers
        self.offload, self.body_tasks = Offload(), Tasks()
        self.allocate_body = (lambda size, _skew: memoryview(bytearray(size))) if has_room else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


class Wire:
    """A connection and its transport; `send` is what a client sends."""

    def __init__(self, app: App) -> None:
        self.state = ServerState()
        self.transport = MemoryTransport()
        self.connection = BoundedHttpProtocol(app.config, self.state, {})
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)

    async def send(self, data: bytes) -> None:
        """As a transport does: while reading goes on, and to the protocol of the moment."""
        while data and not self.transport.closed:
            if self.transport.paused:
                await asyncio.sleep(0)
                continue
            protocol = self.transport.protocol
            if isinstance(protocol, asyncio.BufferedProtocol):
                buffer = protocol.get_buffer(-1)
                size = min(len(buffer), len(data))
                buffer[:size] = data[:size]
                data = data[size:]
                protocol.buffer_updated(size)
            else:
                protocol.data_received(data)
                return

    async def rest(self) -> None:
        """Let everything happen that can."""
        await settle(TURNS)

    async def leave(self) -> None:
        """The client goes, and the connection's task ends."""
        protocol, self.transport.protocol = self.transport.protocol, None
        protocol.connection_lost(None)
        if self.state.tasks:
            await asyncio.wait(self.state.tasks)
        assert not self.state.connections
        assert not self.transport.written_late, "written behind the end"

    async def exchange(self, *pieces: bytes) -> bytes:
        """All that is answered to these pieces."""
        for piece in pieces:
            await self.send(piece)
        await self.rest()
        await self.leave()
        return bytes(self.transport.written)


async def whole_body(receive: Receive) -> tuple[bytes, bool]:
    """The body, and whether all of it came."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(parts), False
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts), True


def summary(method: str, target: str, headers: int, body: bytes) -> bytes:
    """What `echo` answers."""
    return b"%b %b %d %b" % (method.encode(), target.encode(), headers, hashlib.sha256(body).hexdigest().encode())


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Says what it got, in the way that the request's query asks for."""
    way = scope["query_string"]
    exchange = scope["state"][EXCHANGE]
    if way == b"deaf":  # answers before it has read, and reads nothing
        body: bytes | memoryview = b""
    else:
        come = exchange.received() if way == b"quick" else None
        body = (await whole_body(receive))[0] if come is None else come
        view = exchange.received()
        body = view if isinstance(view, memoryview) else body
    text = summary(scope["method"], scope["path"], len(scope["headers"]), bytes(body))
    headers = [(b"x-way", way)]
    at_once = way == b"quick" and scope["method"] != "HEAD"
    if at_once and exchange.respond(response_head(headers, len(text)), text):
        return
    if way != b"chunked":
        headers.append((b"Content-Length", b"%d" % len(text)))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    half = len(text) // 2
    parts: list[Message] = [
        {"type": "http.response.body", "body": text[:half], "more_body": True},
        {"type": "http.response.body", "body": text[half:]},
    ]
    for part in parts:
        await send(part)


def responses(data: bytes, methods: list[str]) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of each response in `data`, to requests of these methods, as another library reads
    them; fewer than requests where the connection was to end, and nothing may be behind them.
    """
    found = []
    for method in methods:
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(data)
        status, headers, body = 0, {}, b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                raise AssertionError(f"no whole response in {data[:200]!r}")
            if isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
        found.append((status, headers, body))
        data = client.trailing_data[0]
        if headers.get("connection") == "close":
            break
    assert not data
    return found
