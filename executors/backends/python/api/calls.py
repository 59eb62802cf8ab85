"""Model code's interface for calling models (P13), and for loading and unloading them (P14).

The model process registers an `Exchange` (`stub.channel`) that sends calls to the executor. In other processes there is
none, and calls fail.
"""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from executors.backends.python.protocol.frames import Buffer, tensor_offsets

from .errors import TritonError, TritonModelException, refused
from .response import InferenceResponse
from .tensor import Tensor

ONLY_IN_EXECUTE = "BLS is only supported during the 'execute' function."
"""Triton's error text for calls outside `execute` (P13)."""

Answer = tuple[Any, memoryview, bool]
"""(content, data, is last). The content of a last one may be nil."""

Sink = Callable[["Answer | None"], object]
"""Called in any thread with each answer, or with None when the executor is gone."""


class Traced(Protocol):
    span_id: bytes


class CallRequest(Protocol):
    """The fields of a call. Implemented by `inference.InferenceRequest`."""

    def inputs(self) -> list[Tensor]: ...

    def model_name(self) -> str: ...

    def model_version(self) -> int: ...

    @property
    def outputs(self) -> list[str]: ...

    def request_id(self) -> str: ...

    def correlation_id(self) -> int | str: ...

    def flags(self) -> int: ...

    def timeout(self) -> int: ...

    def parameters(self) -> str: ...

    def trace(self) -> Traced: ...


class Exchange(Protocol):
    """Sends calls to the executor, and passes answers to sinks. Implemented by `stub.channel.Broker`."""

    @property
    def executes(self) -> bool:
        """Whether the model is initialised and not yet finalised."""

    @property
    def model(self) -> str:
        """The name of the model whose code runs here."""

    def call(self, content: list[Any], data: Iterable[Buffer], sink: Sink, *, blocks: bool = False) -> int:
        """Send a call of another model; return its number. `blocks`: this thread waits until it is answered."""

    def control(self, content: list[Any], data: Iterable[Buffer], sink: Sink) -> int:
        """Send a load, unload or readiness request; it is answered once."""

    def give_up(self, number: int, *, gentle: bool = False) -> None:
        """Cancel a call whose answers are no longer wanted. Its last answer still comes, but sooner.

        `gentle`: they are, and it is for the called model to end it.
        """


_exchange: Exchange | None = None


def set_exchange(exchange: Exchange | None) -> None:
    """Set the exchange of this process, or none."""
    global _exchange
    _exchange = exchange


class ResponseIterator:
    """Yields the responses of one call. An error is a response, and the last one.

    It keeps them: a loop that begins after their end yields them again, one that begins before goes on.
    """

    def __init__(self, start: Callable[[Sink], int], give_up: Callable[..., None]) -> None:
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._give_up = give_up
        self._done = False
        self._seen: list[InferenceResponse] = []
        self._at = 0
        self._number = start(self._sink())

    def _sink(self) -> Sink:
        """Must not refer to the iterator, whose end gives the call up."""
        return self._answers.put

    def _take(self, answer: Answer | None) -> InferenceResponse | None:
        self._done = answer is None or answer[2]
        response = response_of(answer)
        if response is not None:
            self._seen.append(response)
            self._at += 1
        return response

    def _repeat(self) -> InferenceResponse | None:
        """The next of the responses that have come, after a loop over all of them; None at their end."""
        if self._at >= len(self._seen):
            return None
        self._at += 1
        return self._seen[self._at - 1]

    def __iter__(self) -> ResponseIterator:
        if self._done and self._at >= len(self._seen):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        while not self._done:
            response = self._take(self._answers.get())
            if response is not None:
                return response
        response = self._repeat()
        if response is None:
            raise StopIteration
        return response

    def cancel(self) -> None:
        """Ask the called model to end the call; its responses are yielded until it does."""
        if not self._done:
            self._give_up(self._number, gentle=True)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if not self._done:
                self._give_up(self._number)


def call(request: CallRequest, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """`InferenceRequest.exec`: return the response, or with `decoupled` an iterator over all (P13).

    Raises `TritonModelException` outside `execute`; other errors are in the response.
    """
    decoupled = flag("decoupled", decoupled)
    exchange = executing()
    start = starter(exchange, request, decoupled, blocks=not decoupled)
    if decoupled:
        return ResponseIterator(start, exchange.give_up)
    answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
    start(answers.put)
    return single(answers.get())


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model and wait until it is ready (P14). `files` maps `file:<version>/<path>` to content.

    Raises `TritonModelException` outside explicit mode, for a failed load, and for this model while it is being loaded,
    `TypeError` for arguments of other types.
    """
    model_name, config = text("model_name", model_name), text("config", config)
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    contents: dict[str, bytes] = {}
    for path, content in (files or {}).items():
        path = text("a path of 'files'", path)
        if not isinstance(content, (bytes, bytearray, memoryview)):
            raise TypeError(f"the content of file '{path}' must be of type bytes, found type '{type(content)}'.")
        contents[path.removeprefix("file:")] = bytes(content)
    described = [[path, len(content)] for path, content in contents.items()]
    _control("Failed to load model", ["load", model_name, config, described], contents.values(), changes=model_name)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begin to unload a model (P14). Raises as `load_model` does."""
    model_name, dependents = text("model_name", model_name), flag("unload_dependents", unload_dependents)
    _control("Failed to unload model", ["unload", model_name, dependents], (), changes=model_name)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a version is ready; "" for the latest (P14). Raises `TypeError` for arguments of other types."""
    asked = ["is_ready", text("model_name", model_name), text("model_version", model_version)]
    return bool(_control("Failed to check model readiness", asked, ()))


def text(what: str, value: Any) -> str:
    """Check a text argument; bytes are taken as UTF-8, as Triton's bindings take them. Raises `TypeError`."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be of type str, found type '{type(value)}'.")
    return value


def flag(what: str, value: Any) -> bool:
    """Check a boolean argument; numbers are taken as well, as Triton's bindings take them. Raises `TypeError`."""
    if value is None or not hasattr(value, "__bool__"):
        raise TypeError(f"{what} must be of type bool, found type '{type(value)}'.")
    return bool(value)


def _control(what: str, content: list[Any], data: Iterable[Buffer], *, changes: str = "") -> Any:
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
        raise refused(what, failure[1])
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
        request.outputs,
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
    """Return the response in an answer, if any. Raises `TritonModelException` when the executor is gone."""
    if answer is None:
        raise TritonModelException("the executor is gone")
    content, data, _ = answer
    if content is None:
        return None
    failure, parameters, described = content
    if failure is not None:
        return InferenceResponse.received([], TritonError(failure[1], failure[0]), parameters)
    offsets = tensor_offsets([size for _, _, _, size in described])
    tensors = [
        Tensor.received(name, number, tuple(shape), data[at : at + size])
        for (name, number, shape, size), at in zip(described, offsets, strict=True)
    ]
    return InferenceResponse.received(tensors, None, parameters)
