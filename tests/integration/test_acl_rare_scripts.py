"""What roles do so rarely that no day's work does it (`test_acl`): forgetting what expired, and work in a full log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from guarded_server import ROLES, GuardedServer

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.port import EndedWave, Limits, ProgressPart, Reply
from charonia.eventlog.redis import RedisLog
from charonia.facts.jobs import JobEnd, JobState, NewJob

pytestmark = pytest.mark.integration

M = "m"
JOB = NewJob(b"j" * 16, 1, 1, 600)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GuardedServer]:
    guarded = GuardedServer(tmp_path)
    guarded.start()
    yield guarded
    guarded.stop()


@pytest.fixture
async def opened(server: GuardedServer) -> AsyncIterator[Any]:
    """`await opened(role)`: the log as that role sees it."""
    logs: list[RedisLog] = []

    async def as_role(role: str) -> RedisLog:
        logs.append(RedisLog(f"redis://{role}:{role}'s%3Apassword@127.0.0.1:{server.port}", durability="memory"))
        await logs[-1].open()
        return logs[-1]

    yield as_role
    for log in logs:
        await log.close()


def refused(server: GuardedServer) -> set[str]:
    return {refusal for refusal in server.refusals() if not refusal.endswith("command config|get")}


async def end_of(log: RedisLog, job: NewJob) -> None:
    ends = {job.id: JobEnd(JobState.SUCCEEDED, b"", {})}
    assert await log.settle(M, [(job.id, 0)], None, [], ends=ends) == [True]


@pytest.mark.parametrize("role", ["gateway", "batcher", "executor", "operator"])
async def test_who_lists_ended_jobs_forgets_those_whose_records_are_gone(
    server: GuardedServer, opened: Any, role: str
) -> None:
    gateway = await opened("gateway")
    await gateway.accept_job(M, 0, 0, JOB, [b"r", JOB.id], Limits())
    await end_of(gateway, JOB)
    with server.client() as watcher:
        watcher.delete(keys.job(M, JOB.id))
        assert watcher.zcard(keys.ended_jobs(M)) == 1
        log = await opened(role)
        assert await log.jobs(M, ended=True, count=10) == []
        assert watcher.zcard(keys.ended_jobs(M)) == 0
    assert refused(server) == set()


async def test_a_gateway_that_takes_a_batch_over_fences_the_former_one(server: GuardedServer, opened: Any) -> None:
    gateway = await opened("gateway")
    fenced = partial(gateway.append_fenced, keys.batch_facts("b"), keys.batch_fence("b"))
    assert await fenced(7, [b"f", b"fact"], 60)
    assert await fenced(8, [], 60)
    assert not await fenced(7, [b"f", b"late"], 60)
    assert refused(server) == set()


async def test_a_batcher_forgets_sequences_that_nobody_goes_on_with(server: GuardedServer, opened: Any) -> None:
    batcher = await opened("batcher")
    with server.client() as watcher:
        watcher.hset(keys.live_sequences(M), "one", b"run and more")
        watcher.hset(keys.sequence_states(M), "one", b"state")
        executor = await opened("executor")
        assert await executor.keep_states(M, {b"one": (b"run and more", b"newer")}) == [True]
        await batcher.forget_sequences(M, {b"one": b"another run"})
        assert watcher.hlen(keys.live_sequences(M)) == 1
        await batcher.forget_sequences(M, {b"one": b"run"})
        assert watcher.hlen(keys.live_sequences(M)) == watcher.hlen(keys.sequence_states(M)) == 0
    assert refused(server) == set()


async def test_progress_goes_with_whoever_ends_its_request(server: GuardedServer, opened: Any) -> None:
    gateway, batcher, executor = await opened("gateway"), await opened("batcher"), await opened("executor")
    operator = await opened("operator")
    ids = [bytes(15) + bytes([n]) for n in range(4)]
    await gateway.accept(M, 0, 0, [(one, 1) for one in ids], [b"r", b"x"], Limits())
    assert await executor.append_progress(M, [ProgressPart(one, 1, 0, [b"a"]) for one in ids]) == [1] * 4
    assert await executor.append_progress(M, [ProgressPart(ids[0], 1, 0, [b"a", b"b"])]) == [2]
    reply = Reply(keys.replies("gw"), [b"r", b"x"])
    parts = [ProgressPart(ids[1], 1, 0, [b"a"])]
    assert await executor.append_progress_and_replies(M, parts, [reply]) == ([1], True)
    assert await executor.progress(M, ids[:2]) == [[b"a", b"b"], [b"a"]]
    assert sorted(await batcher.progress_ids(M)) == sorted(await operator.progress_ids(M)) == ids
    for log, one in zip((gateway, batcher, executor, operator), ids, strict=True):
        assert await log.settle(M, [(one, 1)], None, []) == [True]
    assert await operator.progress_ids(M) == []
    await batcher.drop_progress(M, ids)
    assert refused(server) == set()


async def test_batchers_read_what_others_tell_of_who_waits(server: GuardedServer, opened: Any) -> None:
    batcher, executor = await opened("batcher"), await opened("executor")
    await batcher.put_note(keys.waiting("b"), b"calls", 5)
    await executor.put_note(keys.turns("e"), b"turns", 5)
    assert await batcher.notes([keys.waiting("b"), keys.turns("e")]) == [b"calls", b"turns"]
    assert refused(server) == set()


async def test_waves_are_sent_answered_and_burst(server: GuardedServer, opened: Any) -> None:
    gateway, batcher, executor = await opened("gateway"), await opened("batcher"), await opened("executor")
    queue = keys.queue(M, 0, 0)
    assert await gateway.waves.lease(M, "g", 10, 1000, Limits())
    assert await batcher.waves.leases(M) == ["g"]
    assert await batcher.waves.lease(M, "g", 0, 0, Limits())
    for burster in (gateway, batcher):
        first, second = [await told(partial(gateway.waves.send, queue, [b"wave"])) for _ in range(2)]
        replies = [Reply(keys.replies("g"), [b"w", b"reply"])]
        counted = (keys.statistics(M, 1, "hash"), {"success_count": 1})
        assert await told(partial(executor.waves.end, [EndedWave(queue, first)], counted, replies)) == [True]
        requests = [(b"p" * 15 + b"0", 1)]
        assert await burster.waves.burst(M, queue, second, requests, [b"r", b"record"])
        assert await gateway.waves.waiting(queue, [first, second]) == [False, False]
    await gateway.append(keys.batches("executor-1"), [b"f", b"fact"])
    assert refused(server) == set()


async def told(write: Callable[[Callable[[Any], None]], bool]) -> Any:
    """What a write that answers to a callback answers."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    assert write(answer.set_result)
    async with asyncio.timeout(30):
        return await answer


