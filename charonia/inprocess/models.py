"""Models of the in-process API, the requests that they are sent and the responses that come back."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from charonia import inference as kernel
from charonia import tensors as kernel_tensors
from charonia.errors import CharoniaError
from charonia.inference import check_dimensions, check_parameter_name, check_request_id
from charonia.models.config_forms import to_json
from gateway.http.codec import control_json
from gateway.requests.large_tensors import complaint

from .dlpack_tensors import DeviceOrMemoryType, Tensor, parse_device
from .host import Exchange, Host
from .kinds import (
    DataType,
    InvalidArgumentError,
    MemoryType,
    ModelBatchFlag,
    ModelTxnPropertyFlag,
    RequestFlag,
    TritonError,
    UnsupportedError,
    triton_error,
)

if TYPE_CHECKING:
    from charonia.catalog.served import ServedVersion

_PARAMETERS = (str, int, float, bool)
_MOST = 2**64 - 1


class Hosted(Protocol):
    """A server that may have been started."""

    def _running(self) -> Host: ...


class Model:
    """A model of a started server; `Server.model` and `Server.models` make them. `version` -1 is the latest."""

    def __init__(
        self, server: Hosted, name: str, version: int = -1, state: str | None = None, reason: str | None = None
    ) -> None:
        self._host = server._running()
        self.name = name
        self.version = version
        self.state = state
        self.reason = reason

    def create_request(self, **kwargs: Any) -> InferenceRequest:
        """A request to this model; `kwargs` are the fields of `InferenceRequest`."""
        kwargs.pop("model", None)
        return InferenceRequest(model=self, **kwargs)

    def infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **kwargs: Any
    ) -> ResponseIterator:
        """Send a request, or one of `kwargs`; its responses are iterated over. Raises what refuses it at once.

        Without `raise_on_error` a response that failed is given as it is, with its `error`.
        """
        return ResponseIterator(self._send(inference_request, kwargs), raise_on_error)

    def async_infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **kwargs: Any
    ) -> AsyncResponseIterator:
        """As `infer`, for `async for` in the caller's event loop."""
        return AsyncResponseIterator(self._send(inference_request, kwargs, asynchronous=True), raise_on_error)

    def metadata(self) -> dict[str, Any]:
        """Name, versions, platform, inputs and outputs."""
        return control_json.model_metadata(self._host.ask(lambda service: service.model_metadata(*self._key)))

    def ready(self) -> bool:
        """Whether it takes requests; no model that is unknown or unloaded does."""
        return self._host.ask(lambda service: service.model_ready(*self._key))

    def batch_properties(self) -> ModelBatchFlag:
        """Whether its tensors have a leading batch dimension."""
        batches = self._served().config.max_batch_size > 0
        return ModelBatchFlag.FIRST_DIM if batches else ModelBatchFlag.UNKNOWN

    def transaction_properties(self) -> ModelTxnPropertyFlag:
        """Whether a request may have any number of responses."""
        decoupled = self._served().config.model_transaction_policy.decoupled
        return ModelTxnPropertyFlag.DECOUPLED if decoupled else ModelTxnPropertyFlag.ONE_TO_ONE

    def statistics(self) -> dict[str, Any]:
        """Statistics of this version, or of all with -1."""
        return control_json.model_statistics(self._host.wait_for(lambda service: service.statistics(*self._key)))

    def config(self, config_version: int = 1) -> dict[str, Any]:
        """The configuration with everything that was filled in."""
        if config_version != 1:
            raise InvalidArgumentError(
                f"model configuration version {config_version} not supported, supported versions are: 1"
            )
        return to_json(self._served().config)

    def __str__(self) -> str:
        return str({"name": self.name, "version": self.version, "state": self.state})

    __repr__ = __str__

    @property
    def _key(self) -> tuple[str, str]:
        return self.name, "" if self.version == -1 else str(self.version)

    def _served(self) -> ServedVersion:
        return self._host.ask(lambda service: service.served_model(*self._key))

    def _send(
        self, request: InferenceRequest | None, fields: dict[str, Any], *, asynchronous: bool = False
    ) -> Exchange[InferenceResponse]:
        wanted = request if request is not None else self.create_request(**fields)
        model = wanted.model
        also = wanted._queue(asynchronous)

        def made(response: kernel.InferenceResponse) -> InferenceResponse:
            return InferenceResponse._of(model, response)

        try:
            sent = wanted._for_kernel()
        except CharoniaError as error:
            raise triton_error(error) from None
        exchange = Exchange(made, also, kernel.InferenceResponse(sent.model, sent.version, [], sent.id))
        model._host.send(sent, exchange)
        return exchange


