"""Streams of endpoints that left do not come back for good, however late somebody writes them."""

from __future__ import annotations

import asyncio

import pytest
from memory_log.log import MemoryLog

from batcher.housekeeping import departed_endpoints
from batcher.housekeeping.departed_endpoints import DepartedEndpoints
from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.facts.events import ProcessJoined

REPLIES = keys.replies("gateway-1")


async def emptied(log: MemoryLog, stream: bytes) -> None:
    async with asyncio.timeout(30):
        while await log.range(stream):
            await asyncio.sleep(0.001)


async def test_a_late_reply_is_swept_by_another_batcher() -> None:
    log = MemoryLog()
    first, second = DepartedEndpoints(log, Catalog()), DepartedEndpoints(log, Catalog())
    await log.append(REPLIES, [b"r", b"x"])
    first.left("gateway-1", [REPLIES])
    await emptied(log, REPLIES)
    assert first.endpoints == {"gateway-1"}
    await first.close()
    await log.append(REPLIES, [b"r", b"late"])
    assert await second.sweep_remembered() == 1
    assert await log.range(REPLIES) == []
    assert await log.count_times(keys.DEPARTED) == 1


async def test_what_is_there_again_is_left_alone() -> None:
    log, catalog = MemoryLog(), Catalog()
    catalog.apply(ProcessJoined("gateway", "gateway-1"))
    await log.set_times(keys.DEPARTED, {REPLIES: 1_000})
    await log.append(REPLIES, [b"r", b"x"])
    await DepartedEndpoints(log, catalog).sweep_remembered()
    assert len(await log.range(REPLIES)) == 1
    assert await log.count_times(keys.DEPARTED) == 0


async def test_the_oldest_are_forgotten() -> None:
    log = MemoryLog()
    await log.set_times(keys.DEPARTED, {REPLIES: 1_000})
    await log.append(REPLIES, [b"r", b"x"])
    assert await DepartedEndpoints(log, Catalog()).sweep_remembered() == 1
    assert await log.range(REPLIES) == []
    assert await log.count_times(keys.DEPARTED) == 0


async def test_endpoints_nobody_hears_of_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed_endpoints, "SWEEP_S", 0.001)
    log, catalog = MemoryLog(), Catalog()
    catalog.apply(ProcessJoined("gateway", "gateway-2"))
    await log.beat("gateway", "gateway-3", 60_000)
    await log.append(REPLIES, [b"r", b"x"])
    found = DepartedEndpoints(log, catalog)
    await found.find({"gateway-1", "gateway-2", "gateway-3", keys.ensemble_endpoint("e")})
    assert found.endpoints == {"gateway-1"}
    await emptied(log, REPLIES)
    await found.close()


async def test_a_stream_whose_reader_is_heard_of_during_a_sweep_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed_endpoints, "SWEEP_S", 0.001)
    log = MemoryLog()
    swept = DepartedEndpoints(log, Catalog())
    batches = keys.batches("executor-1")
    await log.append(batches, [b"h", b"x"])
    delete = log.delete_stream

    async def slowly(stream: bytes) -> None:
        if stream == REPLIES:
            swept.joined("executor-1", [batches])
        await delete(stream)

    monkeypatch.setattr(log, "delete_stream", slowly)
    await log.append(REPLIES, [b"r", b"x"])
    swept.left("executor-1", [REPLIES, batches])
    await emptied(log, REPLIES)
    await swept.close()
    assert len(await log.range(batches)) == 1
