"""Durability levels against real servers: what ends the start, what a receipt waits for, how accepts share barriers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import log_servers as servers
import pytest

from charonia.errors import LogUnavailable, ResourceExhausted, StartupError, Unsupported
from charonia.eventlog.port import Limits
from charonia.eventlog.redis import RedisLog
from charonia.eventlog.redis import durability as levels
from charonia.facts.jobs import NewJob

pytestmark = pytest.mark.integration


FIELDS = [b"r", b"x" * 400]
PATIENCE_S = 20.0


@pytest.fixture
def start() -> Iterator[object]:
    """`start(**options)`: a server of the test's own."""
    with ExitStack() as stack:

        def start(**options: str) -> object:
            server = servers.LogServer(**options).start()
            stack.callback(server.stop)
            return server

        yield start


async def opened(url: str, durability: str = "memory") -> RedisLog:
    log = RedisLog(url, durability=durability)
    await log.open()
    return log


def new_job(number: int, key: bytes = b"") -> NewJob:
    return NewJob(number.to_bytes(16, "big"), 400, 1, 60, key=key, digest=b"d" * 16 if key else b"")


async def test_levels_a_server_cannot_promise_end_the_start_with_one_sentence(start) -> None:  # type: ignore[no-untyped-def]
    server = start(appendonly="no")
    for level in ("fsync", "replicated:1"):
        with pytest.raises(StartupError, match=rf"durability '{level}' .* keeps no append-only file"):
            await opened(server.url, level)
    server.ask("CONFIG", "SET", "appendonly", "yes")
    with pytest.raises(StartupError, match="'appendfsync always', not 'everysec'"):
        await opened(server.url, "fsync")
    server.ask("CONFIG", "SET", "appendfsync", "always")
    await (await opened(server.url, "fsync")).close()
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StartupError, match=r"may evict .*allkeys-lru"):
        await opened(server.url, "fsync")
    await (await opened(server.url)).close()
    with pytest.raises(StartupError, match="memory, fsync or replicated"):
        RedisLog(server.url, durability="often")


async def test_a_level_of_one_request_is_reached_or_refused_before_anything_is_written(start) -> None:  # type: ignore[no-untyped-def]
    server = start()
    log = await opened(server.url)
    with pytest.raises(Unsupported, match="durability 'fsync' cannot be reached"):
        await log.accept("m", 0, 0, [(b"a" * 16, 1)], FIELDS, Limits(), durability="fsync")
    assert await log.pending("m") == (0, 0)
    await log.close()

    server.ask("CONFIG", "SET", "appendfsync", "always")
    log = await opened(server.url)  # every connect asks the server what it is
    ticket = await log.accept_job("m", 0, 0, new_job(1), FIELDS, Limits(), durability="fsync")
    assert (ticket.created, ticket.durability) == (True, "fsync")
    assert (await log.accept_job("m", 0, 0, new_job(2), FIELDS, Limits())).durability == "memory"
    await log.close()


async def test_the_server_flushes_before_the_receipt(start) -> None:  # type: ignore[no-untyped-def]
    """What a receipt of level fsync stands for, seen from outside: the server's own count of flushes under way."""
    server = start(appendfsync="always")
    log = await opened(server.url, "fsync")
    for number in range(20):
        await log.accept_job("m", 0, 0, new_job(number), FIELDS, Limits())
        info = server.ask("INFO", "persistence")
        assert info["aof_pending_bio_fsync"] == 0
        assert info["aof_buffer_length"] == 0
    await log.close()


async def test_a_receipt_of_a_server_that_was_not_asked_is_none(start) -> None:  # type: ignore[no-untyped-def]
    """A failover between the look and the write may lead to a server that flushes every second only."""
    server = start(appendfsync="always")
    log = await opened(server.url, "fsync")
    writes = await log._durability.writes(None)
    await writes.reached()
    server.ask("CONFIG", "SET", "appendfsync", "everysec")
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await log.epoch()
                break
            except LogUnavailable:
                await asyncio.sleep(0.001)
    with pytest.raises(LogUnavailable, match="became another server"):
        await writes.reached()
    with pytest.raises(LogUnavailable, match="'fsync' cannot be reached"):
        await log.accept("m", 0, 0, [(b"a" * 16, 1)], FIELDS, Limits())
    assert await log.pending("m") == (0, 0)
    await log.close()


