"""Another log under the same address: flushed, exchanged or rewound; and a log that is full."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from own_server import admin

from charonia import keys
from charonia.errors import Cancelled, LogUnavailable
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.embedded import PrivateServer
from charonia.eventlog.membership import Membership
from charonia.eventlog.port import Entry, Limits, Reply
from charonia.eventlog.redis import RedisLog
from charonia.eventlog.redis.durability import Server
from charonia.eventlog.redis.server import hot_connection as connection
from charonia.facts.events import FIELD_FACT, ProcessJoined, RepositoryScanned, pack_fact, unpack_fact

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
FIELDS = [b"r", b"x"]


def ask(server: PrivateServer, *words: str) -> object:
    with redis.Redis.from_url(server.url) as client:
        return client.execute_command(*words)  # type: ignore[no-untyped-call]


def exchange(server: PrivateServer, change: Callable[[Path], None]) -> None:
    """Kill the server, change its append-only files, and start it again.

    What it has answered to is in the files first: it postpones writes while a sync is under way.
    """
    with redis.Redis.from_url(server.url) as client:
        while client.info("persistence")["aof_buffer_length"]:
            time.sleep(0.001)
    os.kill(server.pid, signal.SIGKILL)
    while server.poll() is None:
        time.sleep(0.001)
    change(server.state_dir / "appendonlydir")
    server.start()
    server.wait_ready()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def epoch_of(log: RedisLog) -> str:
    """Once the log is there again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await log.epoch()
            except LogUnavailable:
                await asyncio.sleep(0.001)


async def test_an_epoch_lasts_as_long_as_the_contents(server: PrivateServer, log: RedisLog) -> None:
    first, second = await asyncio.gather(log.epoch(), log.epoch())
    other = RedisLog(server.url)
    await other.open()
    assert first == second == await other.epoch()

    exchange(server, lambda files: None)
    assert await epoch_of(log) == first, "a restart alone changes nothing"
    ask(server, "FLUSHALL")
    flushed = await log.epoch()
    assert flushed != first
    assert await epoch_of(other) == flushed, "the first who asks makes it"
    exchange(server, shutil.rmtree)
    assert await epoch_of(log) not in (first, flushed)
    await other.close()


async def test_a_log_that_lost_what_this_process_said_is_another_one(server: PrivateServer, log: RedisLog) -> None:
    """As after a failover to a replica that lagged; who had said nothing lately is not concerned."""
    other = RedisLog(server.url)
    await other.open()
    for one in (log, other):
        await one.append(keys.CONTROL, [FIELD_FACT, pack_fact(ProcessJoined("executor", "e"))])
    before = await log.epoch()
    copy = server.state_dir / "copy"
    exchange(server, lambda files: shutil.copytree(files, copy) and None)
    assert await epoch_of(log) == before
    await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(ProcessJoined("executor", "lost"))])

    def rewind(files: Path) -> None:
        shutil.rmtree(files)
        copy.rename(files)

    exchange(server, rewind)
    assert await epoch_of(log) != before
    assert await epoch_of(log) == await epoch_of(log)
    assert await epoch_of(other) == before
    await other.close()


async def test_a_fact_that_was_deleted_as_needless_is_not_missed(server: PrivateServer, log: RedisLog) -> None:
    needless = await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(ProcessJoined("executor", "e"))])
    before = await log.epoch()
    await log.delete_entries(keys.CONTROL, [needless])
    exchange(server, lambda files: None)
    assert await epoch_of(log) == before
    # and what it says from then on is held against the log as ever
    copy = server.state_dir / "copy"
    exchange(server, lambda files: shutil.copytree(files, copy) and None)
    assert await epoch_of(log) == before
    await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(ProcessJoined("executor", "lost"))])

    def rewind(files: Path) -> None:
        shutil.rmtree(files)
        copy.rename(files)

    exchange(server, rewind)
    assert await epoch_of(log) != before


async def test_a_token_of_before_a_flush_is_worth_nothing_after_it(server: PrivateServer, log: RedisLog) -> None:
    """Somebody may sleep through a flush, wake up, and still believe that a model is his."""
    before = await log.take_ownership("m", "sleeper", "")
    ask(server, "FLUSHALL")
    ask(server, "HSET", "n:{m}", "token", str(before + 5))  # as a second later
    assert await log.take_ownership("m", "other", "") != before
    with pytest.raises(Cancelled):
        await log.begin_attempt("m", before, [b"a" * 16], 1)
    ask(server, "DEL", "n:{m}")
    assert await log.take_ownership("m", "other", "") > time.time() - 60


async def test_members_say_again_what_a_flush_took(server: PrivateServer, log: RedisLog) -> None:
    member = Membership(log, "executor", "e", interval_ms=20)
    forgotten: list[int] = []
    scan = RepositoryScanned("e", ("m",), "none", ready=True)

    async def say_again() -> None:
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(scan)])

    member.on_new_epoch.append(lambda: forgotten.append(member.epoch_changes))
    member.say_again.append(say_again)
    await member.start()
    ask(server, "FLUSHALL")

    async with asyncio.timeout(PATIENCE_S):
        while len(entries := await log.range(keys.CONTROL)) < 2:
            await asyncio.sleep(0.001)
    joined, said = (unpack_fact(entry.fields[1]) for entry in entries)
    assert isinstance(joined, ProcessJoined)
    assert said == scan
    assert forgotten == [1]
    assert await log.alive("executor", ["e"]) == [True]
    await member.leave()


