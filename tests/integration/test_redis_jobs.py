"""Jobs in a real server: what it keeps, for how long, in how much memory, and through what."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from charonia import keys
from charonia.errors import InternalError, LogUnavailable
from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.port import Limits
from charonia.eventlog.redis import RedisLog
from charonia.eventlog.redis.server.address import parse_address
from charonia.eventlog.redis.server.hot_connection import Connection
from charonia.facts.jobs import JobEnd, JobState, NewJob

pytestmark = pytest.mark.integration

MOST_BYTES_PER_QUEUED_JOB = 900
"""Of a small job with a webhook and a key, its 150 bytes of record included; a million of them fit 1 GB."""


@pytest.fixture
async def admin(server: PrivateServer) -> AsyncIterator[Connection]:
    connection = Connection(parse_address(server.url), name="test")
    await connection.open()
    yield connection
    await connection.close()


def made(number: int, size_bytes: int = 150) -> NewJob:
    about = {"webhook": {"url": "https://example.com/hooks/12345"}, "on_disconnect": "keep", "version": 1}
    return NewJob(os.urandom(16), size_bytes, 10**15 + number, 3600, "", os.urandom(16), b"d" * 16, about)


async def accept(log: RedisLog, job: NewJob) -> None:
    await log.accept_job("m", 0, 0, job, [b"r", os.urandom(job.size_bytes)], Limits())


async def end(log: RedisLog, job: NewJob, result: bytes = b"") -> None:
    ends = {job.id: JobEnd(JobState.SUCCEEDED, result)}
    assert await log.settle("m", [(job.id, 1)], None, [], ends=ends, outcomes=b"s") == [True]


async def test_a_queued_job_is_small(log: RedisLog, admin: Connection) -> None:
    async def used() -> int:
        """But for what it will have written to its append-only file within a second."""
        info: bytes = await admin.execute("INFO", "memory")
        used, unwritten = (int(info.split(name)[1].split(b"\r")[0]) for name in (b"used_memory:", b"mem_aof_buffer:"))
        return used - unwritten

    await accept(log, made(0))  # the first one costs once what scripts and connections need, 250 kB on Redis 7.0
    before = await used()
    jobs = [made(number) for number in range(2000)]
    for job in jobs:
        await accept(log, job)

    assert (await used() - before) / len(jobs) < MOST_BYTES_PER_QUEUED_JOB
    assert await admin.execute("OBJECT", "ENCODING", keys.job("m", jobs[0].id)) == b"listpack"


async def test_key_and_record_live_equally_long(log: RedisLog, admin: Connection) -> None:
    job = made(1)
    await accept(log, job)
    names = keys.job("m", job.id), keys.idempotency("m", job.key)
    assert [await admin.execute("PTTL", name) for name in names] == [-1, -1]

    await end(log, job)

    first, second = [await admin.execute("PEXPIRETIME", name) for name in names]
    assert first == second
    record = await log.job("m", job.id)
    assert record is not None
    assert first == record.ended_us // 1000 + 3600 * 1000


async def test_jobs_survive_the_server_and_scripts_come_back(log: RedisLog, admin: Connection) -> None:
    await admin.execute("CONFIG", "SET", "appendfsync", "always")
    jobs = [made(number) for number in range(3)]
    await accept(log, jobs[0])
    await admin.execute("SCRIPT", "FLUSH")
    await accept(log, jobs[1])
    await admin.execute("SCRIPT", "FLUSH")
    await end(log, jobs[0], b"answer")
    await accept(log, jobs[2])

    assert await log.job_result("m", jobs[0].id) == b"answer"
    assert [record.id for record in await log.jobs("m", ended=False)] == [jobs[1].id, jobs[2].id]


async def test_jobs_are_there_after_a_kill(server: PrivateServer) -> None:
    log = RedisLog(server.url)
    await log.open()
    await log._commands.execute("CONFIG", "SET", "appendfsync", "always")
    queued, ended = made(1), made(2)
    await accept(log, queued)
    await accept(log, ended)
    await end(log, ended, b"answer")
    await log.close()
    os.kill(server.pid, signal.SIGKILL)
    while server.poll() is None:
        await asyncio.sleep(0.001)
    server.start()
    server.wait_ready()

    log = RedisLog(server.url)
    await log.open()
    assert await log.pending("m") == (1, 150)
    assert [record.id for record in await log.jobs("m", ended=False)] == [queued.id]
    assert await log.job_result("m", ended.id) == b"answer"
    assert (await log.accept_job("m", 0, 0, queued, [b"r", b"x"], Limits())).created is False
    assert await log.job_models() == ["m"]
    await log.close()


async def test_a_full_server_takes_no_job_and_still_ends_them(log: RedisLog, admin: Connection) -> None:
    job, refused = made(1), made(2)
    await accept(log, job)
    await admin.execute("CONFIG", "SET", "maxmemory", "1")

    with pytest.raises(LogUnavailable, match="OOM"):
        await accept(log, refused)
    assert await log.job("m", refused.id) is None
    assert await log.add_job_event("m", job.id, "output", {}) is True
    await end(log, job, b"answer")
    assert await log.job_result("m", job.id) == b"answer"
    assert await log.pending("m") == (0, 0)


async def test_a_flushed_log_learns_again_which_models_have_jobs(log: RedisLog, admin: Connection) -> None:
    await accept(log, made(1))
    await admin.execute("FLUSHALL", "SYNC")
    assert await log.job_models() == []
    await accept(log, made(2))
    assert await log.job_models() == ["m"]


async def test_jobs_go_by_the_names_of_the_key_table(log: RedisLog, admin: Connection) -> None:
    job, other = made(1), NewJob(os.urandom(16), 1, 1, 60, "a b:c")
    await accept(log, job)
    await accept(log, other)
    await end(log, job)

    assert set(await admin.execute("KEYS", "*")) - {b"epoch", b"fence"} == {
        keys.queue("m", 0, 0),
        keys.lanes("m"),
        keys.unsettled("m"),
        keys.counters("m"),
        keys.facts("m"),
        keys.tenant("m", "a b:c"),
        keys.job("m", job.id),
        keys.job("m", other.id),
        keys.idempotency("m", job.key),
        keys.active_jobs("m"),
        keys.ended_jobs("m"),
        keys.webhooks("m"),
        keys.journal("m"),
        keys.JOB_MODELS,
    }


async def test_requests_of_two_tenants_do_not_share_a_group(log: RedisLog) -> None:
    """Nobody gives ids so; if somebody did, counters would be wrong: the log refuses before it writes anything."""
    prefix = os.urandom(15)
    await log.accept("m", 0, 0, [(prefix + b"\0", 5)], [b"r", b"x"], Limits(), tenant="a")
    for requests, tenant in (
        ([(prefix + b"\1", 5)], "b"),
        ([(prefix + b"\0", 5)], "a"),
        ([(os.urandom(16), 5), (prefix + b"\1", 5)], "b"),
    ):
        with pytest.raises(LogUnavailable, match="CONFLICT"):
            await log.accept("m", 0, 0, requests, [b"r", b"x"], Limits(), tenant=tenant)
    assert await log.pending("m") == (1, 5)
    assert await log.pending_of_tenants("m", ["a", "b"]) == [(1, 5), (0, 0)]
    assert len(await log.range(keys.queue("m", 0))) == 1


async def test_a_long_journal_is_trimmed_to_its_size_in_few_calls(log: RedisLog, admin: Connection) -> None:
    for second in range(100):
        ids = [f"{1_763_700_000_000 + second * 1000}-{number}" for number in range(100)]
        for entry_id in ids:
            await admin.execute("XADD", keys.journal("m"), entry_id, "k", "started", "i", "x" * 100)
    await log.set_retention("m", size_bytes=0, journal_s=0, journal_size_bytes=200_000)
    unfinished = b"1763700040000-0"

    trimmed = [await log.trim_journal("m", unfinished) for _ in range(3)]
    (first, *_) = await log.range(keys.journal("m"), count=1)
    assert (sum(trimmed), first.id) == (4000, unfinished)
    calls = 0
    while await log.trim_journal("m", b"+"):
        calls += 1
    assert calls < 10
    size = await admin.execute("MEMORY", "USAGE", keys.journal("m"))
    assert 100_000 < size <= 200_000


@pytest.mark.parametrize(
    "field", [{"s": "z"}, {"t": "x"}, {"v": "nan"}, {"v": "9" * 12}, {"b": b"\xff"}, {"b": b"\x05"}]
)
async def test_a_record_nobody_can_read_keeps_no_other_from_being_read(
    log: RedisLog, admin: Connection, field: dict[str, bytes]
) -> None:
    """Somebody with access to the server wrote it."""
    first, forged, last = made(1), made(2), made(3)
    for job in (first, forged, last):
        await accept(log, job)
    for name, value in field.items():
        await admin.execute("HSET", keys.job("m", forged.id), name, value)
    await admin.execute("SADD", keys.lanes("m"), "none", "-1:0", "1:2:3")
    with pytest.raises(InternalError, match="the record of this job cannot be read"):
        await log.job("m", forged.id)
    listed = [record.id for record in await log.jobs("m", ended=False)]
    assert listed in ([first.id, last.id], [first.id, forged.id, last.id])  # its events are not listed
    assert await log.lanes("m") == [(0, 0)]
    await end(log, first)
    assert (await log.job("m", first.id)).state is JobState.SUCCEEDED  # type: ignore[union-attr]
