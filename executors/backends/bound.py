"""The `bound` backend: models that are callables of this process (P21, R42).

It is not in the backend registry: the code that hosts the executor passes a `BoundBackend` with its callables. Each
instance has its own thread that runs the callable, which should release the interpreter's lock or be quick.
`charonia.composition.binding` derives a callable's model configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np

from charonia.backend import (
    Array,
    Backend,
    BatchInstance,
    InstanceDied,
    InstanceSpec,
    Model,
    ModelRequest,
    ModelResponse,
    ModelSource,
    RequestInstance,
    ResponseStream,
    StreamingInstance,
)
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.inference import Parameters
from charonia.tensors import Tensor
from executors.configuration.declarations import BOUND

WORD = BOUND

Style = Literal["keywords", "dict", "requests"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One request for a callable of the style `requests`. Arrays have their batch dimension. Read only."""

    inputs: Mapping[str, Array]
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    """The requested output names, empty for all. More outputs may be returned."""
    timeout_us: int = 0


@dataclass(frozen=True, slots=True)
class BoundFunction:
    """A callable, and how to call it. `outputs` are the model's outputs, in order."""

    function: Callable[..., Any]
    style: Style
    outputs: tuple[str, ...]


class BoundBackend(Backend):
    """Holds the callables by model name. Callables may be added at any time."""

    name = WORD
    api = (1, 0)

    def __init__(self) -> None:
        self.functions: dict[str, BoundFunction] = {}

    async def load(self, source: ModelSource) -> BoundModel:
        """Return the model of a callable. Raises `InvalidArgument` when there is none."""
        bound = self.functions.get(source.name)
        if bound is None:
            raise InvalidArgument(f"nothing is bound as '{source.name}' in this process")
        return BoundModel(bound)


class BoundModel(Model):
    """A callable as a model."""

    def __init__(self, bound: BoundFunction) -> None:
        self._bound = bound

    async def create_instance(self, spec: InstanceSpec) -> BatchInstance | RequestInstance | StreamingInstance:
        """Make an instance that calls the callable."""
        bound = self._bound
        if spec.interface.decoupled:
            return BoundStream(bound, spec.name)
        return BoundRequests(bound, spec.name) if bound.style == "requests" else BoundArrays(bound)


