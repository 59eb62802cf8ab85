"""What becomes of waves and of leases when a batch, a deletion, an owner or a gateway is lost."""

from __future__ import annotations

from typing import Any

import pytest
from asking_cluster import answers
from batched_jobs import ended, submit
from batching_cluster import MODEL, NEVER_MS, Cluster, ask, until, until_so
from wave_senders import SentWave, numbers, send_wave

from batcher.housekeeping.model_checks import verify
from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.port import EventLog, Limits
from charonia.facts.events import (
    FIELD_FACT,
    BatchDied,
    BatchReturned,
    Fact,
    ProcessJoined,
    RequestCancelled,
    pack_fact,
)
from charonia.facts.jobs import JobState
from charonia.wire import FIELD_WAVE, WAVE_BYTE, records_of, unpack_response, unpack_wave_reply

pytestmark = pytest.mark.integration

CALLER = "gateway-waves"


@pytest.fixture(autouse=True)
def only_the_test_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owners' own looks for what is forgotten, every ten seconds, find nothing before the test does."""
    monkeypatch.setattr("batcher.housekeeping.model_checks._LOOK_NS", 3_600_000_000_000)


async def caller(cluster: Cluster) -> EventLog:
    """A log on which a gateway seems to live; the lane of the model is open."""
    log = await cluster.log()
    await log.beat("gateway", CALLER, NEVER_MS)
    gateway = await cluster.gateway()
    assert await answers([ask(gateway, 0)]) == [0]
    await cluster.settled()
    for executor in cluster._executors:
        executor.open = False
        executor.executed.clear()
    return log


async def told(log: EventLog, wave: SentWave) -> dict[bytes, int]:
    """The answers there are to a wave's requests, by request."""
    found: dict[bytes, int] = {}
    for entry in await log.range(keys.replies(CALLER)):
        if entry.fields[0] == FIELD_WAVE:
            reply = unpack_wave_reply(entry.fields[1])
            values = memoryview(bytes(reply.columns[0])).cast("i")
            found |= {reply.prefix + bytes((index,)): value for index, value in enumerate(values)}
        else:
            for record in records_of(entry.fields):
                response = unpack_response(record)
                found[response.id] = int(response.outputs[0].array()[0, 0])
    return {request_id: found[request_id] for request_id in wave.ids if request_id in found}


async def nothing_read(log: EventLog) -> bool:
    """Whether the owner has read all facts."""
    return await log.range(keys.facts(MODEL)) == []


async def nothing_left(log: EventLog, wave: SentWave) -> bool:
    return not await log.range(wave.stream) and await log.unsettled_ids(MODEL) == []


async def test_a_wave_whose_batch_the_log_lost_is_run_all_the_same(cluster: Cluster) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    log = await caller(cluster)
    wave = await send_wave(log, MODEL, numbers(1, 2, 3), CALLER)
    await until(lambda: len(executor.held) == 1)
    lost = executor.held.pop()
    assert lost.waves
    await log.delete_entries(keys.batches(executor.name), [lost.entry_id])
    executor.release()

    await verify(batcher.service.owned[MODEL], 0)

    await until_so(lambda: nothing_left(log, wave))
    assert await told(log, wave) == dict(zip(wave.ids, (1, 2, 3), strict=True))


async def test_a_settled_wave_whose_end_was_never_heard_frees_its_slot(cluster: Cluster) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher(prefetch=0)
    log = await caller(cluster)
    first = await send_wave(log, MODEL, numbers(1), CALLER)
    await until(lambda: len(executor.held) == 1)
    held = executor.held.pop()
    second = await send_wave(log, MODEL, numbers(2), CALLER)
    await log.delete_entries(first.stream, [first.entry_id])
    await log.delete_entries(keys.batches(executor.name), [held.entry_id])

    await verify(batcher.service.owned[MODEL], 0)
    executor.release()

    await until_so(lambda: nothing_left(log, second))
    assert executor.executed == [2]


