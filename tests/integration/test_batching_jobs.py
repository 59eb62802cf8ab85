"""What a batcher promises of jobs: cancels, deadlines, held queues, lanes, lost streams."""

from __future__ import annotations

import pytest
from asking_cluster import DYNAMIC
from batched_jobs import ended, pending_are, settled_then, submit, told
from batching_cluster import HASH, MODEL, Cluster, EchoExecutor, ask, until, until_so

from batcher.housekeeping.model_checks import LOST, ModelChecks
from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog import port
from charonia.eventlog.port import EventLog, Limits
from charonia.facts.events import FIELD_FACT, QueueCommanded, RequestsEnded, pack_fact
from charonia.facts.jobs import JobEnd, JobState
from charonia.wire import unpack_response

pytestmark = pytest.mark.integration


async def test_a_job_is_begun_in_the_log_before_it_runs(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    await cluster.batcher()
    job = await submit(executor.log, 1)
    await until(lambda: len(executor.held) == 1)
    record = await executor.log.job(MODEL, job)
    assert record is not None
    assert (record.state, record.attempts) == (JobState.RUNNING, 1)
    assert executor.held[0].header.attempts == (1,)
    executor.release()
    assert (await ended(executor.log, job)).state is JobState.SUCCEEDED
    assert [fact.kind for fact in await told(executor.log)] == ["accepted", "batched", "ended"]
    await cluster.settled()


async def test_a_cancelled_job_leaves_the_queue_or_is_stopped(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    log = executor.log
    running = await submit(log, 1)
    await until(lambda: len(executor.held) == 1)
    queued = await submit(log, 2)
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == 1)
    for job, attempt in ((running, 1), (queued, 0)):
        ends = {job: JobEnd(JobState.CANCELLED)}
        assert await log.settle(MODEL, [(job, attempt)], None, [], ends=ends, outcomes=b"c") == [True]
    fact = RequestsEnded(running + queued, "cancelled")
    await log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(fact)])

    await until(lambda: executor.unwanted == [running])
    executor.release()
    await until(lambda: len(batcher.service.owned[MODEL].dispatched) == 0)
    assert executor.executed == [1]
    assert (await ended(log, running)).state is JobState.CANCELLED
    await until_so(lambda: no_queue(log))


async def no_queue(log: EventLog) -> bool:
    return not await log.range(keys.queue(MODEL, 0))


async def test_a_job_cancelled_unheard_is_not_given_out(cluster: Cluster) -> None:
    """The fact of its end is lost: beginning it in the log finds out."""
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    log = executor.log
    await submit(log, 1)
    await until(lambda: len(executor.held) == 1)
    queued = await submit(log, 2)
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == 1)
    await log.settle(MODEL, [(queued, 0)], None, [], ends={queued: JobEnd(JobState.CANCELLED)}, outcomes=b"c")
    executor.release()
    await settled_then(cluster, lambda: batcher.service.owned[MODEL].windows.settled_requests == 2)
    assert executor.executed == [1]


async def begun_before_its_deadline(executor: EchoExecutor) -> tuple[bytes, int]:
    """A job that runs and has a deadline, as short a one as the machine is fast enough for."""
    for left_ns in (200_000_000, 2_000_000_000, 10_000_000_000):
        deadline_ns = wall_ns() + left_ns
        job = await submit(executor.log, 1, deadline_ns=deadline_ns)
        await until(lambda deadline_ns=deadline_ns: executor.held or wall_ns() >= deadline_ns)
        if executor.held or "during" in (await ended(executor.log, job)).events[-1].detail["error"]:
            await until(lambda: len(executor.held) == 1)
            return job, deadline_ns
    raise AssertionError("nothing begins within 10 s")


