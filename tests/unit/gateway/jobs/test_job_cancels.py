"""Jobs that are cancelled, by name or with their caller, and callers that hang up."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import job_bench as bench_module
import pytest
from job_bench import HASH, MODEL, JobBench, numbers, options, until, until_so
from job_bench import request as request_of
from slow_log import Slow

from charonia import keys
from charonia.errors import Cancelled
from charonia.facts.events import RequestCancelled, RequestsEnded
from charonia.facts.jobs import JobEnd, JobState, public_id
from charonia.wire import pack_failure
from gateway.deferral import Deferral
from gateway.requests.delivery import ANYONE, Caller, JobFilter

ACME = Caller("acme", scoped=True)


# -- cancelling --------------------------------------------------------------------------------------------------------


async def test_a_cancelled_job_is_never_begun_and_stays_cancelled(bench: Any) -> None:
    gateway, other = await bench.gateway("g1"), await bench.gateway("g2")
    receipt = await gateway.submit_job(request_of(), options())
    (record,) = await bench.queued()
    view = await other.jobs.cancel(receipt.id)
    assert (view.state, view.error) == (JobState.CANCELLED, "request was cancelled")
    assert RequestsEnded(record.id, "cancelled") in await bench.facts()
    assert not await bench.begin(record)
    assert not await bench.finish(record)
    assert (await gateway.jobs.cancel(receipt.id)).state is JobState.CANCELLED
    assert (await gateway.jobs.queries.timeline(receipt.id))[1][-1].detail["by"] == "caller"
    with pytest.raises(Cancelled):
        await gateway.jobs.queries.result(receipt.id)
    assert other.jobs.counts.cancelled == {MODEL: 1}
    assert gateway.jobs.counts.cancelled == {}
    counted = await bench.log.statistics(keys.statistics(MODEL, 1, HASH))
    assert (counted["fail_count"], counted["fail_CANCELED"]) == (1, 1)


DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.mark.parametrize("way", ["infer", "stream", "wait"])
async def test_a_caller_who_leaves_while_its_job_is_on_its_way_cancels_it(way: str) -> None:
    log = Slow()
    bench = JobBench(log)
    await bench.serve(bench_module.CONFIG + (DECOUPLED if way == "stream" else ""))
    gateway = await bench.gateway()
    deferral = Deferral(gateway)

    async def call() -> None:
        if way == "infer":
            await gateway.infer(request_of(), options=options("key", on_disconnect="cancel"))
        elif way == "wait":
            await deferral.answer(request_of(), {"charonia_prefer": "wait=60"}, ANYONE, {})
        else:
            answers = gateway.stream(request_of(), options=options("key", on_disconnect="cancel"))
            async with contextlib.aclosing(answers):
                async for _ in answers:
                    pass

    caller = asyncio.create_task(call())
    await log.asked.wait()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    log.let.set()

    async def cancelled() -> bool:
        return [job.state for job in await log.jobs(MODEL, ended=True)] == [JobState.CANCELLED]

    await until_so(cancelled)
    assert await log.pending(MODEL) == (0, 0)
    await bench.close()


async def test_a_job_that_its_owner_cancelled_says_so(bench: Any) -> None:
    """As those that follow a cancelled one in its sequence, whose waiting callers are told a code and no text."""
    gateway = await bench.gateway()
    receipt = await gateway.submit_job(request_of(), options())
    (record,) = await bench.queued()
    end = JobEnd(JobState.CANCELLED, pack_failure(record.id, MODEL, 1, Cancelled("")))
    assert await bench.log.settle(MODEL, [(record.id, 1)], None, [], ends={record.id: end}) == [True]
    with pytest.raises(Cancelled, match=r"^request was cancelled$"):
        await gateway.jobs.queries.result(receipt.id)


async def test_cancelling_an_ended_job_tells_how_it_ended(bench: Any) -> None:
    gateway = await bench.gateway()
    receipt = await gateway.submit_job(request_of(), options())
    (record,) = await bench.queued()
    await bench.finish(record)
    assert (await gateway.jobs.cancel(receipt.id)).state is JobState.SUCCEEDED


async def test_a_waiting_caller_learns_of_the_cancel(bench: Any) -> None:
    gateway, other = await bench.gateway("g1"), await bench.gateway("g2")
    here = asyncio.create_task(gateway.infer(request_of(1), options=options("one")))
    (record,) = await bench.comes()
    await gateway.jobs.cancel(public_id(MODEL, record.id))
    with pytest.raises(Cancelled, match=r"^request was cancelled$"):
        await here
    there = asyncio.create_task(gateway.infer(request_of(2), options=options("two")))
    (record,) = await bench.comes()
    await other.jobs.cancel(public_id(MODEL, record.id))
    await gateway._dataplane.requester.recheck({record.id})
    with pytest.raises(Cancelled, match=r"^request was cancelled$"):
        await there


async def test_cancelling_what_matches(bench: Any) -> None:
    gateway = await bench.gateway()
    ours = [await gateway.submit_job(request_of(n), options(tenant="acme")) for n in range(3)]
    theirs = await gateway.submit_job(request_of(), options(tenant="other"))
    (running, *_) = await bench.queued()
    await bench.begin(running)
    assert await gateway.jobs.cancel_all(JobFilter(state=JobState.SUCCEEDED)) == 0
    assert await gateway.jobs.cancel_all(JobFilter(model="absent")) == 0
    running_state = (await gateway.jobs.queries.view(public_id(MODEL, running.id))).tenant
    assert await gateway.jobs.cancel_all(JobFilter(state=JobState.QUEUED), ACME) == 3 - (running_state == "acme")
    assert await gateway.jobs.cancel_all(JobFilter(), ACME) == (running_state == "acme")
    assert not (await gateway.jobs.queries.view(theirs.id)).state.terminal
    assert {(await gateway.jobs.queries.view(job.id)).state for job in ours} == {JobState.CANCELLED}
    assert await gateway.jobs.cancel_all(JobFilter()) == 1


async def _hang_up(bench: Any, gateway: Any, wishes: Any) -> Any:
    call = asyncio.create_task(gateway.infer(request_of(), options=wishes))
    (record,) = await bench.comes()
    await until(lambda: gateway._dataplane.requester.requests.get(record.id).accepted)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    return record


# -- callers that hang up ----------------------------------------------------------------------------------------------


async def test_who_hangs_up_without_a_key_cancels(bench: Any) -> None:
    record = await _hang_up(bench, await bench.gateway(), None)

    async def told() -> bool:
        return RequestCancelled(record.id) in await bench.facts()

    await until_so(told)


async def test_a_keyed_job_stays_when_its_caller_hangs_up(bench: Any) -> None:
    gateway = await bench.gateway()
    record = await _hang_up(bench, gateway, options("key"))
    await bench.finish(record)
    assert numbers((await gateway.infer(request_of(), options=options("key"))).outputs)["y"] == 1
    assert [fact for fact in await bench.facts() if isinstance(fact, RequestCancelled | RequestsEnded)] == []


async def test_a_keyed_job_goes_with_its_caller_when_it_said_so(bench: Any) -> None:
    gateway = await bench.gateway()
    record = await _hang_up(bench, gateway, options("key", on_disconnect="cancel"))

    async def ended() -> bool:
        return (await gateway.jobs.queries.view(public_id(MODEL, record.id))).state is JobState.CANCELLED

    await until_so(ended)