async def test_a_wave_that_comes_back_after_its_end_does_not_stay(cluster: Cluster) -> None:
    """As on a log server that was killed before the deletion was on its disk."""
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    log = await caller(cluster)
    wave = await send_wave(log, MODEL, numbers(1, 2), CALLER)
    await until(lambda: len(executor.held) == 1)
    held = executor.held.pop()
    executor.release()
    owned = batcher.service.owned[MODEL]
    owned.batch_finished(held.header.batch_id, executor.name)  # but the entry is there
    checks = batcher.service._checks[MODEL]

    assert await checks.burst_forgotten() == 0, "its settlement may be under way"
    assert await checks.burst_forgotten() == 1

    await until_so(lambda: nothing_left(log, wave))
    assert await told(log, wave) == dict(zip(wave.ids, (1, 2), strict=True))


async def test_a_wave_that_is_read_twice_runs_once_and_leaves_neither_entry(cluster: Cluster) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    log = await caller(cluster)
    wave = await send_wave(log, MODEL, numbers(1, 2), CALLER)
    await until(lambda: len(executor.held) == 1)
    (entry,) = await log.range(wave.stream)
    await log.append(wave.stream, entry.fields)
    windows = batcher.service.owned[MODEL].windows
    await until(lambda: windows.unsettled == 4)

    executor.release()

    await until_so(lambda: nothing_left(log, wave))
    await until(lambda: windows.unsettled == 0)
    assert executor.executed == [1, 2]


async def test_a_wave_whose_executor_was_lost_before_it_sent_the_answers_is_soon_run_again(cluster: Cluster) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    log = await caller(cluster)
    wave = await send_wave(log, MODEL, numbers(1, 2), CALLER)
    await until(lambda: len(executor.held) == 1)
    held = executor.held.pop()
    batcher.service.owned[MODEL].batch_finished(held.header.batch_id, executor.name)
    other = await cluster.executor()
    await cluster.lose("executor", executor.name)

    await until_so(lambda: nothing_left(log, wave))  # nobody looks for other reasons
    assert other.executed == [1, 2]
    assert await told(log, wave) == dict(zip(wave.ids, (1, 2), strict=True))


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_wave_that_a_new_owner_burst_is_its_executor_s_until_it_is_settled(
    cluster: Cluster, is_lost: bool
) -> None:
    """An executor reports the end of waves before it settles them; it may be lost in between."""
    executor, other = await cluster.executor(), await cluster.executor()
    batcher = await cluster.batcher()
    log = await caller(cluster)
    wave = await send_wave(log, MODEL, numbers(1, 2, 3), CALLER)
    await until(lambda: len(executor.held) + len(other.held) == 1)
    runs, rests = (executor, other) if executor.held else (other, executor)
    held = runs.held.pop()
    await batcher.die()
    heir = await cluster.batcher()
    await cluster.lose("batcher", batcher.name)
    await heir.owns()
    assert len(await log.unsettled_ids(MODEL)) == 3, "it was burst"
    owned = heir.service.owned[MODEL]

    await runs.report_waves(held)
    await until_so(lambda: nothing_read(log))
    assert held.header.batch_id in owned.dispatched, "its requests are not settled"
    rests.release()
    if is_lost:
        await cluster.lose("executor", runs.name)
    else:
        assert await runs.settle(held) == [True] * 3

    await until_so(lambda: nothing_left(log, wave))
    assert await told(log, wave) == dict(zip(wave.ids, (1, 2, 3), strict=True))
    assert rests.executed == ([1, 2, 3] if is_lost else [])
    assert held.header.batch_id not in owned.dispatched


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_wave_that_a_new_owner_burst_runs_again_when_its_instance_dies(cluster: Cluster, is_lost: bool) -> None:
    """Executors report which waves have no outcome. Another wave of that batch is answered, and not settled yet."""
    executor, batcher = await cluster.executor(), await cluster.batcher(prefetch=0)
    log = await caller(cluster)
    await send_wave(log, MODEL, numbers(0), CALLER)
    await until(lambda: len(executor.held) == 1)
    first = executor.held.pop()
    waves = [await send_wave(log, MODEL, numbers(*values), CALLER) for values in ((1, 2, 3), (4, 5, 6))]
    await until(lambda: batcher.service.owned[MODEL].windows.unsettled == 7)
    await executor.settle(first)
    await until(lambda: len(executor.held) == 1)
    held = executor.held.pop()
    assert len(held.waves) == 2
    await batcher.die()
    heir = await cluster.batcher()
    await cluster.lose("batcher", batcher.name)
    await heir.owns()
    assert len(await log.unsettled_ids(MODEL)) == 6, "both were burst"
    other = await cluster.executor()
    other.release()

    answered, left = held.waves
    await executor.report_waves(held, BatchDied(executor.name, held.header.batch_id, "gone", ids=left.id))
    await until_so(lambda: nothing_read(log))
    assert other.executed == [], "an answered wave is not settled"
    if is_lost:
        await cluster.lose("executor", executor.name)
    else:
        executor.release()
        assert await executor.settle_burst(answered) == [True] * 3

    await until_so(lambda: nothing_left(log, waves[0]))
    executed = sorted(executor.executed + other.executed)
    assert executed == ([0, 1, 2, 3, 4, 5, 6] if is_lost else [0, 4, 5, 6])


