"""Who decides and who answers when a batcher, an executor, a gateway or the log is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from typing import Any

import batching_cluster as parts
import pytest
from asking_cluster import DYNAMIC, ORDERED, answers, failure, pending_are, statistics
from batched_jobs import ended, submit
from batching_cluster import HASH, MODEL, NEVER_MS, PATIENCE_S, Cluster, ask, until, until_so, value_of

import batcher.service as owners
from batcher.housekeeping.model_checks import ModelChecks, verify
from batcher.owner.owned import OwnedModel
from batcher.takeover import recovery
from charonia import keys
from charonia.clock import wall_ns
from charonia.datatypes import DataType
from charonia.errors import LogUnavailable
from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.membership import preferred_owner
from charonia.eventlog.port import EventLog, Limits
from charonia.facts.events import (
    FIELD_FACT,
    ExecutionUnwanted,
    ProcessJoined,
    QueueCommanded,
    RequestCancelled,
    facts_of,
    pack_fact,
)
from charonia.facts.jobs import JobState
from charonia.facts.sequence_states import SequenceAbout, SequenceStep
from charonia.options.settings import BatcherSettings
from charonia.tensors import Tensor
from charonia.wire import pack_request, request_meta

pytestmark = pytest.mark.integration


async def test_what_a_dead_batcher_had_is_taken_over_and_answered_once(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    first = await cluster.batcher()
    await first.owns()
    gateway = await cluster.gateway()
    calls = [ask(gateway, n) for n in range(40)]
    await until(lambda: len(executor.held) == 2 and first.service.owned[MODEL].scheduler.pending_count() == 24)

    await first.die()
    second = await cluster.batcher()
    later = [ask(gateway, n) for n in range(40, 60)]
    assert MODEL not in second.service.owned
    await cluster.lose("batcher", first.name)
    await second.owns()
    executor.release()

    assert await answers(calls + later) == list(range(60))
    assert sorted(executor.executed) == list(range(60)), "what was running is not run again"
    await cluster.settled()
    assert gateway._dataplane.duplicates == 0


async def test_a_cancel_that_a_former_owner_reads_reaches_the_next_one(cluster: Cluster) -> None:
    """The former owner does not know these requests: its window is full."""
    executor = await cluster.executor(gated=True)
    first = await cluster.batcher(window_requests=4)
    gateway = await cluster.gateway()
    calls = []
    for n in range(30):
        calls.append(ask(gateway, n))
        await until_so(lambda n=n: pending_are(cluster, n + 1))
    former = first.service.owned[MODEL]
    await until(lambda: not former.windows.all_read)
    first.control._reader.remove(keys.CONTROL)  # it has not learnt of its end
    second = await cluster.batcher()
    await cluster.lose("batcher", first.name)
    await second.owns()
    owned = second.service.owned[MODEL]
    facts = owned.facts
    second.service._reader.remove(facts.stream)
    for call in calls[20:]:
        call.cancel()
    await until(lambda: len(former._early_cancels) == 10)
    await first.die()
    second.service._reader.add(facts.stream, facts.after, consume=True, take=owned.on_entries)

    cancels = gateway._dataplane.requester.cancels
    for _ in range(2):
        await cancels.repeat()

    await until_so(lambda: pending_are(cluster, 20))

    executor.release()
    assert await answers(calls[:20]) == list(range(20))
    await cluster.settled()
    assert sorted(executor.executed) == list(range(20))
    for _ in range(4):
        await cancels.repeat()
    assert not cancels


async def test_a_former_owner_ends_no_stream_that_the_next_one_runs(cluster: Cluster) -> None:
    """Its run would go on, perhaps for ever: the next owner would learn of no end, and the caller repeat no cancel."""
    cluster.configure("model_transaction_policy { decoupled: true }", max_batch_size=0)
    await cluster.executor(gated=True)
    first = await cluster.batcher(prefetch=0)
    await first.owns()
    log = await cluster.log()
    await log.beat("gateway", "gateway-0", NEVER_MS)
    tensor = Tensor("x", DataType.INT32, (1,), b"\1\0\0\0")
    meta = request_meta(1, HASH, [tensor], (), {})
    ids = [b"1" * 16, b"2" * 16]
    for request_id in ids:
        words = (request_id, b"gateway-0", b"", meta, [tensor.data])
        record = pack_request(*words, rows=1, signature=1, level=0, accepted_ns=wall_ns())
        await log.accept(MODEL, 0, 0, [(request_id, len(record))], [b"r", record], Limits())
    former = first.service.owned[MODEL]
    await until(lambda: former.scheduler.pending_count() == 1)
    first.control._reader.remove(keys.CONTROL)  # it has not learnt of its end
    second = await cluster.batcher(prefetch=0)
    await cluster.lose("batcher", first.name)
    await second.owns()
    owned = second.service.owned[MODEL]
    runs = await cluster.executor(gated=True)
    await until(lambda: len(runs.held) == 1)
    second.service._reader.remove(owned.facts.stream)

    cancel = [FIELD_FACT, pack_fact(RequestCancelled(ids[1]))]
    await log.append(owned.facts.stream, cancel)
    await until(lambda: MODEL not in first.service.owned)

    assert (await log.unsettled(MODEL, [ids[1]]))[0] >= 0
    await first.die()
    second.service._reader.add(owned.facts.stream, owned.facts.after, consume=True, take=owned.on_entries)
    await log.append(owned.facts.stream, cancel)  # as its caller does
    await until(lambda: runs.unwanted == [ids[1]])


async def test_a_former_owner_stops_no_stream_that_it_does_not_settle(cluster: Cluster) -> None:
    """Executors settle no request that they are told is settled: it would count as lost some time later."""
    cluster.configure("model_transaction_policy { decoupled: true }", max_batch_size=0)
    runs = await cluster.executor(gated=True)
    first = await cluster.batcher(prefetch=0)
    await first.owns()
    log = await cluster.log()
    await log.beat("gateway", "gateway-0", NEVER_MS)
    tensor = Tensor("x", DataType.INT32, (1,), b"\1\0\0\0")
    request_id = b"1" * 16
    words = (request_id, b"gateway-0", b"", request_meta(1, HASH, [tensor], (), {}), [tensor.data])
    record = pack_request(*words, rows=1, signature=1, level=0, accepted_ns=wall_ns())
    await log.accept(MODEL, 0, 0, [(request_id, len(record))], [b"r", record], Limits())
    await until(lambda: len(runs.held) == 1)
    first.control._reader.remove(keys.CONTROL)  # it has not learnt of its end
    second = await cluster.batcher(prefetch=0)
    await cluster.lose("batcher", first.name)
    await second.owns()
    owned = second.service.owned[MODEL]
    await until(lambda: owned.scheduler.find(request_id) is not None)
    second.service._reader.remove(owned.facts.stream)

    cancel = [FIELD_FACT, pack_fact(RequestCancelled(request_id))]
    await log.append(owned.facts.stream, cancel)
    await until(lambda: MODEL not in first.service.owned)
    await first.die()

    assert await _notices(log, runs.name) == []
    assert runs.unwanted == []
    assert (await log.unsettled(MODEL, [request_id]))[0] >= 0
    second.service._reader.add(owned.facts.stream, owned.facts.after, consume=True, take=owned.on_entries)
    await log.append(owned.facts.stream, cancel)  # as its caller does
    await until(lambda: runs.unwanted == [request_id])
    assert (await log.unsettled(MODEL, [request_id]))[0] < 0


async def _notices(log: EventLog, executor: str) -> list[ExecutionUnwanted]:
    """Those that the executor has not read."""
    entries = await log.range(keys.batches(executor))
    return [fact for entry in entries for fact in facts_of(entry) if isinstance(fact, ExecutionUnwanted)]


async def test_what_an_executor_has_that_the_next_owner_has_not_heard_of_is_not_run_twice(cluster: Cluster) -> None:
    """Both are told in the control stream, which everybody reads in its own time."""
    await cluster.executor("executor-known", gated=True)
    first = await cluster.batcher("batcher-first")
    await first.owns()
    gateway = await cluster.gateway()
    name = next(n for n in map("batcher-{}".format, range(99)) if preferred_owner(MODEL, {n, first.name}) == n)
    second = parts.Batcher(await cluster.log(), BatcherSettings(name), None)
    await second.control.announce(ProcessJoined("batcher", name))
    await second.control.start()
    second.control._reader.remove(keys.CONTROL)  # what comes now it has still to read
    new = await cluster.executor("executor-new", gated=True)
    calls = [ask(gateway, n) for n in range(40)]
    await until(lambda: len(new.held) == 2)

    await first.stop()
    await second.service.start()
    second.running = True
    cluster._batchers.append(second)
    await second.owns()
    given = second.service.owned[MODEL].dispatched
    assert given.older_than(0).keys() == {"executor-known", "executor-new"}
    second.control._reader.add(keys.CONTROL, second.control._folded)
    for executor in cluster._executors:
        executor.release()
    assert await answers(calls) == list(range(40))
    assert sorted(value for executor in cluster._executors for value in executor.executed) == list(range(40))
    await cluster.settled()


async def test_a_queue_longer_than_its_window_is_read_on_when_all_that_was_read_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batcher and the gateway of its queued requests die together."""
    executor = await cluster.executor()
    first = await cluster.batcher()
    await first.owns()
    gone, stays = await cluster.gateway("gateway-gone"), await cluster.gateway("gateway-stays")
    await first.die()
    unanswered = [ask(gone, n) for n in range(8)]
    await until_so(lambda: pending_are(cluster, 8))
    monkeypatch.setattr(recovery, "_PAGE", 1)
    log = await cluster.log()
    await log.end_beat("gateway", "gateway-gone")
    await cluster.lose("gateway", "gateway-gone")
    call = ask(stays, 8)
    await until_so(lambda: pending_are(cluster, 9))
    recover = owners.recover

    async def recover_slowly(log: EventLog, owned: OwnedModel, executors: Collection[str]) -> int:
        found = await recover(log, owned, executors)
        assert not owned.windows.all_read
        await until(lambda: owned.windows.unsettled == 0)
        return found

    monkeypatch.setattr(owners, "recover", recover_slowly)
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher(window_requests=1)
    await second.owns()

    assert await answers([call, ask(stays, 9)]) == [8, 9]
    assert executor.executed == [8, 9]
    await cluster.settled()
    for one in unanswered:
        one.cancel()


