"""Runs long work beside an event loop, within bounds: conversions in worker processes, compression in threads.

Python that runs in a thread takes turns with the loop for the interpreter's lock, and a single call into a native
library that keeps the lock (a JSON or protobuf parser, NumPy over lists) stops it altogether. Such work is done in a
process of its own, which starts with its first task and ends when it has had none for a while. Two workers, so that a
message of 64 MB does not make those of 300 KB wait. Threads are for libraries that let go of the lock, as zlib does,
and for what the kernel copies (`transfers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from charonia.errors import SERVER_EXITING, CharoniaError, ErrorCode, InternalError, ResourceExhausted, Unavailable

from .handover import Buffer, receive, send
from .time_slices import follow_processors, name_bulk

OFF_LOOP_BYTES = 64 * 1024
"""What fronts have to parse or write that is larger leaves the event loop. JSON of this size takes up to 10 ms, and
passing it to a worker 0.5 ms. Each front compares its bodies, messages and answers with it."""

MAX_CONTROL_BYTES = 65_536
"""Of a control call, which the event loop parses whole; a load request with files is no such call."""

SECOND_WORKER_BYTES = 4 * 1024 * 1024
"""Tasks of this size and more run in the second worker, one behind the other; smaller ones run in the first."""

MAX_BYTES = 1 << 30
MAX_TASKS = 1024
"""Of what waits or runs: beyond either, work is refused that can be."""

IDLE_S = 30.0
"""A worker without a task for so long ends."""

_THREADS = 2

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Of glibc 2.35 and later; where the system gives huge pages on demand (`madvise`)."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


@dataclass(frozen=True, slots=True)
class _Failed:
    """What work raised, without its frames: they would keep the message until the garbage collector comes by."""

    error: Exception


def _outcome(wanted: list[Callable[[], _T]]) -> _T | _Failed:
    try:
        return wanted.pop()()
    except Exception as error:
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return _Failed(error)


@dataclass(frozen=True, slots=True)
class Task:
    """`function` is `module:name` of what a worker calls with the note and the buffers (`worker.Function`)."""

    function: str
    note: Any
    buffers: Sequence[Buffer] = field(repr=False)
    max_result_bytes: int = 0
    """Where the result may be larger than the buffers: its bound."""

    @property
    def size_bytes(self) -> int:
        return max(sum(map(len, self.buffers)), self.max_result_bytes)


class Offload:
    """One process's workers. Made and closed in the event loop's thread; nothing starts before the first task."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_tasks: int = MAX_TASKS, idle_s: float = IDLE_S) -> None:
        self._max_bytes = max_bytes
        self._max_tasks = max_tasks
        processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        begin, begin_bulk = partial(_begin_thread, processors), partial(_begin_bulk, processors)
        self._workers = (
            _Worker("charonia-offload", idle_s, begin, is_large=False),
            _Worker("charonia-offload-large", idle_s, begin_bulk, is_large=True),
        )
        self._threads = ThreadPoolExecutor(_THREADS, "offload", begin)
        self._transfers = ThreadPoolExecutor(_THREADS, "transfers", begin_bulk)
        self.tasks = self.size_bytes = 0
        """What waits or runs now."""
        self.done = self.refused = 0
        self.closed = False

    @property
    def processes(self) -> list[int]:
        """The ids of the workers that run."""
        return [worker.process_id for worker in self._workers if worker.process_id]

    async def run(self, task: Task, *, may_refuse: bool = True) -> tuple[Any, list[memoryview]]:
        """Have a worker do this. Raises what the function raises of `CharoniaError`, and `InternalError` when the
        worker ended; `ResourceExhausted` when too much waits, unless it may not be refused; `Unavailable` when none can
        be started.
        """
        size = task.size_bytes
        worker = self._workers[size >= SECOND_WORKER_BYTES]
        return await self._await(size, may_refuse, worker.thread, partial(worker.do, task))

    async def in_thread(
        self, size_bytes: int, work: Callable[[*_Ts], _T], *arguments: *_Ts, may_refuse: bool = True
    ) -> _T:
        """The result of work on so many bytes that lets go of the interpreter's lock. Raises what it raises, and as
        `run`.
        """
        return await self._await(size_bytes, may_refuse, self._threads, lambda: work(*arguments))

    async def transfer(self, work: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        """The result of a turn of `transfers.move`, in a thread. A caller that is cancelled waits for the end of a turn
        that has begun: until then the thread uses the connection and the memory. Raises what the turn raises, and
        `Unavailable` when it cannot begin.
        """
        future = self._submit(self._transfers, lambda: work(*arguments))
        turn = asyncio.wrap_future(future)
        try:
            outcome = await asyncio.shield(turn)
        except asyncio.CancelledError:
            if turn.cancelled() and not _is_cancelled():  # this was closed
                raise Unavailable(SERVER_EXITING) from None
            if not future.cancel():
                while not turn.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([turn])
            raise
        if not isinstance(outcome, _Failed):
            return outcome
        try:
            raise outcome.error
        finally:
            del outcome, future, turn  # as in `_await`

    def _submit(self, threads: ThreadPoolExecutor, work: Callable[[], _T]) -> Future[_T | _Failed]:
        """Have a thread do this, and report what it returns or raises. Raises `Unavailable` when no thread can be had:
        then the work is never done.
        """
        if self.closed:
            raise Unavailable(SERVER_EXITING)
        wanted = [work]
        del work
        try:
            return threads.submit(_outcome, wanted)
        except RuntimeError:
            wanted.clear()  # it waits for a thread all the same, with nothing to do
            raise Unavailable("no thread for large messages can be started") from None

    async def _await(self, size: int, may_refuse: bool, threads: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
        if self.closed:
            raise Unavailable(SERVER_EXITING)
        over = self.tasks >= self._max_tasks or (self.tasks and self.size_bytes + size > self._max_bytes)
        if over and may_refuse:
            self.refused += 1
            raise ResourceExhausted(
                f"{self.tasks} large messages of {self.size_bytes} bytes wait for their conversion here, the bound is "
                f"{self._max_tasks} of {self._max_bytes} bytes; retry later"
            )
        loop = asyncio.get_running_loop()
        given = [work]
        del work
        future = self._submit(threads, given.pop())
        self.tasks += 1
        self.size_bytes += size

        def ended(_future: Future[_T | _Failed]) -> None:
            # a caller may have gone before; what it asked for counts until it is over
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._ended, size)

        future.add_done_callback(ended)
        outcome = await asyncio.wrap_future(future)
        if not isinstance(outcome, _Failed):
            return outcome
        try:
            raise outcome.error
        finally:
            del outcome, future  # the error holds this frame: a cycle would keep the message

    def _ended(self, size: int) -> None:
        self.tasks -= 1
        self.size_bytes -= size
        self.done += 1

    def close(self) -> None:
        """End the workers; tasks that wait or run fail."""
        self.closed = True
        for worker in self._workers:
            worker.close()
        for threads in (self._threads, self._transfers):
            threads.shutdown(wait=False, cancel_futures=True)


def _is_cancelled() -> bool:
    """Whether the current task is. A frame that it ends in must not hold it: it holds the error that ends it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _begin_thread(processors: set[int], *, is_bulk: bool = False) -> None:
    """What a thread does first: it takes the processors that this process had. The one that starts it may be kept on a
    single one of two by then (`charonia.eventlog.embedded.shared_processor`), on which its work would be in the way;
    that in bulk leaves it to those who are kept.
    """
    if len(processors) != 2:  # with others none is kept
        return
    with contextlib.suppress(OSError):  # the system takes them away meanwhile
        kept = os.sched_getaffinity(0)
        if len(kept) == 1:
            os.sched_setaffinity(0, (processors - kept if is_bulk else set()) or processors)


def _begin_bulk(processors: set[int]) -> None:
    """What a thread does first that copies large messages. The worker for large tasks inherits the processors of the
    thread that starts it.
    """
    name_bulk()
    _begin_thread(processors, is_bulk=True)
    follow_processors(os.getpid())


def _environment() -> dict[str, str]:
    """That of a worker: its C library asks for huge pages, which saves a third of its time for messages of 64 MB."""
    tunables = os.environ.get(_TUNABLES, "")
    return {**os.environ, _TUNABLES: f"{_HUGE_PAGES}:{tunables}" if tunables else _HUGE_PAGES}


class _Worker:
    """One process and the thread that talks to it."""

    def __init__(self, name: str, idle_s: float, begin: Callable[[], None], *, is_large: bool) -> None:
        self._idle_s = idle_s
        self._is_large = is_large
        self.thread = ThreadPoolExecutor(1, name, begin)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._idle: threading.Timer | None = None
        self._lock = threading.Lock()
        """Around the process and its socket being exchanged; not held while a task runs."""
        self._closed = False
        self._number = 0
        """Of the last task."""

    @property
    def process_id(self) -> int:
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def do(self, task: Task) -> tuple[Any, list[memoryview]]:
        """In `thread`."""
        if self._idle is not None:
            self._idle.cancel()
        connection = self._connected()
        try:
            send(connection, [task.function, task.note], task.buffers)
            (answer, failure), buffers = receive(connection)
        except (EOFError, OSError) as error:
            self._end()
            raise InternalError("the conversion of a large message failed: its worker ended") from error
        finally:
            self._number += 1
            self._idle = threading.Timer(self._idle_s, self._retire, [self._number])
            self._idle.daemon = True
            self._idle.start()
        if failure is not None:
            raise CharoniaError.of(ErrorCode(failure[0]), failure[1])
        return answer, buffers

    def _connected(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise Unavailable(SERVER_EXITING)
            if self._socket is not None and self._process is not None and self._process.poll() is None:
                return self._socket
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-P", "-m", "charonia.offload.worker", str(theirs.fileno())]
            words.append("large" if self._is_large else "small")
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=_environment()
                )
            except OSError as error:
                ours.close()
                raise Unavailable(f"no worker for large messages can be started: {error.strerror}") from None
        with self._lock:
            self._process, self._socket = process, ours
        return ours

    def _retire(self, number: int) -> None:
        """The worker had nothing to do for a while after the task with this number."""
        with contextlib.suppress(RuntimeError):  # closed
            self.thread.submit(self._end_idle, number)

    def _end_idle(self, number: int) -> None:
        if self._number == number:
            self._end()

    def _end(self) -> None:
        with self._lock:
            process, connection = self._process, self._socket
            self._process = self._socket = None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._idle is not None:
            self._idle.cancel()
        self.thread.shutdown(wait=False, cancel_futures=True)
        process = self._process
        if process is not None:
            process.kill()  # a thread that waits for it sees the end of its socket
            process.wait()
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
