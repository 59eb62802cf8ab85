"""Waves are settled once their gateways have what was written to them, each gateway by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.datatypes import DataType
from charonia.eventlog.payloads import PayloadDirectory
from charonia.facts.events import RequestsEnded, facts_of
from charonia.tasks import Tasks
from charonia.tensors import Tensor
from charonia.wire import BatchHeader, Wave, pack_wave_reply, reply_meta, request_meta, unpack_wave, wave_head
from executors.batches.batch_results import Execution
from executors.batches.wave_execution import ExecutedWaves
from executors.metrics import ExecutorMetrics
from executors.running.submitted_batch import SubmittedBatch
from executors.settling.reply_sockets import ReplySockets
from executors.settling.settler import OwnerReports
from executors.settling.usage_counts import UsageCounts
from executors.settling.wave_settler import WaveSettler

PATIENCE_S = 20
LAZY, QUICK = "gw-lazy", "gw-quick"
QUEUE = keys.queue("m", 0, 0)
LOADED: Any = type("Loaded", (), {"model": "m", "version": 1, "content_hash": "h"})()
STATISTICS = keys.statistics("m", 1, "h")
LARGE = 100_000


class Sent(NamedTuple):
    """A wave in the log."""

    entry_id: bytes
    wave: Wave


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

    async def send(self, endpoint: str, size: int, count: int = 1) -> Sent:
        """A wave of `count` requests of one row each, as an executor gets it."""
        self._count += 1
        tensor = Tensor.of("x", np.zeros((1, size), np.uint8))
        about = {"rows": 1, "signature": 7, "level": 0, "accepted_ns": self._count}
        meta = request_meta(1, "", [tensor], (), {})
        prefix = self._count.to_bytes(15, "big")
        record = wave_head(prefix, count, endpoint.encode(), meta, **about) + bytes(tensor.data) * count
        taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        assert self.log.waves.send(QUEUE, [record], taken.set_result)
        return Sent(await taken, unpack_wave(record))

    def execute(self, sent: Sequence[Sent]) -> None:
        """Answer these waves, which ran as one batch; all their requests succeeded."""
        waves = tuple([one.wave for one in sent])
        replies = []
        for wave in waves:
            data = bytes(wave.columns[0])
            outputs = (("x", DataType.UINT8, (1, len(data) // wave.count), len(data) // wave.count),)
            replies.append(pack_wave_reply(wave.prefix, wave.count, reply_meta("m", 1, outputs), [data], 0))
        places = tuple([(QUEUE, one.entry_id) for one in sent])
        header = BatchHeader("b-1", "m", 1, "h", 1, (1,), keys.facts("m"), waves=places)
        execution = Execution(tuple(range(len(sent))), sum([wave.count for wave in waves]), 100, 130, 5, 20, 5)
        batch = SubmittedBatch((), lambda *_: None, header, waves=waves)
        self.settler.settle(batch, ExecutedWaves(replies, executions=[execution]), LOADED)

    async def answer(self, endpoint: str, size: int) -> bytes:
        """A wave of one request, which is executed; the id of its entry."""
        sent = await self.send(endpoint, size)
        self.execute([sent])
        return sent.entry_id

    async def burst(self, sent: Sent) -> list[bytes]:
        """Burst a wave, as a new owner of its model does; the ids of its requests."""
        ids = sent.wave.ids()
        assert await self.log.waves.burst("m", QUEUE, sent.entry_id, [(one, 1) for one in ids], [b"r", b"records"])
        return ids

    async def counted(self) -> tuple[int, int, int]:
        """Successful requests, their rows, and executions."""
        found = await self.log.statistics(STATISTICS)
        return tuple(found.get(name, 0) for name in ("success_count", "inference_count", "execution_count"))

    async def ended(self) -> set[bytes]:
        """The requests that were reported to their owner as settled."""
        found = [fact for entry in await self.log.range(keys.facts("m")) for fact in facts_of(entry)]
        joined = b"".join([fact.ids for fact in found if isinstance(fact, RequestsEnded)])
        return {joined[at : at + 16] for at in range(0, len(joined), 16)}

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


async def test_each_request_of_a_settled_wave_is_counted_once(bench: Bench) -> None:
    reading = asyncio.create_task(bench.gateways[QUICK].read_all())
    bench.execute([await bench.send(QUICK, 8, count=3), await bench.send(QUICK, 8, count=1)])
    bench.execute([await bench.send(QUICK, 8, count=2)])
    await bench.settler.fold()
    assert await bench.counted() == (6, 6, 2)
    assert await bench.log.range(QUEUE) == []
    reading.cancel()


@pytest.mark.parametrize("how_many", [1, 3])
async def test_requests_of_burst_waves_are_counted_by_who_settles_them(bench: Bench, how_many: int) -> None:
    """A new owner has burst them after they were executed, and settles one of them itself."""
    reading = asyncio.create_task(bench.gateways[QUICK].read_all())
    sent = [await bench.send(QUICK, 8, count=3) for _ in range(3)]
    bench.execute(sent)
    ids = [await bench.burst(one) for one in sent[:how_many]]
    elsewhere = {"success_count": 1, "inference_count": 1, "execution_count": 1}
    assert await bench.log.settle("m", [(ids[0][1], 1)], (STATISTICS, elsewhere), []) == [True]
    await bench.settler.settled()
    assert await bench.counted() == (9, 9, 2)
    assert await bench.log.pending("m") == (0, 0)
    assert await bench.ended() == {one for burst in ids for one in burst} - {ids[0][1]}
    reading.cancel()


async def test_an_executor_that_is_killed_has_counted_only_what_it_has_settled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when it has heard that a wave was burst: the wave's requests run again elsewhere."""
    reading = asyncio.create_task(bench.gateways[QUICK].read_all())
    kept, lost = [await bench.send(QUICK, 8, count=3) for _ in range(2)]
    bench.execute([kept, lost])
    ids = await bench.burst(lost)

    async def killed(*_: object) -> list[int]:
        return await asyncio.get_running_loop().create_future()

    with monkeypatch.context() as patched:
        patched.setattr(bench.log, "unsettled", killed)
        await bench.settler.fold()
        bench.tasks.cancel()
    assert await bench.counted() == (3, 3, 1)
    elsewhere = {"success_count": 3, "inference_count": 3, "execution_count": 1}
    assert await bench.log.settle("m", [(one, 1) for one in ids], (STATISTICS, elsewhere), []) == [True] * 3
    assert await bench.counted() == (6, 6, 2)
    reading.cancel()


