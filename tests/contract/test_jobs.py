"""What every adapter of the log port promises about jobs from acceptance to end, and about tenants."""

from __future__ import annotations

import asyncio
import os

import pytest
from log_adapters import NO_LIMITS, PATIENCE_S, Subject
from log_jobs import HUGE, NOW_US, accept, end, journal, made

from charonia import keys
from charonia.errors import KeyReused, ResourceExhausted
from charonia.eventlog.port import Limits
from charonia.facts.jobs import JobEnd, JobState, JobTicket
from charonia.facts.journal import JournalFact

# -- accepting ---------------------------------------------------------------------------------------------------------


async def test_an_accepted_job_is_queued_counted_and_known(subject: Subject) -> None:
    job = made(
        tenant="acme", about={"webhook": {"url": "https://x/" + "y" * 100}, "version": 3, "on_disconnect": "keep"}
    )

    ticket = await accept(subject.log, job)

    assert ticket == JobTicket(job.id, True, "memory")
    assert await subject.peer.pending("m") == (1, 10)
    assert await subject.peer.unsettled("m", [job.id]) == [0]
    (entry,) = await subject.peer.range(keys.queue("m", 0))
    assert bytes(entry.fields[1]) == b"record of " + job.id
    record = await subject.peer.job("m", job.id)
    assert record is not None
    assert (record.model, record.id, record.state, record.tenant) == ("m", job.id, JobState.QUEUED, "acme")
    assert (record.attempts, record.size_bytes, record.accepted_us, record.retention_s) == (0, 10, NOW_US + 1, 60)
    assert (record.ended_us, record.result_size_bytes, record.durability) == (0, 0, "memory")
    assert record.about == job.about
    assert [(e.number, e.kind, e.time_us, e.detail) for e in record.events] == [(1, "accepted", NOW_US + 1, {})]
    assert await subject.peer.job_result("m", job.id) is None
    assert await subject.peer.job_models() == ["m"]
    assert await subject.log.lanes("m") == [(0, 0)]


async def test_the_deadlines_of_active_jobs_are_kept_in_order(subject: Subject) -> None:
    late, soon, without = made(1, about={"deadline_us": NOW_US + 9}), made(2, about={"deadline_us": NOW_US}), made(3)
    for job in (late, soon, without):
        await accept(subject.log, job)
    key = keys.job_deadlines("m")
    assert await subject.peer.due(key, NOW_US - 1, 10) == []
    assert await subject.peer.due(key, NOW_US + 9, 10) == [soon.id, late.id]
    await end(subject.log, soon, without)
    assert await subject.peer.due(key, NOW_US + 9, 10) == [late.id]
    await end(subject.log, late)
    assert await subject.peer.count_times(key) == 0


@pytest.mark.parametrize("length", [0, 1, 60, 64, 128, 200, 250, 260, 5000])
async def test_what_a_caller_knows_of_its_job_comes_back_whatever_its_length(subject: Subject, length: int) -> None:
    job = made(about={"text": "x" * length, "list": [1, {"a": None}], "bytes": b"\0\xff"})
    await accept(subject.log, job)
    record = await subject.peer.job("m", job.id)
    assert record is not None
    assert record.about == job.about


async def test_an_unknown_job_is_none(subject: Subject) -> None:
    other = b"x" * 16
    await accept(subject.log, made())
    assert await subject.log.job("m", other) is None
    assert await subject.log.job("other", made().id) is None
    assert await subject.log.job_result("m", other) is None
    assert await subject.log.add_job_event("m", other, "output", {}) is False
    assert await subject.log.job_position("m", other) is None
    assert await subject.log.jobs("other", ended=False) == []
    assert await subject.log.jobs("m", ended=True) == []


