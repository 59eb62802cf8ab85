"""When a job may be expected to end, and the note that a caller was given its outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from memory_log.log import MemoryLog
from stream_bench import DECOUPLED, MODEL, StreamBench, job_bench

import gateway.jobs.job_queries
import gateway.jobs.job_streams
from charonia import keys
from charonia.catalog.catalog import ServedVersion
from charonia.clock import wall_ns
from charonia.errors import Cancelled, DeadlineExceeded, InternalError, LogUnavailable, Unsupported
from charonia.facts.jobs import DeliveryNote, public_id
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.configuration.config import normalise
from gateway.jobs.job_queries import Pace, Paces, mean_pace, queued_eta_s, running_eta_s
from gateway.jobs.job_streams import JobDeliveries

FIELDS = {
    "inference_count": 100,
    "execution_count": 20,
    "b5_count": 20,
    "b5_input_ns": 1_000_000_000,
    "b5_infer_ns": 8_000_000_000,
    "b5_output_ns": 1_000_000_000,
    "compute_infer_ns": 99_000_000_000,
}

JOB = bytes(16)
KEY = keys.job_delivery("m", JOB)


def test_the_pace_counts_each_execution_once() -> None:
    assert mean_pace(FIELDS) == Pace(batch_s=0.5, row_s=0.1)
    assert mean_pace({}) is None
    assert mean_pace({"execution_count": 1}) is None


def test_what_lies_before_is_shared_by_the_slots() -> None:
    pace = Pace(batch_s=0.5, row_s=0.1)
    assert queued_eta_s(pace, 0, 1, 8) == pytest.approx(0.5)
    assert queued_eta_s(pace, 40, 1, 8) == pytest.approx(4.5)
    assert queued_eta_s(pace, 40, 4, 8) == pytest.approx(1.5)
    assert queued_eta_s(pace, 40, 0, 8) == pytest.approx(4.5)


def test_under_a_backlog_what_was_seen_counts_when_it_is_slower() -> None:
    assert queued_eta_s(Pace(0.5, 0.1, rows_per_s=2.0), 40, 1, 8) == pytest.approx(20.5)
    assert queued_eta_s(Pace(0.5, 0.1, rows_per_s=50.0), 40, 1, 8) == pytest.approx(4.5)
    assert queued_eta_s(Pace(0.5, 0.1, rows_per_s=2.0), 10, 1, 8) == pytest.approx(1.5), "no backlog: idle before"


def test_a_running_job_ends_after_a_mean_execution() -> None:
    assert running_eta_s(Pace(0.5, 0.1), 0.2) == pytest.approx(0.3)
    assert running_eta_s(Pace(0.5, 0.1), 7.0) == 0.0


async def test_statistics_are_read_once_a_second_and_their_growth_is_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(gateway.jobs.job_queries, "monotonic_ns", lambda: now[0])
    config = normalise(parse('name: "m" backend: "python" max_batch_size: 8'))
    served = ServedVersion("m", 1, "h", config, ModelInterface.of(config), {}, {"e": 1})
    log = MemoryLog()
    paces = Paces(log)
    assert await paces.of(served) is None
    await log.add_statistics(keys.statistics("m", 1, "h"), FIELDS)
    assert await paces.of(served) is None, "read less than a second ago"
    now[0] += 2_000_000_000
    assert await paces.of(served) == Pace(0.5, 0.1, rows_per_s=50.0)
    now[0] += 100_000_000_000
    assert await paces.of(served) == Pace(0.5, 0.1, rows_per_s=0.0), "too long ago to tell a rate"

    async def away(key: bytes) -> dict[str, int]:
        raise LogUnavailable("away")

    monkeypatch.setattr(log, "statistics", away)
    now[0] += 2_000_000_000
    assert await paces.of(served) is None


async def noted(log: MemoryLog) -> DeliveryNote | None:
    (data,) = await log.notes([KEY])
    return DeliveryNote.unpack(data) if data is not None else None


async def test_the_first_delivery_of_any_gateway_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now_us = [5]
    monkeypatch.setattr(gateway.jobs.job_streams, "wall_ns", lambda: now_us[0] * 1000)
    log = MemoryLog()
    assert await noted(log) is None
    for incarnation in ("one", "one", "two"):
        deliveries = JobDeliveries(log, incarnation)
        deliveries.given("m", JOB, 3600)
        now_us[0] += 1
        deliveries.given("m", JOB, 3600)
        await deliveries.close()
        assert await noted(log) == DeliveryNote(5, "one")


async def test_a_job_that_is_asked_for_often_costs_the_log_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    asked: list[object] = []
    notes = log.notes

    async def counted(names: list[bytes]) -> list[bytes | None]:
        asked.append(names)
        return await notes(names)

    monkeypatch.setattr(log, "notes", counted)
    deliveries = JobDeliveries(log, "one")
    for _ in range(10):
        deliveries.given("m", JOB, 3600)
    await deliveries.close()
    assert asked == [[KEY]]


async def test_a_log_that_is_away_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()

    async def away(_names: list[bytes]) -> list[bytes | None]:
        raise LogUnavailable("away")

    monkeypatch.setattr(log, "notes", away)
    deliveries = JobDeliveries(log, "one")
    deliveries.given("m", JOB, 3600)
    await deliveries.close()
    monkeypatch.undo()
    assert await noted(log) is None


# -- failed outcomes ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def streams() -> AsyncIterator[Any]:
    """A bench with a decoupled model."""
    bench = StreamBench()
    await bench.serve(DECOUPLED)
    yield bench
    await bench.close()


async def given_by(gateway: Any, job_id: bytes) -> str:
    """The gateway that a job's note names, once the notes under way are written; "" without a note."""
    await gateway.jobs._deliveries._tasks.settled()
    (data,) = await gateway._log.notes([keys.job_delivery(MODEL, job_id)])
    return "" if data is None else DeliveryNote.unpack(data).gateway


