"""Batches that end their executor, and owners that stall: the culprit is found, nobody else suffers."""

from __future__ import annotations

import msgpack
import pytest
from asking_cluster import DYNAMIC
from batched_jobs import ended, pending_are, submit
from batching_cluster import HASH, MODEL, Cluster, ask, until, until_so, value_of

from charonia import keys
from charonia.errors import Cancelled
from charonia.eventlog.port import EventLog
from charonia.facts.jobs import JobState
from charonia.wire import unpack_request, unpack_response

pytestmark = pytest.mark.integration
POISON = 13


async def test_innocents_of_a_deadly_batch_succeed_and_the_culprit_is_kept(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    log = executor.log
    first = ask(gateway, 99)
    await until(lambda: len(executor.held) == 1)
    jobs = [await submit(log, value) for value in range(10, 15)]
    calls = [ask(gateway, value) for value in (15, 16, 17)]
    await until_so(lambda: pending_are(log, 9))
    executor.release(1)
    assert value_of(await first) == 99
    deaths = 0

    async def held_or_done() -> bool:
        return bool(executor.held) or await pending_are(log, 0)

    while deaths < 10:
        await until_so(held_or_done)
        if not executor.held:
            break
        held = executor.held[0]
        if POISON in held.values:
            executor.held.pop(0)
            deaths += 1
            await executor.die(held)
        else:
            executor.release(1)
    assert deaths <= 4
    assert [value_of(await call) for call in calls] == [15, 16, 17]
    culprit = jobs[POISON - 10]
    for job in jobs:
        record = await ended(log, job)
        assert record.state is (JobState.FAILED if job == culprit else JobState.SUCCEEDED)
    record = await ended(log, culprit)
    assert record.attempts == 4
    assert record.events[-1].detail["dead_letter"] is True
    record = await log.job(MODEL, culprit)
    assert record is not None
    assert [event.kind for event in record.events] == ["accepted", *["batched", "returned"] * 4, "failed"]
    result = await log.job_result(MODEL, culprit)
    assert result is not None
    assert unpack_response(result).error.message == "Stub process 'echo_0' is not healthy."  # type: ignore[union-attr]
    (letter,) = await log.range(keys.dead_letters(MODEL))
    assert bytes(letter.fields[0]) == b"r"
    assert unpack_request(letter.fields[1]).id == culprit
    about = msgpack.unpackb(letter.fields[3])
    assert (about["id"], about["job"], about["attempts"]) == (culprit.hex(), True, 4)
    assert about["stderr"] == "Segmentation fault"
    await cluster.settled()
    counted = await log.statistics(keys.statistics(MODEL, 1, HASH))
    assert (counted["fail_BACKEND"], counted["success_count"]) == (1, 8)


async def test_a_request_that_ends_executors_ends_no_more_than_four(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    await cluster.batcher()
    log = executor.log
    await submit(log, 99)
    await until(lambda: len(executor.held) == 1)
    for value in range(10, 18):
        await submit(log, value)
    await until_so(lambda: pending_are(log, 9))
    executor.release(1)
    lost, executors = 0, [executor]
    while await log.range(keys.dead_letters(MODEL)) == []:
        executor = executors[-1]
        await until(lambda: bool(executors[-1].held))
        if POISON in executor.held[0].values:
            lost += 1
            await cluster.lose("executor", executor.name)
            executors.append(await cluster.executor(gated=True))
            if lost >= 4:
                await until_so(lambda: has_letter(log))
        else:
            executor.release(1)
    assert lost == 4
    executors[-1].release()
    await until_so(lambda: pending_are(log, 0))
    assert len(await log.range(keys.dead_letters(MODEL))) == 1


async def has_letter(log: EventLog) -> bool:
    return bool(await log.range(keys.dead_letters(MODEL)))


async def test_a_death_nobody_heard_of_is_known_to_the_next_owner(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    first = await cluster.batcher()
    log = executor.log
    jobs = [await submit(log, value) for value in (1, 2)]
    await until(lambda: sum(len(held.records) for held in executor.held) == 2)
    await first.die()
    for held in executor.held:
        await executor.die(held)
    alone = len(executor.held) == 2
    executor.held.clear()
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher(prefetch=0)
    await second.owns()
    if alone:  # each was in a batch of its own
        for job in jobs:
            assert (await ended(log, job)).state is JobState.FAILED
    else:
        await until(lambda: len(executor.held) == 1)
        assert len(executor.held[0].records) == 1
        executor.release()
        for job in jobs:
            assert (await ended(log, job)).state is JobState.SUCCEEDED


async def test_a_stalled_former_owner_gives_nothing_out(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher()
    log = executor.log
    await batcher.owns()
    token = await log.take_ownership(MODEL, "somebody", batcher.name)
    assert token > 0
    await submit(log, 1)
    await until(lambda: MODEL not in batcher.service.owned)
    assert not executor.held
    with pytest.raises(Cancelled):
        await log.begin_attempt(MODEL, token - 1, [], 1)


@pytest.mark.parametrize("job", [False, True])
async def test_a_request_that_ends_executor_and_batcher_together_is_found(job: bool) -> None:
    """All of one process goes with it, again and again; the log in memory stands for the server beside it."""
    cluster = Cluster("")
    cluster.configure(DYNAMIC)
    log = await cluster.log()
    ends, executed, started = 0, [], False
    while not await pending_are(log, 0) or not started:
        name = f"executor-{ends}"
        executor = await cluster.executor(name, gated=True)
        batcher = await cluster.batcher(f"batcher-{ends}", prefetch=0, beside=executor)
        await batcher.owns()
        if not started:
            started = True
            await submit(log, 99, job=job)
            await until(lambda e=executor: len(e.held) == 1)
            for value in range(10, 18):
                await submit(log, value, job=job)
            await until(lambda b=batcher: b.service.owned[MODEL].scheduler.pending_count() == 8)

        async def held_or_done(executor: object = executor) -> bool:
            return bool(executor.held) or await pending_are(log, 0)  # type: ignore[attr-defined]

        await until_so(held_or_done)
        while executor.held and POISON not in executor.held[0].values:
            executed += executor.held[0].values
            executor.release(1)
            await until_so(held_or_done)
        if executor.held:
            ends += 1
            await batcher.die()
            await executor.close()
            await cluster.lose("batcher", batcher.name)
            await cluster.lose("executor", name)
            assert ends <= 4
    assert ends == 4
    assert sorted(executed) == [10, 11, 12, 14, 15, 16, 17, 99]
    (letter,) = await log.range(keys.dead_letters(MODEL))
    assert msgpack.unpackb(letter.fields[3])["job"] is job
    await cluster.close()