async def test_a_known_key_gives_the_earlier_job_and_records_nothing(subject: Subject) -> None:
    first = made(1, key=b"k" * 16, digest=b"d" * 16)
    await accept(subject.log, first)

    ticket = await accept(subject.peer, made(2, key=b"k" * 16, digest=b"d" * 16))

    assert (ticket.id, ticket.created) == (first.id, False)
    assert await subject.log.pending("m") == (1, 10)
    assert len(await subject.log.range(keys.queue("m", 0))) == 1
    assert await subject.log.job("m", made(2).id) is None
    with pytest.raises(KeyReused):
        await accept(subject.peer, made(3, key=b"k" * 16, digest=b"e" * 16))
    # the key is one model's
    ticket = await subject.log.accept_job("n", 0, 0, made(4, key=b"k" * 16, digest=b"e" * 16), [b"r", b"x"], NO_LIMITS)
    assert ticket.created
    found = await subject.log.jobs_of_keys("m", [b"k" * 16, b"x" * 16])
    assert found == [first.id, None]
    assert await subject.peer.jobs_of_keys("n", [b"k" * 16]) == [ticket.id]
    # also after the end, as long as the record is kept
    assert await end(subject.log, first) == [True]
    assert (await accept(subject.peer, made(5, key=b"k" * 16, digest=b"d" * 16))).id == first.id


async def test_many_at_once_with_one_key_are_one_job(subject: Subject) -> None:
    jobs = [made(number, key=b"k" * 16, digest=b"d" * 16) for number in range(40)]
    tickets = await asyncio.gather(
        *[accept((subject.log, subject.peer)[number % 2], job) for number, job in enumerate(jobs)]
    )
    assert sum(ticket.created for ticket in tickets) == 1
    assert len({ticket.id for ticket in tickets}) == 1
    assert await subject.log.pending("m") == (1, 10)


async def test_a_key_does_not_outlive_its_job(subject: Subject) -> None:
    first = made(1, key=b"k" * 16, digest=b"d" * 16, retention_s=1)
    await accept(subject.log, first)
    await end(subject.log, first)
    async with asyncio.timeout(PATIENCE_S):
        while await subject.log.job("m", first.id) is not None:
            await asyncio.sleep(0.005)
    assert await subject.log.jobs_of_keys("m", [b"k" * 16]) == [None]
    ticket = await accept(subject.log, made(2, key=b"k" * 16, digest=b"other".ljust(16)))
    assert (ticket.id, ticket.created) == (made(2).id, True)


async def test_refused_jobs_leave_nothing(subject: Subject) -> None:
    await accept(subject.log, made(1))
    for limits in (Limits(requests=1), Limits(size_bytes=15)):
        with pytest.raises(ResourceExhausted):
            await accept(subject.log, made(2, key=b"k" * 16), limits)
    assert await subject.log.job("m", made(2).id) is None
    assert await subject.log.pending("m") == (1, 10)
    assert len(await journal(subject.log)) == 1
    assert (await accept(subject.log, made(3, key=b"k" * 16))).created


# -- tenants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (Limits(tenant_requests=20), "tenant 'a:{b}' of model 'm' has reached its limit of 20 unsettled requests"),
        (Limits(tenant_size_bytes=200), "tenant 'a:{b}' of model 'm' has reached its limit of 200 unsettled bytes"),
    ],
    ids=["requests", "bytes"],
)
async def test_bounds_of_tenants_are_exact_under_concurrency(subject: Subject, limits: Limits, named: str) -> None:
    async def one(number: int) -> None:
        log = (subject.log, subject.peer)[number % 2]
        if number % 3 == 0:
            await accept(log, made(number, id=os.urandom(16), tenant="a:{b}"), limits)
            return
        prefix = os.urandom(15)
        requests = [(prefix + b"\0", 10), (prefix + b"\1", 10)]
        await log.accept("m", 0, 1, requests, [b"r", b"x"], limits, tenant="a:{b}")

    outcomes = await asyncio.gather(*[one(number) for number in range(60)], return_exceptions=True)
    errors = [outcome for outcome in outcomes if outcome is not None]
    assert errors
    assert all(isinstance(error, ResourceExhausted) and named in str(error) for error in errors)
    assert await subject.log.pending_of_tenants("m", ["a:{b}", "none"]) == [(20, 200), (0, 0)]
    # another tenant has bounds of its own
    await subject.log.accept("m", 0, 2, [(os.urandom(16), 10)], [b"r", b"x"], limits, tenant="b")
    assert await subject.log.pending("m") == (21, 210)


