"""Responses in model code (P10): to a request of its batch, or from a model that it called; and their senders (P11).

A sender checks what a model may send; `stub.channel` sends it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .errors import TritonError, TritonModelException
from .tensor import Tensor


class InferenceResponse:
    """The response to one request. With `error`, the tensors are ignored (P10)."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, str | int | bool] | None = None,
    ) -> None:
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error of an InferenceResponse must be a TritonError, found type '{type(error)}'.")
        for tensor in output_tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors must be Tensor objects, found type '{type(tensor)}'.")
        self._outputs = list(output_tensors)
        self._error = error
        self.checked_parameters: dict[str, str | int | bool | float] = {**checked_parameters(parameters)}

    @classmethod
    def received(
        cls,
        output_tensors: Sequence[Tensor],
        error: TritonError | None,
        parameters: Mapping[str, str | int | bool | float],
    ) -> InferenceResponse:
        """Make the response of a called model, whose backend may give its parameters more types. Internal."""
        response = cls(output_tensors, error)
        response.checked_parameters = dict(parameters)
        return response

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as a JSON object text."""
        return parameters_text(self.checked_parameters)


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """The JSON text of parameters; `{}` for none."""
    return json.dumps(dict(parameters)) if parameters else "{}"


def checked_parameters(parameters: Mapping[str, str | int | bool] | None) -> dict[str, str | int | bool]:
    """A copy of the parameters that model code gives. Raises `TritonModelException` for any other types."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL."""

CLOSED = "Unable to send response. Response sender has been closed."
NO_RESPONSE = "Inference Response object must be provided when the response flags is set to zero."
UNSUPPORTED_FLAG = "Unable to send response. Unsupported flag provided."
SECOND = "Unable to send response. Non-decoupled model cannot send more than one response."
FINAL_FIRST = "Unable to send response. Non-decoupled model cannot send complete final before sending a response."


class Execution(Protocol):
    """The EXECUTE that a request belongs to. Implemented by `stub.channel.Execution`."""

    decoupled: bool

    def is_cancelled(self, index: int) -> bool: ...

    def sender(self, index: int, names: list[str]) -> ResponseSender:
        """Return the sender of the request at `index`; `names` are its outputs. Called once for a request."""

    def respond(self, index: int, names: list[str], response: Any, *, final: bool) -> None:
        """Send a response, or None for a final flag alone. Blocks while the executor does not read."""

    def wait_for_window(self, index: int, sent: int) -> None:
        """Block while no more than `sent` responses are wanted."""

    def ended(self) -> None:
        """Called when the request is answered in another way."""

    def abandon(self, index: int) -> None:
        """Called when the request and its sender were deleted without a final response. Must not block."""


class ResponseSender:
    """Answers one request from any thread, also after `execute` (P11). The result of `get_response_sender()`."""

    def __init__(self, execution: Execution, index: int, names: list[str]) -> None:
        self._execution = execution
        self._index = index
        self._names = names
        self._decoupled = execution.decoupled
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        """Send a response; with `TRITONSERVER_RESPONSE_COMPLETE_FINAL` the last one, or that flag alone.

        Waits while responses are sent faster than they are read, and while no more are wanted (S55). Raises
        `TritonModelException` with the texts of P11.
        """
        if flags not in (0, FINAL):
            raise TritonModelException(UNSUPPORTED_FLAG)
        if response is None and flags == 0:
            raise TritonModelException(NO_RESPONSE)
        if response is not None and self._decoupled:
            self._execution.wait_for_window(self._index, self._sent)
        # the lock is held during the send, so that responses keep the order of the calls
        with self._lock:
            if not self._decoupled and response is not None and self._sent > 0:
                raise TritonModelException(SECOND)
            if not self._decoupled and response is None and self._sent == 0:
                raise TritonModelException(FINAL_FIRST)
            if self._closed:
                raise TritonModelException(CLOSED)
            if self._decoupled or response is not None:
                final = bool(flags) or not self._decoupled
                self._execution.respond(self._index, self._names, response, final=final)
            self._closed = flags == FINAL
            self._sent += 1

    def is_cancelled(self) -> bool:
        """Whether the request was cancelled: its responses are not read."""
        return self._execution.is_cancelled(self._index)

    @property
    def answered(self) -> bool:
        """Whether the final response, or the only one, was sent. Internal."""
        return self._closed or (not self._decoupled and self._sent > 0)

    def close(self) -> bool:
        """Forbid further responses, as the request is answered in another way; return whether it was open. Internal."""
        with self._lock:
            if self.answered:
                return False
            self._closed = True
        self._execution.ended()
        return True

    def __del__(self) -> None:
        if not self.answered:
            self._execution.abandon(self._index)
