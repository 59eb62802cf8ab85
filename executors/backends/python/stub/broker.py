"""The calls that a model process has under way: numbers them, sends them, hands each answer to whoever waits for it.

The `Exchange` of `api.calls`. Any thread of the model may call; answers come in the thread that receives.
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
    """`executes` is set once the model is initialised.

    A call is made for an EXECUTE: that of the coroutine or thread it is made in (a coroutine knows its own, however
    many began since), or the one that runs where a thread began in it. In older threads that one is only likely: then
    the executor, which knows what else is under way, decides.
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
        # where an EXECUTE runs is where it returns; who waits for what it answered already may do something else
        blocks = blocks and surely and threading.get_ident() == self._thread and not self._has_answered()
        return self._send(Kind.CALL, [execute_call, surely, blocks, *content], data, sink)

    def begin(self, execute_call: int, has_answered: Callable[[], bool] = lambda: False) -> None:
        """An EXECUTE begins in this thread; `has_answered` says whether any of its requests has had a response."""
        _execute_call.set(execute_call)
        self._execute_call, self._running = execute_call, True
        self._thread, self._has_answered = threading.get_ident(), has_answered
        # nearly all models have no other threads
        self._older = frozenset(threading.enumerate() if threading.active_count() > 1 else ())

    def returned(self) -> None:
        """It has returned, in this thread; its coroutines and senders may go on."""
        self._running = False
        self._thread = 0
        _execute_call.set(0)

    def _made_for(self) -> tuple[int, bool]:
        """The EXECUTE that a call is made for, and whether that is sure."""
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