async def test_what_a_tenant_has_is_counted_down_by_settling(subject: Subject) -> None:
    ids = [b"p" * 15 + bytes([last]) for last in range(4)]
    sizes = [10, 20, 30, 40]
    await subject.log.accept("m", 0, 0, list(zip(ids, sizes, strict=True)), [b"r", b"x"], NO_LIMITS, tenant="t")
    await accept(subject.log, made(tenant="t"))
    assert await subject.log.pending_of_tenants("m", ["t"]) == [(5, 110)]

    assert await subject.log.settle("m", [(ids[1], 0), (ids[3], 0)], None, []) == [True, True]
    assert await subject.log.pending_of_tenants("m", ["t"]) == [(3, 50)]
    assert await end(subject.log, made()) == [True]
    assert await subject.log.settle("m", [(one, 0) for one in ids], None, []) == [True, False, True, False]
    assert await subject.log.pending_of_tenants("m", ["t"]) == [(0, 0)]
    assert await subject.log.pending("m") == (0, 0)


# -- running and ending ------------------------------------------------------------------------------------------------


async def test_a_job_has_numbered_events_and_one_end(subject: Subject) -> None:
    job = made()
    await accept(subject.log, job)
    token = await subject.log.take_ownership("m", "me", "")

    begun = await subject.log.begin_attempt("m", token, [job.id], 1, jobs=[job.id], executor="x1", batch_id="b1")
    assert begun == [True]
    record = await subject.peer.job("m", job.id)
    assert record is not None
    assert (record.state, record.attempts) == (JobState.RUNNING, 1)
    assert await subject.log.add_job_event("m", job.id, "returned", {"reason": "drains"}) is True
    record = await subject.peer.job("m", job.id)
    assert record is not None
    assert record.state == JobState.QUEUED
    await subject.log.begin_attempt("m", token, [job.id], 2, jobs=[job.id], executor="x2", batch_id="b2")
    assert await subject.log.add_job_event("m", job.id, "output", {"index": 0}) is True

    assert await end(subject.log, job, result=b"answer", attempt=1) == [False]  # fenced
    assert await end(subject.log, job, result=b"answer", attempt=2, executor="x2", queue_us=5) == [True]

    record = await subject.peer.job("m", job.id)
    assert record is not None
    assert (record.state, record.attempts, record.result_size_bytes) == (JobState.SUCCEEDED, 2, 6)
    assert [(e.number, e.kind) for e in record.events] == [
        (1, "accepted"),
        (2, "batched"),
        (3, "returned"),
        (4, "batched"),
        (5, "output"),
        (6, "succeeded"),
    ]
    assert [e.detail for e in record.events[1:]] == [
        {"executor": "x1", "batch_id": "b1"},
        {"reason": "drains"},
        {"executor": "x2", "batch_id": "b2"},
        {"index": 0},
        {"executor": "x2", "queue_us": 5},
    ]
    assert record.ended_us == record.events[-1].time_us
    assert record.events[1].time_us <= record.events[2].time_us <= record.ended_us
    assert await subject.peer.job_result("m", job.id) == b"answer"
    assert await subject.log.add_job_event("m", job.id, "output", {}) is False
    assert await subject.log.pending("m") == (0, 0)


async def test_whoever_settles_first_decides_a_cancel_as_well(subject: Subject) -> None:
    cancelled, done = made(1), made(2)
    await accept(subject.log, cancelled)
    await accept(subject.log, done)
    token = await subject.log.take_ownership("m", "me", "")
    both = [cancelled.id, done.id]
    assert await subject.log.begin_attempt("m", token, both, 1, jobs=both) == [True, True]
    begun = await subject.peer.job("m", cancelled.id)
    assert begun is not None
    assert (begun.events[1].kind, begun.events[1].detail) == ("batched", {}), "no executor runs an ensemble"

    assert await end(subject.peer, cancelled, state=JobState.CANCELLED, attempt=HUGE, by="caller") == [True]
    assert await end(subject.log, cancelled, done, result=b"late") == [False, True]
    assert await end(subject.peer, done, state=JobState.CANCELLED, attempt=HUGE) == [False]

    first, second = await subject.log.job("m", cancelled.id), await subject.log.job("m", done.id)
    assert first is not None
    assert second is not None
    assert (first.state, second.state) == (JobState.CANCELLED, JobState.SUCCEEDED)
    assert first.events[-1].detail == {"by": "caller"}
    assert await subject.log.job_result("m", cancelled.id) is None
    assert await subject.log.job_result("m", done.id) == b"late"