async def test_every_role_goes_on_in_a_full_log(server: GuardedServer, opened: Any) -> None:
    """Nothing new is taken; what was is run, answered and settled, and heartbeats and control facts are written."""
    logs = {role: await opened(role) for role in ROLES}
    gateway, batcher, executor = (logs[role] for role in ("gateway", "batcher", "executor"))
    await gateway.accept(M, 0, 0, [(b"r" * 16, 1)], [b"r", b"record"], Limits())
    await gateway.accept_job(M, 0, 0, JOB, [b"r", JOB.id], Limits())
    with server.client() as watcher:
        watcher.config_set("maxmemory", 1)
        with pytest.raises(LogUnavailable, match="full"):
            await gateway.accept(M, 0, 0, [(b"s" * 16, 1)], [b"r", b"record"], Limits())
        for role in ("gateway", "batcher", "executor", "webhooks"):
            await logs[role].beat(role, "inc", 10_000)
            await logs[role].append(keys.CONTROL, [b"f", role.encode()])
            assert await logs[role].alive(role, ["inc"]) == [True]
        assert watcher.xlen(keys.CONTROL) == 4

        token = await batcher.take_ownership(M, "batcher-inc", "")
        begun = await batcher.begin_attempt(
            M, token, [b"r" * 16, JOB.id], 1, jobs=[JOB.id], executor="executor-inc", batch_id="b"
        )
        assert begun == [True, True]
        await batcher.append(keys.batches("executor-inc"), [b"b", b"batch"])
        await batcher.append(keys.dead_letters(M), [b"d", b"letter"])
        await executor.append(keys.facts(M), [b"f", b"slot"])
        await executor.append(keys.replies("executor-inc"), [b"r", b"of a model that calls"])
        await gateway.append(keys.facts(M), [b"f", b"cancelled"])
        reply = Reply(keys.replies("gateway-inc"), [b"r", b"answer"])
        assert await executor.settle(
            M, [(b"r" * 16, 1)], (keys.statistics(M, 1, "h"), {"success_count": 1}), [reply]
        ) == [True]
        ends = {JOB.id: JobEnd(JobState.SUCCEEDED, b"", {})}
        assert await executor.settle(M, [(JOB.id, 1)], None, [], ends=ends) == [True]
        await batcher.release_ownership(M, "batcher-inc", token)
        assert await gateway.pending(M) == (0, 0)
        assert watcher.xlen(keys.replies("gateway-inc")) == 1
    assert refused(server) == set()
