"""The model process's end of the socket: the calls that the model makes over it, and the responses it sends.

Sending and receiving block; any thread may send, one thread receives.

Cancellations arrive between other frames. Any thread may check for them with one system call, so a model that never
checks pays nothing. A model that calls others, or that must wait until more responses are wanted, gets a background
thread that receives for all, because the main thread is in the model's code meanwhile.

A request that the model deletes without a final response ends with an error. A separate thread sends that, because a
destructor may run anywhere, even while a frame is being sent.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from executors.backends.python.api.calls import Sink
from executors.backends.python.api.errors import TritonError
from executors.backends.python.api.response import InferenceResponse, ResponseSender
from executors.backends.python.protocol.frames import Buffer, Frame, FrameReader, Kind, pack

_MAX_BUFFERS_PER_WRITE = 512
_ANSWERS = (Kind.ANSWER, Kind.LAST_ANSWER)
_OF_REQUESTS = (Kind.CANCEL, Kind.WINDOW)
_POLL_S = 0.05

ABANDONED = "the model let go of the request without a final response"


class ChannelClosed(Exception):
    """The executor has ended."""


class Channel:
    """Sends and receives frames over a connected socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(True)
        self._reader = FrameReader()
        self._frames: queue.SimpleQueue[Frame | Exception] = queue.SimpleQueue()
        self._background = False
        self._answered: Callable[[Frame], None] | None = None
        self._ended: Callable[[], None] | None = None
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._starting = threading.Lock()
        self._cancelled: dict[int, set[int]] = {}
        self._finished = 0
        self._windows: dict[int, dict[int, int]] = {}
        """By call, then index of a request: how many responses are wanted."""
        self._news = threading.Condition()
        """Notified of cancellations, windows, and the end of the stream."""
        self._over = False
        self._lingering: set[int] = set()
        """Calls whose `execute` has returned while responses are missing."""
        # a forked child of the model must neither write to the stream nor keep it open after our end
        os.register_at_fork(after_in_child=self._drop_after_fork)
        self._owner = os.getpid()

    def send(self, kind: Kind, call: int, content: Any, data: Iterable[Buffer] = ()) -> None:
        """Write one whole frame. Raises `ChannelClosed`, also in processes forked from this one."""
        self.send_packed(pack(kind, call, content, data))

    def send_packed(self, packed: Sequence[Buffer]) -> None:
        """The same of the buffers of one frame."""
        if os.getpid() != self._owner:
            raise ChannelClosed("a forked process has no connection to the executor")
        try:
            with self._sending:
                if len(packed) == 1:
                    sent = self._socket.send(packed[0])
                    if sent == len(packed[0]):
                        return
                    packed = (memoryview(packed[0])[sent:],)
                buffers = [memoryview(buffer).cast("B") for buffer in packed if len(buffer)]
                while buffers:
                    sent = self._socket.sendmsg(buffers[:_MAX_BUFFERS_PER_WRITE])
                    while buffers and sent >= len(buffers[0]):
                        sent -= len(buffers.pop(0))
                    if sent:
                        buffers[0] = buffers[0][sent:]
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> Frame:
        """Wait for the next frame. Raises `ChannelClosed` at the end of the stream, `FrameError` if malformed."""
        while True:
            if not self._background and self._frames.empty():
                # poll: a background thread keeps the lock, and may have queued frames meanwhile
                if self._receiving.acquire(timeout=_POLL_S):
                    try:
                        # a thread that checked for cancellations may have read a frame
                        if not self._background and self._frames.empty():
                            self._read(0)
                    finally:
                        self._receiving.release()
                continue
            frame = self._frames.get()
            if isinstance(frame, Exception):
                raise frame
            return frame

    def deliver_answers_to(self, answered: Callable[[Frame], None], ended: Callable[[], None]) -> None:
        """Set the handlers of answers to the model's requests, and of their end. Called in the receiving thread."""
        self._answered, self._ended = answered, ended

    def receive_in_background(self) -> None:
        """Start a thread that receives from now on."""
        with self._starting:
            if self._background:
                return
            self._background = True
        threading.Thread(target=self._receive_all, name="charonia answers", daemon=True).start()

    def _receive_all(self) -> None:
        try:
            while True:
                with self._receiving:
                    self._read(0)
        except Exception as error:
            self._frames.put(error)
            with self._news:
                self._over = True
                self._news.notify_all()
            if self._ended is not None:
                self._ended()

    def cancelled(self, call: int, index: int) -> bool:
        """Whether the request at `index` of an unfinished EXECUTE was cancelled. Reads the socket without blocking."""
        # if the lock is taken, its holder reads the cancellations
        if self._receiving.acquire(blocking=False):
            try:
                self._read(socket.MSG_DONTWAIT)
            except (BlockingIOError, ChannelClosed):
                pass  # the receiving thread will find the end of the stream
            finally:
                self._receiving.release()
        return index in self._cancelled.get(call, ())

    def limit(self, call: int, index: int, count: int) -> None:
        """Limit the responses to the request at `index` of an EXECUTE for now."""
        known = self._windows.setdefault(call, {})
        known[index] = max(count, known.get(index, 0))

    def wait_for_window(self, call: int, index: int, sent: int) -> None:
        """Wait until more than `sent` responses are wanted, or the request is cancelled, or the stream ends.

        Starts the background thread, because a waiting thread must not hold up the frames of others.
        """
        if self._may_send(call, index, sent):
            return
        self.receive_in_background()
        with self._news:
            self._news.wait_for(lambda: self._may_send(call, index, sent))

    def _may_send(self, call: int, index: int, sent: int) -> bool:
        window = self._windows.get(call, {}).get(index, 0)
        return not 0 < window <= sent or index in self._cancelled.get(call, ()) or self._over

    def finished(self, call: int) -> None:
        """Called when an EXECUTE is completely answered: its cancellations no longer matter."""
        if call in self._lingering:
            self._lingering.discard(call)
        else:
            self._finished = call
        self._cancelled.pop(call, None)
        self._windows.pop(call, None)

    def lingers(self, call: int) -> None:
        """Called when `execute` has returned while responses are missing: cancellations still matter."""
        self._lingering.add(call)
        self._finished = call

    def _read(self, flags: int) -> None:
        """Read from the socket. Raises `BlockingIOError` when there is nothing and `flags` forbid waiting."""
        try:
            count = self._socket.recv_into(self._reader.get_buffer(), 0, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if count == 0:
            raise ChannelClosed("the executor closed the connection")
        for frame in self._reader.received(count):
            if frame.kind in _ANSWERS:
                if self._answered is not None:
                    self._answered(frame)
            elif frame.kind not in _OF_REQUESTS:
                self._frames.put(frame)
            elif frame.call in self._lingering or frame.call != self._finished:  # else it came after the answer
                if frame.kind is Kind.CANCEL:
                    self._cancelled.setdefault(frame.call, set()).update(frame.content())
                else:
                    for index, count in frame.content():
                        self.limit(frame.call, index, count)
                with self._news:
                    self._news.notify_all()

    def _drop_after_fork(self) -> None:
        self._socket.close()


_execute_call: contextvars.ContextVar[int] = contextvars.ContextVar("charonia_execute_call", default=0)


class Broker:
    """Numbers and sends calls. `executes` is set once the model is initialised.

    A call belongs to an EXECUTE: that of its coroutine or thread (a coroutine keeps its own while others start), or the
    running one if the calling thread was started during it. For older threads the running one is only likely; then the
    executor, which knows the other running EXECUTEs, decides.
    """

    def __init__(self, channel: Channel) -> None:
        self.executes = False
        self.model = ""
        self._execute_call = 0
        self._running = False
        self._thread = 0
        self._has_answered: Callable[[], bool] = lambda: False
        self._older: frozenset[threading.Thread] = frozenset()
        self._channel = channel
        self._lock = threading.Lock()
        self._sinks: dict[int, Sink] = {}
        self._numbers = itertools.count(1)
        self._closed = False
        channel.deliver_answers_to(self._answered, self._gone)

    def call(self, content: list[Any], data: Iterable[Buffer], sink: Sink, *, blocks: bool = False) -> int:
        execute_call, surely = self._made_for()
        # an EXECUTE returns in the thread where it runs; callers that have a response already no longer wait for it
        blocks = blocks and surely and threading.get_ident() == self._thread and not self._has_answered()
        return self._send(Kind.CALL, [execute_call, surely, blocks, *content], data, sink)

    def begin(self, execute_call: int, has_answered: Callable[[], bool] = lambda: False) -> None:
        """Called when an EXECUTE begins in this thread. `has_answered()`: whether it has sent a response."""
        _execute_call.set(execute_call)
        self._execute_call, self._running = execute_call, True
        self._thread, self._has_answered = threading.get_ident(), has_answered
        # most models have no other threads
        self._older = frozenset(threading.enumerate() if threading.active_count() > 1 else ())

    def returned(self) -> None:
        """Called when it has returned in this thread. Its coroutines and senders may continue."""
        self._running = False
        self._thread = 0
        _execute_call.set(0)

    def _made_for(self) -> tuple[int, bool]:
        """The EXECUTE that a call belongs to, and whether that is certain."""
        own = _execute_call.get()
        if own:
            return own, True
        return self._execute_call, self._running and threading.current_thread() not in self._older

    def control(self, content: list[Any], data: Iterable[Buffer], sink: Sink) -> int:
        return self._send(Kind.CONTROL, content, data, sink)

    def give_up(self, number: int, *, gentle: bool = False) -> None:
        with self._lock:
            if number not in self._sinks:
                return
        with contextlib.suppress(ChannelClosed):
            self._channel.send(Kind.GIVE_UP, number, gentle)

    def _send(self, kind: Kind, content: list[Any], data: Iterable[Buffer], sink: Sink) -> int:
        number = next(self._numbers) & 0xFFFFFFFF
        with self._lock:
            gone = self._closed
            if not gone:
                self._sinks[number] = sink
        if gone:
            sink(None)
            return number
        self._channel.receive_in_background()
        try:
            self._channel.send(kind, number, content, data)
        except ChannelClosed:
            with self._lock:
                known = self._sinks.pop(number, None)
            if known is not None:
                known(None)
        except BaseException:  # a content that cannot be packed: nothing was sent
            with self._lock:
                self._sinks.pop(number, None)
            raise
        return number

    def _answered(self, frame: Frame) -> None:
        last = frame.kind is Kind.LAST_ANSWER
        with self._lock:
            sink = self._sinks.pop(frame.call, None) if last else self._sinks.get(frame.call)
        if sink is not None:
            sink((frame.content(), frame.data, last))

    def _gone(self) -> None:
        with self._lock:
            self._closed = True
            sinks = list(self._sinks.values())
            self._sinks.clear()
        for sink in sinks:
            sink(None)


class Execution:
    """The requests of one EXECUTE, for their senders: any thread sends responses, during `execute` and after it.

    `describe` converts a response to frame content (`frame_content`).
    """

    def __init__(
        self,
        channel: Channel,
        call: int,
        abandoned: AbandonedRequests,
        describe: Callable[[list[str], InferenceResponse], tuple[Any, list[Buffer]]],
        *,
        decoupled: bool,
    ) -> None:
        self.call = call
        self.decoupled = decoupled
        self._channel = channel
        self._abandoned = abandoned
        self._describe = describe
        self._lock = threading.Lock()
        self._limited = False
        self._open = 0
        self._returned = False
        self._answered = False

    def has_answered(self) -> bool:
        """Whether any request has had a response."""
        return self._answered

    def is_cancelled(self, index: int) -> bool:
        return self._channel.cancelled(self.call, index)

    def limit(self, index: int, count: int) -> None:
        """Limit the responses to the request at `index` for now."""
        self._limited = True
        self._channel.limit(self.call, index, count)

    def wait_for_window(self, index: int, sent: int) -> None:
        """Wait until more than `sent` responses are wanted, or the request is cancelled."""
        if self._limited:
            self._channel.wait_for_window(self.call, index, sent)

    def sender(self, index: int, names: list[str]) -> ResponseSender:
        """Return the sender of the request at `index`; `names` are its outputs."""
        with self._lock:
            self._open += 1
        self._abandoned.start()
        return ResponseSender(self, index, names)

    def respond(self, index: int, names: list[str], response: Any, *, final: bool) -> None:
        self._answered = True
        if response is None:
            self._channel.send(Kind.RESPONSE, self.call, [index, final, None])
        else:
            if not isinstance(response, InferenceResponse):
                raise TypeError(f"response must be an InferenceResponse, found type '{type(response)}'.")
            content, data = self._describe(names, response)
            self._channel.send(Kind.RESPONSE, self.call, [index, final, content], data)
        if final:
            self.ended()

    def fail(self, index: int, message: str, code: int = TritonError.INTERNAL) -> None:
        """End a request with an error."""
        self._channel.send(Kind.RESPONSE, self.call, [index, True, [[code, message], {}, []]])

    def reschedule(self, index: int) -> None:
        """End a request that the model reschedules (S41)."""
        self._channel.send(Kind.RESPONSE, self.call, [index, True, [None, {}, [], True]])

    def abandon(self, index: int) -> None:
        self._abandoned.put(partial(self._fail_abandoned, index))

    def _fail_abandoned(self, index: int) -> None:
        self.fail(index, ABANDONED)
        self.ended()

    def returned(self) -> None:
        """Called when `execute` has returned. Cancellations still matter while responses are missing."""
        with self._lock:
            self._returned = True
            if self._open:
                self._channel.lingers(self.call)
            else:
                self._channel.finished(self.call)

    def ended(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._returned:
                self._channel.finished(self.call)


class AbandonedRequests:
    """Reports requests that will never be answered, in a thread that `start` starts."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, say: Callable[[], None]) -> None:
        self._waiting.put(say)

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._report_all, name="charonia abandoned requests", daemon=True)
            self._thread.start()

    def _report_all(self) -> None:
        while True:
            try:
                self._waiting.get()()
            except ChannelClosed:
                return