async def test_waves_are_counted_when_their_replies_have_left(bench: Bench) -> None:
    """Until then they would run again, and be counted again, if this executor were killed."""
    unread = []
    while bench.sockets.mark(LAZY) is None:
        unread.append(await bench.send(LAZY, LARGE))
        bench.execute(unread[-1:])
    await bench.settler.fold()
    settled = [await bench.waiting(one.entry_id) == [False] for one in unread]
    assert not all(settled)
    assert (await bench.counted())[0] == sum(settled)
    reading = asyncio.create_task(bench.gateways[LAZY].read_all())
    await bench.until_settled(*[one.entry_id for one in unread])
    await bench.settler.fold()
    assert await bench.counted() == (len(unread),) * 3
    reading.cancel()


async def test_requests_that_run_again_are_not_reported_as_settled(bench: Bench) -> None:
    """The owner would take them for settled, and stop the run that is to settle them."""
    reading = asyncio.create_task(bench.gateways[QUICK].read_all())
    sent = await bench.send(QUICK, 8, count=3)
    bench.execute([sent])
    ids = await bench.burst(sent)
    token = await bench.log.take_ownership("m", "heir", "")
    assert all(await bench.log.begin_attempt("m", token, ids[:2], 2))
    await bench.settler.settled()
    assert await bench.log.unsettled("m", ids) == [2, 2, -1]
    assert await bench.ended() == {ids[2]}
    assert (await bench.counted())[0] == 1
    reading.cancel()
