"""What every adapter of the log port promises about lists of jobs, their retention and their responses."""

from __future__ import annotations

import asyncio
import time

from log_adapters import NO_LIMITS, PATIENCE_S, Subject
from log_jobs import NOW_US, accept, end, made

from charonia import keys
from charonia.eventlog.port import Entry, EventLog, kept_response
from charonia.facts.jobs import MOVED, JobPlace, JobState, NewJob

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
    began_s = time.monotonic()
    for job in [*short[:2], long, short[2]]:
        await end(subject.log, job)
    listed = len(await subject.log.jobs("m", ended=True))
    assert listed == 4 or time.monotonic() - began_s >= 1, "a busy machine takes longer than they are kept"

    async with asyncio.timeout(PATIENCE_S):
        while await subject.log.job("m", short[2].id) is not None:
            await asyncio.sleep(0.005)

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


async def begin(log: EventLog, job: NewJob, attempt: int = 1) -> None:
    token = (await log.owner("m"))[1] or await log.take_ownership("m", "owner", "")
    assert await log.begin_attempt("m", token, [job.id], attempt, jobs=[job.id]) == [True]


# -- several responses -------------------------------------------------------------------------------------------------


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
            await asyncio.sleep(0.005)
        while await subject.log.job_responses("m", short.id):
            await asyncio.sleep(0.005)


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
