"""Joining, beating, leaving, over a log in memory that can be taken away."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from memory_log.log import MemoryLog

from charonia import clock, keys
from charonia.errors import LogUnavailable
from charonia.eventlog.membership import Membership
from charonia.facts.events import ProcessJoined, ProcessLeft, unpack_fact


class Log(MemoryLog):
    """Counts beats, and is away while `away` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.beats = 0
        self.missed = 0
        self.contents = "one"
        self.changed = asyncio.Event()

    async def beat(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        self.changed.set()
        if self.away:
            self.missed += 1
            raise LogUnavailable("away")
        self.beats += 1
        return await super().beat(role, incarnation, ttl_ms)

    async def epoch(self) -> str:
        return self.contents

    async def append(self, stream: bytes, fields: object) -> bytes:
        if self.away:
            raise LogUnavailable("away")
        return await super().append(stream, fields)  # type: ignore[arg-type]

    async def until_beats(self, beats: int, missed: int = 0) -> None:
        async with asyncio.timeout(30):
            while self.beats < beats or self.missed < missed:
                self.changed.clear()
                await self.changed.wait()

    async def facts(self) -> list[object]:
        return [unpack_fact(entry.fields[1]) for entry in await self.range(keys.CONTROL)]


async def test_it_joins_beats_and_leaves() -> None:
    log = Log()
    member = Membership(log, "executor", "e1", pool="fast", hosts_batcher=True, interval_ms=1, ttl_ms=60_000)

    await member.start()
    assert await log.alive("executor", ["e1"]) == [True]
    await log.until_beats(5)
    await member.leave()

    joined, left = await log.facts()
    assert isinstance(joined, ProcessJoined)
    assert (joined.role, joined.incarnation, joined.pool, joined.hosts_batcher) == ("executor", "e1", "fast", True)
    assert joined.pid == os.getpid()
    assert joined.host
    assert left == ProcessLeft("executor", "e1", "drained")
    assert await log.alive("executor", ["e1"]) == [False]
    assert len(asyncio.all_tasks()) == 1


async def test_losing_the_log_is_survived() -> None:
    log = Log()
    member = Membership(log, "gateway", "g1", interval_ms=1, ttl_ms=60_000)
    taken: list[bool] = []
    member.on_beat.append(taken.append)
    await member.start()
    await log.until_beats(2)

    log.away = True
    await log.until_beats(2, missed=3)
    assert taken[-1] is False
    log.away = False
    beats = log.beats
    await log.until_beats(beats + 2)
    assert taken[-1] is True

    await member.leave("drained")
    assert len(await log.facts()) == 2


async def test_on_a_machine_whose_clock_is_off_time_is_the_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log's clock is the one that counts, whatever this machine's says."""
    monkeypatch.setattr(clock, "_ahead_of_monotonic_ns", clock._ahead_of_monotonic_ns)  # put back afterwards
    hour_ns, log = 3600 * 1_000_000_000, Log()

    async def clock_ns() -> int:
        return time.time_ns() + hour_ns

    monkeypatch.setattr(log, "clock_ns", clock_ns)
    member = Membership(log, "gateway", "g1", interval_ms=1, ttl_ms=60_000)
    await member.start()
    assert abs(clock.wall_ns() - time.time_ns() - hour_ns) < hour_ns / 100
    await log.until_beats(4)
    await member.leave()
    (word,) = [record.getMessage() for record in caplog.records]
    assert word.startswith("the clock of this machine is -36")


async def test_its_lease_is_sure_until_it_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, ahead_s = asyncio.get_running_loop(), 0.0
    real_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_s() + ahead_s)
    monkeypatch.setattr("memory_log.projections.monotonic_ns", lambda: int(loop.time() * 1e9))
    log = Log()
    member = Membership(log, "gateway", "g1", interval_ms=1, ttl_ms=60_000)
    assert not member.is_leased()
    renewed: list[bool] = []

    async def renew() -> None:
        renewed.append(member.is_leased())

    member.say_again.append(renew)
    await member.start()
    assert member.is_leased()
    log.away = True
    await log.until_beats(1, missed=1)
    assert member.is_leased()
    ahead_s += 61
    assert not member.is_leased()
    log.away = False
    async with asyncio.timeout(30):
        while not member.is_leased():
            await asyncio.sleep(0.001)
    await member.leave()
    assert renewed
    assert not any(renewed[:1]), "what was said again came before it was sure"


async def test_leaving_without_the_log_is_silent() -> None:
    log = Log()
    member = Membership(log, "gateway", "g1", interval_ms=1, ttl_ms=60_000)
    await member.start()
    log.away = True
    await member.leave()
    assert len(await log.facts()) == 1


async def test_joining_without_the_log_fails_and_leaves_nothing_running() -> None:
    log = Log()
    log.away = True
    with pytest.raises(LogUnavailable):
        await Membership(log, "gateway", "g1", interval_ms=1, ttl_ms=60_000).start()
    assert len(asyncio.all_tasks()) == 1


async def test_in_another_log_it_forgets_joins_again_and_says_again_what_it_has() -> None:
    log = Log()
    member = Membership(log, "executor", "e1", interval_ms=1, ttl_ms=60_000)
    steps: list[str] = []
    broken = 1

    async def say_again() -> None:
        nonlocal broken
        if broken:
            broken -= 1
            raise LogUnavailable("away in the middle of it")
        steps.append(f"say again after {len(await log.facts())} facts")

    member.on_new_epoch.append(lambda: steps.append("forget"))
    member.say_again.append(say_again)
    await member.start()
    await log.until_beats(3)
    assert steps == []

    log.contents = "another"
    beats = log.beats
    await log.until_beats(beats + 8)
    await member.leave()

    assert steps == ["forget", "forget", "say again after 3 facts"], "once more from the start, then no more"
    assert member.epoch_changes == 1


async def test_who_hears_that_it_is_lost_joins_again() -> None:
    """Its lease was renewed before the word was written, so nobody else would ever correct it."""
    log = Log()
    member = Membership(log, "executor", "e1", interval_ms=1, ttl_ms=60_000)
    said: list[int] = []

    async def say_again() -> None:
        said.append(len(said))

    member.say_again.append(say_again)
    await member.start()
    for fact in (ProcessLeft("executor", "e2", "lost"), ProcessLeft("executor", "e1", "drained")):
        member.hear(fact)
    await log.until_beats(4)
    assert said == []

    log.away = True
    member.hear(ProcessLeft("executor", "e1", "lost"))
    await log.until_beats(log.beats, missed=2)
    log.away = False
    await log.until_beats(log.beats + 3)
    await member.leave()

    facts = await log.facts()
    assert [type(fact) for fact in facts] == [ProcessJoined, ProcessJoined, ProcessLeft]
    assert said == [0]
