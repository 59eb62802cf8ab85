"""Following `ctl`: unreadable and unfoldable facts are skipped, also at the start, and waiters hear of every fold."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgpack
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.eventlog.control import ControlPlane, FollowedControl
from charonia.eventlog.neighbours import is_ending, is_stopped, pid_space, started_ticks
from charonia.facts.events import (
    FIELD_FACT,
    Fact,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    VersionLoaded,
    pack_fact,
    unpack_fact,
)


async def write(log: MemoryLog, *facts: Fact) -> None:
    for fact in facts:
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])


async def write_bad(log: MemoryLog) -> None:
    await log.append(keys.CONTROL, [FIELD_FACT, b"\xc1"])
    await log.append(keys.CONTROL, [FIELD_FACT, msgpack.packb({"kind": "of_next_year"})])
    await log.append(keys.CONTROL, [FIELD_FACT, msgpack.packb({"kind": "process_left", "role": 7})])
    await log.append(keys.CONTROL, [b"other", b"field"])
    await write(log, VersionLoaded("e", "m", 1, "h", 1, b"\xff\xff"))


async def test_bad_facts_stop_neither_the_start_nor_the_following() -> None:
    log = MemoryLog()
    await write(log, ProcessJoined("executor", "e"))
    await write_bad(log)
    await write(log, RepositoryScanned("e", ("a",), "none", ready=True))
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="g")
    await control.start()
    assert [row.model for row in control.catalog.index()] == ["a"]

    await write_bad(log)
    await write(log, RepositoryScanned("e", ("b",), "none", ready=True))
    async with asyncio.timeout(30):
        while [row.model for row in control.catalog.index()] != ["b"]:
            await control.changed()
    await control.close()


async def test_two_missed_looks_make_a_process_lost() -> None:
    log = MemoryLog()
    await log.beat("executor", "alive", 3_600_000)
    for name in ("dead", "alive"):
        await write(log, ProcessJoined("executor", name))
    await write(log, ProcessJoined("gateway", "g"))
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="g")
    await control.start()

    def lost() -> list[str]:
        return [incarnation for incarnation, view in control.catalog.executors.items() if view.lost]

    await control._look()
    assert lost() == []
    await control._look()
    async with asyncio.timeout(30):
        while not lost():
            await control.changed()
    assert lost() == ["dead"]
    facts = [unpack_fact(entry.fields[1]) for entry in await log.range(keys.CONTROL)]
    assert facts[-1] == ProcessLeft("executor", "dead", "lost")
    await control.close()


def _ended_but_not_reaped() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


async def test_departures_are_the_processes_whose_pid_is_gone() -> None:
    ended = _ended_but_not_reaped()
    log = MemoryLog()
    await write(
        log,
        ProcessJoined("executor", "unreaped", pid=ended.pid),
        ProcessJoined("batcher", "alive", pid=os.getppid()),
        ProcessJoined("executor", "of an older release"),
        ProcessJoined("gateway", "g", pid=ended.pid),
    )
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="g")
    await control.start()
    assert control.departures() == [ProcessLeft("executor", "unreaped", "lost")]
    ended.wait()
    assert control.departures() == [ProcessLeft("executor", "unreaped", "lost")]
    await control.close()


def joined(role: str, name: str, process: subprocess.Popen[bytes], started: int = 0) -> ProcessJoined:
    ticks = started or started_ticks(process.pid)
    return ProcessJoined(role, name, pid=process.pid, pid_space=pid_space(), started_ticks=ticks)


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    running = [subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    yield running
    for process in running:
        process.kill()
        process.communicate()


async def lost_of(log: MemoryLog, control: ControlPlane, count: int) -> list[str]:
    async with asyncio.timeout(30):
        while True:
            facts = [unpack_fact(entry.fields[1]) for entry in await log.range(keys.CONTROL)]
            lost = [fact.incarnation for fact in facts if isinstance(fact, ProcessLeft) and fact.reason == "lost"]
            if len(lost) >= count:
                return lost
            await control.changed()


async def test_the_end_of_a_process_of_this_machine_is_seen_at_once(sleepers: list[subprocess.Popen[bytes]]) -> None:
    """By the kernel: leases are not read here."""
    before, killed, drained = sleepers
    log = MemoryLog()
    await write(log, joined("executor", "was there before", before), joined("gateway", "g", killed))
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="g")
    await control.start()
    await write(log, joined("batcher", "killed", killed), joined("batcher", "drained", drained))
    while "drained" not in control.catalog.processes:
        await control.changed()
    await write(log, ProcessLeft("batcher", "drained", "drained"))
    for process in sleepers:
        process.kill()
    assert sorted(await lost_of(log, control, 2)) == ["killed", "was there before"]
    await control.close()


async def test_a_pid_of_another_process_is_not_the_one_that_joined(sleepers: list[subprocess.Popen[bytes]]) -> None:
    later, elsewhere, _ = sleepers
    log = MemoryLog()
    await write(
        log,
        joined("executor", "its pid is another's by now", later, started=1),
        ProcessJoined("executor", "of another machine", pid=elsewhere.pid, pid_space="another boot", started_ticks=1),
    )
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="g")
    await control.start()
    assert await lost_of(log, control, 1) == ["its pid is another's by now"]
    await control.close()


async def test_who_lives_on_this_machine_is_not_lost_for_a_lease(sleepers: list[subprocess.Popen[bytes]]) -> None:
    """Unless it is stopped, or silent for longer than a stall may last."""
    slow, stopped, _ = sleepers
    log = MemoryLog()
    await write(log, joined("executor", "slow", slow), joined("executor", "stopped", stopped))
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="g", stall_limit_s=0.05)
    await control.start()
    os.kill(stopped.pid, signal.SIGSTOP)
    while not is_stopped(stopped.pid):
        await asyncio.sleep(0.001)
    await control._look()
    await control._look()
    assert await lost_of(log, control, 1) == ["stopped"]
    while len(await lost_of(log, control, 1)) < 2:
        await control._look()
        await asyncio.sleep(0)
    assert await lost_of(log, control, 2) == ["stopped", "slow"]
    await control.close()


def test_a_killed_process_is_ending_before_it_is_waited_for(sleepers: list[subprocess.Popen[bytes]]) -> None:
    killed, alive, _ = sleepers
    assert not is_ending(killed.pid)
    killed.kill()
    while not is_ending(killed.pid):
        time.sleep(0.001)  # for microseconds the signal is taken and the process not yet marked as one that exits
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(killed.pid)
    assert not is_ending(alive.pid)


async def test_in_another_log_only_what_is_said_there_is_known() -> None:
    log = MemoryLog()
    await write(log, ProcessJoined("executor", "e"), RepositoryScanned("e", ("old",), "none", ready=True))
    control = ControlPlane(log, check_interval_ms=3_600_000, incarnation="g")
    await control.start()
    assert control.catalog.started()

    await log.delete_stream(keys.CONTROL)
    control.begin_anew()
    assert not control.catalog.started()
    assert control.catalog.index() == []
    assert control.epoch_changes == 1
    await write(log, ProcessJoined("executor", "e"), RepositoryScanned("e", ("new",), "none", ready=True))
    async with asyncio.timeout(30):
        while not control.catalog.started():
            await control.changed()
    assert [row.model for row in control.catalog.index()] == ["new"]
    await control.close()


async def test_a_command_follows_what_is_written_and_forgets_another_log() -> None:
    log = MemoryLog()
    await write(log, ProcessJoined("executor", "e"))
    control = FollowedControl(log, poll_s=0.001)
    assert await control.read()
    assert not await control.read()
    waiting = asyncio.create_task(control.changed())
    await write(log, RepositoryScanned("e", ("a", "b"), "none", ready=True))
    async with asyncio.timeout(60):
        await waiting
    assert [row.model for row in control.catalog.index()] == ["a", "b"]
    other = MemoryLog()
    await write(other, ProcessJoined("executor", "e"), RepositoryScanned("e", ("c",), "none", ready=True))
    control.log = other
    assert await control.read()
    assert [row.model for row in control.catalog.index()] == ["c"]
    assert control.epoch_changes == 1
