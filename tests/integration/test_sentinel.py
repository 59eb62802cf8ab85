"""A log of one primary and two replicas under three sentinels: found by name, followed over a failover, under load."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import log_servers as servers
import pytest
import redis
from free_ports import free_port

from charonia.errors import LogUnavailable, StartupError
from charonia.eventlog.port import Entry, Limits
from charonia.eventlog.redis import RedisLog
from charonia.eventlog.redis.server.address import parse_address
from charonia.eventlog.redis.server.sentinel import Primary
from charonia.facts.jobs import NewJob

pytestmark = pytest.mark.integration


PATIENCE_S = 90.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    with ExitStack() as stack:
        yield servers.Cluster(stack)


def patient(stack: ExitStack) -> Any:
    """One whose sentinels take no server for lost that is slow to answer on a busy machine."""
    return servers.Cluster(stack, down_after_ms=60_000)


@pytest.fixture(scope="module")
def calm() -> Iterator[Any]:
    """A patient one, left as it was."""
    with ExitStack() as stack:
        yield patient(stack)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_no_job_with_a_receipt_of_a_replica_is_lost_by_a_failover(cluster: Any, number: signal.Signals) -> None:
    """A killed primary ends its connections; one that hangs ends nothing, and comes back as if it were still one."""
    log = RedisLog(cluster.url, durability="replicated:1")
    await log.open()
    epoch = await log.epoch()
    numbers = itertools.count()
    acknowledged: list[bytes] = []
    followed: list[bytes] = []
    unknown = 0
    writing = True

    def on_entries(_: bytes, entries: list[Entry]) -> None:
        followed.extend(bytes(entry.fields[1]) for entry in entries)

    reader = log.reader()
    reader.start(on_entries)
    reader.add(b"q:{m}:0:0")

    async def client() -> None:
        nonlocal unknown
        while writing:
            job = NewJob(next(numbers).to_bytes(16, "big"), 400, 1, 600)
            try:
                ticket = await log.accept_job("m", 0, 0, job, [b"r", job.id], Limits())
                assert ticket.durability == "replicated:1"
                acknowledged.append(job.id)
            except LogUnavailable:
                unknown += 1
                await asyncio.sleep(0.01)

    async def until_more(count: int) -> None:
        reached = len(acknowledged) + count
        async with asyncio.timeout(PATIENCE_S):
            while len(acknowledged) < reached:
                await asyncio.sleep(0.01)

    clients = [asyncio.ensure_future(client()) for _ in range(8)]
    await until_more(200)
    os.kill(cluster.primary.pid, number)
    await until_more(200)
    if number == signal.SIGSTOP:
        os.kill(cluster.primary.pid, signal.SIGCONT)
        await until_more(200)
    writing = False
    await asyncio.gather(*clients)

    async with asyncio.timeout(PATIENCE_S):
        while cluster.named() == cluster.primary.port:  # the log asks another sentinel, which may hear of it earlier
            await asyncio.sleep(0.01)
    assert unknown, "somebody was in flight"
    missing = [job_id for job_id in acknowledged if await log.job("m", job_id) is None]
    assert missing == []
    async with asyncio.timeout(PATIENCE_S):
        while not set(acknowledged) <= set(followed):
            await asyncio.sleep(0.01)
    assert await log.epoch() == epoch
    await reader.close()
    await log.close()


async def test_an_old_primary_without_replicas_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split brain: who still reaches the old primary gets no receipt for what will be lost."""
    from charonia.eventlog.redis import durability

    with ExitStack() as stack:
        cluster = patient(stack)
        log = RedisLog(cluster.primary.url, durability="replicated:1")
        await log.open()
        await log.accept("m", 0, 0, [(b"a" * 16, 1)], [b"r", b"x"], Limits())
        await log.close()
        monkeypatch.setattr(durability, "PATIENCE_MS", 500)  # of what will be in vain
        log = RedisLog(cluster.primary.url, durability="replicated:1")
        await log.open()
        for replica in cluster.replicas:
            replica.ask("REPLICAOF", "NO", "ONE")

        with pytest.raises(LogUnavailable, match="was not reached"):
            await log.accept("m", 0, 0, [(b"b" * 16, 1)], [b"r", b"x"], Limits())
        await log.close()


