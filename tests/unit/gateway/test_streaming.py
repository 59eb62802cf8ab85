"""Requests with several responses through a gateway's handler: in order, interrupted, bounded, left, lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import stream_bench as bench_module
from stream_bench import MODEL

from charonia.clock import wall_ns
from charonia.errors import (
    DeadlineExceeded,
    InternalError,
    LogUnavailable,
    ResourceExhausted,
    StreamInterrupted,
    Unavailable,
)
from charonia.facts.events import RequestCancelled
from charonia.inference import InferenceResponse

request_of, numbers, until = (
    bench_module.job_bench.request,
    bench_module.job_bench.numbers,
    bench_module.job_bench.until,
)
until_so = bench_module.job_bench.until_so


@pytest.fixture
async def bench() -> AsyncIterator[Any]:
    bench = bench_module.StreamBench()
    await bench.serve(bench_module.DECOUPLED)
    yield bench
    await bench.close()


class Reader:
    """Reads a stream in a task of its own; `pause` clear stops it before the next response."""

    def __init__(self, responses: Any) -> None:
        self.read: list[InferenceResponse] = []
        self.pause = asyncio.Event()
        self.pause.set()
        self._responses = responses
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with contextlib.aclosing(self._responses) as responses:
            async for response in responses:
                if response.error is not None and response.final:
                    raise response.error
                self.read.append(response)
                await self.pause.wait()

    async def has(self, count: int) -> None:
        await until(lambda: len(self.read) >= count or self.task.done())
        assert len(self.read) >= count, self.task

    def values(self) -> list[int | None]:
        return [numbers(r.outputs)["y"] if r.outputs else None for r in self.read]


def counts(gateway: Any) -> Any:
    return gateway.metrics.counts(MODEL, 1)


async def cancelled(bench: Any) -> list[bytes]:
    return [fact.id for fact in await bench.facts() if isinstance(fact, RequestCancelled)]


async def test_responses_come_one_by_one(bench: Any) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of(1, id="mine", outputs=("z", "y"))))
    (record,) = await bench.comes()
    for index in range(3):
        await bench.respond(record, index, 10 * index)
        await reader.has(index + 1)
    await bench.respond(record, 3, final=True)
    await reader.task
    assert reader.values() == [0, 10, 20, None]
    assert [r.final for r in reader.read] == [False, False, False, True]
    assert [r.place for r in reader.read] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert {(r.id, r.model, r.version) for r in reader.read} == {("mine", MODEL, 1)}
    assert [t.name for t in reader.read[0].outputs] == ["y", "z"]  # the model's order
    assert (counts(gateway).success, sum(counts(gateway).failures.values())) == (1, 0)
    assert gateway._dataplane.pending_requests == 0
    assert await cancelled(bench) == []


async def test_the_last_response_may_be_one() -> None:
    bench = bench_module.StreamBench()
    await bench.serve()  # a model that answers once
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of(7)))
    (record,) = await bench.comes()
    await bench.finish(record)
    await reader.task
    assert [(r.final, r.place) for r in reader.read] == [(True, (0, 0))]
    assert reader.values() == [7]
    await bench.close()


async def test_a_failed_response_does_not_end_it(bench: Any) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of()))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1)
    await bench.respond(record, 1, error=InternalError("this one"))
    await bench.respond(record, 2, 3, final=True)
    await reader.task
    assert reader.values() == [1, None, 3]
    assert [str(r.error) if r.error else "" for r in reader.read] == ["", "this one", ""]
    assert (counts(gateway).failures["BACKEND"], counts(gateway).success) == (0, 1)


async def test_a_request_fails_by_the_last_response_that_said_anything(bench: Any) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of()))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1)
    await bench.respond(record, 1, error=InternalError("this one"))
    await bench.respond(record, 2, final=True)
    await reader.task
    assert (counts(gateway).failures["BACKEND"], counts(gateway).success) == (1, 0)


@pytest.mark.parametrize("placed", [True, False])
async def test_a_failure_of_the_whole_comes_after_what_was_given(bench: Any, placed: bool) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of()))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1)
    if placed:
        await bench.respond(record, 1, error=InternalError("broken"), final=True)
    else:
        await bench.refuse(record, InternalError("broken"))
    with pytest.raises(InternalError, match="broken"):
        await reader.task
    assert reader.values() == [1]
    assert sum(counts(gateway).failures.values()) == 1
    assert await cancelled(bench) == []


async def test_a_second_run_does_not_go_on_for_the_first(bench: Any) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of()))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1)
    await bench.respond(record, 0, 2, attempt=2)
    with pytest.raises(StreamInterrupted, match=r"^STREAM_INTERRUPTED: "):
        await reader.task
    assert reader.values() == [1]
    await until_so(lambda: _is(cancelled(bench), [record.id]))


async def _is(coming: Any, expected: Any) -> bool:
    return bool(await coming == expected)


async def test_a_repeatable_model_goes_on() -> None:
    bench = bench_module.StreamBench()
    await bench.serve(bench_module.REPEATABLE)
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of()))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1)
    await bench.respond(record, 1, 2)
    await bench.respond(record, 1, 2)
    for index in range(4):
        await bench.respond(record, index, index + 1, attempt=2, final=index == 3)
    await reader.task
    assert reader.values() == [1, 2, 3, 4]
    assert [r.place for r in reader.read] == [(1, 0), (1, 1), (2, 2), (2, 3)]
    assert gateway._dataplane.duplicates == 3
    await bench.close()


async def test_a_lost_response_is_an_end(bench: Any) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of()))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1)
    await bench.respond(record, 2, 3)
    with pytest.raises(StreamInterrupted, match="response 1 was lost"):
        await reader.task


async def test_a_reader_who_leaves_cancels_the_request(bench: Any) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of()))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1)
    await reader.has(1)
    reader.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader.task
    await until_so(lambda: _is(cancelled(bench), [record.id]))
    assert counts(gateway).failures["CANCELED"] == 1
    await bench.respond(record, 1, 2)  # nobody is there, nobody minds
    await until(lambda: gateway._dataplane.duplicates == 1)


async def test_a_reader_who_stops_at_the_end_cancels_nothing(bench: Any) -> None:
    gateway = await bench.gateway()
    responses = gateway.stream(request_of())
    coming = asyncio.ensure_future(anext(responses))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1, final=True)
    assert (await coming).final
    await responses.aclose()
    assert (counts(gateway).success, counts(gateway).failures["CANCELED"]) == (1, 0)
    assert await cancelled(bench) == []


async def test_a_slow_reader_loses_its_stream_and_no_other() -> None:
    bench = bench_module.StreamBench()
    await bench.serve(bench_module.DECOUPLED)
    gateway = await bench.gateway(stream_buffer_size_bytes=10_000)
    slow, quick = Reader(gateway.stream(request_of(1))), Reader(gateway.stream(request_of(2)))
    first, second = await bench.comes(2)
    slow.pause.clear()
    for index in range(8):
        await bench.respond(first, index, size=4000)
        await bench.respond(second, index, size=4000, final=index == 7)
        await quick.has(index + 1)
    await quick.task
    slow.pause.set()
    with pytest.raises(ResourceExhausted, match="reader is 2 responses behind"):
        await slow.task
    assert len(slow.read) == 1
    assert gateway._dataplane.requester.held.size_bytes == 0
    await until_so(lambda: _is(cancelled(bench), [first.id]))
    await bench.close()


async def test_one_response_over_the_bound_is_served() -> None:
    bench = bench_module.StreamBench()
    await bench.serve(bench_module.DECOUPLED)
    gateway = await bench.gateway(stream_buffer_size_bytes=1000)
    reader = Reader(gateway.stream(request_of(1)))
    (record,) = await bench.comes()
    await bench.respond(record, 0, size=40_000, final=True)
    await reader.task
    assert len(reader.read[0].outputs[0].data) == 40_000
    await bench.close()


async def test_a_deadline_in_mid_stream(bench: Any) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of(deadline_ns=wall_ns() + 1_500_000_000)))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1)
    with pytest.raises(DeadlineExceeded):
        await reader.task
    assert reader.values() == [1]


async def test_a_stream_of_a_lost_log_and_of_a_gateway_that_ends(bench: Any) -> None:
    gateway = await bench.gateway()
    lost = Reader(gateway.stream(request_of()))
    await bench.comes()
    gateway.begin_anew()
    with pytest.raises(LogUnavailable):
        await lost.task
    reader = Reader(gateway.stream(request_of()))
    await bench.comes(2)
    await gateway._dataplane.close()
    with pytest.raises(Unavailable, match="Server exiting"):
        await reader.task


async def test_a_stream_whose_request_was_lost(bench: Any) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of()))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 1)
    await reader.has(1)
    await bench.settle(record)  # and its last response never comes
    for _ in range(2):
        await gateway._dataplane.requester.recheck({record.id})
    with pytest.raises(LogUnavailable):
        await reader.task


async def test_open_streams_are_counted_until_they_end(bench: Any) -> None:
    gateway = await bench.gateway()
    reader = Reader(gateway.stream(request_of(1, id="mine")))
    (record,) = await bench.comes()
    await bench.respond(record, 0, 5)
    await reader.has(1)
    (row,) = gateway._streams.note().rows
    assert (row.model, row.version, row.client_id, row.responses) == (MODEL, 1, "mine", 1)
    assert row.last_us >= row.since_us
    await bench.respond(record, 1, final=True)
    await reader.task
    assert not len(gateway._streams)