async def test_an_idle_owner_that_dies_is_replaced(cluster: Cluster) -> None:
    await cluster.executor()
    first = await cluster.batcher()
    await first.owns()
    gateway = await cluster.gateway()
    assert await answers([ask(gateway, 1)]) == [1]
    await first.die()
    waiting = ask(gateway, 2)
    await until_so(lambda: pending_are(cluster, 1))

    await cluster.lose("batcher", first.name)
    await cluster.batcher()

    assert await answers([waiting]) == [2]
    await cluster.settled()


async def test_a_drained_batcher_hands_over(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    first = await cluster.batcher()
    await first.owns()
    gateway = await cluster.gateway()
    calls = [ask(gateway, n) for n in range(20)]
    await until(lambda: len(executor.held) == 2)

    await first.stop()
    await cluster.lose("batcher", first.name)
    await cluster.batcher()
    executor.release()

    assert await answers(calls) == list(range(20))
    assert sorted(executor.executed) == list(range(20))
    await cluster.settled()


async def test_a_batcher_taken_for_lost_takes_its_models_again(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher()
    await batcher.owns()
    gateway = await cluster.gateway()
    calls = [ask(gateway, n) for n in range(20)]
    await until(lambda: len(executor.held) == 2)
    former = batcher.service.owned[MODEL]

    await cluster.lose("batcher", batcher.name)
    await until(lambda: MODEL not in batcher.service.owned)
    calls += [ask(gateway, n) for n in range(20, 30)]
    await batcher.control.announce(ProcessJoined("batcher", batcher.name))
    await batcher.owns()
    assert batcher.service.owned[MODEL].token > former.token
    executor.release()
    calls += [ask(gateway, n) for n in range(30, 40)]

    assert await answers(calls) == list(range(40))
    assert sorted(executor.executed) == list(range(40))
    await cluster.settled()


async def test_a_batcher_taken_for_lost_while_it_takes_a_model_does_not_own_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, taking, go = await cluster.batcher("batcher-slow"), asyncio.Event(), asyncio.Event()
    paused = slow.log.paused

    async def slowly(model: str) -> bool:
        if asyncio.current_task() in slow.service._taking.values():
            taking.set()
            await go.wait()
        return await paused(model)

    monkeypatch.setattr(slow.log, "paused", slowly)
    executor = await cluster.executor()
    await taking.wait()
    other = await cluster.batcher()
    await cluster.lose("batcher", slow.name)
    await executor.load(cluster.config, slots=2)  # news of the model, which the slow one does not take for its own yet
    go.set()
    await other.owns()
    gateway = await cluster.gateway()
    assert await answers([ask(gateway, n) for n in range(20)]) == list(range(20))
    assert slow.service.owned == {}
    await slow.control.announce(ProcessJoined("batcher", slow.name))
    await until(lambda: slow.name in slow.control.catalog.processes)
    assert slow.service.owned == {}
    await cluster.settled()


async def test_a_lost_executors_work_runs_elsewhere_and_its_late_settle_is_fenced(cluster: Cluster) -> None:
    first = await cluster.executor(gated=True)
    batcher = await cluster.batcher()
    gateway = await cluster.gateway()
    calls = [ask(gateway, n) for n in range(4)]
    await until(lambda: len(first.held) == 1)
    (late,) = first.held
    assert late.header.attempts == (1, 1, 1, 1)

    second = await cluster.executor(gated=True, slots=4)
    await cluster.lose("executor", first.name)
    await until(lambda: sum(len(held.records) for held in second.held) == 4)
    assert {attempt for held in second.held for attempt in held.header.attempts} == {2}
    assert await first.settle(late, answer=False) == [False] * 4
    assert await pending_are(cluster, 4)
    second.release()

    assert await answers(calls) == [0, 1, 2, 3]
    assert sorted(second.executed) == [0, 1, 2, 3]
    await cluster.settled()
    owned = batcher.service.owned[MODEL]
    await until(lambda: owned.windows.settled_requests == 4)
    assert not len(owned.dispatched)
    assert (await statistics(cluster))["success_count"] == 4


async def test_an_executor_lost_while_a_successor_recovers_keeps_nothing(cluster: Cluster) -> None:
    first = await cluster.executor(gated=True)
    batcher = await cluster.batcher()
    gateway = await cluster.gateway()
    calls = [ask(gateway, n) for n in range(8)]
    await until(lambda: len(first.held) == 1)
    await batcher.die()
    await cluster.executor()

    await cluster.lose("batcher", batcher.name)
    await cluster.lose("executor", first.name)
    await cluster.batcher()

    assert await answers(calls) == list(range(8))


async def test_a_batch_the_log_forgot_is_given_out_again(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher()
    gateway = await cluster.gateway()
    call = ask(gateway, 1)
    await until(lambda: len(executor.held) == 1)
    lost = executor.held.pop()
    await executor.log.delete_entries(keys.batches(executor.name), [lost.entry_id])
    owned = batcher.service.owned[MODEL]

    await verify(owned, 3600 * 10**9)  # too young to be suspected
    assert not executor.held
    await verify(owned, 0)

    await until(lambda: len(executor.held) == 1)
    executor.release()
    assert await answers([call]) == [1]
    await cluster.settled()


async def test_a_settled_batch_whose_end_was_never_heard_frees_its_slot(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    first = ask(gateway, 1)
    await until(lambda: len(executor.held) == 1)
    held = executor.held.pop()
    second = ask(gateway, 2)
    requests = [(record.id, 1) for record in held.records]
    assert await executor.log.settle(MODEL, requests, None, []) == [True]
    await executor.log.delete_entries(keys.batches(executor.name), [held.entry_id])

    await verify(batcher.service.owned[MODEL], 0)

    executor.release()
    assert await answers([second]) == [2]
    assert isinstance(await failure(first), LogUnavailable)  # settled by somebody who never answered
    await cluster.settled()


async def test_replies_held_for_their_order_survive_their_holder(cluster: Cluster) -> None:
    cluster.configure(ORDERED, max_batch_size=1)
    slow = await cluster.executor("slow", gated=True)
    fast = await cluster.executor("fast", gated=True)
    first = await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    calls = []
    for n in range(2):
        calls.append(ask(gateway, n))
        await until(lambda n=n: len(slow.held) + len(fast.held) == n + 1)
    if fast.held[0].values == [0]:
        slow, fast = fast, slow
    fast.release()
    await until(lambda: len(first.service.owned[MODEL].facts.held) == 1)

    await first.die()
    await cluster.lose("batcher", first.name)
    await cluster.batcher(prefetch=0)
    slow.release()

    assert await answers(calls) == [0, 1]
    await cluster.settled()


async def test_what_waits_for_a_model_unloaded_between_two_batchers_is_refused(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    first = await cluster.batcher(prefetch=0)
    await first.owns()
    gateway = await cluster.gateway()
    await first.die()
    queued = ask(gateway, 1)
    await until_so(lambda: pending_are(cluster, 1))
    await executor.unload()
    await until(lambda: not gateway.model_ready(MODEL, ""))

    await cluster.lose("batcher", first.name)
    await cluster.batcher()

    assert "is not at ready state" in (await failure(queued)).message
    await cluster.settled()


async def test_a_reply_that_died_with_its_executor_does_not_leave_its_caller_waiting(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    await cluster.batcher()
    gateway = await cluster.gateway()
    call = ask(gateway, 1)
    await until(lambda: len(executor.held) == 1)

    assert await executor.settle(executor.held.pop(), answer=False) == [True]

    assert type(await failure(call)) is LogUnavailable
    assert gateway._dataplane.pending_requests == 0


async def test_replies_to_a_gateway_that_left_are_not_kept(cluster: Cluster) -> None:
    executor = await cluster.executor()
    await cluster.batcher()
    await cluster.gateway()
    log = executor.log
    stream = keys.replies("gateway-0")
    await executor.tell(ProcessJoined("gateway", "gateway-0"))
    await log.append(stream, [b"r", b"late"])

    await cluster.lose("gateway", "gateway-0")

    async def gone() -> bool:
        return not await log.range(stream)

    await until_so(gone)


async def test_a_gateway_that_is_lost_while_a_model_is_taken_keeps_no_room_for_waves(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored, go = asyncio.Event(), asyncio.Event()
    recover = owners.recover

    async def slowly(*arguments: Any) -> int:
        found = await recover(*arguments)
        restored.set()
        await go.wait()
        return found

    monkeypatch.setattr(owners, "recover", slowly)
    executor = await cluster.executor()
    log = executor.log
    await log.beat("gateway", "gateway-0", parts.NEVER_MS)
    await executor.tell(ProcessJoined("gateway", "gateway-0"))
    assert await log.waves.lease(MODEL, "gateway-0", 5, 50, Limits())
    batcher = await cluster.batcher()
    await restored.wait()
    await cluster.lose("gateway", "gateway-0")
    await until(lambda: "gateway-0" in batcher.service._departed.endpoints)
    assert await log.waves.leases(MODEL)
    go.set()

    async def ended() -> bool:
        return not await log.waves.leases(MODEL)

    await until_so(ended)


async def test_answers_to_an_executor_that_was_lost_with_its_batcher_are_not_kept(cluster: Cluster) -> None:
    executor = await cluster.executor()
    log = executor.log
    stream, other = keys.replies("executor-0"), keys.replies(executor.name)
    await executor.tell(ProcessJoined("executor", "executor-0"))
    await log.append(stream, [b"r", b"late"])
    await log.append(other, [b"r", b"in time"])
    await cluster.lose("executor", "executor-0")

    await cluster.batcher()

    async def gone() -> bool:
        return not await log.range(stream)

    await until_so(gone)
    assert await log.range(other)


@pytest.mark.parametrize("extra", [DYNAMIC, ORDERED])
async def test_a_lost_and_found_log_leaves_no_caller_waiting(server: PrivateServer, extra: str) -> None:
    cluster = Cluster(server.url)
    cluster.configure(extra)
    try:
        await _lose_and_find(cluster, server)
    finally:
        await cluster.close()


async def _lose_and_find(cluster: Cluster, server: PrivateServer) -> None:
    executor = await cluster.executor(gated=True)
    await cluster.batcher()
    gateway = await cluster.gateway()
    answered: list[int] = []
    unknown: list[int] = []
    numbers = iter(range(1_000_000))
    asking = True

    async def client() -> None:
        while asking:
            number = next(numbers)
            try:
                assert value_of(await gateway.infer(parts.request(number))) == number
                answered.append(number)
            except LogUnavailable:
                unknown.append(number)
                await asyncio.sleep(0.001)

    clients = [asyncio.ensure_future(client()) for _ in range(16)]
    await until(lambda: bool(executor.held))
    executor.release()
    for _ in range(2):
        reached = len(answered) + 100
        await until(lambda reached=reached: len(answered) > reached)
        os.kill(server.pid, signal.SIGKILL)
        while server.poll() is None:
            await asyncio.sleep(0.001)
        await until(lambda: not gateway._control.log_up)
        server.start()
        await asyncio.to_thread(server.wait_ready)
        await until(lambda: gateway._control.log_up)
    reached = len(answered) + 100
    await until(lambda: len(answered) > reached)
    asking = False

    await asyncio.wait_for(asyncio.gather(*clients), PATIENCE_S)
    assert len(answered) == len(set(answered))
    assert gateway._dataplane.pending_requests == 0


async def test_a_new_owner_knows_sequences_of_which_nothing_waits(cluster: Cluster) -> None:
    """Their next request has no START, and must find them."""
    cluster.configure("sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { } }")
    log = await cluster.log()
    begun = bytes(15) + b"1"
    about = SequenceAbout(b"1:scall", begun, 1, HASH, "executor-1", 0, 0, 1, 1, wall_ns() // 1000)
    await log.accept(MODEL, 0, 0, [(begun, 1)], [b"r", b"x"], Limits())
    step = {begun: SequenceStep(about.key, about.pack())}
    assert await log.settle(MODEL, [(begun, 0)], None, [], sequences=step) == [True]
    await log.delete_stream(keys.queue(MODEL, 0, 0))
    await cluster.executor("executor-1")
    batcher = await cluster.batcher()
    await batcher.owns()
    assert batcher.service.owned[MODEL].scheduler.live_sequences() == 1


# -- facts that a former owner has read and deleted --------------------------------------------------------------------


async def test_a_lane_is_read_whose_opening_a_former_owner_has_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has still to learn that it was presumed dead, while the next owner restores the model."""
    monkeypatch.setattr("batcher.housekeeping.model_checks._YOUNG_US", 0)
    monkeypatch.setattr("batcher.housekeeping.model_checks._LOOK_NS", 3_600_000_000_000)
    executor = await cluster.executor()
    first = await cluster.batcher()
    await first.owns()
    first.control._reader.remove(keys.CONTROL)
    first.service._closing = True  # what it loses it does not take again
    recover = owners.recover
    jobs: list[bytes] = []

    async def recover_slowly(log: EventLog, owned: OwnedModel, executors: Collection[str]) -> int:
        found = await recover(log, owned, executors)
        if not jobs:
            jobs.append(await submit(log, 7, lane=3))
            await until_so(lambda: has_no_facts(log))
            await first.die()
        return found

    monkeypatch.setattr(owners, "recover", recover_slowly)
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher()
    await second.owns()
    checks = ModelChecks(second.service.owned[MODEL])
    for _ in range(3):
        await checks.find_lost()
    assert (await ended(executor.log, jobs[0])).state is JobState.SUCCEEDED
    await cluster.settled()
    assert executor.executed == [7]


async def has_no_facts(log: EventLog) -> bool:
    return not await log.range(keys.facts(MODEL))


@pytest.mark.parametrize("action", ["resume", "pause"])
async def test_a_queue_is_held_as_the_log_says_where_a_former_owner_has_read_the_command(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr("batcher.housekeeping.model_checks._LOOK_NS", 3_600_000_000_000)
    executor = await cluster.executor()
    log = executor.log
    await log.set_paused(MODEL, action == "resume")
    first = await cluster.batcher()
    await first.owns()
    first.control._reader.remove(keys.CONTROL)
    first.service._closing = True  # what it loses it does not take again
    recover = owners.recover

    async def command(log: EventLog, word: str) -> None:
        await log.set_paused(MODEL, word == "pause")
        await log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(QueueCommanded(word))])

    async def recover_slowly(log: EventLog, owned: OwnedModel, executors: Collection[str]) -> int:
        found = await recover(log, owned, executors)
        await command(log, action)
        await until_so(lambda: has_no_facts(log))
        await first.die()
        return found

    monkeypatch.setattr(owners, "recover", recover_slowly)
    await cluster.lose("batcher", first.name)
    second = await cluster.batcher()
    await second.owns()
    owned = second.service.owned[MODEL]
    monkeypatch.setattr("batcher.housekeeping.model_checks._LOOK_NS", 0)
    checks = ModelChecks(owned)
    assert owned.is_held is (action == "resume")
    await checks.look()
    await checks.look()
    assert owned.is_held is (action == "pause")
    job = await submit(log, 1)
    if action == "pause":
        await until(lambda: owned.scheduler.pending_count() == 1)
        assert executor.executed == []
        await command(log, "resume")
    assert (await ended(log, job)).state is JobState.SUCCEEDED
    await cluster.settled()


async def test_a_command_that_is_on_its_way_is_not_taken_for_a_lost_one(cluster: Cluster) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    await batcher.owns()
    owned = batcher.service.owned[MODEL]
    checks = ModelChecks(owned)
    for held in (True, False):
        await executor.log.set_paused(MODEL, held)
        await checks.compare_hold()
        assert owned.is_held is not held
        owned.hold(held)  # it arrives
        await checks.compare_hold()
        assert owned.is_held is held


async def test_requests_of_a_lane_that_is_opened_during_the_check_are_not_taken_for_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batcher.housekeeping.model_checks._YOUNG_US", 0)
    monkeypatch.setattr("batcher.housekeeping.model_checks._LOOK_NS", 3_600_000_000_000)
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    await batcher.owns()
    owned, log = batcher.service.owned[MODEL], executor.log
    stream = keys.queue(MODEL, 0, 0)
    owned.windows.open(stream, 0)
    owned._reader.remove(stream)
    lost = await submit(log, 1)
    await log.delete_entries(stream, [entry.id for entry in await log.range(stream)])
    owned._reader.add(stream, take=owned.on_entries)
    await until_so(lambda: has_no_facts(log))
    checks = ModelChecks(owned)
    assert await checks.find_lost() == 0
    owned._reader.remove(owned.facts.stream)
    unsettled_ids = owned.log.unsettled_ids
    young: list[bytes] = []

    async def unsettled(model: str) -> list[bytes]:
        young.append(await submit(log, 2, lane=3, job=False))
        return await unsettled_ids(model)

    monkeypatch.setattr(owned.log, "unsettled_ids", unsettled)
    assert await checks.find_lost() == 1
    monkeypatch.undo()
    assert await log.unsettled(MODEL, [lost, *young]) == [-1, 0]
    owned._reader.add(owned.facts.stream, owned.facts.after, consume=True, take=owned.on_entries)
    await until(lambda: executor.executed == [2])
    await cluster.settled()


# -- an owner that gives its model up and is no longer the preferred one -----------------------------------------------


async def _with_a_preferred_newcomer(cluster: Cluster) -> parts.Batcher:
    """The owner of the model, which another batcher that came later would be now."""
    first = await cluster.batcher("batcher-first")
    await first.owns()
    name = next(n for n in map("batcher-{}".format, range(99)) if preferred_owner(MODEL, {n, first.name}) == n)
    second = await cluster.batcher(name)
    await until(lambda: name in first.control.catalog.processes)
    assert not second.service.owned
    return first


async def test_a_model_goes_on_whose_owner_failed_and_is_not_preferred_any_more(cluster: Cluster) -> None:
    await cluster.executor()
    first = await _with_a_preferred_newcomer(cluster)
    gateway = await cluster.gateway()
    assert await answers([ask(gateway, 1)]) == [1]
    first.service.owned[MODEL].failed(RuntimeError("unforeseen"))
    assert await answers([ask(gateway, 2)]) == [2]
    await cluster.settled()


async def test_a_model_goes_on_that_needs_another_scheduler_than_its_owner_has(cluster: Cluster) -> None:
    executor = await cluster.executor()
    await _with_a_preferred_newcomer(cluster)
    gateway = await cluster.gateway()
    assert await answers([ask(gateway, 1)]) == [1]
    cluster.configure("sequence_batching { }")
    await executor.load(cluster.config, content_hash="hash-2")
    await until(lambda: gateway._control.catalog.served(MODEL)[1].content_hash == "hash-2")  # type: ignore[attr-defined]
    call = ask(gateway, 2, sequence_id=7, sequence_start=True, sequence_end=True)
    assert await answers([call]) == [2]
    await cluster.settled()


async def test_a_model_goes_on_whose_owner_was_presumed_dead_and_came_back_at_once(cluster: Cluster) -> None:
    """The preferred one reads of both together, and finds that the owner lives."""
    await cluster.executor()
    first = await _with_a_preferred_newcomer(cluster)
    gateway = await cluster.gateway()
    assert await answers([ask(gateway, 1)]) == [1]
    second = cluster._batchers[-1]
    second.control._reader.remove(keys.CONTROL)
    await cluster.lose("batcher", first.name)
    await until(lambda: not first.service.owned)
    await first.control.announce(ProcessJoined("batcher", first.name))
    await until(lambda: first.name in first.control.catalog.processes)
    second.control._reader.add(keys.CONTROL, second.control._folded)
    assert await answers([ask(gateway, 2)]) == [2]
    await cluster.settled()
