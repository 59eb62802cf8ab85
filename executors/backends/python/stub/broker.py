"""Sends a model process's calls of other models, and passes each answer to its sink.

Implements `api.calls.Exchange`. Any thread of the model may call; answers arrive in the receiving thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from executors.backends.python.api.calls import Sink
from executors.backends.python.protocol.frames import Buffer, Frame, Kind

from .channel import Channel, ChannelClosed

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

    def give_up(self, number: int) -> None:
        with self._lock:
            if number not in self._sinks:
                return
        with contextlib.suppress(ChannelClosed):
            self._channel.send(Kind.GIVE_UP, number, None)

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
