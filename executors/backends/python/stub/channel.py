"""The model process's end of the socket: blocking, any thread may send, one thread receives.

Cancels come between the frames it receives, and any thread may look for them meanwhile, which takes one system call and
no thread of its own: a model that never asks pays nothing. A model that calls others, or has to wait until more of its
responses are wanted, gets a thread that receives for all: whoever waits may be any thread, while the one that takes the
verbs is in the model's code.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from executors.backends.python.protocol.frames import Buffer, Frame, FrameReader, Kind, pack

_MAX_BUFFERS_PER_WRITE = 512
_ANSWERS = (Kind.ANSWER, Kind.LAST_ANSWER)
_OF_REQUESTS = (Kind.CANCEL, Kind.WINDOW)
_LOOK_S = 0.05


class ChannelClosed(Exception):
    """The executor is gone."""


class Channel:
    """Frames over a connected socket, which it owns."""

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
        """By call and index of a request: how many responses it may be given."""
        self._news = threading.Condition()
        """Told of cancels and windows that come, and of the end."""
        self._over = False
        self._lingering: set[int] = set()
        """Calls that were answered, of whose requests responses are still to come."""
        # A forked child of the model must neither write into the stream nor keep it open after our end.
        os.register_at_fork(after_in_child=self._drop_after_fork)
        self._owner = os.getpid()

    def send(self, kind: Kind, call: int, content: Any, data: Iterable[Buffer] = ()) -> None:
        """Write one frame whole. Raises `ChannelClosed`, also in processes forked from this one."""
        buffers = [memoryview(buffer).cast("B") for buffer in pack(kind, call, content, data) if len(buffer)]
        if os.getpid() != self._owner:
            raise ChannelClosed("a forked process has no connection to the executor")
        try:
            with self._sending:
                while buffers:
                    sent = self._socket.sendmsg(buffers[:_MAX_BUFFERS_PER_WRITE])
                    while buffers and sent >= len(buffers[0]):
                        sent -= len(buffers.pop(0))
                    if sent:
                        buffers[0] = buffers[0][sent:]
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> Frame:
        """The next frame. Raises `ChannelClosed` at the end of the stream, `FrameError` for bytes that are no frame."""
        while True:
            try:
                frame = self._frames.get(block=self._background)
            except queue.Empty:
                # no longer than that: who receives in the background keeps it, and what came meanwhile is there already
                if self._receiving.acquire(timeout=_LOOK_S):
                    try:
                        # who looked for a cancel meanwhile may have read a frame
                        if not self._background and self._frames.empty():
                            self._read(0)
                    finally:
                        self._receiving.release()
                continue
            if isinstance(frame, Exception):
                raise frame
            return frame

    def deliver_answers_to(self, answered: Callable[[Frame], None], ended: Callable[[], None]) -> None:
        """Who takes the answers to what the model asks, in the thread that receives, and is told of the end of them."""
        self._answered, self._ended = answered, ended

    def receive_in_background(self) -> None:
        """Let a thread of its own receive from now on."""
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
        """Whether the request at `index` of an EXECUTE, not `finished` yet, has been cancelled; looks at the socket."""
        # whoever receives now sees the cancels that come
        if self._receiving.acquire(blocking=False):
            try:
                self._read(socket.MSG_DONTWAIT)
            except (BlockingIOError, ChannelClosed):
                pass  # the thread that receives will find the end of the stream
            finally:
                self._receiving.release()
        return index in self._cancelled.get(call, ())

    def limit(self, call: int, index: int, count: int) -> None:
        """The request at `index` of an EXECUTE may be given so many responses for now."""
        known = self._windows.setdefault(call, {})
        known[index] = max(count, known.get(index, 0))

    def wait_for_window(self, call: int, index: int, sent: int) -> None:
        """Wait until more than `sent` responses are wanted, or the request is cancelled; the end is told by a send.

        A thread of its own receives from then on: whoever waits must not keep the frames of others.
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
        """An EXECUTE has been answered: what is cancelled of it is of no interest any more."""
        if call in self._lingering:
            self._lingering.discard(call)
        else:
            self._finished = call
        self._cancelled.pop(call, None)
        self._windows.pop(call, None)

    def lingers(self, call: int) -> None:
        """The model has returned from an EXECUTE; responses are to come, so cancels of it still matter."""
        self._lingering.add(call)
        self._finished = call

    def _read(self, flags: int) -> None:
        """Take in what has come. Raises `BlockingIOError` when that is nothing and `flags` say not to wait."""
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
            elif frame.call in self._lingering or frame.call != self._finished:  # else it crossed the answer
                if frame.kind is Kind.CANCEL:
                    self._cancelled.setdefault(frame.call, set()).update(frame.content())
                else:
                    for index, count in frame.content():
                        self.limit(frame.call, index, count)
                with self._news:
                    self._news.notify_all()

    def _drop_after_fork(self) -> None:
        self._socket.close()