async def test_who_asks_beside_others_leaves_no_connection_behind(calm: Any) -> None:
    """Each asks over connections of its own, which another's end neither closes nor leaves open."""
    primary = Primary(parse_address(calm.url))
    before = _connections(calm)
    found = await asyncio.gather(*(_find_later(primary, turns) for turns in range(40)))
    assert set(found) == {("127.0.0.1", calm.primary.port)}
    asking = [asyncio.ensure_future(primary.find()) for _ in range(20)]
    for turns, one in enumerate(asking):
        for _ in range(turns):
            await asyncio.sleep(0)
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        while _connections(calm) != before:
            await asyncio.sleep(0.02)


async def test_the_watch_ends_though_a_connection_does_not_close(calm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over TLS on a busy machine: what redis-py raises then takes the place of the cancellation."""
    from redis.asyncio.sentinel import Sentinel

    asked, closed = asyncio.Event(), asyncio.Event()
    close = Sentinel.aclose

    async def does_not_close(self: Any) -> None:
        await close(self)
        closed.set()
        raise redis.TimeoutError("Timed out closing connection after 1.0")

    async def asks(self: Any, name: str) -> Any:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Sentinel, "aclose", does_not_close)
    primary = Primary(parse_address(calm.url))
    assert await primary.find() == ("127.0.0.1", calm.primary.port)
    closed.clear()
    monkeypatch.setattr(Sentinel, "discover_master", asks)
    moved = [].append
    async with asyncio.timeout(PATIENCE_S):
        primary.watch(moved)
        await asked.wait()
        await primary.unwatch(moved)
    assert closed.is_set()


async def _find_later(primary: Primary, turns: int) -> tuple[str, int]:
    for _ in range(turns):
        await asyncio.sleep(0)
    return await primary.find()


def _connections(cluster: Any) -> list[int]:
    """How many clients each sentinel has that are no sentinels and no servers."""
    counts = []
    for sentinel in cluster.sentinels:
        with sentinel.client() as client:
            names = [one["name"] for one in client.client_list()]
        counts.append(sum(not name.startswith("sentinel-") for name in names))
    return counts


async def test_sentinels_that_are_slow_to_answer_the_first_time(calm: Any) -> None:
    """Who begins ends with an error without them; later nobody waits for them as long."""
    for sentinel in calm.sentinels:
        sentinel.kill(signal.SIGSTOP)

    def go_on() -> None:
        for sentinel in calm.sentinels:
            sentinel.kill(signal.SIGCONT)

    asyncio.get_running_loop().call_later(2.0, go_on)
    log = RedisLog(calm.url)
    try:
        await log.open()
    finally:
        go_on()
    await log.append(b"ctl", [b"n", b"1"])
    await log.close()


async def test_a_log_that_no_sentinel_knows_is_one_sentence(calm: Any) -> None:
    with pytest.raises(StartupError, match="cannot be reached: no sentinel names a primary of 'other'"):
        await RedisLog(calm.url.replace("/log", "/other")).open()
    with pytest.raises(StartupError, match="no sentinel names a primary of 'log'"):
        await RedisLog(f"redis+sentinel://127.0.0.1:{free_port()}/log").open()


@pytest.mark.parametrize(
    ("url", "sentinels", "rest"),
    [
        ("redis+sentinel://a/log", (("a", 26379),), ("log", 0, "", "")),
        ("redis+sentinel://a:1,b:2,[::1]:3/log/4", (("a", 1), ("b", 2), ("::1", 3)), ("log", 4, "", "")),
        ("redis+sentinel://u:p%40x@a:1,b/log?sentinel_password=s", (("a", 1), ("b", 26379)), ("log", 0, "u", "p@x")),
    ],
)
def test_urls(url: str, sentinels: object, rest: object) -> None:
    address = parse_address(url)
    assert address.sentinels == sentinels
    assert (address.service, address.database, address.username, address.password) == rest
    assert "p%40x" not in address.text


@pytest.mark.parametrize("url", ["redis+sentinel://a:1", "redis+sentinel:///log", "redis+sentinel://a:x/log"])
def test_urls_that_say_too_little_are_refused(url: str) -> None:
    with pytest.raises(StartupError, match=r"must read redis\+sentinel|cannot be read"):
        parse_address(url)
