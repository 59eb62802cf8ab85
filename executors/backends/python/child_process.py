"""The executor's side of one model process: spawn, calls over the socket, output, time-outs, death.

A call ends with its reply frame or with `InstanceDied`. A waiting caller may be cancelled at any time; other calls
continue. `python_instance` makes the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from charonia.backend import InstanceDied
from executors.host.output import OutputLines

from .custom_metrics import Board
from .model_environments import Interpreter
from .protocol.frames import UNREADABLE, Buffer, Frame, FrameError, FrameReader, Kind, pack
from .protocol.shared_slots import ExecutorSlots
from .protocol.startup_arguments import TRACEBACK_SIGNAL, StartupArguments

_SOCKET_BUFFER_BYTES = 1 << 20
_DRAIN_S = 0.5
"""Time to read what an ended process has sent and printed: child processes of its own may keep the pipes open."""

_TRACEBACK_S = 0.2
"""Time for a process to print its traceback before it is killed; it takes some milliseconds."""

_MODEL_REQUESTS = (Kind.CALL, Kind.GIVE_UP, Kind.CONTROL)
_LOG_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)


class ResponseSink(Protocol):
    """Takes the RESPONSE frames of one call, before and after its reply."""

    def response(self, frame: Frame) -> None: ...

    def died(self, death: InstanceDied) -> None: ...

    @property
    def blocked(self) -> bool:
        """Whether no more responses are wanted for now."""


class ChildProcess:
    """A model process, made by `spawn`. After `InstanceDied`, every further call raises it too."""

    def __init__(
        self, model: str, instance: str, board: Board | None = None, slots: ExecutorSlots | None = None
    ) -> None:
        self.name = instance
        self.slots = slots
        """The memory that is shared with the process."""
        self._board = board
        self._log = logging.getLogger(f"charonia.model.{model}")
        self._loop = asyncio.get_running_loop()
        self._output = OutputLines(f"[{model}/{instance}] ", _write_to_stderr)
        self._streams_ended = asyncio.Event()
        self._open_streams = 2
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._checks: set[int] = set()
        """The numbers of health checks: when the process ends during one, no batch is the cause."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._next_call = 1
        self._asked: Callable[[Frame], None] | None = None
        self._gone: Callable[[], None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._streams: dict[int, ResponseSink] = {}
        self._last_response_s: dict[int, float] = {}
        """By unfinished call: when it sent its last response (monotonic seconds)."""
        self._unread = False
        self._ready: asyncio.Future[Frame] = self._loop.create_future()
        self._closing = False
        self._kill_reason = ""
        self._death: InstanceDied | None = None
        self._process: asyncio.subprocess.Process
        self._transport: asyncio.Transport
        self._output_transport: asyncio.ReadTransport
        self._watch: asyncio.Task[None]

    @staticmethod
    async def spawn(
        model: str,
        instance: str,
        interpreter: Interpreter,
        start_timeout_s: float,
        cores: frozenset[int] = frozenset(),
        board: Board | None = None,
        slots: ExecutorSlots | None = None,
    ) -> ChildProcess:
        """Start the process and wait for its first answer; kill it after `start_timeout_s` seconds (0: no limit).

        It is restricted to `cores`, unless empty. It writes its metrics to `board`, which is closed when it ends, and
        exchanges columns in `slots`. Raises `InstanceDied` (P18), and `OSError` when no process can be started.
        """
        child = ChildProcess(model, instance, board, slots)
        await child._start(model, interpreter)
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

    @property
    def dead(self) -> InstanceDied | None:
        return self._death

    def last_lines(self) -> str:
        """The last lines that the process printed."""
        return self._output.last_lines()

    async def call(
        self, kind: Kind, content: Any, data: Iterable[Buffer] = (), *, ceiling_s: float = 0, ceiling: str = ""
    ) -> Frame:
        """Send a verb and wait for its DONE or FAILED.

        The process is killed after `ceiling_s` seconds (0: never), even if the caller no longer waits; `ceiling` names
        the setting. Raises `InstanceDied`.
        """
        return await self.begin(kind, content, data, ceiling_s=ceiling_s, ceiling=ceiling)[1]

    def begin(
        self, kind: Kind, content: Any, data: Iterable[Buffer] = (), *, ceiling_s: float = 0, ceiling: str = ""
    ) -> tuple[int, asyncio.Future[Frame]]:
        """`call` without waiting: return the call's number and the future of its reply."""
        if self._death is not None:
            # this call did not kill it
            raise InstanceDied(str(self._death), self._death.stderr, blameless=True)
        if self._transport.is_closing():  # the process has ended, but its exit status is not known yet
            raise InstanceDied("its process has ended", self.last_lines(), blameless=True)
        number = self._next_call
        self._next_call = number + 1 if number < 0xFFFFFFFF else 1
        buffers = pack(kind, number, content, data)
        reply: asyncio.Future[Frame] = self._loop.create_future()
        self._calls[number] = reply
        if kind is Kind.HEALTH:
            self._checks.add(number)
        if ceiling_s > 0:
            self._timers[number] = self._loop.call_later(ceiling_s, self._expire, number, ceiling_s, ceiling)
        self._write(buffers)
        return number, reply

    def _write(self, buffers: Iterable[Buffer]) -> None:
        """Write buffers. Errors are ignored: when the process ends, all its calls end with `InstanceDied`."""
        with contextlib.suppress(RuntimeError, OSError):
            for buffer in buffers:
                self._transport.write(buffer)

    def notify(self, kind: Kind, call: int, content: Any) -> None:
        """Send a frame without reply about a call in flight; do nothing when the call is over."""
        if self._death is None and (call in self._calls or call in self._streams):
            self._write(pack(kind, call, content))

    def on_model_requests(self, asked: Callable[[Frame], None], gone: Callable[[], None]) -> None:
        """Set the handlers of the model's requests (CALL, GIVE_UP, CONTROL), and of the end of the process."""
        self._asked, self._gone = asked, gone

    def answer(self, kind: Kind, number: int, content: Any, data: Iterable[Buffer] = ()) -> None:
        """Answer the model's request with this number; do nothing when the process is gone."""
        if self._death is None:
            self._write(pack(kind, number, content, data))

    async def drained(self) -> None:
        """Wait until the process has read most of what was written to it."""
        await self._writable.wait()

    def stream(self, call: int, stream: ResponseSink | None) -> None:
        """Set the handler of a call's responses; None: drop them."""
        if stream is None:
            self._streams.pop(call, None)
        elif self._death is not None:
            stream.died(self._death)
        else:
            self._streams[call] = stream

    def read(self, reading: bool) -> None:
        """Pause or resume reading from the process. While paused, it blocks once the socket is full."""
        self._unread = not reading
        with contextlib.suppress(RuntimeError):
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def kill(self, reason: str) -> None:
        """Kill the process. Calls in flight end with `InstanceDied` and this reason."""
        if self._death is None and self._process.returncode is None:
            self._kill_reason = self._kill_reason or reason
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

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

    async def _start(self, model: str, interpreter: Interpreter) -> None:
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
                pass_fds=[theirs.fileno(), *(shared for shared in (board, slots) if shared >= 0)],
                env=interpreter.environment,
            )
        except BaseException:
            ours.close()
            os.close(read_end)
            raise
        finally:
            theirs.close()
            os.close(write_end)
            if self.slots is not None:
                self.slots.close_descriptor()
        try:
            ours.setblocking(False)
            self._transport, _ = await self._loop.create_unix_connection(lambda: _FrameProtocol(self), sock=ours)
            self._output_transport, _ = await self._loop.connect_read_pipe(
                lambda: _OutputProtocol(self), os.fdopen(read_end, "rb", 0)
            )
        except BaseException:
            self.kill("it could not be connected")
            raise
        self._watch = self._loop.create_task(self._until_gone(), name=f"watch {self.name}")

    def _expire(self, call: int, ceiling_s: float, ceiling: str) -> None:
        """Kill the process because of a call that takes too long, after it has printed its tracebacks.

        Each response restarts the time limit, which does not run while the responses are not read.
        """
        stream = self._streams.get(call)
        waits = self._unread or (stream is not None and stream.blocked)
        heard_s = self._loop.time() if waits else self._last_response_s.get(call, 0.0)
        left_s = heard_s + ceiling_s - self._loop.time()
        if left_s > 0:
            self._timers[call] = self._loop.call_later(left_s, self._expire, call, ceiling_s, ceiling)
            return
        reason = f"it ran longer than {ceiling_s:g} s ({ceiling})"
        self._kill_reason = self._kill_reason or reason
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(TRACEBACK_SIGNAL)
        self._loop.call_later(_TRACEBACK_S, self.kill, reason)

    async def _until_gone(self) -> None:
        code = await self._process.wait()
        # its last reply and output may still be in the pipes
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._streams_ended.wait(), _DRAIN_S)
        self._output.end()
        self._transport.abort()
        self._output_transport.close()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._death = InstanceDied(
            f"Stub process '{self.name}' is not healthy. The process (pid {self._process.pid}) {self._ending(code)}.",
            self._output.last_lines(),
            # stopped from outside, or by us during a call, or while it ran no batch
            blameless=self._closing or code == -signal.SIGTERM or next(iter(self._calls), 0) in self._checks,
        )
        for call in [self._ready, *self._calls.values()]:
            if not call.done():
                call.set_exception(InstanceDied(str(self._death), self._death.stderr, blameless=self._death.blameless))
        self._calls.clear()
        self.slots = None
        self._writable.set()
        if self._gone is not None:
            self._gone()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.died(InstanceDied(str(self._death), self._death.stderr, blameless=self._death.blameless))
        if self._board is not None:
            self._board.close(died=not self._closing)

    def _ending(self, code: int) -> str:
        if self._kill_reason:
            return f"was killed: {self._kill_reason}"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with code {code}"

    def frame_received(self, frame: Frame) -> None:
        if frame.kind is Kind.LOG:
            level, file, line, message = frame.content()
            self._log.log(_LOG_LEVELS[level], "%s (%s:%d, %s)", message, os.path.basename(file), line, self.name)
            return
        if frame.kind is Kind.READY:
            if not self._ready.done():
                self._ready.set_result(frame)
            return
        if frame.kind in _MODEL_REQUESTS:
            if self._asked is not None:
                self._asked(frame)
            return
        if frame.kind is Kind.RESPONSE:
            stream = self._streams.get(frame.call)
            if frame.call in self._timers:
                self._last_response_s[frame.call] = self._loop.time()
            if stream is not None:
                stream.response(frame)
            return
        timer = self._timers.pop(frame.call, None)
        if timer is not None:
            timer.cancel()
            self._last_response_s.pop(frame.call, None)
        self._checks.discard(frame.call)
        reply = self._calls.pop(frame.call, None)
        if reply is not None and not reply.done():
            reply.set_result(frame)

    def may_write(self, writable: bool) -> None:
        if writable or self._death is not None:
            self._writable.set()
        else:
            self._writable.clear()

    def output_received(self, data: bytes) -> None:
        self._output.feed(data)

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


class _FrameProtocol(asyncio.BufferedProtocol):
    """Reads frames from the executor's end of the socket."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._reader = FrameReader()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.received(nbytes):
                self._child.frame_received(frame)
        except (FrameError, *UNREADABLE) as error:
            self._child.kill(f"it does not keep to the protocol: {error}")

    def pause_writing(self) -> None:
        self._child.may_write(False)

    def resume_writing(self) -> None:
        self._child.may_write(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._child.connection_ended()


class _OutputProtocol(asyncio.Protocol):
    """Reads the output of the process from its pipe."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child

    def data_received(self, data: bytes) -> None:
        self._child.output_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._child.stream_ended()