async def test_jobs_expire_on_time_queued_and_running(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    await cluster.batcher(prefetch=0)
    log = executor.log
    running, deadline_ns = await begun_before_its_deadline(executor)
    queued = await submit(log, 2, deadline_ns=deadline_ns)
    for job, text in ((running, "Deadline exceeded during execution"), (queued, "Deadline exceeded before execution")):
        record = await ended(log, job)
        assert record.state is JobState.EXPIRED
        assert text in record.events[-1].detail["error"]
        assert record.ended_us * 1000 >= deadline_ns
    await until(lambda: executor.unwanted == [running])
    late = executor.held.pop()
    assert await executor.settle(late) == [False]
    await cluster.settled()


async def test_jobs_expire_on_time_behind_the_window(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0, window_requests=4)
    log = executor.log
    await submit(log, 0)
    await until(lambda: len(executor.held) == 1)
    for value in range(1, 8):
        await submit(log, value)
    owned = batcher.service.owned[MODEL]
    await until(lambda: not owned.windows.all_read)
    deadline_ns = wall_ns() + 100_000_000
    late = [await submit(log, value, deadline_ns=deadline_ns) for value in (8, 9)]
    kept = await submit(log, 10, deadline_ns=wall_ns() + 3_600_000_000_000)
    for job in late:
        record = await ended(log, job)
        assert record.state is JobState.EXPIRED
        assert record.events[-1].detail == {
            "error": "[request id: <id_unknown>] Deadline exceeded before execution",
            "by": "deadline",
        }
        assert record.ended_us * 1000 >= deadline_ns
        result = await log.job_result(MODEL, job)
        assert result is not None
        assert unpack_response(result).error.code.name == "DEADLINE_EXCEEDED"  # type: ignore[union-attr]
    assert owned.scheduler.find(late[0]) is None
    # what has ended is not kept in mind, what is active is
    await until_so(lambda: has_deadlines(log, 1))
    executor.release()
    assert (await ended(log, kept)).state is JobState.SUCCEEDED
    assert sorted(executor.executed) == [0, 1, 2, 3, 4, 5, 6, 7, 10]
    assert await has_deadlines(log, 0)
    await cluster.settled()
    counted = await log.statistics(keys.statistics(MODEL, 1, HASH))
    assert (counted["fail_REJECTED"], counted["success_count"]) == (2, 9)


async def has_deadlines(log: EventLog, jobs: int) -> bool:
    return await log.count_times(keys.job_deadlines(MODEL)) == jobs


async def test_a_callers_cancel_stops_what_runs(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    await cluster.batcher()
    gateway = await cluster.gateway()
    call = ask(gateway, 1)
    await until(lambda: len(executor.held) == 1)
    call.cancel()
    await until(lambda: len(executor.unwanted) == 1)
    await until_so(lambda: pending_are(executor.log, 0))
    executor.release()
    await cluster.settled()
    counted = await executor.log.statistics(keys.statistics(MODEL, 1, HASH))
    assert counted["fail_CANCELED"] == 1
    assert "success_count" not in counted or counted["success_count"] == 0


async def test_a_held_queue_gives_nothing_out_also_after_a_takeover(cluster: Cluster) -> None:
    executor = await cluster.executor()
    first = await cluster.batcher()
    await first.owns()
    log = executor.log

    async def command(action: str) -> None:
        await log.set_paused(MODEL, action == "pause")
        await log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(QueueCommanded(action))])

    await command("pause")
    await until(lambda: first.service.owned[MODEL].scheduler._state.ledger.is_held)
    job = await submit(log, 1)
    expired = await submit(log, 2, deadline_ns=wall_ns() + 50_000_000)
    assert (await ended(log, expired)).state is JobState.EXPIRED
    await first.die()
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher()
    await second.owns()
    await until(lambda: second.service.owned[MODEL].scheduler.pending_count() == 1)
    assert executor.executed == []
    await command("resume")
    assert (await ended(log, job)).state is JobState.SUCCEEDED
    await cluster.settled()