@pytest.mark.parametrize("how", ["its executor is lost", "its batch is returned", "its instance dies"])
async def test_a_request_cancelled_while_its_wave_runs_does_not_run_when_the_wave_comes_back(
    cluster: Cluster, how: str
) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    log = await caller(cluster)
    wave = await send_wave(log, MODEL, numbers(1, 2, 3), CALLER)
    await until(lambda: len(executor.held) == 1)
    held = executor.held.pop()
    await log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(RequestCancelled(wave.ids[1]))])
    await until(lambda: executor.unwanted == [wave.ids[1]])
    runs = executor
    if how == "its executor is lost":
        runs = await cluster.executor()
        await cluster.lose("executor", executor.name)
    else:
        executor.release()
        fact: Fact = BatchReturned(executor.name, held.header.batch_id, "no memory")
        if how == "its instance dies":
            fact = BatchDied(executor.name, held.header.batch_id, "gone", ids=wave.prefix + WAVE_BYTE)
        await log.append(held.header.report_to, [FIELD_FACT, pack_fact(fact)])
        await log.delete_entries(keys.batches(executor.name), [held.entry_id])

    await until_so(lambda: nothing_left(log, wave))

    assert sorted(runs.executed) == [1, 3]
    assert not batcher.service.owned[MODEL]._early_cancels


async def test_requests_aboard_a_loss_are_suspects_when_the_answer_to_their_burst_is_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    log = await caller(cluster)
    wave = await send_wave(log, MODEL, numbers(1, 2, 3, 4), CALLER)
    await until(lambda: len(executor.held) == 1)
    other = await cluster.executor(gated=True)
    burst, replies = batcher.log.waves.burst, []

    async def unheard(*words: Any, **more: Any) -> bytes:
        batcher.service._reader.remove(wave.stream)  # until the burst is tried again, nothing is read
        replies.append(await burst(*words, **more))
        if len(replies) == 1:
            raise LogUnavailable("the connection was lost before the answer")
        batcher.service.owned[MODEL].windows._follow(wave.stream)
        return replies[-1]

    monkeypatch.setattr(batcher.log.waves, "burst", unheard)
    await cluster.lose("executor", executor.name)

    await until(lambda: len(other.held) == 1)
    assert replies[0]
    assert replies[1:] == [b""]
    assert len(other.held[0].records) < 4
    other.release()
    await until_so(lambda: nothing_left(log, wave))
    assert sorted(other.executed) == [1, 2, 3, 4]


async def test_a_cancel_in_a_wave_that_ends_is_not_kept(cluster: Cluster) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    log = await caller(cluster)
    wave = await send_wave(log, MODEL, numbers(1, 2, 3), CALLER)
    await until(lambda: len(executor.held) == 1)
    await log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(RequestCancelled(wave.ids[1]))])
    owned = batcher.service.owned[MODEL]
    await until(lambda: len(owned._early_cancels) == 1)

    executor.release()

    await until_so(lambda: nothing_left(log, wave))
    await until(lambda: not owned._early_cancels)


