"""Large bodies through real sockets: a file's pages are passed on by the kernel, other memory is copied in slices."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from charonia.offload.handed_memory import received_memory
from gateway.http import exchanges
from gateway.http.exchanges import FlowControl

SIZE_BYTES = 12_000_001
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
LOOPS = pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
LIMIT_S = 30.0

Factory = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each call of `sendfile` has sent."""
    sizes: list[int] = []
    real = os.sendfile

    def counted(to: int, file: int, offset: int, count: int) -> int:
        sent = real(to, file, offset, count)
        sizes.append(sent)
        return sent

    monkeypatch.setattr(exchanges.os, "sendfile", counted)
    return sizes


def content() -> bytes:
    return os.urandom(1 << 16) * (SIZE_BYTES >> 16) + b"end"


def in_file(data: bytes) -> memoryview:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(b"before" + data)
    return received_memory(descriptor, len(data) + 6)[6:]


class Server(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.flow = FlowControl(self.transport, (), 1)
        self.lost = asyncio.Event()

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport.close()
        self.flow.resume_writing()
        self.lost.set()


async def pair() -> tuple[Server, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, server = await asyncio.get_running_loop().create_unix_connection(Server, sock=ours)
    return server, theirs


def run(factory: Factory, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(work, LIMIT_S))


async def received(client: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(client, 50_000)
        assert piece, "the connection ended early"
        data += piece
    return bytes(data)


@LOOPS
@pytest.mark.parametrize("is_file", [True, False])
def test_a_client_has_all_of_it_in_order(loop_factory: Factory, is_file: bool, passed_on: list[int]) -> None:
    async def work() -> None:
        server, client = await pair()
        data = content()
        server.transport.write(HEAD)
        writing = asyncio.ensure_future(server.flow.write(in_file(data) if is_file else data))
        assert await received(client, len(HEAD) + len(data)) == HEAD + data
        await writing
        server.transport.write(b"next")
        assert await received(client, 4) == b"next"
        assert sum(passed_on) == (len(data) if is_file else 0)
        assert all(size <= exchanges._SLICE_BYTES for size in passed_on)
        server.transport.close()
        client.close()

    run(loop_factory, work())


@LOOPS
def test_what_the_client_has_not_read_yet_comes_first(loop_factory: Factory, passed_on: list[int]) -> None:
    async def work() -> None:
        server, client = await pair()
        data, before = content(), b"b" * 3_000_000
        server.transport.write(before)
        writing = asyncio.ensure_future(server.flow.write(in_file(data)))
        assert await received(client, len(before) + len(data)) == before + data
        await writing
        assert not passed_on
        server.transport.close()
        client.close()

    run(loop_factory, work())


@LOOPS
@pytest.mark.parametrize("who", ["client", "server"])
def test_a_connection_that_ends_meanwhile_ends_the_write(loop_factory: Factory, who: str, passed_on: list[int]) -> None:
    """And no descriptor of it is left, else the client would wait for the rest."""

    async def work() -> None:
        server, client = await pair()
        writing = asyncio.ensure_future(server.flow.write(in_file(content())))
        await received(client, 100_000)
        assert not writing.done()
        if who == "client":
            client.close()
        else:
            server.transport.abort()
        await writing
        await server.lost.wait()
        if who == "server":
            with pytest.raises(AssertionError, match="ended early"):
                await received(client, SIZE_BYTES)
            client.close()

    run(loop_factory, work())
    assert 0 < sum(passed_on) < SIZE_BYTES
