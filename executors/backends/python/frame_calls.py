"""Calls over a socket of frames, from the executor's side: replies, responses, time limits, requests of the model.

A call ends with its reply frame or with `InstanceDied`. A waiting caller may be cancelled at any time; other calls
continue. `child_process` is the process of a python model; native models share processes (`executors.isolation`).
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgpack

from charonia.backend import InstanceDied, ModelResponse

from .frame_content import responses_together
from .protocol.frames import (
    MAX_DATA_BYTES,
    UNREADABLE,
    Buffer,
    Frame,
    FrameError,
    FrameReader,
    Kind,
    pack,
    pack_described,
)
from .protocol.shared_slots import ExecutorSlots

LOOK_MS = 1
"""The shortest time for which `poll` can wait."""

_TRACEBACK_S = 0.2
"""Time for a process to print its traceback before it is killed; it takes some milliseconds."""

_MODEL_REQUESTS = (Kind.CALL, Kind.GIVE_UP, Kind.CONTROL)
_OF_THE_PROCESS = (Kind.READY, Kind.LOG)


class ResponseSink(Protocol):
    """Takes the responses of one call, before and after its reply."""

    def response(self, frame: Frame) -> None: ...

    def take(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        """As `response`, of one that was read. Raises `FrameError`."""

    def died(self, death: InstanceDied) -> None: ...

    @property
    def blocked(self) -> bool:
        """Whether no more responses are wanted for now."""


class FrameCalls(ABC):
    """The calls over one socket. After `InstanceDied`, every further call raises it too."""

    def __init__(self, name: str, slots: ExecutorSlots | None = None) -> None:
        self.name = name
        self.slots = slots
        """The memory that is shared with the process."""
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._checks: set[int] = set()
        """The numbers of health checks: when the process ends during one, no batch is the cause."""
        self._replied: dict[int, Callable[[], None]] = {}
        """By call: what is called when it has its reply, or will have none."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._overdue: set[int] = set()
        """The unfinished calls whose time is over: the process is killed as soon as it has printed its tracebacks."""
        self._next_call = 1
        self._asked: Callable[[Frame], None] | None = None
        self._gone: Callable[[], None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._streams: dict[int, ResponseSink] = {}
        self._last_response_s: dict[int, float] = {}
        """By unfinished call: when it sent its last response (monotonic seconds)."""
        self._unread = False
        self._death: InstanceDied | None = None
        self._transport: asyncio.Transport
        self._protocol: FrameProtocol
        self._connection: socket.socket
        """The transport's, which closes it."""
        self._arrivals = select.poll()
        """Of the same."""

    @property
    def dead(self) -> InstanceDied | None:
        return self._death

    @property
    @abstractmethod
    def pid(self) -> int:
        """The id of the process."""

    @abstractmethod
    def last_lines(self) -> str:
        """The last lines that the process printed."""

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Kill the process. Calls in flight end with `InstanceDied` and this reason."""

    @abstractmethod
    async def close(self, finalize_timeout_s: float) -> None:
        """End the model's part in an orderly way, by force after the time-out."""

    @abstractmethod
    def connection_ended(self) -> None:
        """Called when the other end of the socket was closed."""

    @abstractmethod
    def _print_tracebacks(self, reason: str) -> None:
        """Make the process print where its threads are; it is killed for this reason soon."""

    @abstractmethod
    def _withdraw_reason(self) -> None:
        """Called when it is not killed, because the call has gone on or ended in the meantime."""

    async def call(
        self, kind: Kind, content: Any, data: Iterable[Buffer] = (), *, ceiling_s: float = 0, ceiling: str = ""
    ) -> Frame:
        """Send a verb and wait for its DONE or FAILED.

        The process is killed after `ceiling_s` seconds (0: never), even if the caller no longer waits; `ceiling` names
        the setting. Raises `InstanceDied`.
        """
        return await self.begin(kind, msgpack.packb(content), data, ceiling_s=ceiling_s, ceiling=ceiling)[1]

    def begin(
        self,
        kind: Kind,
        meta: bytes,
        data: Iterable[Buffer] = (),
        *,
        ceiling_s: float = 0,
        ceiling: str = "",
        replied: Callable[[], None] | None = None,
    ) -> tuple[int, asyncio.Future[Frame]]:
        """`call` without waiting: return the call's number and the future of its reply. `meta` is the packed content.

        `replied` is called once the future is done, without another turn of the event loop. It must not raise.
        """
        if self._death is not None:
            # this call did not kill it
            raise InstanceDied(str(self._death), self._death.stderr, blameless=True)
        if self._transport.is_closing():  # the process has ended, but its exit status is not known yet
            raise InstanceDied("its process has ended", self.last_lines(), blameless=True)
        number = self._next_call
        self._next_call = number + 1 if number < 0xFFFFFFFF else 1
        buffers = pack_described(kind, number, meta, data)
        reply: asyncio.Future[Frame] = self._loop.create_future()
        self._calls[number] = reply
        if kind is Kind.HEALTH:
            self._checks.add(number)
        if ceiling_s > 0:
            self._timers[number] = self._loop.call_later(ceiling_s, self._expire, number, ceiling_s, ceiling)
        if replied is not None:
            self._replied[number] = replied
        self._write(buffers)
        return number, reply

    async def _connect(self, connection: socket.socket, limit_bytes: int) -> None:
        """Take a connected socket over. A frame with more than `limit_bytes` of data ends the process."""
        connection.setblocking(False)
        self._transport, self._protocol = await self._loop.create_unix_connection(
            lambda: FrameProtocol(self, limit_bytes), sock=connection
        )
        self._connection = connection
        self._arrivals.register(connection, select.POLLIN)

    def _write(self, buffers: Sequence[Buffer]) -> None:
        """Write buffers. Errors are ignored: when the process ends, all its calls end with `InstanceDied`."""
        with contextlib.suppress(RuntimeError, OSError):
            if len(buffers) == 1 and not self._transport.get_write_buffer_size():
                # now, not at the end of the loop's turn
                buffers = self._rest_of(buffers[0])
            for buffer in buffers:
                self._transport.write(buffer)

    def _rest_of(self, buffer: Buffer) -> Sequence[Buffer]:
        """Write what the socket takes; return the rest. Raises `OSError`."""
        try:
            sent = self._connection.send(buffer)
        except BlockingIOError:
            return (buffer,)
        return () if sent == len(buffer) else (memoryview(buffer)[sent:],)

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

    def frame_received(self, frame: Frame) -> None:
        kind = frame.kind
        if kind is Kind.RESPONSE:
            stream = self._streams.get(frame.call)
            if frame.call in self._timers:
                self._last_response_s[frame.call] = self._loop.time()
            if stream is not None:
                stream.response(frame)
            return
        if kind is Kind.RESPONSES:
            self._take_all(frame)
            return
        if kind in _MODEL_REQUESTS:
            if self._asked is not None:
                self._asked(frame)
            return
        if kind in _OF_THE_PROCESS:
            self.process_said(frame)
            return
        timer = self._timers.pop(frame.call, None)
        if timer is not None:
            timer.cancel()
            self._last_response_s.pop(frame.call, None)
        self._excuse(frame.call)
        self._checks.discard(frame.call)
        reply = self._calls.pop(frame.call, None)
        if reply is not None and not reply.done():
            reply.set_result(frame)
        replied = self._replied.pop(frame.call, None)
        if replied is not None:
            replied()

    def process_said(self, frame: Frame) -> None:
        """Take a frame that belongs to no call. Raises `FrameError`: only the socket of a whole process has such."""
        raise FrameError(f"{frame.kind.name} is not said of a call")

    def _take_all(self, frame: Frame) -> None:
        """Pass the responses of a step on."""
        now_s = self._loop.time()
        for call, index, final, response in responses_together(frame):
            if call in self._timers:
                self._last_response_s[call] = now_s
            stream = self._streams.get(call)
            if stream is not None:
                stream.take(index, response, final=final)

    def look(self) -> None:
        """Wait for the process for a moment, and take what it has sent.

        This saves the event loop a turn, and holds it up for `LOOK_MS` at most.
        """
        if not self._unread and not self._transport.is_closing() and self._arrivals.poll(LOOK_MS):
            self._protocol.read(self._connection)

    def may_write(self, writable: bool) -> None:
        if writable or self._death is not None:
            self._writable.set()
        else:
            self._writable.clear()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _expire(self, call: int, ceiling_s: float, ceiling: str) -> None:
        """Kill the process because of a call that takes too long, after it has printed its tracebacks.

        Each response restarts the time limit, which does not run while the responses are not read.
        """
        stream = self._streams.get(call)
        waits = self._unread or (stream is not None and stream.blocked)
        heard_s = self._loop.time() if waits else self._last_response_s.get(call, 0.0)
        left_s = heard_s + ceiling_s - self._loop.time()
        reason = f"it ran longer than {ceiling_s:g} s ({ceiling})"
        if left_s > 0:
            self._excuse(call)
        elif call in self._overdue:
            self.kill(reason)
            return
        else:
            self._overdue.add(call)
            self._print_tracebacks(reason)
            left_s = _TRACEBACK_S
        # a reply cancels it, also while the tracebacks are printed: the process may be running other calls
        self._timers[call] = self._loop.call_later(left_s, self._expire, call, ceiling_s, ceiling)

    def _excuse(self, call: int) -> None:
        if call in self._overdue:
            self._overdue.discard(call)
            self._withdraw_reason()

    def _end(self, death: InstanceDied) -> None:
        """The process has ended: so do its calls."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._overdue.clear()
        self._death = death
        for call in self._calls.values():
            if not call.done():
                call.set_exception(_copy_of(death))
        self._calls.clear()
        self.slots = None
        self._writable.set()
        if self._gone is not None:
            self._gone()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.died(_copy_of(death))
        waiting, self._replied = list(self._replied.values()), {}
        for replied in waiting:
            replied()


class FrameProtocol(asyncio.BufferedProtocol):
    """Reads frames from the executor's end of the socket. One with more than `limit_bytes` of data ends the process."""

    def __init__(self, calls: FrameCalls, limit_bytes: int = MAX_DATA_BYTES) -> None:
        self._calls = calls
        self._reader = FrameReader(limit_bytes)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.received(nbytes):
                self._calls.frame_received(frame)
        except (FrameError, *UNREADABLE) as error:
            self._calls.kill(f"it does not keep to the protocol: {error}")

    def read(self, connection: socket.socket) -> None:
        """Take what has come, before the event loop does. The loop hears of the end of the stream."""
        with contextlib.suppress(OSError):
            count = connection.recv_into(self._reader.get_buffer())
            if count:
                self.buffer_updated(count)

    def pause_writing(self) -> None:
        self._calls.may_write(False)

    def resume_writing(self) -> None:
        self._calls.may_write(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._calls.connection_ended()


def _copy_of(death: InstanceDied) -> InstanceDied:
    return InstanceDied(str(death), death.stderr, blameless=death.blameless, shared=death.shared)
