"""`charonia.offload.pool`: results, errors, bounds, dead and idle workers, with real worker processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from charonia.errors import CharoniaError, InternalError, InvalidArgument, ResourceExhausted, Unavailable
from charonia.offload import pool
from charonia.offload.handover import Buffer
from charonia.offload.pool import SECOND_WORKER_BYTES, Offload, Task
from charonia.offload.time_slices import BULK

HERE = "test_pool"


def upper(note: Any, buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    return [note, len(buffers), os.getpid()], [bytes(buffer).upper() for buffer in buffers]


def refuse(note: Any, _buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    raise InvalidArgument(f"refused {note}")


def fail(_note: Any, _buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    raise ValueError("a fault of ours")


def end(_note: Any, _buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    os.kill(os.getpid(), signal.SIGKILL)
    return None, ()


def wait_for_file(note: Any, _buffers: list[memoryview]) -> tuple[Any, Sequence[Buffer]]:
    with open(note, "rb") as pipe:  # a FIFO: until the test opens it, too
        pipe.read()
    return None, ()


@pytest_asyncio.fixture
async def offload(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Offload]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    made = Offload(max_bytes=1000, max_tasks=3)
    yield made
    made.close()


def task(name: str, note: Any = None, *buffers: Buffer) -> Task:
    return Task(f"{HERE}:{name}", note, buffers)


async def test_notes_and_buffers_come_back(offload: Offload) -> None:
    note, buffers = await offload.run(task("upper", "x", b"abc", memoryview(b"-de")[1:], bytearray()))
    assert note[:2] == ["x", 3]
    assert note[2] != os.getpid()
    assert [bytes(buffer) for buffer in buffers] == [b"ABC", b"DE", b""]
    assert offload.processes == [note[2]]


async def test_large_tasks_have_a_worker_of_their_own(offload: Offload, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    waiting = asyncio.ensure_future(offload.run(task("wait_for_file", str(gate), bytes(SECOND_WORKER_BYTES))))
    await asyncio.sleep(0)
    # it is not refused, as it is alone; a small one is answered while it runs
    small = await offload.run(task("upper", 1, b"a"), may_refuse=False)
    assert small[0][0] == 1
    assert not waiting.done()
    await asyncio.to_thread(lambda: gate.open("wb").close())
    await waiting


async def test_errors_are_those_of_the_function(offload: Offload) -> None:
    with pytest.raises(InvalidArgument, match="refused 7"):
        await offload.run(task("refuse", 7))
    with pytest.raises(InternalError, match="internal server error"):
        await offload.run(task("fail"))
    assert (await offload.run(task("upper", 1, b"a")))[0][0] == 1


async def test_a_worker_that_dies_fails_one_task_and_is_replaced(offload: Offload) -> None:
    with pytest.raises(InternalError, match="its worker ended"):
        await offload.run(task("end"))
    assert (await offload.run(task("upper", 1, b"a")))[0][0] == 1


async def test_bytes_that_wait_are_bounded(offload: Offload, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    first = asyncio.ensure_future(offload.run(task("wait_for_file", str(gate), bytes(900))))
    await asyncio.sleep(0)
    assert (offload.tasks, offload.size_bytes) == (1, 900)
    with pytest.raises(ResourceExhausted, match="wait for their conversion"):
        await offload.run(task("upper", 1, bytes(101)))
    answer = asyncio.ensure_future(offload.run(task("upper", 1, bytes(101)), may_refuse=False))
    await asyncio.to_thread(lambda: gate.open("wb").close())
    await asyncio.gather(first, answer)
    while offload.tasks:
        await asyncio.sleep(0)
    assert (offload.size_bytes, offload.refused) == (0, 1)


async def test_tasks_that_wait_are_bounded(offload: Offload, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    held = [asyncio.ensure_future(offload.run(task("wait_for_file", str(gate), b"a")))]
    held += [asyncio.ensure_future(offload.run(task("upper", 1, b"a"))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted):
        await offload.run(task("upper", 1, b"a"))
    with pytest.raises(ResourceExhausted):
        await offload.in_thread(1, bytes, 1)
    # who has gone does not free what is being done for it
    held[0].cancel()
    await asyncio.sleep(0)
    assert offload.tasks == 3
    await asyncio.to_thread(lambda: gate.open("wb").close())
    await asyncio.gather(*held[1:])


async def test_what_cannot_be_begun_does_not_count(offload: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(Unavailable, match="no thread"):
            await offload.run(task("upper", 1, bytes(900)))
        with pytest.raises(Unavailable, match="no thread"):
            await offload.in_thread(900, bytes, 1)
    assert (offload.tasks, offload.size_bytes) == (0, 0)
    # with threads again, tasks run as before
    assert (await offload.run(task("upper", 1, bytes(900))))[0][0] == 1
    assert await offload.in_thread(900, bytes, 1) == b"\0"


async def test_a_failure_keeps_nothing_of_its_message(offload: Offload) -> None:
    class Held(bytearray):
        pass

    def failing(body: Held) -> bytes:
        raise InvalidArgument(f"not {len(body)} bytes")

    gc.disable()
    try:
        body = Held(b"message")
        seen = weakref.ref(body)
        try:
            await offload.in_thread(1, failing, body)
        except InvalidArgument as error:
            assert error.message == "not 7 bytes"
        del body
        async with asyncio.timeout(30):  # the thread lets go of it in its own time
            while seen() is not None:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_an_idle_worker_ends(offload: Offload) -> None:
    quick = Offload(idle_s=0.05)
    try:
        await quick.run(task("upper", 1, b"a"))
        while quick.processes:
            await asyncio.sleep(0.01)
        assert (await quick.run(task("upper", 2, b"a")))[0][0] == 2
    finally:
        quick.close()


async def test_closing_fails_what_waits(offload: Offload, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    running = asyncio.ensure_future(offload.run(task("wait_for_file", str(gate), b"a")))
    while not offload.processes:
        await asyncio.sleep(0.01)
    offload.close()
    with pytest.raises((CharoniaError, asyncio.CancelledError)):
        await running
    with pytest.raises(Unavailable, match="Server exiting"):
        await offload.run(task("upper", 1, b"a"))
    assert offload.processes == []


def is_in_bulk(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == BULK


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs masks of processors")
async def test_work_is_not_kept_on_the_processor_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two processors")
    processors = set(sorted(allowed)[:2])
    os.sched_setaffinity(0, processors)
    offload = Offload()
    os.sched_setaffinity(0, {min(processors)})
    try:
        assert await offload.in_thread(1, os.sched_getaffinity, 0) == processors
        other = processors - {min(processors)}  # that in bulk has the other one
        assert await offload.transfer(os.sched_getaffinity, 0) == other
        await offload.run(task("upper", "note", b"abc"))
        await offload.run(task("upper", "note", bytes(SECOND_WORKER_BYTES)))
        assert [os.sched_getaffinity(pid) for pid in offload.processes] == [processors, other]
        assert [is_in_bulk(pid) for pid in offload.processes] == [False, True]
        assert os.sched_getaffinity(0) == {min(processors)}
    finally:
        os.sched_setaffinity(0, allowed)
        offload.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs masks of processors")
async def test_work_in_bulk_that_begins_while_the_loop_is_let_go_has_its_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it has its name, the part that lets the loop go does not know it (`shared_processor`)."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two processors")
    processors = set(sorted(allowed)[:2])
    os.sched_setaffinity(0, processors)
    offload = Offload()
    popen = subprocess.Popen

    def let_go(*words: Any, **more: Any) -> subprocess.Popen[bytes]:
        process = popen(*words, **more)
        os.sched_setaffinity(os.getpid(), processors)  # the main thread; the worker has no name yet
        return process

    monkeypatch.setattr(subprocess, "Popen", let_go)
    os.sched_setaffinity(0, {min(processors)})
    try:
        await offload.run(task("upper", "note", bytes(SECOND_WORKER_BYTES)))
        assert [os.sched_getaffinity(pid) for pid in offload.processes] == [processors]
        begun = threading.Thread(target=_begin_kept, args=(processors, masks := list[set[int]]()))
        begun.start()
        begun.join()
        assert masks == [processors]
    finally:
        os.sched_setaffinity(0, allowed)
        offload.close()


def _begin_kept(processors: set[int], masks: list[set[int]]) -> None:
    """Begin as a thread whose starter was kept."""
    os.sched_setaffinity(0, {min(processors)})
    pool._begin_bulk(processors)
    masks.append(os.sched_getaffinity(0))


async def test_a_cancelled_transfer_is_waited_for(offload: Offload) -> None:
    """The thread uses memory and descriptors of the caller, which frees them next."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def turn() -> None:
        begun.set()
        go_on.wait(60)
        ended.set()

    async def transfer() -> None:
        try:
            await offload.transfer(turn)
        finally:
            assert ended.is_set()

    moving = asyncio.ensure_future(transfer())
    await asyncio.to_thread(begun.wait, 60)
    for _ in range(2):
        moving.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not moving.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await moving


