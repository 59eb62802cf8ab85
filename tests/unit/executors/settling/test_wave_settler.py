"""Waves are settled once their gateways have what was written to them, each gateway by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.eventlog.payloads import PayloadDirectory
from charonia.tasks import Tasks
from charonia.tensors import Tensor
from charonia.wire import BatchHeader, pack_wave_reply, reply_meta, request_meta, unpack_wave, wave_head
from executors.batches.wave_execution import ExecutedWaves
from executors.metrics import ExecutorMetrics
from executors.running.submitted_batch import SubmittedBatch
from executors.settling.settler import OwnerReports
from executors.settling.usage_counts import UsageCounts
from executors.settling.wave_settler import ReplySockets, WaveSettler

PATIENCE_S = 20
LAZY, QUICK = "gw-lazy", "gw-quick"
QUEUE = keys.queue("m", 0, 0)
LOADED: Any = type("Loaded", (), {"model": "m", "version": 1, "content_hash": "h"})()
LARGE = 100_000


class Gateway:
    """A gateway's end. It reads nothing before `read_all`."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()

    async def listen(self, path: str) -> asyncio.Server:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return await asyncio.start_unix_server(self._on, path, limit=1024)

    def _on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.connected.set()

    async def read_all(self) -> None:
        while await self.reader.read(1 << 20):
            pass


class Bench:
    """A settler over a log in memory, with the sockets of two gateways."""

    def __init__(self, directory: str) -> None:
        self.log = MemoryLog()
        self.payloads = PayloadDirectory(directory, "executor-1")
        self.sockets = ReplySockets(self.payloads)
        self.tasks = Tasks()
        metrics = ExecutorMetrics()
        reports = OwnerReports(self.log, None)
        self.settler = WaveSettler(
            self.log, "executor-1", metrics, self.sockets, self.tasks, reports, UsageCounts(metrics)
        )
        self.gateways = {name: Gateway() for name in (LAZY, QUICK)}
        self._count = 0

    async def answer(self, endpoint: str, size: int) -> bytes:
        """A wave of one request, which is executed; the id of its entry."""
        self._count += 1
        tensor = Tensor.of("x", np.zeros((1, size), np.uint8))
        about = {"rows": 1, "signature": 7, "level": 0, "accepted_ns": self._count}
        meta = request_meta(1, "", [tensor], (), {})
        record = wave_head(self._count.to_bytes(15, "big"), 1, endpoint.encode(), meta, **about) + bytes(tensor.data)
        taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        assert self.log.waves.send(QUEUE, [record], taken.set_result)
        entry_id = await taken
        wave = unpack_wave(record)
        header = BatchHeader("b-1", "m", 1, "h", 1, (1,), keys.facts("m"), waves=((QUEUE, entry_id),))
        outputs = ((tensor.name, tensor.datatype, tensor.shape, len(tensor.data)),)
        reply = pack_wave_reply(wave.prefix, 1, reply_meta("m", 1, outputs), [tensor.data], 0)
        batch = SubmittedBatch((), lambda *_: None, header, waves=(wave,))
        self.settler.settle(batch, ExecutedWaves([reply]), LOADED)
        return entry_id

    async def connect(self, endpoint: str) -> None:
        self.sockets.seek(endpoint)
        async with asyncio.timeout(PATIENCE_S):
            await self.gateways[endpoint].connected.wait()
            while not self.sockets.send(endpoint, b"first"):
                await asyncio.sleep(0)

    async def waiting(self, *entry_ids: bytes) -> list[bool]:
        return await self.log.waves.waiting(QUEUE, entry_ids)

    async def until_settled(self, *entry_ids: bytes) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while any(await self.waiting(*entry_ids)):
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(str(tmp_path))
    async with AsyncExitStack() as stack:
        for name, gateway in made.gateways.items():
            server = await gateway.listen(made.payloads.socket_path(name))
            stack.callback(server.close)
            await made.connect(name)
        yield made
        await made.sockets.close()
        made.tasks.cancel()
        for gateway in made.gateways.values():
            gateway.writer.close()


async def test_a_gateway_that_does_not_read_holds_up_no_wave_of_another(bench: Bench) -> None:
    reading = asyncio.create_task(bench.gateways[QUICK].read_all())
    unread = []
    while bench.sockets.mark(LAZY) is None:
        unread.append(await bench.answer(LAZY, LARGE))
        assert len(unread) < 100, "its socket takes anything"
    read = [await bench.answer(QUICK, 100) for _ in range(20)]
    await bench.until_settled(*read)
    assert (await bench.waiting(*unread))[-1], "its reply is still here"
    assert bench.sockets.mark(LAZY) is not None

    late = asyncio.create_task(bench.gateways[LAZY].read_all())
    await bench.until_settled(*unread)
    assert await bench.log.range(QUEUE) == []
    reading.cancel()
    late.cancel()
    await asyncio.gather(reading, late, return_exceptions=True)


async def test_replies_that_are_long_together_are_answered_one_by_one_in_the_thread(bench: Bench) -> None:
    waves = []
    for number in range(3):
        tensor = Tensor.of("x", np.zeros((1, 1), np.uint8))
        about = {"rows": 1, "signature": 7, "level": 0, "accepted_ns": 1}
        head = wave_head(bytes(14) + bytes([number]), 1, QUICK.encode(), request_meta(1, "", [tensor], (), {}), **about)
        waves.append(unpack_wave(head + bytes(tensor.data)))
    executed = ExecutedWaves([bytes([number]) * 500_000 for number in range(3)])
    bench.settler.answer(SubmittedBatch((), lambda *_: None, None, waves=tuple(waves)), executed)
    assert executed.sent == {0, 1, 2}, "two fit what may be kept, and the third what is not yet above it"
    reader = bench.gateways[QUICK].reader
    async with asyncio.timeout(PATIENCE_S):
        assert len(await reader.readexactly(len(b"first") + 4 + 3 * (4 + 500_000)))


async def test_waves_are_settled_while_their_gateway_always_has_something_to_read(bench: Bench) -> None:
    """Its socket is never empty when the settler checks it: each wave waits for its own reply alone."""
    lazy = bench.gateways[LAZY]
    unread = []
    while bench.sockets.mark(LAZY) is None:
        unread.append(await bench.answer(LAZY, LARGE))
    unread += [await bench.answer(LAZY, LARGE) for _ in range(6)]  # more than its reader takes at once
    async with asyncio.timeout(PATIENCE_S):
        while (await bench.waiting(unread[0]))[0]:
            unread.append(await bench.answer(LAZY, LARGE))
            await lazy.reader.readexactly(LARGE)
            assert bench.sockets.mark(LAZY) is not None
            await asyncio.sleep(0.001)
    assert (await bench.waiting(*unread))[-1], "its reply is still here"


async def test_the_waves_of_a_gateway_that_has_gone_are_settled(bench: Bench) -> None:
    unread = []
    while bench.sockets.mark(LAZY) is None:
        unread.append(await bench.answer(LAZY, LARGE))
    bench.gateways[LAZY].writer.close()
    await bench.until_settled(*unread)