@dataclass
class InferenceRequest:
    """A request. `inputs` are tensors, or what becomes one: arrays, lists, objects with `__dlpack__`.

    `timeout` is in microseconds, 0 for none; `priority` 0 is the model's default; `flags` are `RequestFlag`s of a
    sequence's request, which `correlation_id` names. Outputs come in host memory, whatever is asked for besides is
    refused. Each response is put into `response_queue` as it comes, too: a `queue.SimpleQueue`, or an `asyncio.Queue`
    of the event loop in which `async_infer` is called.
    """

    model: Model
    request_id: str | None = None
    flags: int = 0
    correlation_id: int | str | None = None
    priority: int = 0
    timeout: int = 0
    inputs: dict[str, Tensor | Any] = field(default_factory=dict)
    parameters: dict[str, str | int | bool | float] = field(default_factory=dict)
    output_memory_type: DeviceOrMemoryType | None = None
    response_queue: queue.SimpleQueue[InferenceResponse] | asyncio.Queue[InferenceResponse] | None = None

    def _for_kernel(self) -> kernel.InferenceRequest:
        """Raises `TritonError` and `CharoniaError` for what no model can be sent."""
        self._check_output_memory()
        for name, value in self.parameters.items():
            if type(value) not in _PARAMETERS:
                raise InvalidArgumentError(f"Unsupported Value. Can't convert {type(value)} to Request Parameter")
            check_parameter_name(name)
        request_id = "" if self.request_id is None else self.request_id
        check_request_id(request_id)
        sequence = 0 if self.correlation_id is None else self.correlation_id
        numbers = {"flags": self.flags, "priority": self.priority, "timeout": self.timeout, "correlation_id": sequence}
        for name, number in numbers.items():
            if not isinstance(number, str) and not (isinstance(number, int) and 0 <= number <= _MOST):
                raise InvalidArgumentError(f"'{name}' must be a whole number from 0 to {_MOST}, got {number!r}")
        inputs: list[kernel_tensors.Tensor] = []
        elements: dict[str, str] = {}
        for name, given in self.inputs.items():
            tensor = given if isinstance(given, Tensor) else Tensor._from_object(given)
            check_dimensions(name, len(tensor.shape))
            made = tensor._named(name)
            inputs.append(made)
            if tensor.data_type is DataType.BYTES:  # here, and not in the event loop: there may be many
                elements[name] = complaint(made.data, prod(made.shape), name, self.model.name)
        return kernel.InferenceRequest(
            self.model.name,
            kernel.parse_version(self.model._key[1]),
            inputs,
            id=request_id,
            parameters=dict(self.parameters),
            priority=self.priority,
            timeout_us=self.timeout,
            sequence_id=sequence,
            sequence_start=bool(self.flags & RequestFlag.SEQUENCE_START),
            sequence_end=bool(self.flags & RequestFlag.SEQUENCE_END),
            elements=elements or None,
        )

    def _check_output_memory(self) -> None:
        wanted = self.output_memory_type
        if wanted is None:
            return
        try:
            kind, number = parse_device(wanted)
            if (kind, number) != (MemoryType.CPU, 0):
                raise UnsupportedError(f"Conversion from {(MemoryType.CPU, 0)} to {(kind, number)} not supported.")
        except TritonError as error:
            raise InvalidArgumentError(f"Memory type {wanted} not supported: {error}") from None

    def _queue(self, asynchronous: bool) -> Callable[[InferenceResponse], None] | None:
        """How a response gets into the caller's queue."""
        given = self.response_queue
        if given is None:
            return None
        if isinstance(given, asyncio.Queue) is not asynchronous:
            raise InvalidArgumentError("response_queue must be a queue.SimpleQueue, or an asyncio.Queue of async_infer")
        if not isinstance(given, asyncio.Queue):
            return given.put_nowait
        loop, put = asyncio.get_running_loop(), given.put_nowait
        return lambda response: _hand_over(loop, put, response)


def _hand_over(
    loop: asyncio.AbstractEventLoop, put: Callable[[InferenceResponse], None], response: InferenceResponse
) -> None:
    loop.call_soon_threadsafe(put, response)


@dataclass
class InferenceResponse:
    """A response. The last one of a request is `final`; of a decoupled model it may be without outputs."""

    model: Model
    request_id: str | None = None
    parameters: dict[str, str | int | bool | float] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    error: TritonError | None = None
    classification_label: str | None = None
    final: bool = False

    @staticmethod
    def _of(asked: Model, response: kernel.InferenceResponse) -> InferenceResponse:
        model = object.__new__(Model)  # the one that answered; the caller's stays as it is
        model.__dict__.update(asked.__dict__, name=response.model, version=response.version)
        outputs = {tensor.name: Tensor._of(tensor) for tensor in response.outputs}
        made = InferenceResponse(model, response.id, response.parameters, outputs, final=response.final)
        if response.error is not None:
            made.error = triton_error(response.error)
            made.error.args += (made,)
        return made


class ResponseIterator:
    """The responses of a request as they come. A request goes on without a reader when its iterator is dropped."""

    def __init__(self, exchange: Exchange[InferenceResponse], raise_on_error: bool) -> None:
        self._exchange = exchange
        self._raise_on_error = raise_on_error
        self._complete = False

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._complete:
            raise StopIteration
        coming = self._exchange.next()
        try:
            response = coming.result()
        except BaseException:  # Ctrl-C while it waits
            self._exchange.give_back(coming)
            raise
        return self._given(response)

    def cancel(self) -> None:
        """Cancel the request: its last response says so, unless it has ended already."""
        self._exchange.cancel()

    def __del__(self) -> None:
        self._exchange.abandon()

    def _given(self, response: InferenceResponse) -> InferenceResponse:
        self._complete = response.final
        if response.error is not None and self._raise_on_error:
            raise response.error
        return response


class AsyncResponseIterator(ResponseIterator):
    """As `ResponseIterator`, for `async for`."""

    def __aiter__(self) -> AsyncResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._complete:
            raise StopAsyncIteration
        coming = self._exchange.next()
        try:
            response = await asyncio.wrap_future(coming)
        except BaseException:
            self._exchange.give_back(coming)
            raise
        return self._given(response)
