"""Requests with several responses through an executor that drains, is slowed by its log or has a new owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import repeat_backend as repeat
from executor_bench import ME, Bench, Follower, running
from memory_log.log import MemoryLog
from response_reader import MODEL, Reader, told

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.facts.events import (
    FIELD_FACT,
    BatchReturned,
    ExecutorDraining,
    OwnerChanged,
    ResponsesBegun,
    ResponsesWanted,
    SlotFreed,
    pack_fact,
)
from executors.configuration import declarations
from executors.running import streamed_batch


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repeat.reset()
    monkeypatch.setitem(declarations.SHIPPED, "repeat", "repeat_backend:RepeatBackend")
    (tmp_path / MODEL / "1").mkdir(parents=True)
    (tmp_path / MODEL / "config.pbtxt").write_text(repeat.CONFIG)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with running(tmp_path) as found:
        yield found


async def test_a_drain_waits_for_what_is_still_to_come(bench: Bench) -> None:
    reader, owner = Reader(bench), Follower(bench.log, keys.facts(MODEL))
    repeat.FREE.add(1)
    repeat.HOLD_AFTER[1] = 1
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 2))
    batch_id = await bench.dispatch(MODEL, [record])
    await owner.fact(SlotFreed, batch_id=batch_id)

    draining = asyncio.ensure_future(bench.service.drain(30))
    assert not await bench.service.drain(0.05), "it would not wait for ever"
    repeat.release(1)
    assert await draining
    assert told(await reader.ended(request_id)) == [1000, 1001, "end"]


async def stopped_taking(bench: Bench) -> None:
    """Wait until a drain has begun: a batch that comes is given back."""
    _, record = await bench.accept(MODEL, repeat.inputs(99, 1))
    await bench.control.fact(ExecutorDraining)
    await bench.finished(MODEL, await bench.dispatch(MODEL, [record]), BatchReturned)


async def test_a_producer_is_let_go_on_while_its_executor_drains(bench: Bench) -> None:
    """S55: who waits for its responses takes them on, and says so."""
    reader = Reader(bench)
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 5), window=2)
    batch_id = await bench.dispatch(MODEL, [record])
    assert told(await reader.count(request_id, 2)) == [1000, 1001]

    draining = asyncio.ensure_future(bench.service.drain(30))
    await stopped_taking(bench)
    assert repeat.MADE == [1000, 1001]
    for count in (4, 6):
        wanted = ResponsesWanted(batch_id, request_id, count)
        await bench.log.append(keys.batches(ME), [FIELD_FACT, pack_fact(wanted)])
    assert told(await reader.ended(request_id)) == [1000, 1001, 1002, 1003, 1004, "end"]
    assert await draining


async def test_a_model_hears_while_its_executor_drains_that_nobody_waits(bench: Bench) -> None:
    reader = Reader(bench)
    repeat.HOLD_AFTER[1] = 1
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 5))
    batch_id = await bench.dispatch(MODEL, [record])
    await reader.count(request_id, 1)
    draining = asyncio.ensure_future(bench.service.drain(30))
    await stopped_taking(bench)
    await bench.unwant(batch_id, request_id)
    other = await bench.dispatch(MODEL, [(await bench.accept(MODEL, repeat.inputs(2, 1)))[1]])
    await bench.finished(MODEL, other, BatchReturned)
    assert repeat.CANCELLED == [1]
    repeat.release(1)
    assert await draining


async def test_a_new_owner_is_told_again_while_the_executor_drains(bench: Bench) -> None:
    reader, owner = Reader(bench), Follower(bench.log, keys.facts(MODEL))
    repeat.FREE.add(1)
    repeat.HOLD_AFTER[1] = 1
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 2))
    batch_id = await bench.dispatch(MODEL, [record])
    await reader.count(request_id, 1)
    draining = asyncio.ensure_future(bench.service.drain(30))
    await stopped_taking(bench)
    known = len(owner.entries)
    await bench.log.append(keys.batches(ME), [FIELD_FACT, pack_fact(OwnerChanged(MODEL))])
    await owner.until(lambda: len(owner.entries) == known + 2)
    assert owner.facts()[known:] == [SlotFreed(ME, batch_id), ResponsesBegun(ME, batch_id, request_id)]
    repeat.release(1)
    assert await draining


async def test_a_new_owner_is_told_again(bench: Bench) -> None:
    reader = Reader(bench)
    repeat.FREE.add(1)
    repeat.HOLD_AFTER[1] = 1
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 2))
    batch_id = await bench.dispatch(MODEL, [record])
    await reader.count(request_id, 1)
    owner = Follower(bench.log, keys.facts(MODEL))
    await owner.fact(SlotFreed)
    known = len(owner.entries)
    await bench.log.append(keys.batches(ME), [FIELD_FACT, pack_fact(OwnerChanged(MODEL))])
    await bench.log.append(keys.batches(ME), [FIELD_FACT, pack_fact(OwnerChanged("another"))])
    await owner.until(lambda: len(owner.entries) == known + 2)
    assert owner.facts()[known:] == [SlotFreed(ME, batch_id), ResponsesBegun(ME, batch_id, request_id)]
    repeat.release(1)
    await reader.ended(request_id)


class StalledLog(MemoryLog):
    """Takes no responses while `stalled`."""

    def __init__(self) -> None:
        super().__init__()
        self.stalled = False
        self.refused = asyncio.Event()

    async def append(self, stream: bytes, fields: Any) -> bytes:
        if self.stalled and stream.startswith(b"r:"):
            self.refused.set()
            raise LogUnavailable("away")
        return await super().append(stream, fields)

    async def settle(self, *args: Any, **named: Any) -> list[bool]:
        if self.stalled:
            raise LogUnavailable("away")
        return await super().settle(*args, **named)


async def test_a_model_is_slowed_while_the_log_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_batch, "MAX_UNWRITTEN_BYTES", 10_000)
    log = StalledLog()
    async with running(tmp_path, log=log) as bench:
        reader = Reader(bench)
        request_id, record = await bench.accept(MODEL, repeat.inputs(1, 500))
        log.stalled = True
        batch_id = await bench.dispatch(MODEL, [record])
        await asyncio.wait_for(log.refused.wait(), 30)
        for _ in range(1000):
            await asyncio.sleep(0)
        made = len(repeat.MADE)
        assert 10 < made < 60
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(repeat.MADE) == made
        log.stalled = False
        await bench.finished(MODEL, batch_id)
        records = await reader.ended(request_id)
        assert told(records) == [*range(1000, 1500), "end"]
        assert [record.place for record in records] == [(0, n) for n in range(501)]