async def test_a_reader_follows_a_stream_that_was_rewound(server: PrivateServer, log: RedisLog) -> None:
    """Its next entries may have smaller ids than those it has read (another clock): they are read all the same."""
    got: list[bytes] = []
    states: list[bool] = []

    def on_entries(_: bytes, entries: list[Entry]) -> None:
        got.extend(bytes(entry.fields[1]) for entry in entries)

    reader = log.reader()
    reader.start(on_entries, states.append)
    reader.add(b"kept")
    reader.add(b"gone", consume=True)
    ask(server, "XADD", "kept", "5-0", "r", "old")
    copy = server.state_dir / "copy"
    await until(lambda: got == [b"old"])
    exchange(server, lambda files: shutil.copytree(files, copy) and None)
    await until(lambda: states.count(True) == 2)
    ask(server, "XADD", "kept", "9999999999999-0", "r", "lost")
    ask(server, "XADD", "gone", "9999999999999-0", "r", "lost too")
    await until(lambda: len(got) == 3)

    def rewind(files: Path) -> None:
        shutil.rmtree(files)
        copy.rename(files)

    exchange(server, rewind)
    await until(lambda: states.count(True) == 3)
    ask(server, "XADD", "kept", "6-0", "r", "new")
    ask(server, "XADD", "gone", "1-0", "r", "new too")

    await until(lambda: len(got) == 5)
    assert sorted(got[3:]) == [b"new", b"new too"]
    await reader.close()


async def test_a_log_that_hangs_is_lost_after_a_while_and_found_again(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends no connection: those that only wait for it to speak notice nothing."""
    monkeypatch.setattr(connection, "_STALL_TIMEOUT_S", 1.5)
    monkeypatch.setattr(connection, "_CONNECT_TIMEOUT_S", 1.5)
    log = RedisLog(server.url)
    await log.open()
    control = ControlPlane(log, check_interval_ms=20, incarnation="g")
    states: list[bool] = []
    control.on_log_state.append(states.append)
    await control.start()
    assert control.log_up
    os.kill(server.pid, signal.SIGSTOP)
    await until(lambda: not control.log_up)
    with pytest.raises(LogUnavailable):
        await log.append(b"s", FIELDS)
    os.kill(server.pid, signal.SIGCONT)
    await until(lambda: control.log_up)
    await log.append(b"s", FIELDS)
    # again and again, if this process is held up for as long as the log may hang
    assert states == [False, True] * (len(states) // 2)
    assert states
    await control.close()
    await log.close()


async def test_a_full_log_takes_nothing_new_and_ends_everything_old(server: PrivateServer, log: RedisLog) -> None:
    await log.accept("m", 0, 0, [(b"a" * 16, 1), (b"b" * 16, 1)], FIELDS, Limits())
    token = await log.take_ownership("m", "o", "")
    await log.append(keys.CONTROL, [FIELD_FACT, b"before"])
    ask(server, "CONFIG", "SET", "maxmemory", "1")
    got: list[bytes] = []
    reader = log.reader()
    reader.start(lambda _, entries: got.extend(bytes(entry.fields[1]) for entry in entries))
    reader.add(b"r:g")

    with pytest.raises(LogUnavailable, match="is full, nothing new is taken") as refused:
        await log.accept("m", 0, 0, [(b"c" * 16, 1)], FIELDS, Limits())
    assert "unknown" not in str(refused.value), "it is known that nothing was written"
    # processes stay alive, decisions and their answers go on
    await log.beat("executor", "e", 60_000)
    assert await log.alive("executor", ["e"]) == [True]
    await log.append(keys.batches("e"), [b"h", b"batch"])
    assert await log.begin_attempt("m", token, [b"a" * 16], 1) == [True]
    assert await log.settle("m", [(b"a" * 16, 1)], (b"s", {"n": 1}), [Reply(b"r:g", [b"r", b"answer"])]) == [True]
    await until(lambda: got == [b"answer"])
    assert await log.statistics(b"s") == {"n": 1}
    ask(server, "DEL", "epoch")
    assert await log.epoch()

    # a process may also come back, or begin, while it is full
    other = RedisLog(server.url)
    await other.open()
    assert await other.settle("m", [(b"b" * 16, 0)], None, []) == [True]
    assert await other.pending("m") == (0, 0)
    assert await other.take_ownership("n", "o", "") > 0
    await other.close()
    ask(server, "CONFIG", "SET", "maxmemory", "0")
    await log.accept("m", 0, 0, [(b"c" * 16, 1)], FIELDS, Limits())
    await reader.close()


async def test_waitaof_is_asked_behind_each_group(server: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a server that answers it honestly under everysec; this one only shows that question and answer fit."""
    if await admin(server, "COMMAND", "INFO", "WAITAOF") == [None]:
        pytest.skip("the server has no WAITAOF: it is older than 7.2")
    monkeypatch.setattr(Server, "shortfall", lambda self, level: "")
    log = RedisLog(server.url, durability="fsync")
    await log.open()
    await asyncio.gather(
        *(log.accept("m", 0, 0, [(bytes([number]) * 16, 1)], FIELDS, Limits()) for number in range(32))
    )
    (group,) = log._durability._groups.values()
    assert 1 <= group.barriers <= 3
    assert (await log.pending("m"))[0] == 32
    await log.close()