class BoundArrays:
    """An instance whose callable gets batch arrays, as keywords or as one dict."""

    def __init__(self, bound: BoundFunction) -> None:
        self._bound = bound
        self._call = _Call(bound.function)

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Call the callable in this thread; see `BatchInstance`."""
        named = _by_name(_call_styled(self._call, self._bound.style, inputs), self._bound.outputs)
        for name in outputs:
            if name not in named:
                raise InternalError(f"a bound function gave no output '{name}'")
        return {name: named[name] for name in outputs}

    def close(self) -> None:
        """Close the event loop of a coroutine function, if there is one."""
        self._call.close()


class BoundRequests:
    """An instance whose callable gets a list of requests, and returns one answer for each."""

    def __init__(self, bound: BoundFunction, name: str) -> None:
        self._bound = bound
        self._call = _Call(bound.function)
        self._thread = _InstanceThread(name)

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        """Call the callable in the instance's thread. An exception returned as an answer fails that request alone."""
        return await self._thread.run(partial(self._answers, requests))

    async def close_instance(self) -> None:
        """End the thread."""
        await self._thread.close(self._call.close)

    def _answers(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        passed = [
            Request(
                {tensor.name: tensor.array() for tensor in request.inputs},
                request.id,
                request.parameters,
                request.outputs,
                request.timeout_us,
            )
            for request in requests
        ]
        answers = self._call(passed)
        if not isinstance(answers, Sequence) or len(answers) != len(passed):
            raise InternalError(
                f"a function bound with style 'requests' must return a list of {len(passed)} answers, one per request"
            )
        return [self._response(answer) for answer in answers]

    def _response(self, answer: Any) -> ModelResponse:
        if isinstance(answer, BaseException):
            return ModelResponse(error=answer if isinstance(answer, CharoniaError) else _error_of(answer))
        try:
            named = _by_name(answer, self._bound.outputs)
            return ModelResponse([Tensor.of(name, np.asarray(array)) for name, array in named.items()])
        except CharoniaError as error:
            return ModelResponse(error=error)


class BoundStream:
    """An instance whose callable is a generator: one call per request, one response per yielded value."""

    def __init__(self, bound: BoundFunction, name: str) -> None:
        self._bound = bound
        self._call = _Call(bound.function)
        self._thread = _InstanceThread(name)
        self._executing: set[int] = set()
        self._cancelled: set[int] = set()

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        """Run the requests one after another in the instance's thread. An exception fails its request alone."""
        loop = asyncio.get_running_loop()
        self._executing.update(id(request) for request in requests)
        try:
            for index, request in enumerate(requests):
                send = partial(_send_from_thread, loop, responses, index)
                await self._thread.run(partial(self._stream, request, send))
        finally:
            for request in requests:
                self._executing.discard(id(request))
                self._cancelled.discard(id(request))

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        """Close the requests' generators at their next yield."""
        self._cancelled.update(id(request) for request in requests if id(request) in self._executing)

    async def close_instance(self) -> None:
        """End the thread."""
        await self._thread.close(self._call.close)

    def _stream(self, request: ModelRequest, send: Callable[[ModelResponse | None, bool], None]) -> None:
        try:
            inputs = {tensor.name: tensor.array() for tensor in request.inputs}
            for answer in self._call.each(_call_styled(self._call, self._bound.style, inputs)):
                named = _by_name(answer, self._bound.outputs)
                if id(request) in self._cancelled:
                    break
                wanted = {
                    name: array for name, array in named.items() if not request.outputs or name in request.outputs
                }
                send(ModelResponse([Tensor.of(name, array) for name, array in wanted.items()]), False)
        except CharoniaError as error:
            send(ModelResponse(error=error), True)
        else:
            send(None, True)


def _send_from_thread(
    loop: asyncio.AbstractEventLoop, responses: ResponseStream, index: int, response: ModelResponse | None, final: bool
) -> None:
    """Pass a response to the event loop, and wait while too many are unwritten."""

    async def send() -> None:
        responses.send(index, response, final=final)
        await responses.drain()

    asyncio.run_coroutine_threadsafe(send(), loop).result()


def _call_styled(call: _Call, style: Style, inputs: Mapping[str, Array]) -> Any:
    return call(**inputs) if style == "keywords" else call(dict(inputs))


class _InstanceThread:
    """The thread of one instance. A daemon, because the callable may never return."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"instance {name}", daemon=True)
        self._thread.start()
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; return or raise what it does. Raises `InstanceDied` once it is closed."""
        if self._closed:
            raise InstanceDied("the instance was closed", blameless=True)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(cast("T", result))

        def call() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as failure:
                error = failure
            with contextlib.suppress(RuntimeError):  # the event loop has ended, nothing waits for the result
                loop.call_soon_threadsafe(settle, result, error)

        self._work.put(call)
        return await done

    async def close(self, last: Callable[[], None]) -> None:
        """End the thread after running `last`. A second call does nothing."""
        if not self._closed:
            last_run = asyncio.ensure_future(self.run(last))
            await asyncio.sleep(0)  # it is queued
            self._closed = True
            await last_run
            self._work.put(None)

    def _serve(self) -> None:
        while (call := self._work.get()) is not None:
            call()


class _Call:
    """Calls a function, or runs a coroutine function in an event loop of the calling thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        self._runner = asyncio.Runner() if asynchronous else None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            result = self._function(*arguments, **named)
            if self._runner is not None and inspect.iscoroutine(result):
                return self._runner.run(result)
            return result
        except CharoniaError:
            raise
        except Exception as error:
            raise _error_of(error) from error

    def each(self, generator: Any) -> Iterator[Any]:
        """Yield what a generator, or an asynchronous one, yields; closed with this one."""
        try:
            if self._runner is None:
                with contextlib.closing(generator):
                    yield from generator
                return
            try:
                while True:
                    try:
                        answer = self._runner.run(_next_of(generator))
                    except StopAsyncIteration:
                        return
                    yield answer
            finally:
                self._runner.run(generator.aclose())
        except CharoniaError:
            raise
        except Exception as error:
            raise _error_of(error) from error

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


async def _next_of(generator: AsyncGenerator[Any, None]) -> Any:
    return await anext(generator)


def _error_of(error: BaseException) -> InternalError:
    return InternalError(f"{type(error).__name__}: {error}")


def _by_name(result: Any, outputs: tuple[str, ...]) -> dict[str, Array]:
    """A callable's result by output name: a mapping, a list or tuple in the outputs' order, or the single output."""
    if isinstance(result, Mapping):
        return {str(name): np.asarray(array) for name, array in result.items()}
    if isinstance(result, (list, tuple)) and len(result) == len(outputs):
        return {name: np.asarray(array) for name, array in zip(outputs, result, strict=True)}
    if isinstance(result, np.ndarray) and len(outputs) == 1:
        return {outputs[0]: result}
    raise InternalError(
        f"a bound function must return a dict of arrays or the outputs {', '.join(outputs)} in this order, found type "
        f"'{type(result)}'"
    )
