"""Requests in model code (P9), and functions to find a tensor in a request or response (P8)."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from executors.backends.python.api import calls

from .errors import TritonModelException
from .response import Execution, InferenceResponse, ResponseSender, checked_parameters, parameters_text
from .tensor import Tensor

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_CPU_PINNED = 1
TRITONSERVER_MEMORY_GPU = 2

_FLAGS, _UINT64 = range(1 << 32), range(1 << 64)

_MAKING_SENDER = threading.Lock()
"""A thread of the model may ask for a sender while `execute` returns."""


class PreferredMemory:
    """The caller's preferred location of outputs; a hint only."""

    def __init__(self, preferred_memory_type: int = TRITONSERVER_MEMORY_CPU, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request. Pass it to a request that the model makes, to make that part of the trace (P17)."""

    def __init__(self, span_id: bytes = b"", context: str | None = None) -> None:
        self.span_id = span_id
        """Empty without tracing. Internal."""
        self._context = context

    def get_context(self) -> str | None:
        """The JSON text of OpenTelemetry's propagation context; None unless the request is traced in that mode."""
        return self._context


class InferenceRequest:
    """One request of a batch. Models also make requests to call other models (P13)."""

    # class attributes: most requests never change these, and a batch makes many requests at once (`of_columns`)
    _correlation_id: int | str = 0
    _flags = 0
    _preferred_memory: PreferredMemory | None = None
    _trace: InferenceTrace | None = None
    _rescheduled = False
    _execution: Execution | None = None
    _index = 0
    _sender: ResponseSender | None = None

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """A request of another model. `inputs`, `requested_output_names` and `model_name` are needed.

        Raises `TypeError` for values of other types, `TritonModelException` for empty ones.
        """
        inputs = _sequence("inputs", inputs, Tensor)
        names = _sequence("requested_output_names", requested_output_names, str)
        if not isinstance(model_name, str):
            raise TypeError(f"'model_name' must be of type str, found type '{type(model_name)}'.")
        if not isinstance(request_id, str):
            raise TypeError(f"'request_id' must be of type str, found type '{type(request_id)}'.")
        model_version = _whole("model_version", model_version, range(-(1 << 63), 1 << 63))
        flags, timeout = _whole("flags", flags, _FLAGS), _whole("timeout", timeout, _UINT64)
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        if isinstance(correlation_id, int):
            correlation_id = _whole("correlation_id", correlation_id, _UINT64)
        for what, given, kind in (
            ("preferred_memory", preferred_memory, PreferredMemory),
            ("trace", trace, InferenceTrace),
        ):
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"'{what}' must be of type {kind.__name__}, found type '{type(given)}'.")
        if None in inputs:
            raise TritonModelException(_empty("Input tensor", request_id, model_name))
        if "" in names:
            raise TritonModelException(_empty("Requested output name", request_id, model_name))
        self._model_name = model_name
        self._outputs = sorted(set(names))
        self._inputs = list(inputs)
        self._id = request_id
        self._correlation_id = correlation_id
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters = parameters_text(checked_parameters(parameters))

    @classmethod
    def of_frame(
        cls,
        *,
        request_id: str,
        correlation_id: int | str,
        outputs: Sequence[str],
        parameters: str,
        timeout: int,
        flags: int,
        model_name: str,
        model_version: int,
        trace: InferenceTrace | None,
    ) -> InferenceRequest:
        """Make a request of an EXECUTE, without its inputs. `parameters` is JSON text. Internal."""
        request = cls.__new__(cls)
        request._model_name = model_name
        request._outputs = list(outputs)
        request._inputs = []
        request._id = request_id
        request._correlation_id = correlation_id
        request._model_version = model_version
        request._flags = flags
        request._timeout = timeout
        request._trace = trace
        request._parameters = parameters
        return request

    @classmethod
    def of_columns(
        cls,
        execution: Execution,
        count: int,
        columns: Sequence[Sequence[Tensor]],
        ids: Sequence[str] | None,
        model_name: str,
        model_version: int,
        outputs: Sequence[str],
        timeout: int,
        parameters: str,
    ) -> list[InferenceRequest]:
        """Make the requests of an EXECUTE of a model that is not decoupled, from columns of inputs. Internal.

        A column has one input of every request. All else is equal in all requests, except their `ids` (None: "").
        """
        requests = []
        for index, inputs in enumerate(zip(*columns, strict=True) if columns else ((),) * count):
            request = cls.__new__(cls)
            request._model_name = model_name
            request._outputs = list(outputs)
            request._inputs = list(inputs)
            request._id = "" if ids is None else ids[index]
            request._model_version = model_version
            request._timeout = timeout
            request._parameters = parameters
            request._execution = execution
            request._index = index
            requests.append(request)
        return requests

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> set[str]:
        """The outputs to return: those the client named, or all of the model's. A new set with every call."""
        return set(self._outputs)

    @property
    def outputs(self) -> list[str]:
        """The outputs to return, in their order. Internal."""
        return self._outputs

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def flags(self) -> int:
        """The sequence start and end bits."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Raises `TypeError` for anything that is no whole number in its range."""
        self._flags = _whole("flags", flags, _FLAGS)

    def timeout(self) -> int:
        """The request's queue time-out in microseconds, 0 for none (I11)."""
        return self._timeout

    def parameters(self) -> str:
        """The custom parameters as a JSON object text (P9)."""
        return self._parameters

    def preferred_memory(self) -> PreferredMemory:
        if self._preferred_memory is None:
            self._preferred_memory = PreferredMemory()
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        if self._trace is None:
            self._trace = InferenceTrace()
        return self._trace

    def belongs_to(self, execution: Execution, index: int) -> None:
        """Set the EXECUTE of this request and its index in it. Internal."""
        self._execution, self._index = execution, index
        if execution.decoupled:
            self._sender = execution.sender(index, self._outputs)

    def is_cancelled(self) -> bool:
        """Whether the request was cancelled: its answer is not read, so the model may stop working on it."""
        return self._execution is not None and self._execution.is_cancelled(self._index)

    def get_response_sender(self) -> ResponseSender:
        """Return a sender that answers this request from any thread, also after `execute` (P11).

        A decoupled model may send any number of responses; others send one, and `execute` returns None in its place.
        Raises for a request that the model made.
        """
        if self._execution is None:
            raise TritonModelException(
                "Unable to send response. Response sender has no reference to the decoupled state of the model."
            )
        with _MAKING_SENDER:
            if self._sender is None:
                self._sender = self._execution.sender(self._index, self._outputs)
        return self._sender

    @property
    def sender(self) -> ResponseSender | None:
        """The sender that answers this request, if it has one. Internal."""
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """RELEASE_ALL is the default; RELEASE_RESCHEDULE reschedules the request instead of answering it (S41)."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"Invalid release flag {flags}: expected TRITONSERVER_REQUEST_RELEASE_ALL or "
                "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE."
            )
        self._rescheduled = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def is_rescheduled(self) -> bool:
        """Whether the model reschedules the request. Internal."""
        return self._rescheduled

    def exec(self, decoupled: bool = False) -> Any:
        """Call the model that this request names; return its response, or with `decoupled` an iterator over all (P13).

        Errors are in the response. Raises `TritonModelException` outside `execute`.
        """
        return calls.call(self, decoupled)

    def async_exec(self, decoupled: bool = False) -> Any:
        """The same as an awaitable, for an `async def execute`. The call is sent at once."""
        from executors.backends.python.api import async_calls

        return async_calls.call_async(self, decoupled)


def _sequence(what: str, values: Any, kind: type) -> Sequence[Any]:
    """Check a sequence of values of a type, or of None; it may be empty but not missing."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"an InferenceRequest needs '{what}' as a list, found type '{type(values)}'.")
    for value in values:
        if not isinstance(value, kind) and (value is not None or kind is str):
            raise TypeError(f"'{what}' must be of type {kind.__name__}, found type '{type(value)}'.")
    return values


def _whole(what: str, number: Any, allowed: range) -> int:
    """Check a whole number, which may be of NumPy's types; numbers out of range are Triton's `TypeError`, too."""
    if not hasattr(number, "__index__") or operator.index(number) not in allowed:
        raise TypeError(f"'{what}' must be a whole number in its range, found {number!r}.")
    return operator.index(number)


def _empty(what: str, request_id: str, model_name: str) -> str:
    return f"{what} for request with id '{request_id}' and model name '{model_name}' should not be empty."


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the request's input with this name, or None."""
    return _named(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the response's output with this name, or None."""
    return _named(inference_response.output_tensors(), name)


def _named(tensors: Sequence[Tensor], name: str) -> Tensor | None:
    for tensor in tensors:
        if tensor.name() == name:
            return tensor
    return None
