"""Gateway, batchers and executors over a real log: answers, refusals, cancels, order and reloads."""

from __future__ import annotations

import asyncio

import batching_cluster as parts
import pytest
from asking_cluster import DYNAMIC, ORDERED, answers, failure, pending_are, statistics
from batching_cluster import HASH, MODEL, Cluster, ask, until, until_so, value_of
from scheduler_account import queued_by_level

from charonia import keys
from charonia.clock import wall_ns
from charonia.datatypes import DataType
from charonia.errors import Unavailable
from charonia.eventlog.port import Limits
from charonia.facts.events import FIELD_FACT, BatchReturned, ProcessJoined, RequestCancelled, pack_fact
from charonia.tensors import Tensor
from charonia.wire import pack_request, request_meta

pytestmark = pytest.mark.integration


async def test_every_request_gets_its_own_answer_and_leaves_nothing(cluster: Cluster) -> None:
    executor = await cluster.executor()
    batcher = await cluster.batcher()
    gateway = await cluster.gateway()

    calls = [ask(gateway, n) for n in range(200)]

    assert await answers(calls) == list(range(200))
    assert sorted(executor.executed) == list(range(200))
    await cluster.settled()
    assert gateway._dataplane.pending_requests == 0
    assert gateway._dataplane.counts.requests == 200
    assert gateway._dataplane.counts.entries < 200, "requests of one tick share entries"
    await until(lambda: batcher.service.owned[MODEL].windows.settled_requests == 200)
    assert (await statistics(cluster))["success_count"] == 200
    owned = batcher.service.owned[MODEL]
    assert not len(owned.dispatched)
    assert not len(owned.facts.held)


async def test_a_request_that_waits_too_long_is_refused_promptly(cluster: Cluster) -> None:
    cluster.configure(
        "dynamic_batching { priority_levels: 2 default_priority_level: 2 "
        "priority_queue_policy { key: 2 value { default_timeout_microseconds: 50000 } } }"
    )
    executor = await cluster.executor(gated=True)
    await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    running = ask(gateway, 1, id="a", priority=1)  # which is given all the time it needs to get there
    await until(lambda: len(executor.held) == 1)

    error = await failure(ask(gateway, 2, id="b"))
    nameless = await failure(ask(gateway, 3))

    assert type(error) is Unavailable
    assert error.message == nameless.message == "Request timeout expired", "no request id, as in Triton"
    executor.release()
    assert await answers([running]) == [1]
    await cluster.settled()
    counted = await statistics(cluster)
    assert (counted["fail_REJECTED"], counted["fail_count"]) == (2, 2)
    assert counted["fail_ns"] >= 100_000_000
    assert gateway.metrics.counts(MODEL, 1).failures["REJECTED"] == 2


async def test_a_refusal_of_what_ran_before_is_not_fenced(cluster: Cluster) -> None:
    """Lost, begun again, given back and then refused: the log must let go of it."""
    cluster.configure("dynamic_batching { default_queue_policy { default_timeout_microseconds: 60000000 } }")
    first = await cluster.executor(gated=True)
    batcher = await cluster.batcher()
    gateway = await cluster.gateway()
    call = ask(gateway, 1)
    await until(lambda: len(first.held) == 1)
    second = await cluster.executor(gated=True)
    await cluster.lose("executor", first.name)
    await until(lambda: len(second.held) == 1)
    assert second.held[0].header.attempts == (2,)

    held = second.held.pop()
    await second.unload()
    await until(lambda: not batcher.control.catalog.held(MODEL))
    await second.log.append(held.header.report_to, _returned(second.name, held.header.batch_id))

    assert "not at ready state" in (await failure(call)).message
    await until_so(lambda: pending_are(cluster, 0))


def _returned(executor: str, batch_id: str) -> list[bytes]:
    fact = BatchReturned(executor, batch_id, "drains")
    return [FIELD_FACT, pack_fact(fact)]


async def test_a_full_queue_refuses(cluster: Cluster) -> None:
    cluster.configure("dynamic_batching { default_queue_policy { max_queue_size: 2 } }")
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    calls = [ask(gateway, 0)]
    await until(lambda: len(executor.held) == 1)
    calls += [ask(gateway, n) for n in (1, 2)]
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == 2)

    error = await failure(ask(gateway, 3, id="c"))

    assert type(error) is Unavailable
    assert error.message == "[request id: c] Exceeds maximum queue size"
    executor.release()
    assert await answers(calls) == [0, 1, 2]
    await cluster.settled()


async def test_a_cancelled_request_leaves_the_queue(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    running = ask(gateway, 1)
    await until(lambda: len(executor.held) == 1)
    queued = ask(gateway, 2)
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == 1)

    queued.cancel()

    await until_so(lambda: pending_are(cluster, 1))
    executor.release()
    assert await answers([running]) == [1]
    assert executor.executed == [1]
    await cluster.settled()
    counted = await statistics(cluster)
    assert (counted["fail_CANCELED"], counted["fail_count"], counted["success_count"]) == (1, 1, 1)
    assert gateway.metrics.counts(MODEL, 1).failures["CANCELED"] == 1


