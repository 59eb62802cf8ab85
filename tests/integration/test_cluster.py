"""The log on a real Redis Cluster: slots that move under those who write and read, and a primary that is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from charonia import keys
from charonia.errors import CharoniaError, LogUnavailable, StartupError
from charonia.eventlog.port import EndedWave, Entry, Limits, Reply
from charonia.eventlog.redis import ClusterLog, open_log
from charonia.eventlog.redis.server.topology import slot_of

pytestmark = pytest.mark.integration

PATIENCE_S = 90.0
MODEL = "m"


@pytest.fixture
async def log(fresh_cluster_url: str) -> AsyncIterator[ClusterLog]:
    opened = open_log(fresh_cluster_url)
    assert isinstance(opened, ClusterLog)
    await opened.open()
    yield opened
    await opened.close()


def test_slots_are_those_of_the_servers(redis_cluster: Any) -> None:
    for key in (b"ctl", b"u:{m}", b"{}", b"a{}b", b"{a}{b}", b"x{{y}}", b"}{", b"", b"q:{a b}:0:1"):
        assert slot_of(key) == int(redis_cluster.servers[0].ask("CLUSTER", "KEYSLOT", key.decode()))


async def test_streams_are_followed_wherever_their_slots_go(redis_cluster: Any, log: ClusterLog) -> None:
    streams = {b"ctl": False, b"x:executor": True, keys.facts(MODEL): True}
    got: dict[bytes, list[bytes]] = {stream: [] for stream in streams}
    states: list[bool] = []
    changed = asyncio.Event()

    def on_entries(stream: bytes, entries: list[Entry]) -> None:
        got[stream] += [bytes(entry.fields[1]) for entry in entries]
        changed.set()

    reader = log.reader()
    reader.start(on_entries, states.append)
    for stream, consume in streams.items():
        reader.add(stream, consume=consume)
    moving = asyncio.create_task(asyncio.to_thread(_move_about, redis_cluster, list(streams)))
    written = 0
    while not moving.done():
        await asyncio.gather(*(log.append(stream, [b"n", b"%d" % written]) for stream in streams))
        written += 1
    await moving
    async with asyncio.timeout(PATIENCE_S):
        while any(len(found) < written for found in got.values()):
            changed.clear()
            await changed.wait()
        while any([await log.range(stream) for stream, consume in streams.items() if consume]):
            await asyncio.sleep(0.001)
    assert got == {stream: [b"%d" % n for n in range(written)] for stream in streams}
    assert states == [True], "a slot that moves is no reason to say that the log is lost"
    await reader.close()


async def test_counts_stay_exact_while_a_model_moves(redis_cluster: Any, log: ClusterLog) -> None:
    moving = asyncio.create_task(asyncio.to_thread(_move_about, redis_cluster, [keys.counters(MODEL), b"r:gateway"]))
    number = 0
    while not moving.done():
        ids = [b"%015d" % number + bytes((last,)) for last in range(4)]
        number += 1
        await log.accept(MODEL, 0, 0, [(one, 10) for one in ids], [b"r", b"four"], Limits(requests=4))
        assert await log.pending(MODEL) == (4, 40)
        won = await log.settle(MODEL, [(one, 1) for one in ids], None, [Reply(b"r:gateway", [b"r", ids[0]])])
        assert won == [True] * 4
    await moving
    assert await log.pending(MODEL) == (0, 0)
    assert await log.unsettled_ids(MODEL) == []
    answered = [bytes(entry.fields[1]) for entry in await log.range(b"r:gateway", count=100_000)]
    assert answered == [b"%015d\0" % n for n in range(number)]


@pytest.mark.parametrize("gone", [0, 1])
async def test_waves_are_counted_whichever_of_their_streams_has_moved(
    redis_cluster: Any, log: ClusterLog, gone: int
) -> None:
    """The scripts of the server that a slot leaves fail at the first key that is not there any more."""
    streams = [keys.queue(MODEL, level, 0) for level in range(2)]
    statistics = keys.statistics(MODEL, 1, "hash")
    await log.add_statistics(statistics, {"success_count": 10})
    waves = [EndedWave(stream, await _told(partial(log.waves.send, stream, [b"wave"])), 1, 1) for stream in streams]
    end = partial(log.waves.end, waves, (statistics, {"success_count": 2}), ())
    slot = slot_of(statistics)
    to = next(server for server in redis_cluster.servers if server is not redis_cluster.holder(slot))
    redis_cluster.begin_move(slot, to, streams[gone].decode())
    assert isinstance(await _told(end), CharoniaError)
    await asyncio.to_thread(redis_cluster.move, slot, to)
    assert list(await _told(end)) == [True, True]
    assert await log.statistics(statistics) == {"success_count": 12}


async def _told(call: Callable[[Callable[[Any], None]], bool]) -> Any:
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    assert call(told.set_result)
    return await told


async def test_a_lost_primary_is_replaced_by_its_replica(redis_cluster: Any, fresh_cluster_url: str) -> None:
    cluster = type(redis_cluster)()
    replica = type(cluster.servers[0])()
    try:
        await asyncio.to_thread(cluster.start)
        primary = cluster.holder(slot_of(keys.CONTROL))
        await asyncio.to_thread(cluster.replicate, primary, replica)
        async with asyncio.timeout(PATIENCE_S):
            log = open_log(cluster.url)
            await log.open()
            await log.append(keys.CONTROL, [b"n", b"before"])
            written = primary.ask("INFO", "replication")["master_repl_offset"]
            while replica.ask("INFO", "replication")["slave_repl_offset"] < written:
                await asyncio.sleep(0.01)
            primary.kill()
            while True:
                try:
                    await log.append(keys.CONTROL, [b"n", b"after"])
                    break
                except LogUnavailable:
                    await asyncio.sleep(0.02)
            found = [bytes(entry.fields[1]) for entry in await log.range(keys.CONTROL)]
        assert (found[0], found[-1]) == (b"before", b"after")
        await log.close()
    finally:
        cluster.stop()
        replica.stop()


async def test_servers_that_are_slow_to_answer_the_first_time(redis_cluster: Any, fresh_cluster_url: str) -> None:
    """Who begins waits for them as long as for a single server."""
    for server in redis_cluster.servers:
        server.kill(signal.SIGSTOP)

    def go_on() -> None:
        for server in redis_cluster.servers:
            server.kill(signal.SIGCONT)

    asyncio.get_running_loop().call_later(2.0, go_on)
    log = open_log(fresh_cluster_url)
    try:
        await log.open()
    finally:
        go_on()
    await log.append(b"ctl", [b"n", b"1"])
    await log.close()


async def test_a_url_that_names_no_cluster(fresh_cluster_url: str) -> None:
    with pytest.raises(StartupError, match="names 'one'"):
        open_log("redis+cluster://localhost:6379/one")
    with pytest.raises(StartupError, match=r"must read redis\+cluster://host:port"):
        open_log("redis+cluster:///")
    nobody = open_log("redis+cluster://127.0.0.1:1")
    with pytest.raises(StartupError, match="cannot be reached: no server names its slots"):
        await nobody.open()


def _move_about(cluster: Any, names: list[bytes]) -> None:
    for _ in range(3):
        for name in names:
            slot = slot_of(name)
            at = cluster.servers.index(cluster.holder(slot))
            cluster.move(slot, cluster.servers[(at + 1) % len(cluster.servers)])
