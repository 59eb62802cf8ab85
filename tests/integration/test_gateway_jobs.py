"""Jobs of several gateways over a real log: what a killed gateway leaves, who wakes whom, who wins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import job_bench as bench_module
import pytest
from job_bench import MODEL, numbers, options
from job_bench import request as request_of

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import Cancelled, DeadlineExceeded, KeyReused, ResourceExhausted
from charonia.eventlog.port import EventLog
from charonia.eventlog.redis import open_log
from charonia.facts.jobs import JobState, public_id
from charonia.facts.journal import read_facts
from gateway.requests.delivery import Caller, JobFilter

pytestmark = pytest.mark.integration


class Over:
    """A bench over Redis, where each gateway has a connection of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.logs: list[EventLog] = []
        self.bench: Any = None

    async def log(self) -> EventLog:
        log = open_log(self.url)
        await log.open()
        self.logs.append(log)
        return log

    async def gateway(self, name: str, **settings: Any) -> Any:
        gateway = await self.bench.gateway(name, log=await self.log(), **settings)
        async with asyncio.timeout(30):
            while not gateway.model_ready(MODEL, ""):
                await asyncio.sleep(0.001)
        return gateway


@pytest.fixture
async def over(fresh_log_url: str) -> AsyncIterator[Over]:
    over = Over(fresh_log_url)
    over.bench = bench_module.JobBench(await over.log())
    await over.bench.serve()
    yield over
    await over.bench.close()
    for log in over.logs:
        await log.close()


async def test_the_job_of_a_killed_gateway_is_answered_by_another(over: Over) -> None:
    bench, first, second = over.bench, await over.gateway("g1"), await over.gateway("g2")
    cut_off = asyncio.create_task(first.infer(request_of(3, id="a"), options=options("key")))
    (record,) = await bench.comes()
    await bench.begin(record)
    await bench.kill(first)
    early = asyncio.create_task(second.infer(request_of(3, id="b"), options=options("key")))
    async with asyncio.timeout(30):
        while second.jobs.counts.replays != {MODEL: 1}:
            await asyncio.sleep(0.001)
    assert await bench.finish(record)
    async with asyncio.timeout(30):
        answers = [await early, await second.infer(request_of(3, id="c"), options=options("key"))]
    assert [(response.id, numbers(response.outputs)["y"]) for response in answers] == [("b", 3), ("c", 3)]
    assert [len(await bench.log.jobs(MODEL, ended=ended)) for ended in (False, True)] == [0, 1]
    with pytest.raises(KeyReused):
        await second.infer(request_of(4), options=options("key"))
    cut_off.cancel()
    await asyncio.gather(cut_off, return_exceptions=True)


