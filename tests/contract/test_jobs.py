"""What every adapter of the log port promises about jobs, tenants and the journal: one suite over all of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from charonia import keys
from charonia.errors import KeyReused, ResourceExhausted
from charonia.eventlog.colocated import ColocatedLog
from charonia.eventlog.memory import MemoryLog
from charonia.eventlog.port import Entry, EventLog, Limits, kept_response
from charonia.eventlog.redis import open_log
from charonia.jobs import MOVED, JobEnd, JobState, JobTicket, NewJob
from charonia.journal import JournalFact, read_facts
from charonia.places import JobPlace

PATIENCE_S = 10.0
NO_LIMITS = Limits()
NOW_US = 1_763_700_000_000_000
HUGE = 2**31 - 1


@dataclass
class Subject:
    """A log under test and a second handle on the same data, as another process would have it."""

    log: EventLog
    peer: EventLog


@pytest.fixture(params=["memory", "redis", "cluster", "colocated"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "memory":
        log = MemoryLog()
        yield Subject(log, log)
        return
    url = request.getfixturevalue("fresh_cluster_url" if request.param == "cluster" else "fresh_log_url")
    pair: list[EventLog] = [open_log(url), open_log(url)]
    if request.param == "colocated":
        pair = [ColocatedLog(log, MemoryLog()) for log in pair]
    for log in pair:
        await log.open()
    yield Subject(*pair)
    for log in pair:
        await log.close()


def made(number: int = 1, **fields: Any) -> NewJob:
    return NewJob(
        **{"id": b"%016d" % number, "size_bytes": 10, "accepted_us": NOW_US + number, "retention_s": 60, **fields}
    )


async def accept(log: EventLog, job: NewJob, limits: Limits = NO_LIMITS, journalled: bool = True) -> JobTicket:
    return await log.accept_job("m", 0, 0, job, [b"r", b"record of " + job.id], limits, journalled=journalled)


async def end(
    log: EventLog,
    *jobs: NewJob,
    state: JobState = JobState.SUCCEEDED,
    result: bytes = b"",
    attempt: int = 1,
    **detail: Any,
) -> list[bool]:
    ends = {job.id: JobEnd(state, result, detail) for job in jobs}
    return await log.settle("m", [(job.id, attempt) for job in jobs], None, [], ends=ends)


async def journal(log: EventLog, model: str = "m") -> list[JournalFact]:
    return [fact for entry in await log.range(keys.journal(model)) for fact in read_facts(entry.fields)]


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
            pass
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


# -- listing -----------------------------------------------------------------------------------------------------------


async def test_active_jobs_are_listed_oldest_first_in_pages(subject: Subject) -> None:
    numbers = [5, 3, 9, 1, 7, 2]
    for number in numbers:
        # some of the same microsecond
        await accept(subject.log, made(number, accepted_us=NOW_US + number // 3))
    order = sorted(numbers, key=lambda number: (number // 3, number))

    found, after = [], None
    while page := await subject.peer.jobs("m", ended=False, after=after, count=2):
        assert len(page) <= 2
        assert all(record.events == () for record in page)
        found += [int(record.id) for record in page]
        after = (page[-1].accepted_us, page[-1].id)
    assert found == order
    places = [await subject.log.job_position("m", b"%016d" % number) for number in order]
    assert places == [JobPlace((0, 0), rank, {(0, 0): 6}, 6) for rank in range(6)]

    await end(subject.log, made(order[0]))
    assert await subject.log.job_position("m", b"%016d" % order[0]) is None
    assert await subject.log.job_position("m", b"%016d" % order[1]) == JobPlace((0, 0), 0, {(0, 0): 5}, 5)


async def test_a_place_counts_the_jobs_of_each_level_and_lane(subject: Subject) -> None:
    log, lines = subject.log, [(0, 0), (1, 0), (1, 7), (1, 0), (0, 0), (1, 7), (1, 7)]
    for number, (level, lane) in enumerate(lines):
        await log.accept_job("m", level, lane, made(number), [b"r", b"a record"], NO_LIMITS)
    counts = {(0, 0): 2, (1, 0): 2, (1, 7): 3}
    ranks = [0, 0, 0, 1, 1, 1, 2]
    places = [await subject.peer.job_position("m", b"%016d" % number) for number in range(7)]
    assert places == [JobPlace(line, rank, counts, 7) for line, rank in zip(lines, ranks, strict=True)]

    await log.accept("m", 1, 7, [(b"r" * 16, 3)], [b"r", b"a call"], NO_LIMITS)
    await log.set_paused("m", True)
    await log.take_ownership("m", "b-1", "")
    await end(log, made(1))
    await end(log, made(4))
    assert await log.job_position("m", b"%016d" % 3) == JobPlace(
        (1, 0), 0, {(0, 0): 1, (1, 0): 1, (1, 7): 3}, 6, True, "b-1"
    )
    # moved behind what waits there; in its lane still
    await log.accept("m", 3, 7, [], [b"r", b"the record carried anew"], NO_LIMITS)
    assert await log.add_job_event("m", b"%016d" % 5, MOVED, {"level": 3, "from_level": 1})
    assert await log.add_job_event("m", b"%016d" % 2, MOVED, {"level": 3, "from_level": 1})
    counts = {(0, 0): 1, (1, 0): 1, (1, 7): 1, (3, 7): 2}
    assert await log.job_position("m", b"%016d" % 2) == JobPlace((3, 7), 1, counts, 6, True, "b-1")
    for number in (0, 2, 3, 5):
        await end(log, made(number))
    assert await log.job_position("m", b"%016d" % 6) == JobPlace((1, 7), 0, {(1, 7): 1}, 2, True, "b-1")


async def test_ended_jobs_are_listed_newest_first_in_pages(subject: Subject) -> None:
    jobs = [made(number) for number in range(7)]
    for job in jobs:
        await accept(subject.log, job)
    for job in jobs:
        await end(subject.log, job, state=JobState.FAILED, error="no")

    found, after = [], None
    while page := await subject.peer.jobs("m", ended=True, after=after, count=3):
        found += page
        after = (page[-1].ended_us, page[-1].id)
    assert sorted(found, key=lambda record: (record.ended_us, record.id), reverse=True) == found
    assert {record.id for record in found} == {job.id for job in jobs}
    assert await subject.log.jobs("m", ended=False) == []
    assert await subject.log.job_models() == ["m"]


async def test_ended_jobs_whose_time_is_over_are_forgotten(subject: Subject) -> None:
    short = [made(number, retention_s=1) for number in range(3)]
    long = made(9)
    for job in [*short[:2], long, short[2]]:
        await accept(subject.log, job)
        await end(subject.log, job)
    assert len(await subject.log.jobs("m", ended=True)) == 4

    async with asyncio.timeout(PATIENCE_S):
        while await subject.log.job("m", short[2].id) is not None:
            pass

    assert [record.id for record in await subject.log.jobs("m", ended=True, count=1)] == [long.id]
    assert [record.id for record in await subject.log.jobs("m", ended=True)] == [long.id]
    # what is gone counts no more: three of these have room beside the long one
    await subject.log.set_retention("m", size_bytes=4 * 700, journal_s=0, journal_size_bytes=0)
    for number in range(20, 23):
        await accept(subject.log, made(number))
        await end(subject.log, made(number), result=b"x" * 100)
    assert await subject.log.job("m", long.id) is not None


async def test_the_oldest_ended_jobs_make_room_for_the_newest(subject: Subject) -> None:
    await subject.log.set_retention("m", size_bytes=5 * 10_000, journal_s=0, journal_size_bytes=0)
    jobs = [made(number, key=b"%016d" % number, digest=b"d" * 16) for number in range(12)]
    active = made(50)
    await accept(subject.log, active)
    for job in jobs:
        await accept(subject.log, job)
    for job in jobs:
        await end(subject.log, job, result=b"x" * 9_000)

    kept = await subject.log.jobs("m", ended=True)
    assert [record.id for record in kept] == [job.id for job in reversed(jobs[-5:])]
    assert await subject.log.job("m", jobs[0].id) is None
    assert await subject.log.job("m", active.id) is not None
    # their keys went with them
    assert (await accept(subject.log, made(60, key=jobs[0].key, digest=b"e" * 16))).created
    # one that is too large alone is not kept
    await end(subject.log, active, result=b"x" * 60_000)
    assert await subject.log.jobs("m", ended=True) == []


# -- several responses -------------------------------------------------------------------------------------------------


async def begin(log: EventLog, job: NewJob, attempt: int = 1) -> None:
    token = (await log.owner("m"))[1] or await log.take_ownership("m", "owner", "")
    assert await log.begin_attempt("m", token, [job.id], attempt, jobs=[job.id]) == [True]


async def test_responses_are_kept_in_order_and_read_from_where_one_stopped(subject: Subject) -> None:
    job, other = made(1), made(2)
    for one in (job, other):
        await accept(subject.log, one)
        await begin(subject.log, one)

    assert await subject.log.add_job_responses("m", job.id, 1, 0, [b"zero", b"one"])
    assert await subject.log.add_job_responses("m", job.id, 1, 2, [b"two"])
    assert await subject.log.add_job_responses("m", other.id, 1, 0, [b"other"])
    assert await subject.log.add_job_responses("m", other.id, 1, 1, [])

    assert await subject.peer.job_responses("m", job.id) == [(1, 0, b"zero"), (1, 1, b"one"), (1, 2, b"two")]
    assert await subject.peer.job_responses("m", job.id, 0, 1) == [(1, 1, b"one")]
    assert await subject.peer.job_responses("m", job.id, 2) == []
    assert await subject.peer.job_responses("m", other.id) == [(1, 0, b"other")]
    assert await subject.peer.job_responses("m", b"x" * 16) == []


async def test_very_many_responses_fit_one_call(subject: Subject) -> None:
    job = made()
    await accept(subject.log, job)
    assert await subject.log.add_job_responses("m", job.id, 1, 0, [b"%d" % n for n in range(2500)])
    found = await subject.peer.job_responses("m", job.id, 1999, 1000)
    assert found == [(1, n, b"%d" % n) for n in range(2000, 2500)]


async def test_a_later_attempt_overwrites_nothing_and_an_earlier_one_is_refused(subject: Subject) -> None:
    job = made()
    await accept(subject.log, job)
    await begin(subject.log, job)
    assert await subject.log.add_job_responses("m", job.id, 1, 0, [b"zero", b"one"])
    await begin(subject.log, job, attempt=2)

    assert await subject.log.add_job_responses("m", job.id, 2, 0, [b"ZERO"])
    assert not await subject.log.add_job_responses("m", job.id, 1, 2, [b"late"])
    assert await subject.log.add_job_responses("m", job.id, 2, 1, [b"ONE", b"TWO"])

    assert await subject.peer.job_responses("m", job.id) == [(1, 0, b"zero"), (1, 1, b"one"), (2, 2, b"TWO")]


async def test_an_ended_or_unknown_job_takes_no_responses_but_still_has_them(subject: Subject) -> None:
    job = made()
    assert not await subject.log.add_job_responses("m", job.id, 1, 0, [b"early"])
    await accept(subject.log, job)
    assert await subject.log.add_job_responses("m", job.id, 1, 0, [b"zero"])
    assert await end(subject.log, job, result=b"final") == [True]

    assert not await subject.log.add_job_responses("m", job.id, 1, 1, [b"late"])
    assert await subject.peer.job_responses("m", job.id) == [(1, 0, b"zero")]
    assert await subject.peer.job_result("m", job.id) == b"final"


async def test_responses_go_with_their_job(subject: Subject) -> None:
    short, large, small = made(1, retention_s=1), made(2), made(3)
    for job in (short, large, small):
        await accept(subject.log, job)
        assert await subject.log.add_job_responses("m", job.id, 1, 0, [b"x" * 100])
    await subject.log.add_job_responses("m", large.id, 1, 1, [b"x" * 20_000] * 3)
    await end(subject.log, large)
    await end(subject.log, short)
    await subject.log.set_retention("m", size_bytes=50_000, journal_s=0, journal_size_bytes=0)
    # the 60 kB of the oldest are too much although its result is nothing
    await end(subject.log, small)
    assert await subject.log.job("m", large.id) is None
    assert await subject.log.job_responses("m", large.id) == []
    assert await subject.log.job_responses("m", small.id) == [(1, 0, b"x" * 100)]
    async with asyncio.timeout(PATIENCE_S):
        while await subject.log.job("m", short.id) is not None:
            pass
        while await subject.log.job_responses("m", short.id):
            pass


async def test_responses_can_be_followed(subject: Subject) -> None:
    job = made()
    await accept(subject.log, job)
    await subject.log.add_job_responses("m", job.id, 1, 0, [b"zero", b"one"])
    seen: list[tuple[int, int, bytes]] = []
    came = asyncio.Event()
    reader = subject.peer.reader()

    def on_entries(_stream: bytes, entries: list[Entry]) -> None:
        seen.extend(kept_response(entry) for entry in entries)
        if len(seen) == 2:
            came.set()

    reader.start(on_entries)
    reader.add(keys.job_responses("m", job.id), b"1-0")
    await subject.log.add_job_responses("m", job.id, 1, 2, [b"two"])
    async with asyncio.timeout(PATIENCE_S):
        await came.wait()
    await reader.close()
    assert seen == [(1, 1, b"one"), (1, 2, b"two")]


# -- journal -----------------------------------------------------------------------------------------------------------


async def test_the_journal_tells_a_requests_life(subject: Subject) -> None:
    ids = [b"q" * 15 + bytes([last]) for last in range(3)]
    token = await subject.log.take_ownership("m", "me", "")
    await subject.log.accept("m", 0, 0, [(one, 5) for one in ids], [b"r", b"x"], NO_LIMITS, journalled=True)
    await subject.log.begin_attempt("m", token, ids, 1, journalled=ids, executor="x", batch_id="b")
    assert await subject.log.settle("m", [(ids[1], HUGE)], None, [], outcomes=b"c") == [True]
    attempts = [(ids[0], 1), (ids[1], 1), (ids[2], 1)]
    assert await subject.log.settle("m", attempts, None, [], outcomes=b"sss") == [True, False, True]
    # nothing won, nothing told
    assert await subject.log.settle("m", attempts, None, [], outcomes=b"sss") == [False, False, False]

    assert await journal(subject.peer) == [
        JournalFact("accepted", tuple(ids)),
        JournalFact("batched", tuple(ids), (1, 1, 1), (), "x", "b"),
        JournalFact("ended", (ids[1],), (0,), (JobState.CANCELLED,)),
        JournalFact("ended", (ids[0], ids[2]), (0, 0), (JobState.SUCCEEDED,) * 2),
    ]


async def test_the_end_tells_where_requests_ran_when_that_is_said(subject: Subject) -> None:
    ids = [b"q" * 15 + bytes([last]) for last in range(3)]
    await subject.log.accept("m", 0, 0, [(one, 5) for one in ids], [b"r", b"x"], NO_LIMITS, journalled=True)
    assert await subject.log.settle("m", [(ids[1], HUGE)], None, [], outcomes=b"c") == [True]
    attempts = [(one, 1) for one in ids]
    told = ("executor-1", "batch-7")
    assert await subject.log.settle("m", attempts, None, [], outcomes=b"sfs", ran=told) == [True, False, True]
    assert (await journal(subject.peer))[2:] == [
        JournalFact("started", tuple(ids), (1, 1, 1), (), *told),
        JournalFact("ended", (ids[0], ids[2]), (0, 0), (JobState.SUCCEEDED,) * 2),
    ]
    # who won nothing has told nothing
    assert await subject.log.settle("m", attempts, None, [], outcomes=b"sfs", ran=told) == [False] * 3
    assert len(await journal(subject.peer)) == 4


async def test_several_attempts_of_one_settlement_are_told_one_by_one(subject: Subject) -> None:
    ids = [b"q" * 15 + bytes([last]) for last in range(4)]
    await subject.log.accept("m", 0, 0, [(one, 5) for one in ids], [b"r", b"x"], NO_LIMITS, journalled=True)
    requests = list(zip(ids, [1, 2, 3, 4], strict=True))
    assert await subject.log.settle("m", requests, None, [], outcomes=b"sf-x") == [True] * 4
    told = (ids[0], ids[1], ids[3])
    states = (JobState.SUCCEEDED, JobState.FAILED, JobState.EXPIRED)
    assert (await journal(subject.log))[-1] == JournalFact("ended", told, (0, 0, 0), states)
    ids = [b"r" * 15 + bytes([last]) for last in range(2)]
    await subject.log.accept("m", 0, 0, [(one, 5) for one in ids], [b"r", b"x"], NO_LIMITS, journalled=True)
    requests = list(zip(ids, [3, 4], strict=True))
    assert await subject.log.settle("m", requests, None, [], outcomes=b"ss", ran=("x", "b")) == [True] * 2
    assert (await journal(subject.log))[-2] == JournalFact("started", tuple(ids), (3, 4), (), "x", "b")


async def test_what_is_not_journalled_is_not_in_the_journal(subject: Subject) -> None:
    one = os.urandom(16)
    await subject.log.accept("m", 0, 0, [(one, 5)], [b"r", b"x"], NO_LIMITS)
    await subject.log.settle("m", [(one, 0)], None, [], outcomes=b"-")
    await accept(subject.log, made(), journalled=False)
    await end(subject.log, made())
    assert await journal(subject.log) == []


async def test_the_journal_is_trimmed_by_size_but_not_past_what_is_unfinished(subject: Subject) -> None:
    await subject.log.set_retention("m", size_bytes=0, journal_s=0, journal_size_bytes=3000)
    for _ in range(300):
        await subject.log.append(keys.journal("m"), [b"k", b"started", b"i", b"x" * 100])
    entries = await subject.log.range(keys.journal("m"))
    assert await subject.log.journal_complete("m")

    assert await subject.log.trim_journal("m", entries[0].id) == 0
    assert await subject.log.journal_complete("m")
    assert await subject.log.trim_journal("m", entries[10].id) == 10
    left = await subject.log.range(keys.journal("m"))
    assert [entry.id for entry in left] == [entry.id for entry in entries[10:]]
    assert not await subject.log.journal_complete("m")
    while await subject.log.trim_journal("m", b"+"):
        pass
    assert len(await subject.log.range(keys.journal("m"))) < 60
    assert await subject.log.trim_journal("other", b"+") == 0


async def test_the_journal_is_trimmed_by_age(subject: Subject) -> None:
    await accept(subject.log, made())
    assert await subject.log.trim_journal("m", b"+") == 0
    await subject.log.set_retention("m", size_bytes=0, journal_s=1, journal_size_bytes=0)
    async with asyncio.timeout(PATIENCE_S):
        while not await subject.log.trim_journal("m", b"+"):
            pass
    assert await journal(subject.log) == []


# -- the rest ----------------------------------------------------------------------------------------------------------


async def test_a_paused_queue_stays_paused(subject: Subject) -> None:
    assert await subject.log.paused("m") is False
    await subject.log.set_paused("m", True)
    await subject.log.set_paused("m", True)
    assert await subject.peer.paused("m") is True
    assert await subject.peer.paused("other") is False
    await subject.peer.set_paused("m", False)
    assert await subject.log.paused("m") is False


async def test_the_epoch_is_one_for_all(subject: Subject) -> None:
    epochs = await asyncio.gather(subject.log.epoch(), subject.peer.epoch(), subject.log.epoch())
    assert len(set(epochs)) == 1
    assert epochs[0]