async def test_what_a_lost_gateway_waited_for_is_not_run_and_its_jobs_are(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    log = executor.log
    await submit(log, 0)
    await until(lambda: len(executor.held) == 1)
    await submit(log, 1, endpoint=b"gateway-9", job=False)
    await submit(log, 2, endpoint=b"gateway-9")
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == 2)
    await cluster.lose("gateway", "gateway-9")
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == 1)
    await submit(log, 3, endpoint=b"gateway-9", job=False)
    executor.release()
    await settled_then(cluster, lambda: batcher.service.owned[MODEL].windows.settled_requests == 4)
    assert executor.executed == [0, 2]
    assert not await log.range(keys.replies("gateway-9"))


async def test_what_a_gateway_waited_for_that_left_unheard_is_not_run(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    first = await cluster.batcher(prefetch=0)
    log = executor.log
    await log.beat("gateway", "gateway-8", 60_000)
    await submit(log, 0)
    await until(lambda: len(executor.held) == 1)
    await submit(log, 1, endpoint=b"gateway-9", job=False)
    await submit(log, 2, endpoint=b"gateway-9")
    await submit(log, 3, endpoint=b"gateway-8", job=False)
    await until(lambda: first.service.owned[MODEL].scheduler.pending_count() == 3)
    await first.die()
    await log.append(keys.replies("gateway-9"), [b"r", b"late"])
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher(prefetch=0)
    await second.owns()
    executor.release()
    await settled_then(cluster, lambda: second.service.owned[MODEL].windows.settled_requests == 4)
    assert executor.executed == [0, 2, 3]

    async def swept() -> bool:
        return not await log.range(keys.replies("gateway-9"))

    await until_so(swept)
    assert len(await log.range(keys.replies("gateway-8"))) == 1


async def test_jobs_that_have_expired_take_no_room_from_those_that_have_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batcher.housekeeping.model_checks._LOOK_NS", 0)
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    log = executor.log
    kept = await submit(log, 0)
    await ended(log, kept)
    short = [await submit(log, value, retention_s=1) for value in range(1, 71)]

    async def expired() -> bool:
        found = [await log.job(MODEL, job_id) for job_id in short]
        return not any(found)

    await until_so(expired)
    await log.set_retention(MODEL, size_bytes=3000, journal_s=0, journal_size_bytes=0)
    await ModelChecks(batcher.service.owned[MODEL]).look()
    await ended(log, await submit(log, 99))
    assert await log.job(MODEL, kept) is not None


async def test_the_beginning_of_a_moved_job_stays_in_the_journal(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batcher.housekeeping.model_checks._TRIM_NS", 0)
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    log = executor.log
    running = await submit(log, 0)
    await until(lambda: len(executor.held) == 1)
    moved = await submit(log, 1)
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == 1)
    # as `charonia queue move` does it
    stream = keys.queue(MODEL, 0, 0)
    (entry,) = [entry for entry in await log.range(stream) if moved in bytes(entry.fields[1])]
    await log.accept(MODEL, 0, 3, [], entry.fields, Limits())
    await log.delete_entries(stream, [entry.id])
    await until(lambda: batcher.service.owned[MODEL].windows.unsettled == 3)
    executor.release(1)
    assert (await ended(log, running)).state is JobState.SUCCEEDED
    await until(lambda: len(executor.held) == 1)
    await log.set_retention(MODEL, size_bytes=0, journal_s=0, journal_size_bytes=1)
    await ModelChecks(batcher.service.owned[MODEL]).look()
    assert moved in [request_id for fact in await told(log) if fact.kind == "accepted" for request_id in fact.ids]
    executor.release()
    assert (await ended(log, moved)).state is JobState.SUCCEEDED
    await cluster.settled()


async def test_an_owner_seals_the_journal_and_then_trims_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batcher.housekeeping.model_checks._TRIM_NS", 0)
    executor = await cluster.executor()
    batcher = await cluster.batcher(journal_seal_s=3600)
    log = executor.log
    await ended(log, await submit(log, 0))
    await cluster.settled()
    checks = ModelChecks(batcher.service.owned[MODEL], seal_s=3600)
    await log.set_retention(MODEL, size_bytes=0, journal_s=0, journal_size_bytes=1)
    await checks.look()  # not due: what is not sealed stays
    assert len(await told(log)) > 1
    checks._seal_ns -= 3600 * 1_000_000_000
    await checks.look()
    seals = await log.range(keys.journal_seals(MODEL))
    assert len(seals) == 1
    assert await told(log) == []


async def test_another_tenants_request_does_not_wait_for_a_flood(cluster: Cluster) -> None:
    cluster.configure(DYNAMIC, max_batch_size=4)
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(window_requests=64)
    log = executor.log
    for value in range(300):
        await submit(log, value, lane=5, job=False)
    await until(lambda: len(executor.held) == 2)
    windows = batcher.service.owned[MODEL].windows
    await until(lambda: not windows.all_read)  # the flood is more than the window holds
    await submit(log, 999, lane=6, job=False)
    await until(lambda: windows.unsettled >= 65)
    executor.release(1)
    await until(lambda: len(executor.held) == 2)
    assert executor.held[1].values[0] == 999
    executor.release()
    await settled_then(cluster, lambda: len(executor.executed) == 301)


async def test_a_queue_longer_than_the_window_is_recovered_piece_by_piece(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    first = await cluster.batcher(window_requests=16)
    await first.owns()
    log = executor.log
    jobs = [await submit(log, value) for value in range(60)]
    await until(lambda: len(executor.held) == 2)
    await first.die()
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher(window_requests=16)
    await second.owns()
    owned = second.service.owned[MODEL]
    assert owned.windows.unsettled < 60 or not owned.windows.all_read
    executor.release()
    for job in jobs:
        assert (await ended(log, job)).state is JobState.SUCCEEDED
    assert sorted(executor.executed) == list(range(60))
    await cluster.settled()


async def test_what_a_lost_stream_carried_is_ended(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batcher.housekeeping.model_checks._YOUNG_US", 0)
    monkeypatch.setattr("batcher.housekeeping.model_checks._LOOK_NS", 3_600_000_000_000)  # the test looks, nobody else
    executor = await cluster.executor(gated=True)
    first = await cluster.batcher(prefetch=0)
    log = executor.log
    kept = await submit(log, 1)
    await until(lambda: len(executor.held) == 1)
    await first.die()
    gone = await submit(log, 2, lane=3)
    keyless = await submit(log, 3, lane=3, job=False)
    await log.delete_stream(keys.queue(MODEL, 0, 3))
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher(prefetch=0)
    await second.owns()
    checks = ModelChecks(second.service.owned[MODEL])
    assert await checks.find_lost() == 0
    assert await checks.find_lost() == 2
    assert await log.unsettled(MODEL, [keyless]) == [-1]
    assert await log.unsettled_ids(MODEL) == [kept]
    record = await ended(log, gone)
    assert record.state is JobState.FAILED
    assert record.events[-1].detail["error"] == LOST
    assert await checks.find_lost() == 0
    executor.release()
    assert (await ended(log, kept)).state is JobState.SUCCEEDED
    await cluster.settled()


async def test_requests_that_the_log_would_not_take_as_one_batch_run_in_smaller_ones(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    await submit(executor.log, 0)
    await until(lambda: len(executor.held) == 1)
    jobs = [await submit(executor.log, value) for value in range(1, 8)]
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == 7)
    size = len(executor.held[0].records[0].record)
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 3 * size)
    executor.release(1)
    sizes: list[int] = []
    while len(executor.executed) < 8:
        await until(lambda: len(executor.held) == 1)
        sizes.append(len(executor.held[0].values))
        executor.release(1)
        await until(lambda: len(executor.executed) == 1 + sum(sizes))
    assert sizes == [2, 2, 3]
    for job in jobs:
        assert (await ended(executor.log, job)).state is JobState.SUCCEEDED
    assert executor.executed == list(range(8))
    await cluster.settled()
