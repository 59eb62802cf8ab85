"""A gateway records requests of models that ask for it, of both calls, and nothing of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import stream_bench as bench_module
from stream_bench import DECOUPLED, MODEL

from charonia import keys
from charonia.errors import InternalError
from charonia.wire.recorded_calls import RecordedCall, unpack_recorded_call

request_of, CONFIG = bench_module.job_bench.request, bench_module.job_bench.CONFIG
RECORDED = 'parameters { key: "charonia.record_share" value { string_value: "1" } }\n'


@pytest.fixture
async def bench() -> AsyncIterator[Any]:
    bench = bench_module.StreamBench()
    yield bench
    await bench.close()


async def recorded(bench: Any, gateway: Any) -> list[RecordedCall]:
    await gateway._recorder.settled()
    call_ids = await bench.log.due(keys.recorded_times(MODEL), 2**53, 100)
    records = await bench.log.notes([keys.recorded_call(MODEL, call_id) for call_id in call_ids])
    return [unpack_recorded_call(record) for record in records]


def values(call: RecordedCall) -> list[Any]:
    return [
        type(one.error) if one.error is not None else {t.name: int(t.array()[0, 0]) for t in one.outputs}
        for one in call.responses
    ]


@pytest.mark.parametrize(("config", "count"), [(CONFIG, 0), (CONFIG + RECORDED, 2)])
async def test_answers_and_failures_are_recorded(bench: Any, config: str, count: int) -> None:
    await bench.serve(config)
    gateway = await bench.gateway()
    for error in (None, InternalError("broken")):
        call = asyncio.create_task(gateway.infer(request_of(3, outputs=("z",), id="mine")))
        (record,) = await bench.comes()
        await bench.finish(record, error=error)
        if error is None:
            await call
        else:
            with pytest.raises(InternalError):
                await call
    found = await recorded(bench, gateway)
    assert [values(one) for one in found] == [[{"z": 3}], [InternalError]][:count]
    assert [int(one.inputs[0].array()[0, 0]) for one in found] == [3, 3][:count]
    assert gateway._recorder.pending_bytes == 0


async def test_streams_are_recorded_and_left_ones_are_not(bench: Any) -> None:
    await bench.serve(DECOUPLED + RECORDED)
    gateway = await bench.gateway()

    async def read(most: int) -> None:
        seen = 0
        responses = gateway.stream(request_of(5))
        async for _ in responses:
            seen += 1
            if seen == most:
                break
        await responses.aclose()

    for most in (9, 1):
        reading = asyncio.create_task(read(most))
        record = (await bench.comes())[-1]
        for index in range(2):
            await bench.respond(record, index, 10 * index)
        if most > 1:
            await bench.respond(record, 2, final=True)
        await reading
        await bench.settle(record)
    (found,) = await recorded(bench, gateway)
    assert values(found) == [{"y": 0, "z": 0}, {"y": 10, "z": 10}]
    assert int(found.inputs[0].array()[0, 0]) == 5, "which the stream no longer holds"
    assert gateway._recorder.pending_bytes == 0
    assert gateway._recorder.counts == {(MODEL, "recorded"): 1}
