"""Waves on a server that is full: nothing new is taken, and what was accepted ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from own_server import PATIENCE_S, admin, log_on, own_server

from charonia import keys
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.port import EndedWave, Limits, Reply
from charonia.eventlog.redis import RedisLog

pytestmark = pytest.mark.integration
QUEUE = keys.queue("m", 0, 0)


async def send(log: RedisLog) -> bytes | CharoniaError:
    told: asyncio.Future[bytes | CharoniaError] = asyncio.get_running_loop().create_future()
    assert log.waves.send(QUEUE, [b"wave"], told.set_result)
    return await asyncio.wait_for(told, PATIENCE_S)


async def test_a_full_server_takes_no_wave_and_lets_those_it_has_end() -> None:
    with own_server() as server:
        async with log_on(server) as log:
            ended, burst = await send(log), await send(log)
            assert isinstance(ended, bytes)
            assert isinstance(burst, bytes)
            await admin(server, "CONFIG", "SET", "maxmemory", "1")

            refused = await send(log)
            assert isinstance(refused, LogUnavailable)
            assert "OOM" in str(refused)
            told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            replies = [Reply(keys.replies("g"), [b"w", b"reply"]), Reply(keys.replies("h"), [b"w", b"other"])]
            counted = (keys.statistics("m", 1, "hash"), {"success_count": 1})
            assert log.waves.end([EndedWave(QUEUE, ended)], counted, replies, told.set_result)
            assert list(await asyncio.wait_for(told, PATIENCE_S)) == [True]
            assert await log.statistics(counted[0]) == {"success_count": 1}
            for endpoint, reply in (("g", b"reply"), ("h", b"other")):
                (entry,) = await log.range(keys.replies(endpoint))
                assert bytes(entry.fields[1]) == reply, "it is answered though the server is full"
            assert await log.waves.burst("m", QUEUE, burst, [(b"a" * 16, 1)], [b"r", b"x"]) != b""
            assert await log.pending("m") == (1, 1)
            assert await log.waves.lease("m", "g", 1, 1, Limits())
            assert await log.settle("m", [(b"a" * 16, 0)], None, []) == [True]


async def test_a_wave_that_the_server_refuses_is_told_as_an_error() -> None:
    with own_server() as server:
        async with log_on(server) as log:
            await admin(server, "SET", QUEUE.decode(), "no stream")
            assert isinstance(await send(log), LogUnavailable)
            await admin(server, "DEL", QUEUE.decode())
            assert isinstance(await send(log), bytes)


async def test_waves_of_one_flush_arrive_together() -> None:
    with own_server() as server:
        async with log_on(server) as log:
            other = keys.queue("m", 1, 0)
            came: list[tuple[bytes, int]] = []
            reader = log.reader()
            for stream in (QUEUE, other):
                reader.add(stream)
            reader.start(lambda stream, entries: came.append((stream, len(entries))))
            await send(log)
            while not came:
                await asyncio.sleep(0.005)
            came.clear()
            told: list[bytes | CharoniaError] = []
            for stream in (QUEUE, other, QUEUE):
                assert log.waves.send(stream, [b"wave"], told.append)
            log.waves.flush()
            async with asyncio.timeout(PATIENCE_S):
                while len(told) < 3 or sum(count for _, count in came) < 3:
                    await asyncio.sleep(0.005)
            assert sorted(came) == [(QUEUE, 2), (other, 1)]
            assert [entry.id for entry in await log.range(other)] == [told[1]]
            await reader.close()


async def test_waves_of_one_flush_are_refused_together() -> None:
    with own_server() as server:
        async with log_on(server) as log:
            await admin(server, "CONFIG", "SET", "maxmemory", "1")
            told = await asyncio.wait_for(asyncio.gather(send(log), send(log)), PATIENCE_S)
            assert all(isinstance(error, LogUnavailable) and "OOM" in str(error) for error in told)
            await admin(server, "CONFIG", "SET", "maxmemory", "0")
            assert await log.range(QUEUE) == []
            await admin(server, "SET", keys.queue("x", 0, 0).decode(), "no stream")
            results: list[bytes | CharoniaError] = []
            for stream in (QUEUE, keys.queue("x", 0, 0)):
                assert log.waves.send(stream, [b"wave"], results.append)
            async with asyncio.timeout(PATIENCE_S):
                while len(results) < 2:
                    await asyncio.sleep(0.005)
            assert isinstance(results[0], bytes)
            assert isinstance(results[1], LogUnavailable), "each has its own outcome"


async def test_waves_of_one_flush_are_accepted_without_transactions() -> None:
    with own_server() as server:
        await admin(server, "ACL", "SETUSER", "default", "-multi", "-exec")
        async with log_on(server) as log:
            told = await asyncio.wait_for(asyncio.gather(send(log), send(log)), PATIENCE_S)
            assert told == [entry.id for entry in await log.range(QUEUE)]
