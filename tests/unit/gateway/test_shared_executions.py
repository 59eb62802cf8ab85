"""One execution for all who ask the same at once: who leads, who joins, who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import job_bench as bench_module
import pytest
from cache_bench import CACHED, CountingLog, asking, cached_gateway, executed, stored
from job_bench import MODEL, JobBench, until, until_so
from job_bench import request as request_of

from charonia import keys
from charonia.clock import wall_ns
from charonia.datatypes import DataType
from charonia.errors import Cancelled, DeadlineExceeded, InternalError, Unavailable
from charonia.eventlog.port import Reply
from charonia.tensors import Tensor
from charonia.traces.contexts import TIMESTAMPS, Context, Traced
from charonia.traces.reports import Report
from charonia.wire import pack_response, record_fields, report_response


@pytest.fixture
async def bench() -> AsyncIterator[Any]:
    bench = JobBench(CountingLog())
    await bench.serve(CACHED)
    yield bench
    await bench.close()


async def waiting(gateway: Any, count: int) -> None:
    """Until so many callers wait in the one execution there is."""
    await until(lambda: [len(f._callers) for f in gateway._cache._executions.values()] == [count])


async def test_equal_requests_in_flight_are_executed_once(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    tasks = [asking(gateway, id=str(n)) for n in range(5)]
    await waiting(gateway, 5)
    (record,) = await bench.comes()
    await bench.finish(record)
    assert await asyncio.gather(*tasks) == [{"y": 1, "z": 1}] * 5
    await stored(bench)
    await until(lambda: gateway.metrics.counts(MODEL, 1).cache_misses == 1)
    (found,) = await gateway.statistics(MODEL, "")
    assert (found.cache_hit.count, found.cache_miss.count, found.success.count) == (4, 1, 4)
    assert gateway._cache._executions == {}


async def test_a_failure_of_the_model_is_everybodys(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    tasks = [asking(gateway) for _ in range(3)]
    await waiting(gateway, 3)
    (record,) = await bench.comes()
    await bench.finish(record, error=InternalError("broken"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["broken"] * 3
    assert len({id(result) for result in results}) == 3, "each has an error of its own"
    (found,) = await gateway.statistics(MODEL, "")
    # the executor counts the one it ran
    assert (found.fail.count, found.failures["BACKEND"]) == (2, 2)


async def test_who_asked_first_may_go(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    first, second = asking(gateway), asking(gateway)
    await waiting(gateway, 2)
    (record,) = await bench.comes()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await bench.facts() == [fact for fact in await bench.facts() if type(fact).__name__ != "RequestCancelled"]
    await bench.finish(record)
    assert await second == {"y": 1, "z": 1}
    await until(lambda: gateway.metrics.counts(MODEL, 1).cache_misses == 1)
    assert gateway.metrics.counts(MODEL, 1).cache_hits == 0, "it was made for the second, then"


async def test_one_who_joined_may_go(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    first, second = asking(gateway), asking(gateway)
    await waiting(gateway, 2)
    second.cancel()
    (record,) = await bench.comes()
    await bench.finish(record)
    assert await first == {"y": 1, "z": 1}


async def test_when_all_have_gone_the_request_is_cancelled(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    tasks = [asking(gateway) for _ in range(2)]
    await waiting(gateway, 2)
    await bench.comes()
    for task in tasks:
        task.cancel()

    async def told() -> bool:
        return any(type(fact).__name__ == "RequestCancelled" for fact in await bench.facts())

    await until_so(told)
    assert gateway._cache._executions == {}
    for record in await bench.queued():
        await bench.finish(record)
    await executed(bench, gateway)


async def test_a_deadline_is_its_callers_own(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    patient = asking(gateway)
    await bench.comes()
    hasty = asking(gateway, deadline_ns=wall_ns() + 1_000_000_000)
    with pytest.raises(DeadlineExceeded, match=r"^request deadline exceeded$"):
        await hasty
    (record,) = await bench.comes()
    await bench.finish(record)
    assert await patient == {"y": 1, "z": 1}
    (found,) = await gateway.statistics(MODEL, "")
    assert found.failures["REJECTED"] == 1


async def test_the_next_one_takes_over_from_one_whose_deadline_is_past(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    hasty = asking(gateway, deadline_ns=wall_ns() + 1_500_000_000)
    await waiting(gateway, 1)
    patient = asking(gateway)
    await waiting(gateway, 2)
    (first,) = await bench.comes()
    with pytest.raises(DeadlineExceeded):
        await hasty
    (second,) = await bench.comes()
    assert second.id != first.id
    await bench.finish(second)
    assert await patient == {"y": 1, "z": 1}


@pytest.mark.parametrize(
    ("error", "timeout_us", "taken_over"),
    [
        (Cancelled("cancelled"), 0, True),
        (Unavailable("Request timeout expired"), 5_000_000, True),
        (Unavailable("Exceeds maximum queue size"), 0, False),
    ],
)
async def test_what_was_about_one_caller_alone(bench: Any, error: Any, timeout_us: int, taken_over: bool) -> None:
    gateway = await cached_gateway(bench)
    first = asking(gateway, timeout_us=timeout_us)
    await waiting(gateway, 1)
    second = asking(gateway)
    await waiting(gateway, 2)
    (record,) = await bench.comes()
    await bench.finish(record, error=error)
    with pytest.raises(type(error), match=error.message):
        await first
    if taken_over:
        (record,) = await bench.comes()
        await bench.finish(record)
        assert await second == {"y": 1, "z": 1}
    else:
        with pytest.raises(type(error), match=error.message):
            await second


async def test_nobody_is_left_behind_when_the_gateway_ends(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    tasks = [asking(gateway) for _ in range(2)]
    await waiting(gateway, 2)
    await gateway.close()
    for task in tasks:
        with pytest.raises(Unavailable, match=r"^Server exiting$"):
            await task


async def test_large_inputs_are_hashed_aside() -> None:
    bench = JobBench()
    await bench.serve(
        CACHED.replace('name: "x" data_type: TYPE_INT32 dims: 1', 'name: "x" data_type: TYPE_INT32 dims: -1')
    )
    gateway = await bench.gateway(response_cache_size_bytes=10_000_000)
    request = request_of()
    request.inputs[0].shape, request.inputs[0].data = (1, 100_000), bytes(400_000)
    task = asyncio.create_task(gateway.infer(request))
    (record,) = await bench.comes()
    packed = bench_module.pack_response(record.id, MODEL, 1, request_of(9).inputs, {})
    await bench.log.append(keys.replies(record.endpoint), bench_module.record_fields([packed]))
    await task
    assert await gateway.infer(request) == await gateway.infer(request)
    await bench.close()


async def test_the_trace_of_who_asked_first_has_what_the_executor_says_of_it(bench: Any) -> None:
    gateway = await cached_gateway(bench)
    traces = [Traced(Context(TIMESTAMPS, bytes(16), bytes([number]) * 8)) for number in (1, 2)]
    first = asking(gateway, trace=traces[0])
    (record,) = await bench.comes()
    second = asking(gateway, trace=traces[1])
    await waiting(gateway, 2)
    assert record.trace is not None
    report = Report(record.trace.context.span_id, MODEL, 1, "", (("COMPUTE_START", 5),))
    outputs = [Tensor(name, DataType.INT32, (1, 1), bytes(4)) for name in ("y", "z")]
    answer = report_response(pack_response(record.id, MODEL, 1, outputs, {}), report)
    reply = Reply(keys.replies(record.endpoint), record_fields([answer]))
    assert await bench.log.settle(MODEL, [(record.id, 1)], None, [reply]) == [True]
    await asyncio.gather(first, second)
    assert [trace.report for trace in traces] == [report, None], "nothing was executed for the second"