async def test_replicated_waits_for_replicas_and_says_so_when_they_do_not_answer(start, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(levels, "PATIENCE_MS", 20_000)
    primary = start()
    replica = start(replicaof=f"127.0.0.1 {primary.port}")
    servers.wait_until(lambda: servers.replicates(primary))
    log = await opened(primary.url, "replicated:1")
    ticket = await log.accept_job("m", 0, 0, new_job(1, key=b"k" * 16), FIELDS, Limits())
    assert (ticket.created, ticket.durability) == (True, "replicated:1")
    assert replica.ask("EXISTS", f"job:{{m}}:{new_job(1).id.hex()}") == 1
    record = await log.job("m", new_job(1).id)
    assert record is not None
    assert record.durability == "replicated:1"
    monkeypatch.setattr(
        levels, "PATIENCE_MS", 300
    )  # of what will be in vain: levels that are first asked for from here
    impatient = await opened(primary.url, "replicated:1")
    with pytest.raises(LogUnavailable, match="'replicated:2' was not reached"):
        await impatient.accept_job("m", 0, 0, new_job(9), FIELDS, Limits(), durability="replicated:2")
    record = await log.job("m", new_job(9).id)
    assert record is not None
    assert record.durability == "memory"  # it is there, and claims no more than is true

    os.kill(replica.pid, signal.SIGSTOP)
    outcomes = await asyncio.gather(
        impatient.accept("m", 0, 0, [(b"c" * 16, 1)], FIELDS, Limits()),
        impatient.accept_job("m", 0, 0, new_job(2, key=b"l" * 16), FIELDS, Limits()),
        # a known key promises no more than a new one
        impatient.accept_job("m", 0, 0, new_job(3, key=b"k" * 16), FIELDS, Limits()),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [LogUnavailable] * 3
    assert all("outcome is unknown" in str(outcome) for outcome in outcomes)
    assert (await log.pending("m"))[0] == 4, "what was not confirmed is written all the same"
    # level memory does not wait
    accepting = log.accept("m", 0, 0, [(b"e" * 16, 1)], FIELDS, Limits(), durability="memory")
    await asyncio.wait_for(accepting, PATIENCE_S)
    await impatient.close()

    os.kill(replica.pid, signal.SIGCONT)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                ticket = await log.accept_job("m", 0, 0, new_job(4, key=b"l" * 16), FIELDS, Limits())
                break
            except LogUnavailable:
                pass
    assert (ticket.created, ticket.id) == (False, new_job(2).id)
    await log.close()


async def test_accepts_in_flight_share_barriers(start) -> None:  # type: ignore[no-untyped-def]
    primary = start()
    start(replicaof=f"127.0.0.1 {primary.port}")
    servers.wait_until(lambda: servers.replicates(primary))
    log = await opened(primary.url, "replicated:1")

    async def client(number: int) -> None:
        for turn in range(8):
            await log.accept_job("m", 0, 0, new_job(number * 100 + turn), FIELDS, Limits())

    await asyncio.gather(*(client(number) for number in range(64)))
    (group,) = log._durability._groups.values()
    assert (await log.pending("m"))[0] == 512
    assert group.barriers <= 64, "each barrier is shared by all that came while another was under way"
    await log.close()


async def test_a_refused_accept_does_not_wait_for_a_level(start, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(levels, "PATIENCE_MS", 60_000)
    primary = start()
    log = await opened(primary.url)
    await log.accept("m", 0, 0, [(b"a" * 16, 1)], FIELDS, Limits())
    with pytest.raises(ResourceExhausted):
        async with asyncio.timeout(levels.PATIENCE_MS / 2000):
            await log.accept("m", 0, 0, [(b"b" * 16, 1)], FIELDS, Limits(requests=1), durability="replicated:1")
    await log.close()
