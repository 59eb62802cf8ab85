"""Sends the responses of one EXECUTE from the model process, from any thread, during `execute` and after it.

This is the model's side of RESPONSE frames (`exchange`). A request that the model deletes without a final response ends
with an error. A separate thread sends that, because a destructor may run anywhere, even while a frame is being sent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from executors.backends.python.api.errors import TritonError
from executors.backends.python.api.response import InferenceResponse, ResponseSender
from executors.backends.python.protocol.frames import Buffer, Kind

from .channel import Channel, ChannelClosed

ABANDONED = "the model let go of the request without a final response"


class Execution:
    """The requests of one EXECUTE, for their senders. `describe` converts a response to frame content (`exchange`)."""

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
