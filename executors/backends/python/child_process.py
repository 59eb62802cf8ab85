"""The executor's side of one model process: spawn, output, death. `frame_calls` are the calls over its socket.

`python_instance` makes the calls; the processes of isolated native models are `executors.isolation`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Self

from charonia.backend import InstanceDied
from executors.host.output import OutputLines

from .custom_metrics import Board
from .frame_calls import FrameCalls
from .model_environments import Interpreter
from .protocol.frames import MAX_DATA_BYTES, Frame, Kind
from .protocol.shared_slots import ExecutorSlots
from .protocol.startup_arguments import TRACEBACK_SIGNAL, StartupArguments

_SOCKET_BUFFER_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_DRAIN_S = 0.5
"""Time to read what an ended process has sent and printed: child processes of its own may keep the pipes open."""

_LOG_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)


class ChildProcess(FrameCalls):
    """A model process, made by `spawn`. After `InstanceDied`, every further call raises it too."""

    _max_frame_bytes = MAX_DATA_BYTES

    def __init__(
        self, model: str, instance: str, board: Board | None = None, slots: ExecutorSlots | None = None
    ) -> None:
        super().__init__(instance, slots)
        self._board = board
        self._log = logging.getLogger(f"charonia.model.{model}")
        self._output = OutputLines(f"[{model}/{instance}] ", _write_to_stderr)
        self._streams_ended = asyncio.Event()
        self._open_streams = 2
        self._ready: asyncio.Future[Frame] = self._loop.create_future()
        self._closing = False
        self._kill_reason = ""
        self._killed = False
        self._process: asyncio.subprocess.Process
        self._pidfd: int | None = None
        self._pipe: _OutputPipe
        self._watch: asyncio.Task[None]

    @classmethod
    async def spawn(
        cls,
        model: str,
        instance: str,
        interpreter: Interpreter,
        start_timeout_s: float,
        cores: frozenset[int] = frozenset(),
        board: Board | None = None,
        slots: ExecutorSlots | None = None,
        passed: Sequence[int] = (),
    ) -> Self:
        """Start the process and wait for its first answer; kill it after `start_timeout_s` seconds (0: no limit).

        It is restricted to `cores`, unless empty. It writes its metrics to `board`, which is closed when it ends, and
        exchanges columns in `slots`. It inherits the descriptors `passed`. Raises `InstanceDied` (P18), and `OSError`
        when no process can be started.
        """
        child = cls(model, instance, board, slots)
        await child._start(model, interpreter, passed)
        if cores:  # before it has threads: later threads inherit the cores
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(child.pid, cores)
        timer = None
        if start_timeout_s > 0:
            reason = f"it did not start within {start_timeout_s:g} s (stub-timeout-seconds)"
            timer = child._loop.call_later(start_timeout_s, child.kill, reason)
        try:
            ready = await child._ready
            if ready.content()[1] is not True:
                child.slots = None
        except asyncio.CancelledError:
            child.kill("the load was cancelled")
            raise
        finally:
            if timer is not None:
                timer.cancel()
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_lines(self) -> str:
        """The last lines that the process printed."""
        return self._output.last_lines()

    def kill(self, reason: str) -> None:
        """Kill the process. Calls in flight end with `InstanceDied` and this reason."""
        if self._death is None and self._process.returncode is None:
            self._kill_reason = self._kill_reason or reason
            self._killed = True
            self._signal(signal.SIGKILL)

    async def close(self, finalize_timeout_s: float) -> None:
        """Finalize the model, then end the process, by force after the time-out. Returns when it has ended (P5)."""
        if not self._closing and self._death is None:
            self._closing = True
            timer = self._loop.call_later(
                finalize_timeout_s, self.kill, f"it did not finalize within {finalize_timeout_s:g} s"
            )
            try:
                frame = await self.call(Kind.FINALIZE, None)
                if frame.kind is Kind.FAILED:
                    self._log.error("instance %s failed to finalize: %s", self.name, frame.content()[1])
                await asyncio.shield(self._watch)
            except InstanceDied as death:
                self._log.warning("%s", death)
            except asyncio.CancelledError:
                self.kill("closing it was cancelled")
                raise
            finally:
                timer.cancel()
        await asyncio.shield(self._watch)

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _start(self, model: str, interpreter: Interpreter, passed: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            board = -1 if self._board is None else self._board.descriptor
            slots = -1 if self.slots is None else self.slots.descriptor
            arguments = StartupArguments(model, self.name, theirs.fileno(), os.getpid(), board, slots)
            self._process = await asyncio.create_subprocess_exec(
                *interpreter.command,
                *arguments.words(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=[theirs.fileno(), *passed, *(shared for shared in (board, slots) if shared >= 0)],
                env=interpreter.environment,
            )
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            ours.close()
            os.close(read_end)
            raise
        finally:
            theirs.close()
            os.close(write_end)
            if self.slots is not None:
                self.slots.close_descriptor()
        self._pipe = _OutputPipe(self._loop, read_end, self._output.feed, self.stream_ended)
        try:
            await self._connect(ours, self._max_frame_bytes)
        except BaseException:
            self._pipe.close()
            self.kill("it could not be connected")
            raise
        self._watch = self._loop.create_task(self._until_gone(), name=f"watch {self.name}")

    async def _until_gone(self) -> None:
        code = await self._process.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        # its last reply and output may still be in the pipes
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._streams_ended.wait(), _DRAIN_S)
        self._output.end()
        self._transport.abort()
        self._pipe.close()
        death = InstanceDied(
            f"Stub process '{self.name}' is not healthy. The process (pid {self._process.pid}) {self._ending(code)}.",
            self._output.last_lines(),
            # stopped from outside, or by us during a call, or while it ran no batch
            blameless=self._closing or code == -signal.SIGTERM or next(iter(self._calls), 0) in self._checks,
            # the kernel kills the largest process, not the one that asked for too much; a second death names the batch
            shared=code == -signal.SIGKILL and not self._kill_reason,
        )
        if not self._ready.done():
            self._ready.set_exception(InstanceDied(str(death), death.stderr, blameless=death.blameless))
        self._end(death)
        if self._board is not None:
            self._board.close(died=not self._closing)

    def _ending(self, code: int) -> str:
        if self._kill_reason and code == -signal.SIGKILL:  # else it had ended before
            return f"was killed: {self._kill_reason}"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with code {code}"

    def _print_tracebacks(self, reason: str) -> None:
        self._kill_reason = self._kill_reason or reason
        self._signal(TRACEBACK_SIGNAL)

    def _withdraw_reason(self) -> None:
        if not self._killed:
            self._kill_reason = ""

    def _signal(self, number: int) -> None:
        # not `Process.send_signal`: it polls first, and may take the exit code before asyncio's watcher asks for it,
        # which then reports 255 (python/cpython#127049)
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def process_said(self, frame: Frame) -> None:
        if frame.kind is Kind.LOG:
            level, file, line, message = frame.content()
            self._log.log(_LOG_LEVELS[level], "%s (%s:%d, %s)", message, os.path.basename(file), line, self.name)
        elif not self._ready.done():
            self._ready.set_result(frame)

    def stream_ended(self) -> None:
        self._open_streams -= 1
        if self._open_streams == 0:
            self._streams_ended.set()

    def connection_ended(self) -> None:
        # without its socket the process is useless, even if it still runs
        if not self._closing:
            self._loop.call_later(_DRAIN_S, self.kill, "it closed its connection")
        self.stream_ended()


def _write_to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


class _OutputPipe:
    """Reads the output of the process from its pipe.

    Not the loop's `connect_read_pipe`: uvloop's closes the descriptor twice, and the second time it may be another's
    (MagicStack/uvloop#763).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        descriptor: int,
        received: Callable[[bytes], None],
        ended: Callable[[], None],
    ) -> None:
        """Owns `descriptor`. `ended` is called once, at its end or when it is closed."""
        self._loop = loop
        self._descriptor = descriptor
        self._received = received
        self._ended = ended
        os.set_blocking(descriptor, False)
        loop.add_reader(descriptor, self._read)

    def close(self) -> None:
        """A second call does nothing."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            self._ended()

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._received(data)
        else:
            self.close()
