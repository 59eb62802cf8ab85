"""Jobs that an operator moves to another level: each is run and settled once, whatever ends or waits meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from batched_jobs import ended, submit
from batching_cluster import MODEL, Batcher, Cluster, EchoExecutor, until, until_so
from scheduler_account import queued_by_level

from charonia import keys
from charonia.eventlog.port import EventLog, Limits
from charonia.facts.events import FIELD_FACT, QueueCommanded, RequestsMoved, pack_fact
from charonia.facts.jobs import JobState
from charonia.operations.moving import move

pytestmark = pytest.mark.integration

LEVELS = "dynamic_batching { priority_levels: 3 default_priority_level: 2 }"


@pytest.fixture
async def executor(cluster: Cluster) -> EchoExecutor:
    cluster.configure(LEVELS, max_batch_size=1)
    return await cluster.executor(gated=True)


async def owner(cluster: Cluster, **settings: int) -> Batcher:
    """A live batcher that owns the model."""
    batcher = await cluster.batcher(**settings)  # type: ignore[arg-type]
    await batcher.log.beat("batcher", batcher.name, 3_600_000)
    await batcher.owns()
    return batcher


async def command(log: EventLog, batcher: Batcher, action: str) -> None:
    """`charonia queue pause` or `resume`, once the owner has read it."""
    await log.set_paused(MODEL, action == "pause")
    await log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(QueueCommanded(action))])
    ledger = batcher.service.owned[MODEL].scheduler._state.ledger
    await until(lambda: ledger.is_held is (action == "pause"))


async def queued(batcher: Batcher, requests: int) -> None:
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == requests)


def is_done(batcher: Batcher) -> bool:
    windows = batcher.service.owned[MODEL].windows
    return windows.unsettled == 0 and windows.oldest() is None


async def test_a_job_that_is_being_dispatched_leaves_none_of_its_entries(
    cluster: Cluster, executor: EchoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beginning is on the way to the log when it is moved, so no reader of the log sees that it has begun."""
    log = executor.log
    batcher = await owner(cluster)
    owned, asked, let = batcher.service.owned[MODEL], asyncio.Event(), asyncio.Event()
    begin = owned.log.begin_attempt

    async def begin_later(*words: Any, **more: Any) -> Any:
        asked.set()
        await let.wait()
        return await begin(*words, **more)

    monkeypatch.setattr(owned.log, "begin_attempt", begin_later)
    job = await submit(log, 1)
    await asked.wait()
    await command(log, batcher, "pause")

    assert (await move(log, MODEL, [job], 1))["moved"] == [job.hex()]
    await until(lambda: len(owned.windows.lanes) == 2 and owned.windows.unsettled == 2)
    let.set()
    await until(lambda: len(executor.held) == 1)
    executor.release()

    assert (await ended(log, job)).state is JobState.SUCCEEDED
    await until(lambda: is_done(batcher))
    await cluster.settled()
    assert executor.executed == [1]


async def test_a_job_runs_whose_mover_died_once_the_owner_had_read_of_it(
    cluster: Cluster, executor: EchoExecutor
) -> None:
    log = executor.log
    batcher = await owner(cluster)
    await command(log, batcher, "pause")
    job = await submit(log, 1)
    await queued(batcher, 1)
    await log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(RequestsMoved(job))])
    await until_so(lambda: no_facts(log))
    await command(log, batcher, "resume")
    executor.release()
    assert (await ended(log, job)).state is JobState.SUCCEEDED
    await cluster.settled()


async def no_facts(log: EventLog) -> bool:
    return not await log.range(keys.facts(MODEL))