async def test_a_race_of_ends_has_one_winner(subject: Subject) -> None:
    jobs = [made(number) for number in range(20)]
    for job in jobs:
        await accept(subject.log, job)
    results = await asyncio.gather(
        *[
            end((subject.log, subject.peer)[number % 2], *jobs, state=state, attempt=HUGE)
            for number, state in enumerate([JobState.SUCCEEDED, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED])
        ]
    )
    assert [sum(column) for column in zip(*results, strict=True)] == [1] * 20
    for job in jobs:
        record = await subject.log.job("m", job.id)
        assert record is not None
        assert [event.number for event in record.events] == [1, 2]
        assert record.events[-1].kind == record.state.value


async def test_beginning_drops_what_is_settled_and_tells_nobody_of_it(subject: Subject) -> None:
    jobs = [made(number) for number in range(4)]
    for job in jobs:
        await accept(subject.log, job)
    await end(subject.peer, jobs[2], state=JobState.CANCELLED, attempt=HUGE)
    token = await subject.log.take_ownership("m", "me", "")
    ids = [job.id for job in jobs]

    begun = await subject.log.begin_attempt(
        "m", token, ids, 1, jobs=ids[1:], journalled=ids[:1] + ids[2:], executor="x", batch_id="b"
    )

    assert begun == [True, True, False, True]
    assert await subject.log.unsettled("m", ids) == [1, 1, -1, 1]
    states = [record.state for record in await subject.log.jobs("m", ended=False)]
    assert states == [JobState.QUEUED, JobState.RUNNING, JobState.RUNNING]
    assert (await journal(subject.log))[-1] == JournalFact("batched", (ids[0], ids[3]), (1, 1), (), "x", "b")
    before = len(await journal(subject.log))
    assert await subject.log.begin_attempt("m", token, [ids[2]], 2, jobs=[ids[2]], journalled=[ids[2]]) == [False]
    assert len(await journal(subject.log)) == before


async def test_ended_jobs_with_a_webhook_are_told_to_its_senders_once(subject: Subject) -> None:
    jobs = [made(1, about={"webhook": {"url": "https://x"}}), made(2), made(3, about={"webhook": {"url": "https://y"}})]
    for job in jobs:
        await accept(subject.log, job)
    await end(subject.log, jobs[0], state=JobState.CANCELLED, attempt=HUGE)
    await end(subject.log, *jobs)

    entries = await subject.log.range(keys.webhooks("m"))
    assert [[bytes(field) for field in entry.fields] for entry in entries] == [
        [b"i", jobs[0].id.hex().encode()],
        [b"i", jobs[2].id.hex().encode()],
    ]


async def test_jobs_among_other_requests_each_get_their_own(subject: Subject) -> None:
    job, large = made(7), os.urandom(200_000)
    plain = [b"p" * 15 + bytes([last]) for last in range(3)]
    await subject.log.accept("m", 0, 0, [(one, 5) for one in plain], [b"r", b"x"], NO_LIMITS)
    await accept(subject.log, job)
    key = keys.statistics("m", 1, "h")

    # the group is torn apart by the job: results stay in the order of the call
    requests = [(plain[0], 1), (job.id, 1), (b"unknown".ljust(16), 1), (plain[2], 1), (plain[1], 1)]
    won = await subject.log.settle(
        "m", requests, (key, {"n": 1}), [], ends={job.id: JobEnd(JobState.SUCCEEDED, large)}, outcomes=b"-ss-s"
    )

    assert won == [True, True, False, True, True]
    assert await subject.log.statistics(key) == {}
    assert await subject.peer.job_result("m", job.id) == large
    ended = (await journal(subject.log))[-1]
    assert (ended.kind, sorted(ended.ids)) == ("ended", sorted([job.id, plain[1]]))
    assert ended.outcomes == (JobState.SUCCEEDED,) * 2
