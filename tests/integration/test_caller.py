"""Calls from a process that is no gateway: into a model's queue, through its batcher, to an executor and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from batching_cluster import MODEL, Cluster, request, until, until_so

from charonia import keys
from charonia.calls.caller import MAX_DEPTH, NOBODY, Caller, Origin
from charonia.clock import wall_ns
from charonia.errors import (
    Cancelled,
    CharoniaError,
    DeadlineExceeded,
    InvalidArgument,
    LogUnavailable,
    NotFound,
    ResourceExhausted,
)
from charonia.eventlog.port import Entry, Limits
from charonia.facts.events import ProcessJoined
from charonia.wire import Lineage, ResponseRecord

ME = "executor-that-calls"


class World(Cluster):
    """A cluster in memory whose batcher owns the model, with one caller."""

    async def begin(self, **bounds: object) -> None:
        self.configure()
        self.batching = await self.batcher(prefetch=0)
        self.echo = await self.executor("executor-1")
        await self.batching.owns()
        log = await self.log()
        await self.batching.control.announce(ProcessJoined("executor", ME))
        self.caller = Caller(log, self.batching.control.catalog, ME, **bounds)  # type: ignore[arg-type]
        await self.caller.start()

    async def unsettled(self) -> tuple[int, int]:
        return await (await self.log()).pending(MODEL)

    async def end(self) -> None:
        await self.caller.close()
        await self.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    found = World("")
    await found.begin()
    yield found
    await found.end()


def number(answer: ResponseRecord | None) -> int:
    assert answer is not None
    assert answer.error is None
    return int(answer.outputs[0].array()[0, 0])


async def test_calls_are_answered(world: World) -> None:
    answers = await asyncio.gather(*(world.caller.infer(request(value)) for value in range(40)))
    assert [number(answer) for answer in answers] == list(range(40))
    await until_so(_nothing_left(world))
    assert (world.caller.open_calls, world.caller.requester.held.size_bytes) == (0, 0)


async def test_what_cannot_be_asked_enters_no_log(world: World) -> None:
    with pytest.raises(NotFound):
        world.caller.open(request(1, deadline_ns=0).__class__("nobody", -1, []))
    bad = request(1)
    bad.inputs[0].name = "z"
    with pytest.raises(InvalidArgument, match="unexpected inference input 'z'"):
        world.caller.open(bad)
    with pytest.raises(DeadlineExceeded):
        world.caller.open(request(1, deadline_ns=1))
    deep = Lineage(tuple((MODEL, bytes([n]) * 16) for n in range(MAX_DEPTH + 1)))
    with pytest.raises(InvalidArgument, match="more than 32 models wait for one another: echo -> echo"):
        world.caller.open(request(1), Origin(deep))
    assert await world.unsettled() == (0, 0)


async def test_a_call_given_up_is_taken_out_of_the_queue(world: World) -> None:
    world.echo.open = False
    first = world.caller.open(request(1))
    await until(lambda: len(world.echo.held) == 1)
    second, later = world.caller.open(request(2)), world.caller.open(request(3))
    await until(lambda: later.accepted)
    later.cancel()
    with pytest.raises(Cancelled):
        await later.next()
    world.echo.release()
    assert {number(await first.next()), number(await second.next())} == {1, 2}
    await until_so(_nothing_left(world))
    assert 3 not in world.echo.executed


async def test_a_call_that_is_read_twice_while_it_runs_is_still_known_as_a_call(world: World) -> None:
    """The search for deadlocks asks for the calls, and what it forgot it never knew again."""
    world.echo.open = False
    call = world.caller.open(request(1), Origin(Lineage((("a", bytes(16)),))))
    await until(lambda: len(world.echo.held) == 1)
    owned, log = world.batching.service.owned[MODEL], await world.log()
    (stream,) = owned.windows.lanes
    (entry,) = await log.range(stream)
    await log.append(stream, entry.fields)
    await until(lambda: owned.windows.unsettled == 2)

    assert [one.id for one in owned.unsettled_calls()] == [call.id]

    world.echo.release()
    assert number(await call.next()) == 1
    await until_so(_nothing_left(world))
    assert owned.unsettled_calls() == []


async def test_a_call_that_its_scheduler_has_yet_to_see_is_not_forgotten(world: World) -> None:
    """Where a model has several queues, requests of one tick are seen together at its end."""
    owned, log = world.batching.service.owned[MODEL], await world.log()
    owned.windows.open(keys.queue(MODEL, 1, 0), 0)
    owned.windows.open(keys.queue(MODEL, 0, 0), 0)
    read: list[list[bytes]] = []
    take = owned.on_entries

    def read_and_check(stream: bytes, entries: list[Entry]) -> None:
        take(stream, entries)
        read.append([one.id for one in owned.unsettled_calls()])

    stream = keys.queue(MODEL, 0, 0)
    owned._reader.remove(stream)
    owned._reader.add(stream, owned.windows.lanes[stream].after, take=read_and_check)
    world.echo.open = False
    call = world.caller.open(request(1), Origin(Lineage((("a", bytes(16)),))))
    await until(lambda: len(world.echo.held) == 1)
    assert read == [[call.id]]
    assert len(await log.range(stream)) == 1
    world.echo.release()
    assert number(await call.next()) == 1


async def test_a_deadline_ends_a_call_that_waits(world: World) -> None:
    world.echo.open = False
    running = world.caller.open(request(1))
    await until(lambda: len(world.echo.held) == 1)
    answer = await world.caller.infer(request(2, deadline_ns=wall_ns() + 1_500_000_000))
    assert isinstance(answer.error, DeadlineExceeded)
    world.echo.release()
    assert number(await running.next()) == 1


async def test_the_lineage_and_the_tenant_travel_with_a_call(world: World) -> None:
    world.echo.open = False
    lineage = Lineage((("a", bytes(16)), ("b", bytes(15) + b"1")), "tenant-7")
    call = world.caller.open(request(1), Origin(lineage, journalled=True))
    await until(lambda: len(world.echo.held) == 1)
    (record,) = world.echo.held[0].records
    assert (record.lineage, record.endpoint, record.journalled, record.is_job) == (lineage, ME, True, False)
    log = await world.log()
    assert (await log.pending_of_tenants(MODEL, ["tenant-7"]))[0][0] == 1
    assert (0, keys.lane_of("tenant-7")) in await log.lanes(MODEL)
    world.echo.release()
    assert number(await call.next()) == 1


async def test_calls_of_a_process_that_is_gone_are_not_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they had queued is dropped, and the answers to what runs are swept."""
    monkeypatch.setattr("batcher.housekeeping.departed_endpoints.SWEEP_S", 0.02)
    world.echo.open = False
    world.caller.open(request(1))
    await until(lambda: len(world.echo.held) == 1)
    for value in (2, 3, 4):
        world.caller.open(request(value))
    log = await world.log()
    await until_so(lambda: _pending_is(world, 4))
    await world.caller.requester._reader.close()  # as by SIGKILL: no process reads the answers any more
    await world.lose("executor", ME)
    await until_so(lambda: _pending_is(world, 1))
    world.echo.release()
    await until_so(_nothing_left(world))
    assert world.echo.executed == [1]

    async def swept() -> bool:
        return await log.range(keys.replies(ME)) == []

    await until_so(swept)


