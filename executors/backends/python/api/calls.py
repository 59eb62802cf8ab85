"""Models that call models (P13) and load or unload them (P14), as model code sees it.

Carrying a call to the executor and its answers back is the model process's (`broker`), which puts itself in here as the
`Exchange`; elsewhere there is none, and nothing can be called.
"""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from executors.backends.python.protocol.frames import Buffer, places

from .errors import TritonError, TritonModelException
from .inference_response import InferenceResponse
from .tensor import Tensor

ONLY_IN_EXECUTE = "BLS is only supported during the 'execute' function."
"""P13."""

Answer = tuple[Any, memoryview, bool]
"""(content, data, whether it is the last); content is nil where a last one says nothing but that."""

Sink = Callable[["Answer | None"], object]
"""Called in any thread with each answer; with None when there will be none, because the executor is gone."""


class Traced(Protocol):
    span_id: bytes


class CallRequest(Protocol):
    """What a call says of itself (`inference.InferenceRequest`)."""

    def inputs(self) -> list[Tensor]: ...

    def model_name(self) -> str: ...

    def model_version(self) -> int: ...

    def requested_output_names(self) -> list[str]: ...

    def request_id(self) -> str: ...

    def correlation_id(self) -> int | str: ...

    def flags(self) -> int: ...

    def timeout(self) -> int: ...

    def parameters(self) -> str: ...

    def trace(self) -> Traced: ...


class Exchange(Protocol):
    """What carries calls."""

    @property
    def executes(self) -> bool:
        """Whether the model is initialised and not finalised yet."""

    @property
    def model(self) -> str:
        """The model whose code runs here."""

    def call(self, content: list[Any], data: Iterable[Buffer], sink: Sink, *, blocks: bool = False) -> int:
        """Send a call of another model; its number. `blocks`: this thread does nothing else until it is answered."""

    def control(self, content: list[Any], data: Iterable[Buffer], sink: Sink) -> int:
        """Send a word about the repository; it is answered once."""

    def give_up(self, number: int) -> None:
        """Nobody wants the answers of a call any more; the last one comes all the same, sooner."""


_exchange: Exchange | None = None


def carry_with(exchange: Exchange | None) -> None:
    """Use an exchange from now on, or none."""
    global _exchange
    _exchange = exchange


class ResponseIterator:
    """The responses of one call, as they come. What went wrong is a response with an error, and the last."""

    def __init__(self, start: Callable[[Sink], int], give_up: Callable[[int], None]) -> None:
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._give_up = give_up
        self._done = False
        self._number = start(self._answers.put)

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        while not self._done:
            answer = self._answers.get()
            self._done = answer is None or answer[2]
            response = response_of(answer)
            if response is not None:
                return response
        raise StopIteration

    def cancel(self) -> None:
        """Want no more responses; one with the error CANCELLED may be the last."""
        if not self._done:
            self._give_up(self._number)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.cancel()


def call(request: CallRequest, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """`InferenceRequest.exec`: the response, or with `decoupled` all of them as they come (P13).

    Raises `TritonModelException` outside `execute`; what a call ends with is in its response.
    """
    exchange = executing()
    start = starter(exchange, request, decoupled, blocks=not decoupled)
    if decoupled:
        return ResponseIterator(start, exchange.give_up)
    answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
    start(answers.put)
    return single(answers.get())


def load_model(model_name: str, files: Mapping[str, bytes] | None = None, config: str = "") -> None:
    """Load a model and wait until it is ready (P14); `files` maps `file:<version>/<path>` to content.

    Raises `TritonModelException`: not in explicit mode, not loadable, or this very model while it is being loaded.
    """
    contents = {path.removeprefix("file:"): bytes(content) for path, content in (files or {}).items()}
    described = [[path, len(content)] for path, content in contents.items()]
    _control(["load", model_name, config, described], contents.values(), changes=model_name)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; it goes on when this has returned (P14). Raises `TritonModelException` as `load_model` does."""
    _control(["unload", model_name, bool(unload_dependents)], (), changes=model_name)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a version would be run now, "" for the latest (P14)."""
    return bool(_control(["is_ready", model_name, str(model_version)], ()))


def _control(content: list[Any], data: Iterable[Buffer], *, changes: str = "") -> Any:
    exchange = _exchange
    if exchange is None:
        raise TritonModelException("models cannot be loaded, unloaded or asked for outside of a model's process")
    if changes == exchange.model and not exchange.executes:
        raise TritonModelException(f"model '{changes}' cannot load or unload itself while it is being loaded")
    answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
    exchange.control(content, data, answers.put)
    answer = answers.get()
    if answer is None:
        raise TritonModelException("the executor is gone")
    failure, value = answer[0]
    if failure is not None:
        raise TritonModelException(failure[1])
    return value


def executing() -> Exchange:
    if _exchange is None or not _exchange.executes:
        raise TritonModelException(ONLY_IN_EXECUTE)
    return _exchange


def starter(
    exchange: Exchange, request: CallRequest, decoupled: bool, *, blocks: bool = False
) -> Callable[[Sink], int]:
    described: list[Any] = []
    data: list[Buffer] = []
    for tensor in request.inputs():
        encoded = tensor.encoded()
        described.append([tensor.name(), tensor.triton_dtype(), tensor.shape(), len(encoded)])
        data.append(encoded)
    content = [
        request.model_name(),
        int(request.model_version()),
        list(request.requested_output_names()),
        request.request_id(),
        request.correlation_id(),
        request.flags(),
        request.timeout(),
        json.loads(request.parameters()),
        decoupled,
        described,
    ]
    if request.trace().span_id:
        content.append(request.trace().span_id)
    return lambda sink: exchange.call(content, data, sink, blocks=blocks)


def single(answer: Answer | None) -> InferenceResponse:
    response = response_of(answer)
    if response is None:
        raise TritonModelException("the model ended without a response")
    return response


def response_of(answer: Answer | None) -> InferenceResponse | None:
    """The response an answer holds, if any. Raises `TritonModelException` when the executor is gone."""
    if answer is None:
        raise TritonModelException("the executor is gone")
    content, data, _ = answer
    if content is None:
        return None
    failure, parameters, described = content
    if failure is not None:
        return InferenceResponse(error=TritonError(failure[1], failure[0]), parameters=parameters)
    offsets = places([size for _, _, _, size in described])
    tensors = [
        Tensor.received(name, number, tuple(shape), data[at : at + size])
        for (name, number, shape, size), at in zip(described, offsets, strict=True)
    ]
    return InferenceResponse(tensors, parameters=parameters)
