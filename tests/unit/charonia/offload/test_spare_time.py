"""`charonia.offload.spare_time`: the policy of the worker for large messages, and what happens when it starves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from charonia.offload import spare_time
from charonia.offload.handover import Buffer
from charonia.offload.pool import SECOND_WORKER_BYTES, Offload, Task
from charonia.offload.spare_time import ORDINARY_S, WINDOW_S, SpareTime, run_in_spare_time

LARGE = bytes(SECOND_WORKER_BYTES)


def policy(_note: Any, _buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    return [os.sched_getscheduler(0), os.getpid()], ()


def work(processor: Any, _buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    """Work on this processor until there is more than spare time."""
    os.sched_setaffinity(0, {processor})
    end_s = time.monotonic() + 60
    while os.sched_getscheduler(0) == os.SCHED_IDLE and time.monotonic() < end_s:
        pass
    return policy(None, [])


@pytest_asyncio.fixture
async def offload(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Offload]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    made = Offload()
    yield made
    made.close()


@pytest.fixture
def busy() -> Iterator[int]:
    """A processor that two processes of ordinary priority keep busy."""
    processor = max(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{processor}}}); print('busy', flush=True)\nwhile True: pass"
    made = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in made:
            assert process.stdout is not None
            assert process.stdout.readline() == b"busy\n"
        yield processor
    finally:
        for process in made:
            process.kill()
            process.communicate()


def without_readings(offload: Offload) -> SpareTime:
    """On a busy machine a worker may starve at any time: from now on that is not noticed."""
    spare = offload._workers[1]._spare_time
    assert spare is not None
    spare._window_s = 3600.0
    return spare


async def asked(offload: Offload, name: str, note: Any = None, buffer: bytes = LARGE) -> tuple[int, int]:
    """Policy and process id of the worker that did it."""
    (found, process), _ = await offload.run(Task(f"test_spare_time:{name}", note, (buffer,)))
    return found, process


async def test_only_the_worker_for_large_messages_has_the_spare_time(offload: Offload) -> None:
    without_readings(offload)
    assert (await asked(offload, "policy"))[0] == os.SCHED_IDLE
    assert (await asked(offload, "policy", buffer=b"a"))[0] == os.SCHED_OTHER


async def test_a_starving_worker_gets_its_ordinary_priority_for_a_while(offload: Offload, busy: int) -> None:
    starved, process = await asked(offload, "work", busy)
    assert starved == os.SCHED_OTHER
    assert (await asked(offload, "policy")) == (os.SCHED_OTHER, process)
    without_readings(offload)._ordinary_until_s = 0.0  # the while is over
    assert (await asked(offload, "policy")) == (os.SCHED_IDLE, process)


async def test_without_the_right_another_worker_does_the_task(
    offload: Offload, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy = os.sched_setscheduler

    def without_right(process: int, wanted: int, param: os.sched_param) -> None:
        if wanted == os.SCHED_OTHER:
            raise PermissionError  # as the kernel says to a process without CAP_SYS_NICE
        set_policy(process, wanted, param)

    monkeypatch.setattr(os, "sched_setscheduler", without_right)
    spare = without_readings(offload)
    _, before = await asked(offload, "policy")
    spare._window_s = WINDOW_S
    starved, process = await asked(offload, "work", busy)
    assert starved == os.SCHED_OTHER
    assert process != before
    assert offload.processes == [process]
    assert spare._ordinary_s == 2 * ORDINARY_S


def test_a_worker_that_waits_does_not_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    spare, (ours, theirs) = SpareTime(window_s=0.001), socket.socketpair()
    read, readings = spare_time._processor_time_s, 0

    def reading(process: int) -> float:
        nonlocal readings
        readings += 1
        if readings == 5:
            theirs.send(b"the answer")
        return read(process)

    monkeypatch.setattr(spare_time, "_processor_time_s", reading)
    with ours, theirs, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as waits:
        os.sched_setscheduler(waits.pid, os.SCHED_IDLE, os.sched_param(0))
        assert not spare.starved(waits.pid, ours)
        assert os.sched_getscheduler(waits.pid) == os.SCHED_IDLE
    assert readings >= 5
    assert spare.may_be_used


def test_a_process_with_a_policy_of_its_own_keeps_it() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as waits:
        os.sched_setscheduler(waits.pid, os.SCHED_BATCH, os.sched_param(0))
        assert not run_in_spare_time(waits.pid)
        assert os.sched_getscheduler(waits.pid) == os.SCHED_BATCH
