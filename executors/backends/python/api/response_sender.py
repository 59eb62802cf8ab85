"""How model code answers a request whenever it likes: its response sender, from any thread, also after `execute` (P11).

How an answer travels is `answering`'s; here is what a model may do, and what it is told when it may not.
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
    """Where the answers to one request go."""

    def respond(self, response: Any, *, final: bool) -> None:
        """One response, or None for a final flag alone. Blocks while the executor takes none."""

    def wait_for_window(self, sent: int) -> None:
        """Block while no more than `sent` responses are wanted."""

    def closed(self) -> None:
        """The request is answered otherwise."""

    def abandoned(self) -> None:
        """The model has let go of the request and its sender without a final response. Must not block."""


class Outcome:
    """How far one request is answered; its request and its senders share it. Not for models."""

    __slots__ = ("_answers", "_closed", "_decoupled", "_lock", "_sent")

    def __init__(self, answers: Answers, *, decoupled: bool) -> None:
        self._answers = answers
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    @property
    def answered(self) -> bool:
        """Whether nothing more is needed: the final response, or the only one, was sent."""
        return self._closed or (not self._decoupled and self._sent > 0)

    def send(self, response: Any, flags: int) -> None:
        """Raises `TritonModelException` with the texts of P11."""
        if flags not in (0, FINAL):
            raise TritonModelException(UNSUPPORTED_FLAG)
        if response is None and flags == 0:
            raise TritonModelException(NO_RESPONSE)
        if response is not None and self._decoupled:
            self._answers.wait_for_window(self._sent)
        # held while it is sent, so that the order of the responses is that of the calls
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
        """Nothing more may be sent: it is answered otherwise. Whether it was not answered yet."""
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
    """What `InferenceRequest.get_response_sender()` gives."""

    def __init__(self, outcome: Outcome, is_cancelled: Callable[[], bool]) -> None:
        self._outcome = outcome
        self._is_cancelled = is_cancelled

    def send(self, response: Any = None, flags: int = 0) -> None:
        """Send a response, with `TRITONSERVER_RESPONSE_COMPLETE_FINAL` the last one, or that flag alone.

        Waits while responses are made faster than they are taken, or more than are wanted for now (S55). Raises
        `TritonModelException` (P11).
        """
        self._outcome.send(response, flags)

    def is_cancelled(self) -> bool:
        """Whether the client has given up: then nobody reads the responses."""
        return self._is_cancelled()