@pytest.mark.parametrize("beats", [True, False], ids=["told", "looks"])
async def test_a_caller_of_one_gateway_is_cancelled_through_another(
    over: Over, beats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.calls.requester._RECHECK_S", 3600.0 if beats else 0.5)
    bench, first, second = over.bench, await over.gateway("g1"), await over.gateway("g2")
    if beats:
        await bench.log.beat("gateway", "g1", 60_000)
    call = asyncio.create_task(first.infer(request_of(), options=options("key")))
    (record,) = await bench.comes()
    watching = asyncio.create_task(_kinds(second, public_id(MODEL, record.id)))
    assert (await second.jobs.cancel(public_id(MODEL, record.id))).state is JobState.CANCELLED
    async with asyncio.timeout(30):
        with pytest.raises(Cancelled, match=r"^request was cancelled$"):
            await call
        assert first.jobs.counts.rechecks == (not beats)
        assert await watching == ["accepted", "cancelled"]
    assert not await bench.begin(record)
    assert await bench.log.pending(MODEL) == (0, 0)


async def _kinds(gateway: Any, job_id: str) -> list[str]:
    return [event.kind async for event in await gateway.jobs.queries.events(job_id)]


@pytest.mark.parametrize("journal", ["jobs", "off"])
async def test_those_who_wait_are_woken(over: Over, journal: str) -> None:
    bench, gateway = over.bench, await over.gateway("g1", journal=journal)
    receipts = [await gateway.submit_job(request_of(n), options()) for n in range(8)]
    waiting = [asyncio.create_task(gateway.jobs.queries.result(r.id, wait_s=30)) for r in receipts for _ in range(2)]
    following = [asyncio.create_task(_kinds(gateway, r.id)) for r in receipts]
    for record in await bench.queued():
        await bench.begin(record)
        await bench.finish(record)
    async with asyncio.timeout(30):
        responses = await asyncio.gather(*waiting)
        assert [numbers(response.outputs)["y"] for _, (response,) in responses] == [
            n for n in range(8) for _ in range(2)
        ]
        assert await asyncio.gather(*following) == [["accepted", "batched", "succeeded"]] * 8


async def test_cancels_deadlines_and_completions_at_once_have_one_end_each(over: Over) -> None:
    bench, first, second = over.bench, await over.gateway("g1"), await over.gateway("g2")
    # a deadline as near as the machine is fast enough for
    for left_ns in (1_500_000_000, 8_000_000_000, 40_000_000_000):
        deadline_ns = wall_ns() + left_ns
        calls = [
            asyncio.create_task(
                (first, second)[n % 2].infer(
                    request_of(n, deadline_ns=deadline_ns), options=options(f"key {left_ns} {n}")
                )
            )
            for n in range(60)
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_ns / 1e9):
                records = await bench.comes(60)
                break
        await asyncio.gather(*calls, return_exceptions=True)
    by_value = {int(record.inputs()[0].array()[0, 0]): record for record in records}

    async def end(n: int) -> None:
        await asyncio.sleep(max(0.0, (deadline_ns - wall_ns()) / 1e9))
        record = by_value[n]
        if n % 3 and await bench.begin(record):
            await bench.finish(record)
        if n % 3 != 1:
            await (second, first)[n % 2].jobs.cancel(public_id(MODEL, record.id))

    async with asyncio.timeout(left_ns / 1e9 + 30):
        await asyncio.gather(*[end(n) for n in range(60)])
        answers = await asyncio.gather(*calls, return_exceptions=True)
    journal = [fact for e in await bench.log.range(keys.journal(MODEL)) for fact in read_facts(e.fields)]
    ended = [request_id for fact in journal if fact.kind == "ended" for request_id in fact.ids]
    for n, answer in enumerate(answers):
        job = await bench.log.job(MODEL, by_value[n].id)
        assert ended.count(by_value[n].id) == 1
        assert sum(event.kind == job.state.value for event in job.events) == 1
        assert job.events[-1].kind == job.state.value
        expected: Any = {JobState.CANCELLED: Cancelled, JobState.EXPIRED: DeadlineExceeded}.get(job.state)
        if expected is None:
            assert numbers(answer.outputs)["y"] == n
        else:
            assert type(answer) is expected
    assert await bench.log.pending(MODEL) == (0, 0)


async def test_lists_cancels_and_bounds_of_tenants(over: Over, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[tenants.acme]\nkeys = ["k1"]\nmax_pending_requests = 20\n[tenants.other]\nkeys = ["k2"]\n')
    gateway = await over.gateway("g1", api_keys=str(file))
    acme, other = (gateway.identify([(b"x-api-key", key)]) for key in (b"k1", b"k2"))
    wishes = type(options())(caller=acme)
    submitted = await asyncio.gather(
        *[gateway.submit_job(request_of(n), wishes) for n in range(30)], return_exceptions=True
    )
    refused = [receipt for receipt in submitted if isinstance(receipt, ResourceExhausted)]
    assert len(refused) == 10, "exact under concurrency"
    await gateway.submit_job(request_of(), type(options())(caller=other))
    seen, cursor = [], ""
    while True:
        page = await gateway.jobs.queries.page(JobFilter(), acme, cursor=cursor, limit=7)
        seen += [job.id for job in page.jobs]
        cursor = page.cursor
        if not cursor:
            break
    assert len(seen) == len(set(seen)) == 20
    assert await gateway.jobs.cancel_all(JobFilter(), acme) == 20
    assert [
        job.tenant for job in (await gateway.jobs.queries.page(JobFilter(state=JobState.QUEUED), Caller())).jobs
    ] == ["other"]
    assert (await over.bench.log.pending_of_tenants(MODEL, ["acme", "other"]))[0] == (0, 0)