async def read(answers: AsyncGenerator[Any]) -> list[Any]:
    """The errors that a stream ends with, as a response or raised."""
    found = []
    try:
        async with contextlib.aclosing(answers):
            async for answer in answers:
                found.append(answer.error)
    except InternalError as error:
        found.append(error)
    return [str(error) for error in found if error is not None]


@pytest.mark.parametrize("way", ["responses", "call"])
async def test_an_error_that_ends_a_stream_is_a_delivery(streams: Any, way: str) -> None:
    gateway = await streams.gateway()
    if way == "responses":
        receipt = await gateway.submit_job(job_bench.request(), job_bench.options())
        answers = gateway.jobs.queries.responses(receipt.id)
    else:
        answers = gateway.stream(job_bench.request(), options=job_bench.options("key"))
    reading = asyncio.create_task(read(answers))
    (record,) = await streams.comes()
    assert await streams.begin(record)
    await streams.answer(record, 0, 5)
    await streams.end(record, 1, error=InternalError("broken"))
    async with asyncio.timeout(job_bench.PATIENCE_S):
        assert await reading == ["broken"]
    assert await given_by(gateway, record.id) == "g"


@pytest.mark.parametrize("way", ["infer", "stream"])
async def test_a_deadline_is_a_delivery_of_the_callers_own_job_alone(way: str, streams: Any, bench: Any) -> None:
    served = streams if way == "stream" else bench
    gateway = await served.gateway()

    def ask(key: str) -> Any:
        request = job_bench.request(deadline_ns=wall_ns() + 1_500_000_000)
        if way == "stream":
            return read(gateway.stream(request, options=job_bench.options(key)))
        return gateway.infer(request, options=job_bench.options(key))

    async def ends(asking: Any) -> None:
        async with asyncio.timeout(job_bench.PATIENCE_S):
            if way == "stream":
                assert await asking == ["request deadline exceeded"]
            else:
                with pytest.raises(DeadlineExceeded):
                    await asking

    own = asyncio.create_task(ask("own"))
    (record,) = await served.comes()
    await ends(own)
    assert await given_by(gateway, record.id) == "g"
    await gateway.submit_job(job_bench.request(), job_bench.options("theirs"))
    (record,) = await served.comes()
    await ends(ask("theirs"))
    assert await given_by(gateway, record.id) == "", "that job goes on"


async def test_a_cancelled_job_is_delivered_to_the_caller_that_waits(bench: Any) -> None:
    gateway = await bench.gateway()
    asking = asyncio.create_task(gateway.infer(job_bench.request(), options=job_bench.options("key")))
    (record,) = await bench.comes()
    await gateway.jobs.cancel(public_id(MODEL, record.id))
    with pytest.raises(Cancelled):
        await asking
    assert await given_by(gateway, record.id) == "g"


@pytest.mark.parametrize(("error", "gateway_name"), [(InternalError("broken"), "g"), (None, "")])
async def test_the_last_event_has_the_error_of_a_job_and_never_its_answer(
    bench: Any, error: InternalError | None, gateway_name: str
) -> None:
    gateway = await bench.gateway()
    receipt = await gateway.submit_job(job_bench.request(), job_bench.options())
    (record,) = await bench.queued()
    await bench.begin(record)
    await bench.finish(record, error=error)
    events = [event async for event in await gateway.jobs.queries.events(receipt.id)]
    assert events[-1].detail.get("error") == (None if error is None else "broken")
    assert await given_by(gateway, record.id) == gateway_name


@pytest.mark.parametrize("count", [0, 1, 2])
async def test_a_result_is_a_delivery_to_callers_that_take_it(streams: Any, count: int) -> None:
    """A caller that takes one response is refused others: that is none."""
    gateway = await streams.gateway()
    receipt = await gateway.submit_job(job_bench.request(), job_bench.options())
    (record,) = await streams.comes()
    assert await streams.begin(record)
    for index in range(count):
        await streams.answer(record, index, index)
    await streams.end(record, count)
    if count == 1:
        _, response = await gateway.jobs.queries.single(receipt.id)
        assert response.outputs[0].array().tolist() == [[0]]
    else:
        with pytest.raises(Unsupported, match=f"the job has {count} responses: follow its events"):
            await gateway.jobs.queries.single(receipt.id)
    assert await given_by(gateway, record.id) == ("g" if count == 1 else "")
    _, responses = await gateway.jobs.queries.result(receipt.id)
    assert [response.outputs[0].array().tolist() for response in responses] == [[[index]] for index in range(count)]
    assert await given_by(gateway, record.id) == "g"


@pytest.mark.parametrize("way", ["result", "single"])
async def test_an_error_after_responses_is_a_delivery(streams: Any, way: str) -> None:
    gateway = await streams.gateway()
    receipt = await gateway.submit_job(job_bench.request(), job_bench.options())
    (record,) = await streams.comes()
    assert await streams.begin(record)
    await streams.answer(record, 0, 5)
    await streams.end(record, 1, error=InternalError("broken"))
    with pytest.raises(InternalError, match="broken"):
        await getattr(gateway.jobs.queries, way)(receipt.id)
    assert await given_by(gateway, record.id) == "g"
