"""Those who wait for a job, how long they wait, and what they are told at a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import job_bench as bench_module
import pytest
from job_bench import HASH, MODEL, JobBench, numbers, options, until
from job_bench import request as request_of
from slow_log import Slow

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import DeadlineExceeded, InvalidArgument, LogUnavailable, ResourceExhausted, Unavailable
from charonia.facts.events import RequestsEnded
from charonia.facts.jobs import JobState, public_id
from charonia.facts.journal import read_facts
from gateway.deferral import Accepted, Deferral
from gateway.requests.delivery import Caller

ACME = Caller("acme", scoped=True)
OTHER = Caller("other", scoped=True)


DECOUPLED = "model_transaction_policy { decoupled: true }"


# -- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", ["off", "jobs", "all"])
async def test_many_wait_for_a_job_and_all_are_told(bench: Any, journal: str) -> None:
    gateway = await bench.gateway(journal=journal)
    receipt = await gateway.submit_job(request_of(9), options())
    (record,) = await bench.queued()
    assert record.journalled == (journal != "off")
    assert (await gateway.jobs.queries.result(receipt.id, wait_s=0.01))[1] is None

    async def kinds(after: int) -> list[str]:
        return [event.kind async for event in await gateway.jobs.queries.events(receipt.id, after_number=after)]

    waiting = [asyncio.create_task(gateway.jobs.queries.result(receipt.id, wait_s=60)) for _ in range(3)]
    reading = [asyncio.create_task(kinds(after)) for after in (0, 1, 2)]
    await until(lambda: len(gateway.jobs._watches._watches) == 1)
    await bench.begin(record)
    await bench.finish(record)
    async with asyncio.timeout(30):
        for _, responses in await asyncio.gather(*waiting):
            (response,) = responses
            assert numbers(response.outputs)["y"] == 9
        assert await asyncio.gather(*reading) == [
            ["accepted", "batched", "succeeded"],
            ["batched", "succeeded"],
            ["succeeded"],
        ]
    assert await kinds(0) == ["accepted", "batched", "succeeded"]
    assert await kinds(3) == []
    assert gateway.jobs._watches._watches == {}, "nobody is watched when nobody waits"


async def test_the_journal_wakes_before_the_slow_look(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watches = sys.modules["gateway.jobs.job_watches"]
    monkeypatch.setattr(watches, "_AFTER_WAKING_S", ())
    monkeypatch.setattr(watches, "_SLOWLY_S", 3600.0)
    gateway = await bench.gateway()
    receipt = await gateway.submit_job(request_of(), options())
    (record,) = await bench.queued()
    waiting = asyncio.create_task(gateway.jobs.queries.result(receipt.id, wait_s=3600))
    await until(lambda: any(w.record for j in gateway.jobs._watches._watches.values() for w in j.values()))
    await bench.finish(record)
    async with asyncio.timeout(30):
        assert (await waiting)[1]


async def test_not_everybody_can_wait_at_once(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watches = sys.modules["gateway.jobs.job_watches"]
    monkeypatch.setattr(watches, "MAX_WAITING", 3)
    monkeypatch.setattr(watches, "MAX_WAITING_OF_TENANT", 1)
    gateway = await bench.gateway()
    ours = (await gateway.submit_job(request_of(), options(tenant="acme"))).id
    theirs = (await gateway.submit_job(request_of(), options(tenant="other"))).id

    async def follow(job_id: str, caller: Caller) -> Any:
        stream = await gateway.jobs.queries.events(job_id, caller, 1)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        return waiting

    first = await follow(ours, ACME)
    with pytest.raises(ResourceExhausted, match="ask again later"):
        await gateway.jobs.queries.result(ours, ACME, 60)
    with pytest.raises(ResourceExhausted):
        await gateway.jobs.queries.events(ours, ACME)  # before a reader is told that there will be events
    others = [await follow(theirs, OTHER), await follow(theirs, Caller())]
    with pytest.raises(ResourceExhausted):
        await gateway.jobs.queries.result(theirs, Caller(), 60)
    for record in await bench.queued():
        await bench.finish(record)
    async with asyncio.timeout(30):
        assert [event.kind for event in await asyncio.gather(first, *others)] == ["succeeded"] * 3
    assert (await gateway.jobs.queries.result(ours, ACME, 60))[1]


async def test_who_may_not_wait_learns_of_the_job_that_was_accepted(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = sys.modules["gateway.jobs.job_watches"]
    monkeypatch.setattr(watches, "MAX_WAITING", 0)
    gateway = await bench.gateway()
    accepted = await Deferral(gateway).answer(request_of(9), {"charonia_prefer": "respond-async, wait=30"}, ACME, {})
    assert isinstance(accepted, Accepted)
    (record,) = await bench.queued()
    assert accepted.receipt.id == public_id(MODEL, record.id)
    await bench.finish(record)
    assert (await gateway.jobs.queries.single(accepted.receipt.id, ACME))[1]


@pytest.mark.parametrize("step", ["wait", "single", "view"])
async def test_a_log_that_is_away_hides_no_accepted_job(bench: Any, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    gateway = await bench.gateway()
    queries = gateway.jobs.queries

    async def away(*_: Any) -> Any:
        raise LogUnavailable("the log is away")

    monkeypatch.setattr(queries, step, away)
    accepted = await Deferral(gateway).answer(request_of(9), {"charonia_prefer": "respond-async, wait=0.01"}, ACME, {})
    assert isinstance(accepted, Accepted)
    (record,) = await bench.queued()
    assert accepted.receipt.id == public_id(MODEL, record.id)


async def test_a_client_that_leaves_before_it_has_the_id_leaves_no_job(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await bench.gateway()
    deferral, view, reading = Deferral(gateway), gateway.jobs.queries.view, asyncio.Event()

    async def slow(*given: Any) -> Any:
        reading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.jobs.queries, "view", slow)
    asking = asyncio.create_task(
        deferral.answer(request_of(9), {"charonia_prefer": "respond-async, wait=0.01"}, ACME, {})
    )
    async with asyncio.timeout(30):
        await reading.wait()
        (record,) = await bench.queued()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while not (await view(public_id(MODEL, record.id), ACME)).state.terminal:
            await asyncio.sleep(0.001)


async def test_a_reader_that_leaves_disturbs_nobody(bench: Any) -> None:
    gateway = await bench.gateway()
    receipt = await gateway.submit_job(request_of(), options())
    (record,) = await bench.queued()
    staying = asyncio.create_task(gateway.jobs.queries.result(receipt.id, wait_s=60))
    leaving = await gateway.jobs.queries.events(receipt.id)
    assert (await anext(leaving)).kind == "accepted"
    await leaving.aclose()
    gone = asyncio.create_task(gateway.jobs.queries.result(receipt.id, wait_s=60))
    await asyncio.sleep(0)
    gone.cancel()
    await bench.finish(record)
    async with asyncio.timeout(30):
        assert (await staying)[1]


# -- deadlines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "key"])
async def test_the_answer_comes_at_the_deadline(bench: Any, key: str) -> None:
    gateway = await bench.gateway(journal="all")
    deadline_ns = wall_ns() + 1_500_000_000
    call = asyncio.create_task(
        gateway.infer(request_of(deadline_ns=deadline_ns), options=options(key) if key else None)
    )
    (record,) = await bench.comes()
    assert record.deadline_ns == deadline_ns
    await bench.begin(record)
    with pytest.raises(DeadlineExceeded, match=r"^request deadline exceeded$"):
        await call
    assert wall_ns() >= deadline_ns
    assert not await bench.finish(record), "the executor comes too late"
    assert RequestsEnded(record.id, "expired") in await bench.facts()
    counted = await bench.log.statistics(keys.statistics(MODEL, 1, HASH))
    assert (counted["fail_count"], counted["fail_REJECTED"]) == (1, 1)
    assert gateway._dataplane.deadlines.expired == 1
    told = [fact for e in await bench.log.range(keys.journal(MODEL)) for fact in read_facts(e.fields)]
    assert [fact.kind for fact in told].count("ended") == 1
    if key:
        view = await gateway.jobs.queries.view(public_id(MODEL, record.id))
        assert (view.state, view.error) == (JobState.EXPIRED, "request deadline exceeded")


async def test_a_completion_that_was_first_is_the_answer(bench: Any) -> None:
    gateway = await bench.gateway()
    call = asyncio.create_task(gateway.infer(request_of(4, deadline_ns=wall_ns() + 1_500_000_000)))
    (record,) = await bench.comes()
    await bench.finish(record, reply=False)
    lost, settle = [], bench.log.settle

    async def settle_and_tell(*given: Any, **more: Any) -> list[bool]:
        won: list[bool] = await settle(*given, **more)
        lost.append(won)
        return won

    bench.log.settle = settle_and_tell
    await until(lambda: lost == [[False]])
    assert not call.done()
    reply = bench_module.pack_response(record.id, MODEL, 1, [], {})
    await bench.log.append(keys.replies("g"), bench_module.record_fields([reply]))
    assert (await call).outputs == []


async def test_a_deadline_while_the_log_is_away_is_an_unknown_outcome(bench: Any) -> None:
    gateway = await bench.gateway()
    call = asyncio.create_task(gateway.infer(request_of(deadline_ns=wall_ns() + 1_500_000_000)))
    await bench.comes()

    async def away(*_: Any, **__: Any) -> None:
        raise bench_module.LogUnavailable("away")

    bench.log.settle = away
    with pytest.raises(Unavailable, match="outcome is unknown"):
        await call


async def test_what_has_not_left_at_its_deadline_never_leaves(bench: Any) -> None:
    gateway = await bench.gateway()
    first = asyncio.create_task(gateway.infer(request_of(1), flush_interval_s=60.0))
    await bench.comes()
    with pytest.raises(DeadlineExceeded):
        await gateway.infer(request_of(2, deadline_ns=wall_ns() + 20_000_000), flush_interval_s=60.0)
    (record,) = await bench.queued()
    await bench.finish(record)
    assert numbers((await first).outputs)["y"] == 1
    assert await bench.log.pending(MODEL) == (0, 0)


async def test_deadlines_that_cannot_be_met(bench: Any) -> None:
    gateway = await bench.gateway()
    with pytest.raises(DeadlineExceeded):
        await gateway.infer(request_of(deadline_ns=wall_ns() - 1))
    with pytest.raises(DeadlineExceeded):
        await gateway.submit_job(request_of(deadline_ns=1), options())
    with pytest.raises(InvalidArgument, match="more than 366 days ahead"):
        await gateway.infer(request_of(deadline_ns=wall_ns() + 367 * 86_400 * 10**9))
    assert await bench.queued() == []


@pytest.mark.parametrize("key", ["", "key"])
async def test_a_log_that_takes_its_time_keeps_nobody_waiting(
    bench: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["gateway.dataplane"], "_LOG_PATIENCE_S", 0.05)
    gateway = await bench.gateway()
    stalled = asyncio.Event()

    async def stall(*_: Any, **__: Any) -> None:
        await stalled.wait()

    bench.log.accept = bench.log.accept_job = bench.log.settle = stall
    ask = request_of(deadline_ns=wall_ns() + 1_500_000_000)
    async with asyncio.timeout(30):
        with pytest.raises(Unavailable, match="outcome is unknown"):
            await gateway.infer(ask, options=options(key) if key else None)
    assert gateway._dataplane.pending_requests == 0


async def test_a_retry_has_a_deadline_of_its_own(bench: Any) -> None:
    gateway = await bench.gateway()
    receipt = await gateway.submit_job(request_of(), options("key"))
    with pytest.raises(DeadlineExceeded):
        await gateway.infer(request_of(deadline_ns=wall_ns() + 20_000_000), options=options("key"))
    assert not (await gateway.jobs.queries.view(receipt.id)).state.terminal


@pytest.mark.parametrize("way", ["infer", "stream"])
async def test_a_deadline_is_kept_while_the_log_takes_its_time(way: str) -> None:
    log = Slow()
    bench = JobBench(log)
    await bench.serve(bench_module.CONFIG + (DECOUPLED if way == "stream" else ""))
    gateway = await bench.gateway()
    ask = request_of(deadline_ns=wall_ns() + 1_500_000_000)
    if way == "infer":
        with pytest.raises(LogUnavailable, match="outcome is unknown"):
            await asyncio.wait_for(gateway.infer(ask, options=options("key")), 30)
    else:
        answers = gateway.stream(ask, options=options("key"))
        async with asyncio.timeout(30), contextlib.aclosing(answers):
            (answer,) = [answer async for answer in answers]
        assert type(answer.error) is LogUnavailable
    await bench.close()