async def test_a_call_that_the_log_lost_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.calls.requester._RECHECK_S", 0.02)
    world.echo.open = False
    call = world.caller.open(request(1))
    await until(lambda: len(world.echo.held) == 1)
    await world.echo.settle(world.echo.held[0], answer=False)
    with pytest.raises(LogUnavailable, match="its outcome is unknown"):
        await asyncio.wait_for(call.next(), 20)


async def test_calls_are_bounded() -> None:
    world = World("")
    await world.begin(limits=Limits(requests=2), max_held_bytes=12)
    try:
        world.echo.open = False
        calls = [world.caller.open(request(value)) for value in (1, 2)]
        await until(lambda: all(call.accepted for call in calls))
        third = world.caller.open(request(3))
        with pytest.raises(ResourceExhausted):
            await third.next()
        world.caller.open(request(4))
        with pytest.raises(ResourceExhausted, match="this process holds 12 bytes of its models' calls"):
            world.caller.open(request(5))
    finally:
        await world.end()


async def test_who_closes_leaves_nothing(world: World) -> None:
    world.echo.open = False
    world.caller.open(request(1), NOBODY)
    waiting = world.caller.open(request(2))
    await until(lambda: len(world.echo.held) == 1)
    await world.caller.close()
    with pytest.raises(CharoniaError, match="Server exiting"):
        await waiting.next()
    world.echo.release()
    await until_so(lambda: _pending_is(world, 0))


async def _pending_is(world: World, count: int) -> bool:
    return (await world.unsettled())[0] == count


def _nothing_left(world: World):  # type: ignore[no-untyped-def]
    async def empty() -> bool:
        log = await world.log()
        lanes = [keys.queue(MODEL, level, lane) for level, lane in await log.lanes(MODEL)]
        left = [await log.range(stream) for stream in (*lanes, keys.facts(MODEL))]
        return not any(left) and await world.unsettled() == (0, 0)

    return empty
