"""Response senders, with which model code answers requests from any thread, also after `execute` (P11).

This module checks what a model may send; `stub.answering` sends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from .errors import TritonModelException

FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL."""

CLOSED = "Unable to send response. Response sender has been closed."
NO_RESPONSE = "Inference Response object must be provided when the response flags is set to zero."
UNSUPPORTED_FLAG = "Unable to send response. Unsupported flag provided."
SECOND = "Unable to send response. Non-decoupled model cannot send more than one response."
FINAL_FIRST = "Unable to send response. Non-decoupled model cannot send complete final before sending a response."


class Answers(Protocol):
    """Sends the answers to one request. Implemented in `stub.answering`."""

    def respond(self, response: Any, *, final: bool) -> None:
        """Send a response, or None for a final flag alone. Blocks while the executor does not read."""

    def wait_for_window(self, sent: int) -> None:
        """Block while no more than `sent` responses are wanted."""

    def closed(self) -> None:
        """Called when the request is answered in another way."""

    def abandoned(self) -> None:
        """Called when the request and its sender were deleted without a final response. Must not block."""


class Outcome:
    """The state of one request's answers, shared by the request and its senders. Internal."""

    __slots__ = ("_answers", "_closed", "_decoupled", "_lock", "_sent")

    def __init__(self, answers: Answers, *, decoupled: bool) -> None:
        self._answers = answers
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    @property
    def answered(self) -> bool:
        """Whether the final response, or the only one, was sent."""
        return self._closed or (not self._decoupled and self._sent > 0)

    def send(self, response: Any, flags: int) -> None:
        """Send a response. Raises `TritonModelException` with the texts of P11."""
        if flags not in (0, FINAL):
            raise TritonModelException(UNSUPPORTED_FLAG)
        if response is None and flags == 0:
            raise TritonModelException(NO_RESPONSE)
        if response is not None and self._decoupled:
            self._answers.wait_for_window(self._sent)
        # the lock is held during the send, so that responses keep the order of the calls
        with self._lock:
            if not self._decoupled and response is not None and self._sent > 0:
                raise TritonModelException(SECOND)
            if not self._decoupled and response is None and self._sent == 0:
                raise TritonModelException(FINAL_FIRST)
            if self._closed:
                raise TritonModelException(CLOSED)
            if self._decoupled or response is not None:
                self._answers.respond(response, final=bool(flags) or not self._decoupled)
            self._closed = flags == FINAL
            self._sent += 1

    def close(self) -> bool:
        """Forbid further responses, as the request is answered in another way. Returns whether it was unanswered."""
        with self._lock:
            if self.answered:
                return False
            self._closed = True
        self._answers.closed()
        return True

    def __del__(self) -> None:
        if not self.answered:
            self._answers.abandoned()


class ResponseSender:
    """The result of `InferenceRequest.get_response_sender()`."""

    def __init__(self, outcome: Outcome, is_cancelled: Callable[[], bool]) -> None:
        self._outcome = outcome
        self._is_cancelled = is_cancelled

    def send(self, response: Any = None, flags: int = 0) -> None:
        """Send a response; with `TRITONSERVER_RESPONSE_COMPLETE_FINAL` the last one, or that flag alone.

        Waits while responses are sent faster than they are read, and while no more are wanted (S55). Raises
        `TritonModelException` (P11).
        """
        self._outcome.send(response, flags)

    def is_cancelled(self) -> bool:
        """Whether the request was cancelled: its responses are not read."""
        return self._is_cancelled()