async def test_a_job_is_taken_over_whose_mover_died_with_its_owner(cluster: Cluster, executor: EchoExecutor) -> None:
    """Both its entries are there, and the fact that it was moved is still to be read."""
    log = executor.log
    first = await cluster.batcher()
    await first.owns()
    await command(log, first, "pause")
    job = await submit(log, 1)
    await queued(first, 1)
    (entry,) = await log.range(keys.queue(MODEL, 0))
    await first.die()
    await log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(RequestsMoved(job))])
    await log.accept(MODEL, 1, 0, [], entry.fields, Limits())
    await log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(QueueCommanded("resume"))])
    await log.set_paused(MODEL, False)
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher()
    await second.owns()
    executor.release()
    assert (await ended(log, job)).state is JobState.SUCCEEDED
    await until(lambda: is_done(second))
    await cluster.settled()
    assert executor.executed == [1]


async def test_a_job_that_was_begun_twice_ends_after_it_was_moved(cluster: Cluster, executor: EchoExecutor) -> None:
    """Its next attempt is its third: the log would take the settlement of an earlier one for a late one."""
    log = executor.log
    batcher = await owner(cluster)
    job = await submit(log, 1)
    for attempt in (1, 2):
        await until(lambda: len(executor.held) == 1)
        (held,) = executor.held
        executor.held = []
        assert held.header.attempts == (attempt,)
        if attempt == 2:
            await command(log, batcher, "pause")
        await executor.give_back(held)
    await queued(batcher, 1)
    assert await log.unsettled(MODEL, [job]) == [2]
    await until_so(lambda: is_queued(log, job))
    moved = await move(log, MODEL, [job], 1)
    assert moved["moved"] == [job.hex()]
    await command(log, batcher, "resume")
    await until(lambda: len(executor.held) == 1)
    assert executor.held[0].header.attempts == (3,)
    executor.release()
    assert (await ended(log, job)).state is JobState.SUCCEEDED
    await cluster.settled()


async def is_queued(log: EventLog, job: bytes) -> bool:
    record = await log.job(MODEL, job)
    return record is not None and record.state is JobState.QUEUED


async def test_moved_jobs_run_in_the_order_of_their_new_levels(cluster: Cluster, executor: EchoExecutor) -> None:
    log = executor.log
    batcher = await owner(cluster, prefetch=0)
    await command(log, batcher, "pause")
    jobs = [await submit(log, value) for value in range(4)]
    await queued(batcher, 4)
    assert len((await move(log, MODEL, [jobs[3]], 1))["moved"]) == 1
    assert len((await move(log, MODEL, [jobs[0]], 3))["moved"]) == 1
    await queued(batcher, 4)
    await until(lambda: queued_by_level(batcher.service.owned[MODEL].scheduler) == {1: 1, 2: 2, 3: 1})
    await command(log, batcher, "resume")
    executor.release()
    for job in jobs:
        assert (await ended(log, job)).state is JobState.SUCCEEDED
    assert executor.executed == [3, 1, 2, 0]
    await until(lambda: is_done(batcher))
    await cluster.settled()


async def test_an_owner_that_reads_nothing_meanwhile_moves_a_job_when_it_reads_on(
    cluster: Cluster, executor: EchoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has given up waiting for it, and withdrawn the fact."""
    monkeypatch.setattr("charonia.operations.moving._PATIENCE_S", 0.05)
    log = executor.log
    batcher = await owner(cluster, prefetch=0)
    await command(log, batcher, "pause")
    jobs = [await submit(log, value) for value in range(2)]
    await queued(batcher, 2)
    owned = batcher.service.owned[MODEL]
    reader = owned._reader
    reader.remove(owned.facts.stream)
    moved = await move(log, MODEL, [jobs[1]], 1)
    assert (moved["applied"], len(moved["moved"])) == (False, 1)
    reader.add(owned.facts.stream, owned.facts.after, consume=True, take=owned.on_entries)
    await until(lambda: queued_by_level(owned.scheduler) == {1: 1, 2: 1})
    await command(log, batcher, "resume")
    executor.release()
    for job in jobs:
        assert (await ended(log, job)).state is JobState.SUCCEEDED
    assert executor.executed == [1, 0]
    await until(lambda: is_done(batcher))
    await cluster.settled()
