"""Large bodies through real sockets, sent in threads: a file's pages are passed on by the kernel."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from few_turns import FewTurns

from charonia.offload.handed_memory import part_of, received_memory
from charonia.offload.pool import Offload
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

    monkeypatch.setattr(os, "sendfile", counted)
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
        self.offload = Offload()
        self.flow = FlowControl(self.transport, (), 1, self.offload)
        self.lost = asyncio.Event()
        self.got: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.got.append(data)

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport.close()
        self.flow.resume_writing()
        self.offload.close()
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
        assert all(size <= 1 << 16 for size in passed_on)
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
        assert sum(passed_on) == len(data)
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


@LOOPS
def test_a_file_that_is_shorter_than_the_body_ends_the_connection(loop_factory: Factory) -> None:
    """The client was told the length of the body, and waits for all of it."""

    async def work() -> None:
        server, client = await pair()
        view = in_file(content())
        found = part_of(view)
        assert found is not None
        os.truncate(found[0], SIZE_BYTES // 2)
        writing = asyncio.ensure_future(server.flow.write(view))
        with pytest.raises(AssertionError, match="ended early"):
            await received(client, SIZE_BYTES)
        await writing
        await server.lost.wait()
        client.close()

    run(loop_factory, work())


@LOOPS
def test_a_connection_that_ends_before_its_turn_ends_the_write(loop_factory: Factory) -> None:
    """It waits until what was written before has left."""

    async def work() -> None:
        server, client = await pair()
        server.transport.write(b"b" * 3_000_000)
        writing = asyncio.ensure_future(server.flow.write(in_file(content())))
        async with asyncio.timeout(LIMIT_S):
            while not server.flow.write_paused or server.transport.get_write_buffer_limits() != (0, 0):
                await asyncio.sleep(0)
        client.close()
        await server.lost.wait()
        await writing

    run(loop_factory, work())


@LOOPS
@pytest.mark.parametrize("turns", [0, 1])
def test_what_threads_cannot_send_the_loop_sends(
    loop_factory: Factory, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        server, client = await pair()
        data = content()
        monkeypatch.setattr(server.offload, "transfer", FewTurns(server.offload, turns))
        writing = asyncio.ensure_future(server.flow.write(in_file(data)))
        assert await received(client, len(data)) == data
        await writing
        server.transport.close()
        client.close()

    run(loop_factory, work())


@LOOPS
def test_nothing_is_read_while_others_read(loop_factory: Factory) -> None:
    async def work() -> None:
        server, client = await pair()
        flow = server.flow
        for change in (flow.pause_reading, flow.hold_reading, flow.resume_reading, flow.pause_reading):
            change()
        assert flow.read_paused
        flow.resume_reading()
        assert not flow.read_paused
        client.send(b"for others")
        descriptor = server.flow.descriptor()
        assert descriptor is not None
        for _ in range(20):
            await asyncio.sleep(0)
        assert os.read(descriptor, 100) == b"for others"
        os.close(descriptor)
        server.flow.release_reading()
        client.send(b"mine")
        async with asyncio.timeout(LIMIT_S):
            while not server.got:
                await asyncio.sleep(0)
        assert server.got == [b"mine"]
        server.transport.close()
        client.close()

    run(loop_factory, work())
