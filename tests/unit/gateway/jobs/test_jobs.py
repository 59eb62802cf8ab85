"""Jobs through a gateway's handler: accepted, answered, replayed, seen by their tenants."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import job_bench as bench_module
import pytest
from job_bench import HASH, MODEL, JobBench, numbers, options, until
from job_bench import request as request_of

from charonia import keys
from charonia.errors import (
    InternalError,
    InvalidArgument,
    KeyReused,
    LogUnavailable,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from charonia.facts.events import ProcessLeft
from charonia.facts.jobs import JobState, parse_public_id, public_id
from charonia.models.recording_rules import RecordingRules
from gateway.requests.delivery import Caller, JobFilter, Webhook

ACME = Caller("acme", scoped=True)
OTHER = Caller("other", scoped=True)


# -- accepting ---------------------------------------------------------------------------------------------------------


async def test_a_job_from_its_receipt_to_its_result(bench: Any) -> None:
    gateway = await bench.gateway()
    ask = request_of(7, id="mine", outputs=("z", "y"))
    receipt = await gateway.submit_job(ask, options(form={"binary": True}, durability="memory"))
    assert (receipt.created, receipt.durability, receipt.position, receipt.total) == (True, "memory", 1, 1)
    (record,) = await bench.queued()
    assert (record.is_job, record.journalled, record.endpoint) == (True, True, "")
    assert receipt.id == public_id(MODEL, record.id)

    view = await gateway.jobs.queries.view(receipt.id)
    assert (view.state, view.position, view.total, view.wait_reason) == (JobState.QUEUED, 1, 1, "it is next")
    assert (view.version, view.client_id, view.attempts, view.form) == (1, "mine", 0, {"binary": True})
    assert (await gateway.jobs.queries.result(receipt.id))[1] is None

    assert await bench.begin(record)
    view = await gateway.jobs.queries.view(receipt.id)
    assert (view.state, view.attempts, view.wait_reason) == (JobState.RUNNING, 1, "it runs")
    assert view.timings.batched_us >= view.timings.accepted_us > 0

    assert await bench.finish(record)
    view = await gateway.jobs.queries.view(receipt.id)
    assert (view.state, view.position, view.wait_reason, view.error) == (JobState.SUCCEEDED, 0, "", "")
    assert view.has_result
    assert view.expires_us == view.timings.ended_us + 86_400 * 1_000_000
    _, responses = await gateway.jobs.queries.result(receipt.id)
    assert responses is not None
    (response,) = responses
    assert [t.name for t in response.outputs] == ["y", "z"]  # the model's order, not that of the request
    assert numbers(response.outputs) == {"y": 7, "z": 7}
    assert (response.id, response.version, response.parameters) == ("mine", 1, {"note": "kept"})
    assert gateway.jobs.counts.accepted == {MODEL: 1}


async def test_positions_and_reasons_to_wait(bench: Any) -> None:
    gateway = await bench.gateway()
    receipts = [await gateway.submit_job(request_of(n), options()) for n in range(3)]
    assert [(r.position, r.total) for r in receipts] == [(1, 1), (2, 2), (3, 3)]
    assert receipts[2].eta_s is None, "nothing was executed yet"
    views = [await gateway.jobs.queries.view(r.id) for r in receipts]
    assert [view.wait_reason for view in views] == ["it is next", "queued behind 1 job", "queued behind 2 jobs"]

    await bench.log.set_paused(MODEL, True)
    view = await gateway.jobs.queries.view(receipts[0].id)
    assert (view.wait_reason, view.eta_s) == ("the queue of model 'm' is paused", None)
    await bench.log.set_paused(MODEL, False)
    await bench.tell(ProcessLeft("batcher", "b", "lost"))
    await until(lambda: "b" not in gateway._catalog.processes)
    assert (
        await gateway.jobs.queries.view(receipts[0].id)
    ).wait_reason == "no batcher decides about model 'm' at the moment"

    await bench.tell(ProcessLeft("executor", "e", "lost"))
    reason = "no executor serves model 'm' at the moment"
    await until(lambda: not gateway._catalog.held(MODEL)[1].slots)
    assert (await gateway.jobs.queries.view(receipts[0].id)).wait_reason == reason


async def test_an_estimate_comes_from_what_executions_took(bench: Any) -> None:
    gateway = await bench.gateway()
    counters = {"inference_count": 40, "execution_count": 10, "b4_infer_ns": 2_000_000_000, "b4_count": 10}
    await bench.log.add_statistics(keys.statistics(MODEL, 1, HASH), counters)
    receipts = [await gateway.submit_job(request_of(n), options()) for n in range(3)]
    # 0.2 s a batch, 0.05 s a row
    assert [r.eta_s for r in receipts] == pytest.approx([0.2, 0.25, 0.3])
    assert (await gateway.jobs.queries.view(receipts[2].id)).eta_s == pytest.approx(0.3)


async def test_what_a_job_remembers_of_its_options(bench: Any) -> None:
    gateway = await bench.gateway(job_retention_s=100)
    hook = Webhook("https://example.org/hook", ("failed",))
    wishes = options(webhook=hook, retention_s=5, on_disconnect="cancel")
    receipt = await gateway.submit_job(request_of(), wishes)
    record = await bench.log.job(*_key(receipt.id))
    assert record.retention_s == 5
    assert record.about["webhook"] == {"url": "https://example.org/hook", "events": ["failed"]}
    assert record.about["on_disconnect"] == "cancel"
    longer = await gateway.submit_job(request_of(), options(retention_s=1000))
    assert (await bench.log.job(*_key(longer.id))).retention_s == 100, "no longer than the operator keeps jobs"


async def test_refusals_leave_no_job(bench: Any) -> None:
    gateway = await bench.gateway(max_pending_requests=1)
    with pytest.raises(InvalidArgument, match="256 bytes exceeds the maximum of 255"):
        await gateway.submit_job(request_of(), options("k" * 256))
    with pytest.raises(InvalidArgument, match="invalid durability 'disk'"):
        await gateway.submit_job(request_of(), options(durability="disk"))
    with pytest.raises(NotFound):
        await gateway.submit_job(_of_version(2), options())
    await gateway.submit_job(request_of(), options())
    with pytest.raises(ResourceExhausted) as caught:
        await gateway.submit_job(request_of(), options())
    assert caught.value.retry_after_s >= 1
    gateway.begin_drain()
    with pytest.raises(Unavailable, match="Server exiting"):
        await gateway.submit_job(request_of(), options())
    assert len(await bench.log.jobs(MODEL, ended=False)) == 1


def _of_version(version: int) -> Any:
    ask = request_of()
    ask.version = version
    return ask


def _key(job_id: str) -> tuple[str, bytes]:
    parsed = parse_public_id(job_id)
    assert parsed is not None
    return parsed


# -- idempotency -------------------------------------------------------------------------------------------------------


async def test_a_keyed_call_is_answered_and_its_retry_gets_the_same_answer(bench: Any) -> None:
    first, second = await bench.gateway("g1"), await bench.gateway("g2")
    call = asyncio.create_task(first.infer(request_of(3, id="a"), options=options("key")))
    (record,) = await bench.comes()
    assert (record.is_job, record.endpoint) == (True, "g1")
    # a retry while it runs waits for the same job, on another gateway
    retry = asyncio.create_task(second.infer(request_of(3, id="b"), options=options("key")))
    await until(lambda: second.jobs.counts.replays == {MODEL: 1})
    await bench.begin(record)
    await bench.finish(record)
    answers = [await call, await retry, await second.infer(request_of(3, id="c"), options=options("key"))]
    assert [response.id for response in answers] == ["a", "b", "c"]
    assert [numbers(response.outputs) for response in answers] == [{"y": 3, "z": 3}] * 3
    assert [response.parameters for response in answers] == [{"note": "kept"}] * 3
    assert len(await bench.log.jobs(MODEL, ended=True)) == 1
    receipt = await second.submit_job(request_of(3), options("key"))
    assert (receipt.created, receipt.id, receipt.position) == (False, public_id(MODEL, record.id), 0)
    assert receipt.accepted_us > 0
    assert second.jobs.counts.replays == {MODEL: 3}
    assert (first._dataplane.pending_requests, second._dataplane.pending_requests) == (0, 0)


async def test_a_failure_is_the_same_failure_for_every_retry(bench: Any) -> None:
    gateway = await bench.gateway()
    call = asyncio.create_task(gateway.infer(request_of(), options=options("key")))
    (record,) = await bench.comes()
    await bench.begin(record)
    await bench.finish(record, error=InternalError("the model broke"))
    for attempt in (call, gateway.infer(request_of(), options=options("key"))):
        with pytest.raises(InternalError, match=r"^the model broke$"):
            await attempt
    assert (await gateway.jobs.queries.view(public_id(MODEL, record.id))).error == "the model broke"


async def test_a_key_may_stand_for_what_a_front_says_was_asked(bench: Any) -> None:
    gateway = await bench.gateway()
    first = await gateway.submit_job(request_of(1), options("key", digest=b"a" * 16))
    again = await gateway.submit_job(request_of(2), options("key", digest=b"a" * 16))
    assert (again.id, again.created) == (first.id, False)
    with pytest.raises(KeyReused):
        await gateway.submit_job(request_of(1), options("key", digest=b"b" * 16))


async def test_a_key_belongs_to_one_request_of_one_tenant(bench: Any) -> None:
    gateway = await bench.gateway(tenant_header="x-tenant")
    first = await gateway.submit_job(request_of(1), options("key", "acme"))
    with pytest.raises(KeyReused):
        await gateway.submit_job(request_of(2), options("key", "acme"))
    with pytest.raises(KeyReused):
        await gateway.infer(request_of(2), options=options("key", "acme"))
    foreign = await gateway.submit_job(request_of(2), options("key", "other"))
    assert foreign.created
    assert foreign.id != first.id
    assert gateway._dataplane.pending_requests == 0


async def test_a_lost_reply_is_read_from_the_record(bench: Any) -> None:
    gateway = await bench.gateway()
    call = asyncio.create_task(gateway.infer(request_of(5), options=options("key")))
    (record,) = await bench.comes()
    await bench.begin(record)
    await bench.finish(record, reply=False)
    await gateway._dataplane.requester.recheck({record.id})
    assert numbers((await call).outputs) == {"y": 5, "z": 5}
    assert gateway.jobs.counts.rechecks == 1


async def test_a_record_that_cannot_be_read_keeps_nobody_else_waiting(bench: Any) -> None:
    gateway = await bench.gateway()
    calls = [asyncio.create_task(gateway.infer(request_of(n), options=options(f"{n}"))) for n in range(4)]
    records = await bench.comes(4)
    for record in records:
        await bench.finish(record, reply=False)
    read = bench.log.job_result

    async def garbage(model: str, job_id: bytes) -> bytes | None:
        found: bytes | None = await read(model, job_id)
        return b"garbage" if job_id == records[0].id else found

    bench.log.job_result = garbage
    await gateway._dataplane.requester.recheck({record.id for record in records})
    broken = int(records[0].inputs()[0].array()[0, 0])
    for n, call in enumerate(calls):
        if n == broken:
            with pytest.raises(InternalError, match="cannot be read"):
                await call
        else:
            assert numbers((await call).outputs)["y"] == n


async def test_a_result_that_is_not_kept_any_more(bench: Any) -> None:
    gateway = await bench.gateway()
    receipt = await gateway.submit_job(request_of(), options())
    (record,) = await bench.queued()
    await bench.finish(record)

    async def nothing(model: str, job_id: bytes) -> None:
        return None

    bench.log.job_result = nothing
    with pytest.raises(NotFound, match="not kept any more"):
        await gateway.jobs.queries.result(receipt.id)


# -- who sees what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["", "x", "0" * 32, "0" * 32 + ".m", "0" * 31 + "g.m", "0" * 32 + "." + "m" * 9999])
async def test_absent_and_foreign_jobs_look_the_same(bench: Any, absent: str) -> None:
    gateway = await bench.gateway()
    foreign = (await gateway.submit_job(request_of(), options(tenant="acme"))).id
    for job_id in (absent, foreign):
        read = gateway.jobs.queries
        for ask in (read.view, read.result, read.events, read.timeline, gateway.jobs.cancel):
            with pytest.raises(NotFound) as caught:
                await ask(job_id, OTHER)
            assert caught.value.message == "job not found"
    assert (await gateway.jobs.queries.view(foreign, ACME)).tenant == "acme"
    assert (await gateway.jobs.queries.view(foreign)).tenant == "acme"


async def test_pages_show_every_visible_job_once(bench: Any) -> None:
    gateway = await bench.gateway()
    made = [await gateway.submit_job(request_of(n), options(tenant="acme" if n % 3 else "other")) for n in range(11)]
    for record in (await bench.queued())[:4]:
        await bench.finish(record)
    for limit in (1, 2, 3, 11, 100):
        for caller in (ACME, OTHER, bench_module.ANYONE):
            seen, cursor = [], ""
            while True:
                page = await gateway.jobs.queries.page(JobFilter(), caller, cursor=cursor, limit=limit)
                assert len(page.jobs) <= limit
                seen += page.jobs
                cursor = page.cursor
                if not cursor:
                    break
            wanted = {job.id for n, job in enumerate(made) if not caller.scoped or (caller == ACME) == bool(n % 3)}
            assert sorted(view.id for view in seen) == sorted(wanted)
            states = [view.state.terminal for view in seen]
            assert states == sorted(states), "active ones first"
    ended = await gateway.jobs.queries.page(JobFilter(state=JobState.SUCCEEDED))
    assert len(ended.jobs) == 4
    times = [view.timings.ended_us for view in ended.jobs]
    assert times == sorted(times, reverse=True)
    assert (await gateway.jobs.queries.page(JobFilter(model="absent"))).jobs == ()
    assert len((await gateway.jobs.queries.page(JobFilter(tenant="other"))).jobs) == 4
    with pytest.raises(InvalidArgument, match="cursor"):
        await gateway.jobs.queries.page(JobFilter(), cursor="nonsense")
    for limit in (0, 1001):
        with pytest.raises(InvalidArgument, match="limit must be between 1 and 1000"):
            await gateway.jobs.queries.page(JobFilter(), limit=limit)


# -- tenants -----------------------------------------------------------------------------------------------------------


async def test_tenants_have_lanes_bounds_and_their_own_jobs(bench: Any, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text('[tenants.acme]\nkeys = ["k1"]\nmax_pending_requests = 2\n[tenants.other]\nkeys = ["k2"]\n')
    gateway = await bench.gateway(api_keys=str(keys_file))
    assert gateway.identifies
    acme = gateway.identify([(b"authorization", b"Bearer k1")])
    wishes = options()
    wishes = type(wishes)(caller=acme)
    for _ in range(2):
        await gateway.submit_job(request_of(), wishes)
    with pytest.raises(ResourceExhausted, match="tenant 'acme' of model 'm' has reached its limit of 2"):
        await gateway.submit_job(request_of(), wishes)
    with pytest.raises(ResourceExhausted):
        await gateway.infer(request_of(), options=wishes)
    other = type(wishes)(caller=gateway.identify([(b"x-api-key", b"k2")]))
    await gateway.submit_job(request_of(), other)
    assert len({lane for _, lane in await bench.log.lanes(MODEL)}) == 2


async def test_weights_of_tenants_reach_the_catalog_of_everybody(bench: Any, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text('[tenants.acme]\nkeys = ["k1"]\nweight = 5\n')
    other = await bench.gateway("g1")
    gateway = await bench.gateway("g2", api_keys=str(keys_file))
    await until(lambda: other._catalog.lane_weights == {keys.lane_of("acme"): 5})
    await until(lambda: gateway._catalog.lane_weights == {keys.lane_of("acme"): 5})
    said = len(await bench.log.range(keys.CONTROL))
    await bench.gateway("g3", api_keys=str(keys_file))
    assert len(await bench.log.range(keys.CONTROL)) == said, "they know already"


async def test_the_retention_of_a_model_is_told_to_the_log() -> None:
    bench = JobBench()
    await bench.serve(
        bench_module.CONFIG + 'parameters { key: "charonia.job_retention_s" value { string_value: "7" } }'
        'parameters { key: "charonia.job_retention_bytes" value { string_value: "1234" } }'
    )
    gateway = await bench.gateway(journal_retention_s=9, journal_retention_size_bytes=10)
    receipt = await gateway.submit_job(request_of(), options())
    assert (await bench.log.job(*_key(receipt.id))).retention_s == 7
    work = bench.log._of(MODEL)
    assert (work.keep_size_bytes, work.keep_journal_s, work.keep_journal_size_bytes) == (1234, 9, 10)
    await bench.gateway("all", journal="all", journal_retention_s=11)
    await until(lambda: work.keep_journal_s == 11)  # without any job
    await bench.close()


@pytest.mark.parametrize("error", [LogUnavailable("away"), asyncio.CancelledError()])
async def test_a_step_that_may_run_without_its_recording_is_a_gap(
    bench: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await bench.gateway()
    lost: list[Any] = []
    admit = gateway._entrances.admit

    def recorded(*arguments: Any) -> Any:
        entrance, one = admit(*arguments)
        return replace(entrance, recording=RecordingRules(1.0)), one

    async def fails(one: Any) -> None:
        raise error

    monkeypatch.setattr(gateway._entrances, "admit", recorded)
    monkeypatch.setattr(gateway.jobs, "submit", fails)
    monkeypatch.setattr(gateway._recorder, "lost", lost.append)
    with pytest.raises(type(error)):
        await gateway.submit_job(request_of(), options())
    assert len(lost) == 1
