"""Jobs whose deadline passes while nobody decides about their model."""

from __future__ import annotations

from typing import Any

import pytest
from job_bench import HASH, MODEL, options, until_so
from job_bench import request as request_of

import gateway.jobs.job_watches
from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import DeadlineExceeded
from charonia.eventlog.port import Limits
from charonia.facts.jobs import JobEnd, JobState, NewJob, public_id
from charonia.facts.journal import read_facts
from gateway.requests.delivery import JobFilter, Webhook

SHORTLY_NS = 60_000_000
EXPIRED = "request deadline exceeded"


@pytest.fixture
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.jobs.job_watches, "_CHECK_INTERVAL_S", 3600.0)


async def past(bench: Any, number: int = 1, **about: Any) -> str:
    """A job whose deadline was a second ago; nobody has said so."""
    about = {"version": 1, "deadline_us": wall_ns() // 1000 - 1_000_000, **about}
    job = NewJob(b"%016d" % number, 3, wall_ns() // 1000 - 2_000_000, 60, about=about)
    await bench.log.accept_job(MODEL, 0, 0, job, [b"r", b"..."], Limits())
    return public_id(MODEL, job.id)


@pytest.mark.usefixtures("nobody_looks")
async def test_who_waits_sees_it_expire_on_time(bench: Any) -> None:
    gateway = await bench.gateway()
    deadline_ns = wall_ns() + SHORTLY_NS
    receipt = await gateway.submit_job(request_of(deadline_ns=deadline_ns), options())
    with pytest.raises(DeadlineExceeded, match=EXPIRED):
        await gateway.jobs.queries.result(receipt.id, wait_s=30.0)
    assert 0 <= wall_ns() - deadline_ns < 900_000_000, "sooner than it would have been looked at again"
    assert (await gateway.jobs.queries.view(receipt.id)).state is JobState.EXPIRED


@pytest.mark.usefixtures("nobody_looks")
async def test_who_follows_sees_it_expire(bench: Any) -> None:
    gateway = await bench.gateway()
    receipt = await gateway.submit_job(request_of(deadline_ns=wall_ns() + SHORTLY_NS), options())
    kinds = [event.kind async for event in await gateway.jobs.queries.events(receipt.id)]
    assert kinds == ["accepted", "expired"]


@pytest.mark.usefixtures("nobody_looks")
async def test_who_asks_is_told_what_is_made_true_first(bench: Any) -> None:
    gateway = await bench.gateway()
    job_id = await past(bench, webhook={"url": "https://example.org/", "events": []})
    view = await gateway.jobs.queries.view(job_id)
    assert (view.state, view.error, view.attempts) == (JobState.EXPIRED, EXPIRED, 0)
    assert await bench.log.pending(MODEL) == (0, 0)
    assert len(await bench.log.range(keys.webhooks(MODEL))) == 1
    statistics = await bench.log.statistics(keys.statistics(MODEL, 1, HASH))
    assert statistics["fail_REJECTED"] == 1
    assert statistics["fail_ns"] >= 2_000_000_000
    journal = await bench.log.range(keys.journal(MODEL))
    assert [fact.kind for fact in read_facts(journal[-1].fields)] == ["ended"]


@pytest.mark.usefixtures("nobody_looks")
async def test_a_job_that_runs_expires_too(bench: Any) -> None:
    gateway = await bench.gateway()
    job_id = await past(bench)
    await bench.log.begin_attempt(MODEL, bench._token, [b"%016d" % 1], 1, jobs=[b"%016d" % 1], executor="e")
    assert (await gateway.jobs.queries.view(job_id)).state is JobState.EXPIRED
    late = await bench.log.settle(MODEL, [(b"%016d" % 1, 1)], None, (), ends={b"%016d" % 1: JobEnd(JobState.SUCCEEDED)})
    assert late == [False]


@pytest.mark.usefixtures("nobody_looks")
async def test_lists_show_no_job_past_its_deadline_as_waiting(bench: Any) -> None:
    gateway = await bench.gateway()
    waiting = (await gateway.submit_job(request_of(), options())).id
    overdue = {await past(bench, number) for number in range(1, 4)}
    page = await gateway.jobs.queries.page(JobFilter())
    assert {view.id: view.state for view in page.jobs} == {waiting: JobState.QUEUED} | dict.fromkeys(
        overdue, JobState.EXPIRED
    )
    assert len(page.jobs) == 4


async def test_what_nobody_asks_for_is_looked_for(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.jobs.job_watches, "_CHECK_INTERVAL_S", 0.01)
    await past(bench, webhook={"url": "https://example.org/", "events": []})
    await past(bench, 2, unjournalled=True)
    own = await bench.gateway(webhook_allow=("example.org",))
    hook = Webhook("https://example.org/hook")
    later = await own.submit_job(request_of(deadline_ns=wall_ns() + 3600 * 10**9), options(webhook=hook))

    async def both_ended() -> bool:
        return (await bench.log.pending(MODEL))[0] == 1

    await until_so(both_ended)
    assert len(await bench.log.range(keys.webhooks(MODEL))) == 1
    assert await bench.log.count_times(keys.job_deadlines(MODEL)) == 1
    assert (await own.jobs.queries.view(later.id)).state is JobState.QUEUED
    assert own.jobs._overdue.expired == 2


async def test_many_models_are_looked_at_in_turn(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.jobs.job_watches, "_MODELS_AT_ONCE", 2)
    about = {"version": 1, "deadline_us": 1}
    for model in "abcde":
        await bench.log.accept_job(model, 0, 0, NewJob(b"j" * 16, 3, 1, 60, about=about), [b"r", b"..."], Limits())
    overdue = gateway.jobs.job_watches.OverdueJobs(bench.log, (await bench.gateway())._catalog)
    assert [await overdue.check() for _ in range(3)] == [2, 2, 1]
