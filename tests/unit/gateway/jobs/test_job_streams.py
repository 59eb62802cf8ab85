"""Jobs of models that answer more than once: followed, resumed, attached to, fetched, ended early."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import stream_bench as bench_module
from stream_bench import MODEL, job_bench

from charonia.clock import wall_ns
from charonia.errors import (
    DeadlineExceeded,
    InternalError,
    KeyReused,
    NotFound,
    StreamInterrupted,
    Unsupported,
)
from charonia.facts.jobs import JobEvent, JobState
from charonia.inference import InferenceResponse
from gateway.requests.delivery import Caller

request_of, options, numbers, until, until_so = (
    job_bench.request,
    job_bench.options,
    job_bench.numbers,
    job_bench.until,
    job_bench.until_so,
)
PATIENCE_S = 30


@pytest.fixture(params=["jobs", "off"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """With a journal that wakes followers, and without."""
    bench = bench_module.StreamBench()
    bench.journal = request.param
    await bench.serve(bench_module.DECOUPLED)
    yield bench
    await bench.close()


async def gateway_of(bench: Any, name: str = "g") -> Any:
    return await bench.gateway(name, journal=bench.journal)


async def running(bench: Any, gateway: Any, **more: Any) -> tuple[str, Any]:
    """A job that runs: its id and its record."""
    receipt = await gateway.submit_job(request_of(1, **more), options())
    (record,) = await bench.comes()
    assert await bench.begin(record)
    return receipt.id, record


def told(happening: Any) -> Any:
    if isinstance(happening, JobEvent):
        return happening.kind
    return next(iter(numbers(happening.outputs).values()), None)


class Following:
    """Reads on in a task of its own."""

    def __init__(self, coming: Any) -> None:
        self.read: list[Any] = []
        self.task = asyncio.create_task(self._run(coming))

    async def _run(self, coming: Any) -> None:
        async with contextlib.aclosing(await coming if asyncio.iscoroutine(coming) else coming) as items:
            async for item in items:
                if isinstance(item, InferenceResponse) and item.error is not None and item.final:
                    raise item.error
                self.read.append(item)

    async def has(self, count: int) -> None:
        await until(lambda: len(self.read) >= count or self.task.done())
        assert len(self.read) >= count, self.task

    async def ended(self) -> list[Any]:
        await asyncio.wait_for(self.task, PATIENCE_S)
        return [told(item) for item in self.read]


async def test_events_and_responses_come_to_every_reader_at_any_gateway(bench: Any) -> None:
    first, second = await gateway_of(bench), await gateway_of(bench, "other")
    job_id, record = await running(bench, first)
    early = [Following(gateway.jobs.queries.events(job_id)) for gateway in (first, first, second)]
    for each in early:
        await each.has(2)
    for index in range(40):  # more than a page
        assert await bench.answer(record, index, index)
        if index in (0, 1, 39):
            for each in early:
                await each.has(index + 3)
    late = Following(second.jobs.queries.events(job_id))
    await late.has(42)
    await bench.end(record, 40, 100)
    expected = ["accepted", "batched", *range(40), 100, "succeeded"]
    for each in (*early, late, Following(first.jobs.queries.events(job_id))):
        assert await each.ended() == expected
    places = [item.place for item in late.read if isinstance(item, InferenceResponse)]
    assert places == [(1, index) for index in range(41)]


async def test_a_reader_that_joins_late_learns_of_the_end_that_another_one_was_told_of(bench: Any) -> None:
    gateway = await gateway_of(bench)
    job_id, record = await running(bench, gateway)
    assert await bench.answer(record, 0, 7)
    slow = await gateway.jobs.queries.events(job_id)
    late = await gateway.jobs.queries.events(job_id)
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(slow), contextlib.aclosing(late):
        assert [told(await anext(slow)) for _ in range(3)] == ["accepted", "batched", 7]
        joins = asyncio.create_task(anext(slow))  # it hears of the end, and its client reads no further
        assert told(await anext(late)) == "accepted"
        await until(lambda: any(w.record for j in gateway.jobs._watches._watches.values() for w in j.values()))
        await bench.end(record, 1, 100)
        assert told(await joins) == 100
        assert [told(item) async for item in late] == ["batched", 7, 100, "succeeded"]


async def test_a_reader_that_names_a_response_that_there_is_not_delays_no_other(bench: Any) -> None:
    gateway = await gateway_of(bench)
    job_id, record = await running(bench, gateway)
    ahead = Following(gateway.jobs.queries.events(job_id, after_index=999_999_999))
    await until(lambda: bool(gateway.jobs.queries._streams._followers))
    reader = Following(gateway.jobs.queries.events(job_id))
    await reader.has(2)
    await until(lambda: sum(map(len, gateway.jobs.queries._streams._followers.values())) == 2)
    assert await bench.answer(record, 0, 7)
    await reader.has(3)
    assert await bench.answer(record, 1, 8)
    await reader.has(4)
    ahead.task.cancel()
    await bench.end(record, 2, 100)
    assert await reader.ended() == ["accepted", "batched", 7, 8, 100, "succeeded"]


@pytest.mark.parametrize("where", range(6))
async def test_a_reader_that_comes_back_misses_nothing_and_sees_nothing_twice(bench: Any, where: int) -> None:
    gateway, other = await gateway_of(bench), await gateway_of(bench, "other")
    job_id, record = await running(bench, gateway)
    for index in range(2):
        await bench.answer(record, index, index)
    all_of_it = ["accepted", "batched", 0, 1, 2, "succeeded"]
    seen = all_of_it[:where]
    number = len([item for item in seen if isinstance(item, str)])
    if where < 5:
        reader = Following(other.jobs.queries.events(job_id, after_number=number, after_index=len(seen) - number - 1))
        await reader.has(4 - where)
        await bench.end(record, 2, 2)
        assert seen + await reader.ended() == all_of_it
    else:
        await bench.end(record, 2, 2)
        reader = Following(other.jobs.queries.events(job_id, after_number=number, after_index=len(seen) - number - 1))
        assert seen + await reader.ended() == all_of_it


async def test_responses_alone(bench: Any) -> None:
    gateway = await gateway_of(bench)
    job_id, record = await running(bench, gateway, id="mine", outputs=("z",))
    reader = Following(gateway.jobs.queries.responses(job_id))
    await bench.answer(record, 0, 5)
    await reader.has(1)
    await bench.end(record, 1)
    assert await reader.ended() == [5, None]
    assert [t.name for t in reader.read[0].outputs] == ["z"]
    assert [(r.id, r.final) for r in reader.read] == [("mine", False), ("mine", True)]
    assert await Following(gateway.jobs.queries.responses(job_id, after_index=0)).ended() == [None]
    assert await Following(gateway.jobs.queries.responses(job_id, after_index=1)).ended() == []


async def test_a_job_that_fails_after_its_first_responses(bench: Any) -> None:
    gateway = await gateway_of(bench)
    job_id, record = await running(bench, gateway)
    await bench.answer(record, 0, 5)
    await bench.end(record, 1, error=StreamInterrupted("lost"))
    reader = Following(gateway.jobs.queries.responses(job_id))
    with pytest.raises(Exception, match="STREAM_INTERRUPTED: lost"):
        await reader.ended()
    assert [told(item) for item in reader.read] == [5]
    assert await Following(gateway.jobs.queries.events(job_id)).ended() == ["accepted", "batched", 5, "failed"]


async def test_a_response_that_is_not_kept(bench: Any) -> None:
    gateway = await gateway_of(bench)
    job_id, record = await running(bench, gateway)
    await bench.answer(record, 0, 5)
    await bench.answer(record, 2, 7)
    with pytest.raises(StreamInterrupted, match="response 1 of the job is not kept any more"):
        await Following(gateway.jobs.queries.responses(job_id)).ended()


async def test_a_repeated_run_goes_on_in_the_log(bench: Any) -> None:
    gateway = await gateway_of(bench)
    job_id, record = await running(bench, gateway)
    await bench.answer(record, 0, 5)
    reader = Following(gateway.jobs.queries.responses(job_id))
    await reader.has(1)
    assert await bench.begin(record, 2)
    for index in range(2):
        await bench.answer(record, index, 5 + index, attempt=2)
    await bench.end(record, 2, 7, attempt=2)
    assert await reader.ended() == [5, 6, 7]
    assert [item.place for item in reader.read] == [(1, 0), (2, 1), (2, 2)]


async def test_the_result_of_one_response_and_of_another_number(bench: Any) -> None:
    gateway = await gateway_of(bench)
    job_id, record = await running(bench, gateway)
    view, responses = await gateway.jobs.queries.result(job_id)
    assert view.decoupled
    assert responses is None
    await bench.answer(record, 0, 5)
    await bench.end(record, 1)
    _, response = await gateway.jobs.queries.single(job_id)
    assert numbers(response.outputs) == {"y": 5, "z": 5}
    job_id, record = await running(bench, gateway)
    await bench.end(record, 0)
    with pytest.raises(Unsupported, match="the job has 0 responses"):
        await gateway.jobs.queries.single(job_id)


async def test_another_tenants_job(bench: Any) -> None:
    gateway = await gateway_of(bench)
    job_id, _ = await running(bench, gateway)
    with pytest.raises(NotFound):
        await Following(gateway.jobs.queries.responses(job_id, Caller("other", scoped=True))).ended()


# -- streams with a key ------------------------------------------------------------------------------------------------


async def test_a_key_attaches_to_the_first_ones_stream(bench: Any) -> None:
    gateway, other = await gateway_of(bench), await gateway_of(bench, "other")
    first = Following(gateway.stream(request_of(1), options=options("k")))
    (record,) = await bench.comes()
    assert record.is_job
    assert await bench.begin(record)
    await bench.answer(record, 0, 5)
    await first.has(1)
    first.task.cancel()
    await asyncio.wait({first.task})
    second = Following(other.stream(request_of(1), options=options("k")))
    await second.has(1)
    await bench.answer(record, 1, 6)
    await second.has(2)
    await bench.end(record, 2)
    assert await second.ended() == [5, 6, None]
    third = Following(gateway.stream(request_of(1), options=options("k")))
    assert await third.ended() == [5, 6, None]
    with pytest.raises(KeyReused):
        await Following(gateway.stream(request_of(2), options=options("k"))).ended()
    assert len(await bench.queued()) == 0


async def test_a_stream_whose_job_fails(bench: Any) -> None:
    gateway = await gateway_of(bench)
    reader = Following(gateway.stream(request_of(1), options=options("k")))
    (record,) = await bench.comes()
    await bench.begin(record)
    await bench.end(record, 0, error=InternalError("broken"))
    with pytest.raises(InternalError, match="broken"):
        await reader.ended()


@pytest.mark.parametrize("known", [False, True])
async def test_the_deadline_of_a_stream_with_a_key(bench: Any, known: bool) -> None:
    gateway = await gateway_of(bench)
    if known:
        await gateway.submit_job(request_of(1), options("k"))
    deadline_ns = wall_ns() + 150_000_000
    reader = Following(gateway.stream(request_of(1, deadline_ns=deadline_ns), options=options("k")))
    with pytest.raises(DeadlineExceeded):
        await reader.ended()
    assert len(await bench.queued()) == int(known)  # another's job goes on


async def test_leaving_a_stream_with_a_key(bench: Any) -> None:
    gateway = await gateway_of(bench)
    for disconnect, state in (("", JobState.RUNNING), ("cancel", JobState.CANCELLED)):
        key = f"k{disconnect}"
        reader = Following(gateway.stream(request_of(1), options=options(key, on_disconnect=disconnect)))
        (record,) = await bench.comes()
        await bench.begin(record)
        await bench.answer(record, 0, 5)
        await reader.has(1)
        reader.task.cancel()
        await asyncio.wait({reader.task})

        async def there(record: Any = record, state: JobState = state) -> bool:
            found = await bench.log.job(MODEL, record.id)
            return found is not None and found.state is state

        await until_so(there)
        if state is JobState.RUNNING:
            await bench.end(record, 1)
