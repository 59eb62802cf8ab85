"""One connection of HTTP/2, of gRPC or HTTP, without a socket, and what it must keep to whatever comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from uvicorn.server import ServerState
from virtual_time import settle

from gateway.grpc.calling import Context, Streaming, Unary, Write
from gateway.grpc.native.codec import http2_frames as frames
from gateway.grpc.native.codec.limits import KeepAlive
from gateway.grpc.native.connection import Connection
from gateway.grpc.native.serving import Serving
from gateway.grpc.statuses import Refusal
from gateway.http.bodies import Receive, Scope, Send
from gateway.http2.http_connection import HttpConnection


async def _echo(data: bytes, _context: Context) -> bytes | Refusal:
    await asyncio.sleep(0)
    return data


async def _echo_all(messages: AsyncIterator[bytes], write: Write, _context: Context) -> Refusal | None:
    async for message in messages:
        await write(message)
    return None


METHODS = {"/s/Unary": Unary(_echo), "/s/Stream": Streaming(_echo_all)}


class Transport(asyncio.Transport):
    """Keeps what is written; closed, it says so to its protocol as a loop does."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def read_frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each frame."""
    found, at = [], 0
    while at < len(data):
        high, low, kind, flags, number = frames.HEAD.unpack_from(data, at)
        start, at = at + 9, at + 9 + (high << 8 | low)
        assert at <= len(data), "a frame is cut"
        found.append((kind, flags, number, bytes(data[start:at])))
    return found


async def _echo_body(_scope: Scope, receive: Receive, send: Send) -> None:
    """As an application does, it ends when the client has left."""
    with contextlib.suppress(asyncio.CancelledError):
        body, goes_on = b"", True
        while goes_on:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            goes_on = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def answers(
    pieces: list[bytes], *, slowly: bool = False, begins_well: bool = True, of_http: bool = False
) -> bytes:
    """All that is written to a client that sends these pieces. `slowly`: the loop turns now and then in between;
    `of_http`: on the HTTP port."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    serving = Serving(dict(METHODS), KeepAlive(), 0, 1 << 20)
    state = ServerState()
    connection = HttpConnection(serving, _echo_body, state) if of_http else Connection(serving)
    transport = Transport(connection)
    connection.connection_made(transport)
    start = [frames.PREFACE + frames.settings({})] if begins_well else []
    for number, piece in enumerate([*start, *pieces]):
        if transport.closing:
            break
        connection.data_received(piece)
        if slowly and number % 3 == 0:
            await asyncio.sleep(0)
    await settle(20)
    written = bytes(transport.written)
    answered = read_frames(written)
    ended = [number for kind, flags, number, _ in answered if kind == frames.HEADERS and flags & frames.END_STREAM]
    assert len(ended) == len(set(ended)), "a stream was ended twice"
    assert answered[0][0] == frames.SETTINGS
    transport.close()
    await settle(5)
    assert not connection.calls.streams
    assert not serving.connections
    assert connection.out.blocked_bytes == serving.held_bytes == 0
    assert not state.tasks
    assert not state.connections
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert problems == []
    return written
