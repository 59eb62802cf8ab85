"""What a gateway that stops waits for, and whom it does not keep waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import stream_bench as bench_module
from memory_log.log import MemoryLog
from stream_bench import job_bench

from gateway.deferral import Accepted, Deferral
from gateway.requests.delivery import ANYONE

request_of, options, numbers, until = job_bench.request, job_bench.options, job_bench.numbers, job_bench.until

PATIENCE_S = 30


class SlowLog(MemoryLog):
    """Answers look-ups of cached responses only once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.looks = 0

    async def notes(self, keys: Any) -> list[bytes | None]:
        self.looks += 1
        await self.go.wait()
        return await super().notes(keys)


@pytest.fixture
async def bench() -> AsyncIterator[Any]:
    bench = bench_module.StreamBench(SlowLog())
    yield bench
    await bench.close()


async def ends(gateway: Any) -> bool:
    """Whether it would end now; given the time to find out."""
    draining = asyncio.create_task(gateway.drained())
    for _ in range(20):
        await asyncio.sleep(0)
    over = draining.done()
    draining.cancel()
    return over


async def test_a_request_that_is_looked_up_is_waited_for(bench: Any) -> None:
    await bench.serve(job_bench.CONFIG + "response_cache { enable: true }\n")
    gateway = await bench.gateway(response_cache_size_bytes=1_000_000)
    call = asyncio.create_task(gateway.infer(request_of(3)))
    await until(lambda: bench.log.looks == 1)
    gateway.begin_drain()
    assert not await ends(gateway)
    bench.log.go.set()
    (record,) = await bench.comes()
    assert not await ends(gateway)
    assert await bench.finish(record)
    assert numbers((await call).outputs)["y"] == 3
    assert await ends(gateway)


async def test_a_keyed_stream_is_waited_for(bench: Any) -> None:
    await bench.serve(bench_module.DECOUPLED)
    gateway = await bench.gateway()
    responses = gateway.stream(request_of(1), options=options("key"))
    first = asyncio.create_task(anext(responses))
    (record,) = await bench.comes()
    assert await bench.begin(record)
    assert await bench.answer(record, 0, 7)
    assert numbers((await first).outputs)["y"] == 7
    gateway.begin_drain()
    assert not await ends(gateway)
    await bench.end(record, 1)
    assert [response.final async for response in responses] == [True]
    assert await ends(gateway)


async def test_who_waits_for_a_job_is_told_how_far_it_is(bench: Any) -> None:
    await bench.serve()
    gateway = await bench.gateway()
    receipt = await gateway.submit_job(request_of(1), options())
    waiting = asyncio.create_task(gateway.jobs.queries.result(receipt.id, wait_s=3600))
    words = {"charonia_prefer": "wait=60"}
    deferred = asyncio.create_task(Deferral(gateway).answer(request_of(2), words, ANYONE, {}))
    await bench.comes(2)
    await until(lambda: len(gateway.jobs.queries._waits) == 2)
    gateway.begin_drain()
    async with asyncio.timeout(PATIENCE_S):
        assert (await waiting)[1] is None
        accepted = await deferred
        assert isinstance(accepted, Accepted)
        assert accepted.state == "queued"
        assert (await gateway.jobs.queries.result(receipt.id, wait_s=3600))[1] is None, "a new wait is refused, too"
    assert len(await bench.queued()) == 2, "the job goes on"
    assert await ends(gateway)
