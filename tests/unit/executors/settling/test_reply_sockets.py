"""Replies over a gateway's socket: whole ones in any number of threads, and what a gateway does not read in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from struct import unpack_from
from types import SimpleNamespace
from typing import Any

import pytest

from charonia.eventlog.payloads import PayloadDirectory
from executors.settling.reply_sockets import _MOST_REPLY_BYTES, _MOST_UNSENT_BYTES, ReplySockets

PATIENCE_S = 20
GATEWAY = "gw-1"


class Gateway:
    """A gateway's end: it reads when it is told to."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.server: asyncio.Server | None = None

    async def listen(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.server = await asyncio.start_unix_server(self._on, path, limit=1024)

    def _on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.connected.set()

    async def reply(self) -> bytes:
        assert self.reader is not None
        async with asyncio.timeout(PATIENCE_S):
            (size,) = unpack_from("<I", await self.reader.readexactly(4))
            return await self.reader.readexactly(size)

    async def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.server is not None:
            self.server.close()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Any]:
    directory = PayloadDirectory(str(tmp_path), "executor-1")
    sockets, gateway = ReplySockets(directory), Gateway()
    await gateway.listen(directory.socket_path(GATEWAY))
    try:
        yield SimpleNamespace(sockets=sockets, gateway=gateway, path=directory.socket_path(GATEWAY))
    finally:
        await sockets.close()
        await gateway.close()


async def connect(bench: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        bench.sockets.seek(GATEWAY)
        await bench.gateway.connected.wait()
        while not bench.sockets.send(GATEWAY, b"first"):
            await asyncio.sleep(0)
    assert await bench.gateway.reply() == b"first"


async def test_a_gateway_that_was_not_sought_is_sent_nothing(bench: Any) -> None:
    assert not bench.sockets.send(GATEWAY, b"reply")
    assert bench.sockets.mark(GATEWAY) is None


async def test_replies_of_one_call_arrive_as_single_ones(bench: Any) -> None:
    await connect(bench)
    assert bench.sockets.send(GATEWAY, b"one", b"", b"three" * 50_000)
    assert [await bench.gateway.reply() for _ in range(3)] == [b"one", b"", b"three" * 50_000]


async def test_nothing_is_sent_of_replies_one_of_which_is_too_long(bench: Any) -> None:
    await connect(bench)
    assert not bench.sockets.send(GATEWAY, b"one", bytes(_MOST_REPLY_BYTES + 1))
    assert bench.sockets.send(GATEWAY, b"two")
    assert await bench.gateway.reply() == b"two"


async def test_nothing_is_sent_of_replies_that_are_long_together(bench: Any) -> None:
    """Else all of a batch would be kept for a gateway that does not read, not one more than the bound."""
    await connect(bench)
    half = bytes(_MOST_UNSENT_BYTES // 2 + 1)
    assert not bench.sockets.send(GATEWAY, half, half)
    assert bench.sockets.send(GATEWAY, half)
    assert await bench.gateway.reply() == half


async def test_replies_of_many_threads_arrive_whole(bench: Any) -> None:
    await connect(bench)
    sizes = [1, 100, 70_000, 300_000]

    def write(thread: int) -> int:
        return sum(bench.sockets.send(GATEWAY, bytes([thread]) * size) for size in sizes * 3)

    writing = [asyncio.create_task(asyncio.to_thread(write, thread)) for thread in range(4)]
    got: list[bytes] = []

    async def read() -> None:
        while True:
            got.append(await bench.gateway.reply())

    reading = asyncio.create_task(read())
    async with asyncio.timeout(PATIENCE_S):
        accepted = sum([await one for one in writing])
        while len(got) < accepted:
            await asyncio.sleep(0.001)
        while bench.sockets.mark(GATEWAY) is not None:
            await asyncio.sleep(0.001)
    reading.cancel()
    assert accepted > 0
    assert all(len(set(reply)) == 1 and len(reply) in sizes for reply in got)
    for thread in range(4):
        mine = [len(reply) for reply in got if reply[0] == thread]
        assert len(mine) <= len(sizes) * 3


async def test_what_a_gateway_does_not_read_is_bounded_and_not_taken_for_sent(bench: Any) -> None:
    await connect(bench)
    reply = b"x" * 100_000
    accepted = 0
    while bench.sockets.send(GATEWAY, reply):
        accepted += 1
        assert accepted < 100, "it takes anything"
    assert bench.sockets.mark(GATEWAY) is not None
    for _ in range(accepted):
        assert await bench.gateway.reply() == reply
    async with asyncio.timeout(PATIENCE_S):
        while bench.sockets.mark(GATEWAY) is not None:
            await asyncio.sleep(0.001)
    assert bench.sockets.send(GATEWAY, b"again")
    assert await bench.gateway.reply() == b"again"


async def test_a_gateway_that_has_gone_is_noticed_and_found_again(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await connect(bench)
    bench.gateway.writer.close()
    async with asyncio.timeout(PATIENCE_S):
        while bench.sockets.send(GATEWAY, b"x"):
            await asyncio.sleep(0.001)
    assert bench.sockets.mark(GATEWAY) is None, "it waits for nothing"
    bench.gateway.connected.clear()
    monkeypatch.setattr("executors.settling.reply_sockets._TRY_AGAIN_NS", 0)
    await connect(bench)