async def test_waves_that_wait_or_run_are_not_taken_for_forgotten(cluster: Cluster) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher(prefetch=0)
    log = await caller(cluster)
    waves = [await send_wave(log, MODEL, numbers(*range(8)), CALLER) for _ in range(3)]
    await until(lambda: len(executor.held) == 1 and batcher.service.owned[MODEL].windows.unsettled == 24)
    checks = batcher.service._checks[MODEL]

    assert [await checks.burst_forgotten() for _ in range(3)] == [0, 0, 0]

    executor.release()
    await until_so(lambda: nothing_left(log, waves[-1]))
    assert len(executor.executed) == 24


async def test_a_gateway_that_is_lost_has_no_leases_any_more(cluster: Cluster) -> None:
    await cluster.executor()
    batcher = await cluster.batcher()
    await batcher.owns()
    log = await cluster.log()
    limits = Limits(1000)
    assert await log.waves.lease(MODEL, CALLER, 900, 0, limits)
    assert await log.waves.lease(MODEL, "gateway-alive", 50, 0, limits)
    assert not await log.waves.lease(MODEL, "gateway-other", 100, 0, limits)

    await cluster.lose("gateway", CALLER)

    async def only_one_left() -> bool:
        return await log.waves.leases(MODEL) == ["gateway-alive"]

    await until_so(only_one_left)
    assert await log.waves.lease(MODEL, "gateway-other", 900, 0, limits)


async def test_a_new_owner_ends_the_leases_of_gateways_that_left_unheard(cluster: Cluster) -> None:
    await cluster.executor()
    log = await cluster.log()
    await log.beat("gateway", "gateway-alive", NEVER_MS)
    assert await log.waves.lease(MODEL, CALLER, 100, 0, Limits())
    assert await log.waves.lease(MODEL, "gateway-alive", 100, 0, Limits())

    batcher = await cluster.batcher()
    await batcher.owns()

    assert await log.waves.leases(MODEL) == ["gateway-alive"]


async def test_a_gateway_that_was_taken_for_lost_reserves_anew(cluster: Cluster) -> None:
    await cluster.executor()
    batcher = await cluster.batcher()
    await batcher.owns()
    gateway = await cluster.gateway()
    log = await cluster.log()
    assert await gateway.lane.waves.leases.reserve(MODEL)
    assert gateway.lane.waves.leases.has(MODEL)

    await cluster.lose("gateway", "gateway-1")
    await until(lambda: not gateway.lane.waves.leases.has(MODEL))

    async def ended() -> bool:
        return await log.waves.leases(MODEL) == []

    await until_so(ended)
    await log.append(keys.CONTROL, _joined("gateway-1"))
    assert await gateway.lane.waves.leases.reserve(MODEL)
    assert await log.waves.leases(MODEL) == ["gateway-1"]


def _joined(name: str) -> list[bytes]:
    return [FIELD_FACT, pack_fact(ProcessJoined("gateway", name))]


async def test_lost_requests_are_found_although_waves_run_all_the_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log counts single requests alone."""
    monkeypatch.setattr("batcher.housekeeping.model_checks._YOUNG_US", 0)
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    log = await caller(cluster)
    owned = batcher.service.owned[MODEL]
    await send_wave(log, MODEL, numbers(1, 2, 3), CALLER)
    await until(lambda: len(executor.held) == 1)
    stream = keys.queue(MODEL, 0, 0)
    owned._reader.remove(stream)
    lost = await submit(log, 4)
    kept = (await log.range(stream))[0].id
    await log.delete_entries(stream, [entry.id for entry in await log.range(stream, kept)])
    owned._reader.add(stream, owned.windows.lanes[stream].after, take=owned.on_entries)
    checks = batcher.service._checks[MODEL]
    assert await checks.find_lost() == 0
    assert await checks.find_lost() == 1
    assert (await ended(log, lost)).state is JobState.FAILED
    executor.release()
    await until(lambda: owned.windows.unsettled == owned.windows.in_waves == 0)
    assert executor.executed == [1, 2, 3]
