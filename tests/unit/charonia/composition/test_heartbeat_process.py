"""What the keeper of a part's leases writes: nothing that the part has not earned."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Callable

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.composition import heartbeat_process
from charonia.composition.heartbeat_process import HeartbeatProcess, Keeper, KeeperTerms
from charonia.errors import LogUnavailable
from charonia.facts.events import ProcessLeft, unpack_fact

INTERVAL_S = 0.01
LEASES = [["executor", "e1", 60], ["batcher", "b1", 60]]
EVER_S = 3600.0


class Log(MemoryLog):
    """Notes how often leases were prolonged; refuses to while `away`."""

    passed_ns = 0
    """The time of leases: with each heartbeat some passes, and none while a busy machine stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.prolonged = self.reported = 0
        self.away = False
        self.changed = asyncio.Event()

    async def prolong(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        self.changed.set()
        self.prolonged += 1
        Log.passed_ns += int(INTERVAL_S * 1e9) // len(LEASES)
        if self.away:
            raise LogUnavailable("away")
        return await super().prolong(role, incarnation, ttl_ms)

    async def append(self, stream: bytes, fields: object) -> bytes:
        if self.away:
            raise LogUnavailable("away")
        self.changed.set()
        self.reported += 1
        return await super().append(stream, fields)  # type: ignore[arg-type]

    async def until(self, seen: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not seen():
                self.changed.clear()
                await self.changed.wait()

    async def losses(self) -> list[object]:
        return [unpack_fact(entry.fields[1]) for entry in await self.range(keys.CONTROL)]


@pytest.fixture(autouse=True)
def _time_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "passed_ns", 0)
    monkeypatch.setattr("memory_log.projections.monotonic_ns", lambda: Log.passed_ns)


LOST = [ProcessLeft("executor", "e1", "lost"), ProcessLeft("batcher", "b1", "lost")]


def keeper_of(log: Log, stall_limit_s: float = EVER_S, *, stopped: bool = False) -> Keeper:
    terms = KeeperTerms("redis://unused", INTERVAL_S, stall_limit_s)
    keeper = Keeper(log, terms, os.getpid(), lambda: stopped)
    keeper.tick(json.dumps(LEASES).encode())
    return keeper


async def joined(log: Log) -> None:
    for role, incarnation, ttl_ms in LEASES:
        await log.beat(str(role), str(incarnation), int(ttl_ms))


async def end(keeper: Keeper, running: asyncio.Task[None]) -> None:
    keeper.gone.set()
    async with asyncio.timeout(30):
        await running


async def test_it_prolongs_what_a_silent_part_holds_and_reports_its_end() -> None:
    log = Log()
    await joined(log)
    keeper = keeper_of(log)
    running = asyncio.create_task(keeper.run())
    await log.until(lambda: log.prolonged >= 40)  # for longer than a lease
    assert await log.alive("executor", ["e1"]) == [True]
    assert await log.losses() == []
    await end(keeper, running)
    assert await log.losses() == LOST
    assert await log.alive("executor", ["e1"]) == await log.alive("batcher", ["b1"]) == [False]


async def test_a_lease_that_has_ended_stays_ended() -> None:
    """Others may have taken the part for lost: only the part itself knows what to do about it."""
    log = Log()
    keeper = keeper_of(log)
    running = asyncio.create_task(keeper.run())
    await log.until(lambda: log.prolonged >= 4)
    assert await log.alive("executor", ["e1"]) == [False]
    await end(keeper, running)


async def test_a_part_that_left_in_order_is_not_reported() -> None:
    log = Log()
    await joined(log)
    keeper = keeper_of(log)
    keeper.tick(b"[]")
    await end(keeper, asyncio.create_task(keeper.run()))
    assert await log.losses() == []


@pytest.mark.parametrize(("limit_s", "stopped"), [(0.05, False), (EVER_S, True)], ids=["stuck", "stopped"])
async def test_a_part_that_does_not_go_on_is_lost_once(
    limit_s: float, stopped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log()
    await joined(log)
    keeper = keeper_of(log, limit_s, stopped=stopped)
    running = asyncio.create_task(keeper.run())
    await log.until(lambda: log.reported >= 2)
    prolonged = log.prolonged
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all("is taken for lost: " in text for text in said)
    assert await log.losses() == LOST

    # it goes on after all: its own heartbeat makes the lease, which is prolonged from then on
    await joined(log)
    keeper.tick(json.dumps(LEASES).encode())
    await log.until(lambda: log.prolonged >= prolonged + 2)
    assert await log.alive("executor", ["e1"]) == [True]
    await end(keeper, running)


async def test_a_busy_part_is_not_a_stopped_one() -> None:
    log = Log()
    await joined(log)
    keeper = keeper_of(log)
    running = asyncio.create_task(keeper.run())
    await log.until(lambda: log.prolonged >= 60)
    assert await log.losses() == []
    await end(keeper, running)


async def test_a_log_that_is_away_is_tried_again() -> None:
    log = Log()
    await joined(log)
    keeper = keeper_of(log)
    running = asyncio.create_task(keeper.run())
    log.away = True
    await log.until(lambda: log.prolonged >= 4)
    log.away = False
    await end(keeper, running)
    assert await log.losses() == LOST


@pytest.mark.parametrize(("of_the_part", "own"), [(0, -10), (19, -10), (-10, -10), (-20, -20)])
def test_it_is_never_scheduled_behind_its_part(of_the_part: int, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nice = of_the_part

    def change(_which: int, _who: int, value: int) -> None:
        nonlocal nice
        nice = value

    monkeypatch.setattr(os, "getpriority", lambda _which, _who: nice)
    monkeypatch.setattr(os, "setpriority", change)
    heartbeat_process._go_first()
    assert nice == own


def _never_ending() -> int:
    child = subprocess.Popen(["sleep", "600"])
    child.returncode = 0  # it is waited for by its pid
    return child.pid


async def test_one_that_does_not_end_when_it_should_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a busy machine has not given a turn yet: a program that goes on must not keep it."""
    monkeypatch.setattr(heartbeat_process, "_END_WITHIN_S", 1.0)
    ours, theirs = socket.socketpair()
    with theirs:
        pid = _never_ending()
        await HeartbeatProcess(KeeperTerms("unix:///nowhere", 1.0, 30.0), pid, ours).close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