async def test_what_is_cancelled_before_it_is_read_does_not_run(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(window_requests=4)
    gateway = await cluster.gateway()
    calls = []
    for n in range(30):
        calls.append(ask(gateway, n))
        await until_so(lambda n=n: pending_are(cluster, n + 1))
    owned = batcher.service.owned[MODEL]
    await until(lambda: not owned.windows.all_read)
    for call in calls[20:]:
        call.cancel()
    await until(lambda: len(owned._early_cancels) == 10)

    executor.release()

    assert await answers(calls[:20]) == list(range(20))
    await cluster.settled()
    assert sorted(executor.executed) == list(range(20))
    assert not owned._early_cancels
    assert (await statistics(cluster))["fail_CANCELED"] == 10


async def test_what_is_cancelled_while_it_is_given_out_does_not_run(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempts of decoupled models are recorded before they are given out, which takes a while."""
    cluster.configure("model_transaction_policy { decoupled: true }")
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher()
    await batcher.owns()
    owned = batcher.service.owned[MODEL]
    recorded, go_on = asyncio.Event(), asyncio.Event()
    begin = owned.dispatched.begin_attempts

    async def begin_slowly(decision: object) -> object:
        begun = await begin(decision)
        recorded.set()
        await go_on.wait()
        return begun

    monkeypatch.setattr(owned.dispatched, "begin_attempts", begin_slowly)
    tensor = Tensor("x", DataType.INT32, (1, 1), b"\1\0\0\0")
    meta = request_meta(1, HASH, [tensor], (), {})
    ids = [b"1" * 16, b"2" * 16]
    for request_id in ids:
        record = pack_request(
            request_id, b"gateway-0", b"", meta, [tensor.data], rows=1, signature=1, level=0, accepted_ns=wall_ns()
        )
        await executor.log.accept(MODEL, 0, 0, [(request_id, len(record))], [b"r", record], Limits())
    await recorded.wait()

    await executor.log.append(keys.facts(MODEL), [FIELD_FACT, pack_fact(RequestCancelled(ids[0]))])
    await until(lambda: executor.unwanted == [ids[0]])
    go_on.set()

    await until(lambda: len(executor.held) == 1)
    assert [record.id for record in executor.held[0].records] == [ids[1]]
    executor.release()
    await until_so(lambda: pending_are(cluster, 0))
    assert executor.executed == [1]


async def test_a_request_cancelled_before_it_is_written_is_not_written(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    await cluster.batcher()
    gateway = await cluster.gateway()
    first = ask(gateway, 0)  # while one is open, the next waits for the interval
    await until(lambda: len(executor.held) == 1)
    call = asyncio.ensure_future(gateway.infer(parts.request(1), flush_interval_s=5.0))
    await until(lambda: gateway._dataplane.pending_requests == 2)
    call.cancel()
    await asyncio.wait([call])
    executor.release()

    assert await answers([first]) == [0]
    assert await answers([ask(gateway, 2)]) == [2]
    assert executor.executed == [0, 2]
    await cluster.settled()


async def test_an_answer_that_waits_for_its_order_is_not_lost(cluster: Cluster) -> None:
    """S6: its request is settled, however long the one before it runs."""
    cluster.configure(ORDERED, max_batch_size=1)
    slow, fast = [await cluster.executor(name, gated=True) for name in ("slow", "fast")]
    batcher = await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    calls = []
    for n in range(2):
        calls.append(ask(gateway, n))
        await until(lambda n=n: len(slow.held) + len(fast.held) == n + 1)
    if fast.held[0].values == [0]:
        slow, fast = fast, slow
    fast.release()
    await until(lambda: len(batcher.service.owned[MODEL].facts.held) == 1)
    pending = gateway._dataplane.requester
    for _ in range(3):
        await pending.recheck(set(pending.requests))
    assert pending._unanswered
    assert not calls[1].done()
    slow.release()
    assert await answers(calls) == [0, 1]
    await cluster.settled()


async def test_order_is_kept_over_two_executors(cluster: Cluster) -> None:
    cluster.configure(ORDERED, max_batch_size=1)
    slow = await cluster.executor("slow", gated=True)
    fast = await cluster.executor("fast", gated=True)
    await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    finished: list[int] = []
    calls = []
    for n in range(2):
        calls.append(ask(gateway, n))
        await until(lambda n=n: len(slow.held) + len(fast.held) == n + 1)
    if fast.held[0].values == [0]:
        slow, fast = fast, slow
    calls += [ask(gateway, n) for n in range(2, 12)]
    for call in calls:
        call.add_done_callback(lambda call: finished.append(value_of(call.result())))

    fast.release()
    await until(lambda: len(fast.executed) == 11)
    await until_so(lambda: pending_are(cluster, 1))
    assert finished == []
    slow.release()

    assert await answers(calls) == list(range(12))
    assert finished == list(range(12))
    await cluster.settled()


async def test_what_waits_for_an_unloaded_model_is_refused(cluster: Cluster) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    running = ask(gateway, 1)
    await until(lambda: len(executor.held) == 1)
    queued = [ask(gateway, n) for n in (2, 3)]
    await until(lambda: batcher.service.owned[MODEL].scheduler.pending_count() == 2)

    await executor.unload()

    for call in queued:
        error = await failure(call)
        assert type(error) is Unavailable
        assert error.message.endswith("Request for unknown model: 'echo' version 1 is not at ready state")
    executor.release()
    assert await answers([running]) == [1]
    await cluster.settled()


async def test_a_lower_priority_number_is_served_first(cluster: Cluster) -> None:
    cluster.configure("dynamic_batching { priority_levels: 2 default_priority_level: 2 }", max_batch_size=1)
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(prefetch=0)
    gateway = await cluster.gateway()
    calls = [ask(gateway, 0)]
    await until(lambda: len(executor.held) == 1)
    scheduler = batcher.service.owned[MODEL].scheduler
    calls += [ask(gateway, n) for n in (1, 2, 3)]
    await until(lambda: queued_by_level(scheduler) == {2: 3})
    calls += [ask(gateway, n, priority=1) for n in (4, 5, 6)]
    await until(lambda: queued_by_level(scheduler) == {1: 3, 2: 3})

    executor.release()

    assert await answers(calls) == list(range(7))
    assert executor.executed == [0, 4, 5, 6, 1, 2, 3]
    await cluster.settled()


@pytest.mark.parametrize("window_requests", [1, 4])
async def test_a_full_window_stops_reading_and_goes_on(cluster: Cluster, window_requests: int) -> None:
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher(window_requests=window_requests)
    gateway = await cluster.gateway()
    calls = []
    for n in range(60):
        calls.append(ask(gateway, n))
        if n % 5 == 0:  # so that they come in several entries
            await until_so(lambda n=n: pending_are(cluster, n + 1))
    owned = batcher.service.owned[MODEL]
    await until(lambda: not owned.windows.all_read)
    assert owned.scheduler.pending_count() < 60 - 16

    executor.release()

    assert await answers(calls) == list(range(60))
    assert sorted(executor.executed) == list(range(60))
    await cluster.settled()


@pytest.mark.parametrize("decoupled", [True, False])
async def test_a_stream_that_nobody_reads_any_more_is_given_up(cluster: Cluster, decoupled: bool) -> None:
    """What answers once is soon done and goes on."""
    policy = "model_transaction_policy { decoupled: true }" if decoupled else ""
    cluster.configure(DYNAMIC + policy)
    executor = await cluster.executor(gated=True)
    batcher = await cluster.batcher()
    await batcher.owns()
    await executor.tell(ProcessJoined("gateway", "gateway-0"))
    tensor = Tensor("x", DataType.INT32, (1, 1), b"\1\0\0\0")
    meta = request_meta(1, HASH, [tensor], (), {})
    record = pack_request(
        b"1" * 16, b"gateway-0", b"", meta, [tensor.data], rows=1, signature=1, level=0, accepted_ns=wall_ns()
    )
    await executor.log.accept(MODEL, 0, 0, [(b"1" * 16, len(record))], [b"r", record], Limits())
    await until(lambda: len(executor.held) == 1)

    await cluster.lose("gateway", "gateway-0")

    if decoupled:
        await until(lambda: executor.unwanted == [b"1" * 16])
        await until_so(lambda: pending_are(cluster, 0))
    await until(lambda: "gateway-0" in batcher.service._departed.endpoints)
    assert bool(executor.unwanted) is decoupled
    executor.release()
    await until_so(lambda: pending_are(cluster, 0))


async def test_a_reload_serves_on(cluster: Cluster) -> None:
    executor = await cluster.executor()
    await cluster.batcher()
    gateway = await cluster.gateway()
    calls = [ask(gateway, n) for n in range(20)]
    cluster.configure(ORDERED)
    await executor.load(cluster.config, content_hash="hash-2")
    calls += [ask(gateway, n) for n in range(20, 40)]
    await until(lambda: gateway._catalog.find(MODEL, -1).content_hash == "hash-2")
    calls += [ask(gateway, n) for n in range(40, 60)]

    assert await answers(calls) == list(range(60))
    await cluster.settled()


async def test_an_executor_with_older_content_answers_when_the_newer_one_is_lost(cluster: Cluster) -> None:
    older = await cluster.executor()
    await cluster.batcher()
    gateway = await cluster.gateway()
    newer = await cluster.executor(gated=True)
    await newer.load(cluster.config, content_hash="hash-2")
    await until(lambda: gateway._catalog.find(MODEL, -1).content_hash == "hash-2")
    calls = [ask(gateway, n) for n in range(4)]
    await until(lambda: len(newer.held) > 0)
    assert older.executed == []

    await cluster.lose("executor", newer.name)

    assert await answers(calls) == list(range(4))
    assert await answers([ask(gateway, 4)]) == [4]
    assert sorted(older.executed) == list(range(5))
    await cluster.settled()
