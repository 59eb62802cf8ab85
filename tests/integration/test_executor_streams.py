"""Requests with several responses through an executor: what is written to the log, in which order, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import repeat_backend as repeat
from executor_bench import ME, Bench, Follower, running
from response_reader import DURABLE, MODEL, Reader, facts, statistics, told

from charonia import keys
from charonia.backend import InstanceDied
from charonia.errors import InternalError, InvalidArgument
from charonia.facts.events import (
    FIELD_FACT,
    BatchDied,
    BatchDiedInCompany,
    BatchFinished,
    BatchReturned,
    ResponsesBegun,
    ResponsesWanted,
    SlotFreed,
    pack_fact,
)
from charonia.facts.jobs import JobEnd, JobState
from charonia.wire import FLAG_JOB, unpack_response
from executors.configuration import declarations


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


async def test_responses_come_in_order_with_their_places_and_end_once(bench: Bench) -> None:
    reader = Reader(bench)
    several, flagged = await bench.accept(MODEL, repeat.inputs(1, 3)), await bench.accept(MODEL, repeat.inputs(2, 2))
    none = await bench.accept(MODEL, repeat.inputs(3, 0))
    repeat.LAST_IS_FINAL.add(2)

    batch_id = await bench.dispatch(MODEL, [several[1], flagged[1], none[1]])
    await bench.finished(MODEL, batch_id)

    records = await reader.ended(several[0])
    assert told(records) == [1000, 1001, 1002, "end"]
    assert [record.place for record in records] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert [record.final for record in records] == [False, False, False, True]
    records = await reader.ended(flagged[0])
    assert (told(records), [record.final for record in records]) == ([2000, 2001], [False, True])
    records = await reader.ended(none[0])
    assert (told(records), records[0].place) == (["end"], (0, 0))
    assert await bench.log.pending(MODEL) == (0, 0)
    await bench.service.drain(10)
    assert await bench.log.range(keys.batches(ME)) == []
    counted = await statistics(bench)
    assert (counted["success_count"], counted["inference_count"], counted["execution_count"]) == (3, 3, 1)
    assert counted["b3_count"] == 1
    assert "fail_count" not in counted
    metrics = bench.service.metrics.render().decode()
    assert 'charonia_executor_executions_total{model="repeat",version="1"} 1.0' in metrics


async def test_a_last_response_without_outputs_is_no_flag(bench: Bench) -> None:
    reader = Reader(bench)
    flag, bare = await bench.accept(MODEL, repeat.inputs(1, 1)), await bench.accept(MODEL, repeat.inputs(2, 1))
    repeat.ENDS_BARE.add(2)
    await bench.finished(MODEL, await bench.dispatch(MODEL, [flag[1], bare[1]]))
    for (request_id, _), is_flag in ((flag, True), (bare, False)):
        last = (await reader.ended(request_id))[-1]
        assert (last.outputs, last.final, last.place, last.is_flag) == ([], True, (0, 1), is_flag)


async def test_responses_leave_as_they_are_made_and_the_owner_hears_of_the_first(bench: Bench) -> None:
    reader, owner = Reader(bench), Follower(bench.log, keys.facts(MODEL))
    repeat.HOLD_AFTER[1] = 2
    slow, quick = await bench.accept(MODEL, repeat.inputs(1, 3)), await bench.accept(MODEL, repeat.inputs(2, 1))

    batch_id = await bench.dispatch(MODEL, [slow[1], quick[1]])
    assert told(await reader.count(slow[0], 2)) == [1000, 1001]
    assert told(await reader.ended(quick[0])) == [2000, "end"]
    assert await bench.log.unsettled(MODEL, [slow[0], quick[0]]) == [0, -1], "each request ends at its own time"

    begun = await owner.fact(ResponsesBegun, batch_id=batch_id)
    assert begun.ids == slow[0], "the other one ended in the same moment"
    assert facts(owner, BatchFinished) == facts(owner, SlotFreed) == []
    repeat.release(1)
    await owner.fact(BatchFinished, batch_id=batch_id)
    assert told(reader.of(slow[0])) == [1000, 1001, 1002, "end"]
    counted = await statistics(bench)
    assert (counted["success_count"], counted["execution_count"], counted["b2_count"]) == (2, 1, 1)


async def test_what_is_made_in_one_moment_is_one_entry(bench: Bench) -> None:
    reader = Reader(bench)
    accepted = [await bench.accept(MODEL, repeat.inputs(n, 20)) for n in range(1, 5)]
    batch_id = await bench.dispatch(MODEL, [record for _, record in accepted])
    await bench.finished(MODEL, batch_id)
    for request_id, _ in accepted:
        assert len(await reader.ended(request_id)) == 21
    assert len(reader.follower.entries) < 60


async def test_a_freed_slot_takes_the_next_batch_while_responses_are_to_come(bench: Bench) -> None:
    reader, owner = Reader(bench), Follower(bench.log, keys.facts(MODEL))
    repeat.FREE.add(1)
    repeat.HOLD_AFTER[1] = 1
    first, second = await bench.accept(MODEL, repeat.inputs(1, 2)), await bench.accept(MODEL, repeat.inputs(2, 1))

    one = await bench.dispatch(MODEL, [first[1]])
    await owner.fact(SlotFreed, batch_id=one, executor=ME)
    other = await bench.dispatch(MODEL, [second[1]])
    assert told(await reader.ended(second[0])) == [2000, "end"]
    await owner.fact(BatchFinished, batch_id=other)
    assert not [fact for fact in facts(owner, BatchFinished) if fact.batch_id == one]

    repeat.release(1)
    await owner.fact(BatchFinished, batch_id=one)
    assert told(reader.of(first[0])) == [1000, 1001, "end"]


async def test_what_is_wanted_of_a_request_before_it_runs_is_remembered(bench: Bench) -> None:
    """S55: it ran elsewhere before, and who reads its responses said then how many it wants."""
    reader = Reader(bench)
    repeat.HOLD_AFTER[1] = 1
    first_id, first = await bench.accept(MODEL, repeat.inputs(1, 1))
    await bench.dispatch(MODEL, [first])
    await reader.count(first_id, 1)
    request_id, record = await bench.accept(MODEL, repeat.inputs(2, 3), window=1)
    batch_id = await bench.dispatch(MODEL, [record])
    for count in (3, 4, 2):
        await bench.log.append(keys.batches(ME), [FIELD_FACT, pack_fact(ResponsesWanted(batch_id, request_id, count))])
    other = await bench.dispatch(MODEL, [(await bench.accept(MODEL, repeat.inputs(3, 1)))[1]], version=2)
    await bench.finished(MODEL, other, BatchReturned)
    repeat.release(1)
    assert told(await reader.ended(request_id)) == [2000, 2001, 2002, "end"]


async def test_a_failure_ends_what_is_open_and_nothing_else(bench: Bench) -> None:
    reader = Reader(bench)
    repeat.HOLD_AFTER[1] = 1
    repeat.FAIL[1] = InvalidArgument("no more")
    failing, done = await bench.accept(MODEL, repeat.inputs(1, 3)), await bench.accept(MODEL, repeat.inputs(2, 1))
    batch_id = await bench.dispatch(MODEL, [failing[1], done[1]])
    await reader.ended(done[0])
    repeat.release(1)
    await bench.finished(MODEL, batch_id)
    records = await reader.ended(failing[0])
    assert told(records) == [1000, "no more"]
    assert [record.place for record in records] == [(0, 0), (0, 1)]
    counted = await statistics(bench)
    assert (counted["success_count"], counted["fail_count"], counted["fail_BACKEND"]) == (1, 1, 1)


@pytest.mark.parametrize("failure", [TimeoutError("no answer"), MemoryError("no space"), ValueError("no number")])
async def test_what_a_model_raises_is_its_failure(bench: Bench, failure: Exception) -> None:
    """Whatever type it has, as in Triton and in a process of its own."""
    reader = Reader(bench)
    repeat.HOLD_AFTER[1] = 1
    repeat.FAIL[1] = failure
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 3))
    batch_id = await bench.dispatch(MODEL, [record])
    await reader.count(request_id, 1)
    repeat.release(1)
    await bench.finished(MODEL, batch_id)
    *_, last = await reader.ended(request_id)
    assert type(last.error) is InternalError
    assert last.error.message == f"{type(failure).__name__}: {failure}"


async def test_a_call_that_returns_early_fails_what_it_left_open(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None:
        return

    monkeypatch.setattr(repeat.RepeatInstance, "execute_stream", nothing)
    reader = Reader(bench)
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 3))
    await bench.finished(MODEL, await bench.dispatch(MODEL, [record]))
    assert told(await reader.ended(request_id)) == ["model 'repeat' ended without a final response"]


async def test_what_does_not_fit_ends_before_it_runs(bench: Bench) -> None:
    reader = Reader(bench)
    bad = await bench.accept(MODEL, repeat.inputs(1, 1)[:1])
    good = await bench.accept(MODEL, repeat.inputs(2, 1))
    await bench.finished(MODEL, await bench.dispatch(MODEL, [bad[1], good[1]]))
    (record,) = await reader.ended(bad[0])
    assert record.error is not None
    assert record.place is None
    assert told(await reader.ended(good[0])) == [2000, "end"]


async def test_a_jobs_responses_are_kept_and_its_last_is_its_result(bench: Bench) -> None:
    reader = Reader(bench)
    repeat.HOLD_AFTER[1] = 2
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 3), flags=DURABLE)
    batch_id = await bench.dispatch(MODEL, [record])
    await reader.count(request_id, 2)
    kept = await bench.log.job_responses(MODEL, request_id)
    assert [(attempt, index) for attempt, index, _ in kept] == [(0, 0), (0, 1)]
    assert told([unpack_response(record) for _, _, record in kept]) == [1000, 1001]
    assert (await bench.log.job_result(MODEL, request_id)) is None

    repeat.release(1)
    await bench.finished(MODEL, batch_id)
    assert told(await reader.ended(request_id)) == [1000, 1001, 1002, "end"]
    assert len(await bench.log.job_responses(MODEL, request_id)) == 3
    job = await bench.log.job(MODEL, request_id)
    assert job is not None
    assert job.state is JobState.SUCCEEDED
    result = await bench.log.job_result(MODEL, request_id)
    assert result is not None
    final = unpack_response(result)
    assert (final.place, final.final, final.outputs) == ((0, 3), True, [])


@pytest.mark.parametrize("at_once", [False, True])
async def test_who_reads_a_job_does_not_see_more_than_the_next_owner(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """When its first response is kept, it is marked already: an executor that is killed in between would leave a job
    that ends only when its model is there again. So also when all of its responses were written `at_once`.
    """
    reader = Reader(bench)
    if not at_once:
        repeat.HOLD_AFTER[1] = 1
    marked: list[list[bytes]] = []
    keep = bench.log.add_job_responses

    async def kept(model: str, job_id: bytes, *rest: Any) -> bool:
        marked.append(await bench.log.due(keys.visible(model), 1 << 52, 10))
        return await keep(model, job_id, *rest)

    monkeypatch.setattr(bench.log, "add_job_responses", kept)
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 3), flags=FLAG_JOB)
    batch_id = await bench.dispatch(MODEL, [record])
    if not at_once:
        await reader.count(request_id, 1)
        assert marked == [[request_id]]
        repeat.release(1)
    await bench.finished(MODEL, batch_id)
    assert marked[0] == [request_id]
    assert await bench.log.due(keys.visible(MODEL), 1 << 52, 10) == []


async def test_a_job_that_was_cancelled_is_told_to_its_model(bench: Bench) -> None:
    """Before the owner says so: the log does not take its responses any more."""
    reader, owner = Reader(bench), Follower(bench.log, keys.facts(MODEL))
    repeat.HOLD_AFTER[1] = 1
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 5), flags=FLAG_JOB)
    batch_id = await bench.dispatch(MODEL, [record])
    await reader.count(request_id, 1)
    ends = {request_id: JobEnd(JobState.CANCELLED)}
    assert await bench.log.settle(MODEL, [(request_id, 1)], None, [], ends=ends) == [True]
    repeat.HOLD_AFTER[1] = 2
    repeat.release(1)
    async with asyncio.timeout(30):
        while not repeat.CANCELLED:
            await asyncio.sleep(0.001)
    assert repeat.CANCELLED == [1]
    repeat.release(1)
    await owner.fact(BatchFinished, batch_id=batch_id)
    assert told(reader.of(request_id)) == [1000]


async def test_what_nobody_wants_is_not_written(bench: Bench) -> None:
    reader, owner = Reader(bench), Follower(bench.log, keys.facts(MODEL))
    repeat.HOLD_AFTER[1] = 1
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 5))
    batch_id = await bench.dispatch(MODEL, [record])
    await reader.count(request_id, 1)
    assert await bench.log.settle(MODEL, [(request_id, 1)], None, []) == [True]
    await bench.unwant(batch_id, request_id)
    async with asyncio.timeout(30):
        while not repeat.CANCELLED:
            await asyncio.sleep(0.001)
    repeat.release(1)
    await owner.fact(BatchFinished, batch_id=batch_id)
    assert told(reader.of(request_id)) == [1000]
    async with asyncio.timeout(30):
        while "r1_cancel_count" not in (counted := await statistics(bench)):
            await asyncio.sleep(0.001)
    assert not {"success_count", "fail_count", "r1_infer_count", "r2_cancel_count"} & counted.keys()
    # what was given before it was cancelled was given (X5)
    assert (counted["r0_success_count"], counted["r1_cancel_count"]) == (1, 1)
    assert counted["r1_cancel_ns"] > 0


async def test_what_is_cancelled_gently_is_written_to_its_end(bench: Bench) -> None:
    """The model is notified, of a request that it does not have yet once it has it."""
    reader = Reader(bench)
    repeat.HOLD_AFTER[1] = repeat.HOLD_AFTER[2] = 1
    (first, one), (second, two) = [await bench.accept(MODEL, repeat.inputs(value, 3)) for value in (1, 2)]
    running, waiting = await bench.dispatch(MODEL, [one]), await bench.dispatch(MODEL, [two])
    await reader.count(first, 1)
    await bench.unwant(waiting, second, gentle=True)
    await bench.unwant(running, first, gentle=True)
    async with asyncio.timeout(30):
        while repeat.CANCELLED != [1]:
            await asyncio.sleep(0.001)
    repeat.release(1)
    assert told(await reader.ended(first)) == [1000, 1001, 1002, "end"]
    await reader.count(second, 1)
    assert repeat.CANCELLED == [1, 2]
    repeat.release(2)
    assert told(await reader.ended(second)) == [2000, 2001, 2002, "end"]
    await bench.finished(MODEL, waiting)
    counted = await statistics(bench)
    assert (counted["success_count"], "r1_cancel_count" in counted) == (2, False)


async def test_a_death_names_who_had_no_final_response(bench: Bench) -> None:
    reader, owner = Reader(bench), Follower(bench.log, keys.facts(MODEL))
    repeat.HOLD_AFTER[1] = 1
    repeat.FAIL[1] = InstanceDied("gone", "last words")
    open_, done = await bench.accept(MODEL, repeat.inputs(1, 3)), await bench.accept(MODEL, repeat.inputs(2, 1))
    batch_id = await bench.dispatch(MODEL, [open_[1], done[1]])
    await reader.ended(done[0])
    await reader.count(open_[0], 1)
    repeat.release(1)
    died = await owner.fact(BatchDied, batch_id=batch_id)
    assert (died.ids, died.stderr, died.blameless) == (open_[0], "last words", False)
    assert await bench.log.unsettled(MODEL, [open_[0]]) == [0]
    # the instance was made anew
    later = await bench.accept(MODEL, repeat.inputs(3, 1))
    await bench.dispatch(MODEL, [later[1]])
    assert told(await reader.ended(later[0])) == [3000, "end"]


async def test_who_was_together_with_a_dead_instance_is_told_apart_from_who_was_alone(bench: Bench) -> None:
    reader, owner = Reader(bench), Follower(bench.log, keys.facts(MODEL))
    batches = []
    for value in (1, 2):
        repeat.FREE.add(value)
        repeat.HOLD_AFTER[value] = 1
        repeat.FAIL[value] = InstanceDied("gone")
        request_id, record = await bench.accept(MODEL, repeat.inputs(value, 3))
        batches.append((await bench.dispatch(MODEL, [record]), request_id))
        await reader.count(request_id, 1)
    repeat.release(1)
    repeat.release(2)
    for batch_id, request_id in batches:
        assert (await owner.fact(BatchDiedInCompany, batch_id=batch_id)).ids == request_id


async def test_a_silent_request_is_ended(tmp_path: Path) -> None:
    config = repeat.CONFIG + 'parameters { key: "charonia.max_execution_s" value { string_value: "1.5" } }'
    (tmp_path / MODEL / "config.pbtxt").write_text(config)
    async with running(tmp_path) as bench:
        reader = Reader(bench)
        repeat.FREE.add(1)
        repeat.HOLD_AFTER[1] = 1
        request_id, record = await bench.accept(MODEL, repeat.inputs(1, 2))
        await bench.finished(MODEL, await bench.dispatch(MODEL, [record]))
        text = "model 'repeat' sent no response for 1.5 s (charonia.max_execution_s)"
        assert told(await reader.ended(request_id)) == [1000, text]
        assert repeat.CANCELLED == [1]


async def test_a_response_after_the_final_one_is_the_backends_error(bench: Bench) -> None:
    async def twice(self: Any, requests: Any, responses: Any) -> None:
        responses.send(0, None, final=True)
        with pytest.raises(InternalError):
            responses.send(0, repeat._response(1), final=False)
        with pytest.raises(ValueError, match="neither"):
            responses.send(0, None, final=False)

    patch = pytest.MonkeyPatch()
    patch.setattr(repeat.RepeatInstance, "execute_stream", twice)
    reader = Reader(bench)
    request_id, record = await bench.accept(MODEL, repeat.inputs(1, 3))
    await bench.finished(MODEL, await bench.dispatch(MODEL, [record]))
    patch.undo()
    assert told(await reader.ended(request_id)) == ["end"]