async def test_transfers_fail_as_they_do_and_when_closed(offload: Offload) -> None:
    with pytest.raises(FileNotFoundError):
        await offload.transfer(os.stat, "/nowhere")
    offload.close()
    with pytest.raises(Unavailable):
        await offload.transfer(os.getpid)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_turn_that_fails_or_is_cancelled_keeps_nothing_of_its_message(
    offload: Offload, is_cancelled: bool
) -> None:
    class Held(bytearray):
        pass

    begun, go_on = threading.Event(), threading.Event()

    def turn(_body: Held) -> None:
        begun.set()
        go_on.wait(60)
        raise EOFError

    gc.disable()
    try:
        body = Held(b"message")
        seen = weakref.ref(body)
        moving = asyncio.ensure_future(offload.transfer(turn, body))
        del body
        await asyncio.to_thread(begun.wait, 60)
        if is_cancelled:
            moving.cancel()
        go_on.set()
        await asyncio.wait([moving])
        assert moving.cancelled() is is_cancelled
        if not is_cancelled:
            assert isinstance(moving.exception(), EOFError)
        del moving
        async with asyncio.timeout(30):  # the thread lets go of it in its own time
            while seen() is not None:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def all_threads_busy(offload: Offload, go_on: threading.Event) -> list[asyncio.Task[None]]:
    begun = threading.Barrier(3)

    def work() -> None:
        begun.wait(60)
        go_on.wait(60)

    busy = [asyncio.ensure_future(offload.transfer(work)) for _ in range(2)]
    await asyncio.to_thread(begun.wait, 60)
    return busy


async def test_a_turn_that_has_not_begun_is_not_waited_for(offload: Offload) -> None:
    go_on = threading.Event()
    ran: list[int] = []
    busy = await all_threads_busy(offload, go_on)
    waiting = asyncio.ensure_future(offload.transfer(ran.append, 1))
    for _ in range(10):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 30)
    go_on.set()
    await asyncio.gather(*busy)
    assert not ran


async def test_turns_that_wait_fail_when_it_closes(offload: Offload) -> None:
    go_on = threading.Event()
    busy = await all_threads_busy(offload, go_on)
    waiting = asyncio.ensure_future(offload.transfer(os.getpid))
    for _ in range(10):
        await asyncio.sleep(0)
    offload.close()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, 30)
    go_on.set()
    await asyncio.gather(*busy)


async def test_what_has_no_thread_is_not_done_later(offload: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor may be another connection's by then."""
    ran: list[int] = []

    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(Unavailable):
            await offload.transfer(ran.append, 1)
    await offload.transfer(ran.append, 2)
    assert ran == [2]
