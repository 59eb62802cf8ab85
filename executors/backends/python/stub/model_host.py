"""Runs one model's code in the model process: finds the class, calls its functions, and makes the error texts.

It takes and returns frame content (`frame_content`); `model_process` handles the socket and the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType, ModuleType, TracebackType
from typing import Any

import msgpack

from charonia.errors import escaped, parameter_fault
from executors.backends.python import api
from executors.backends.python.api.errors import TritonError, TritonModelException, failure_text, set_instance
from executors.backends.python.api.inference import InferenceRequest, InferenceTrace
from executors.backends.python.api.model_config import set_model_dir
from executors.backends.python.api.response import CLOSED, InferenceResponse
from executors.backends.python.api.tensor import Tensor
from executors.backends.python.protocol.frames import Buffer, Frame, tensor_offsets
from executors.backends.python.protocol.shared_slots import ModelSlots

from .channel import Execution
from .host_columns import ColumnsAsked, columns_of, inputs_of

_BACKEND = os.path.dirname(os.path.dirname(api.__file__))
_OWN_FILES = (
    _BACKEND + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(_BACKEND)), "configuration") + os.sep,
    importlib.__file__,
)
"""Files that are left out of tracebacks: in Triton they are not Python."""


_MOST_META_BYTES = 4096
"""Larger forms, those with long parameters or sizes of many strings, seldom come again."""
_MOST_KNOWN = 256
"""So many forms of batches are remembered."""
_NIL = msgpack.packb(None)

_TRACE, _WINDOW = 7, 9
"""The positions of the trace and of the window in a request of an EXECUTE."""


class ModelFailure(Exception):
    """An error for the executor: Triton's error code and the exact text."""

    def __init__(self, message: str, code: int = TritonError.INTERNAL) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The location of a model: its `directory`, and the `file` with its code."""

    name: str
    version: str
    directory: str
    file: str


@dataclass(slots=True)
class Reply:
    """The reply to a batch: packed content and data of a DONE, or of a COLUMNS when `columns` is true."""

    meta: bytes
    data: Sequence[Buffer] = ()
    columns: bool = False


class ModelHost:
    """One model class and, once initialised, its instance."""

    def __init__(self, location: ModelLocation, instance_name: str, slots: ModelSlots | None = None) -> None:
        self._location = location
        self._instance_name = instance_name
        self.slots = slots
        """The memory that is shared with the executor."""
        self._class: Any = None
        self._model: Any = None
        self._outputs: list[str] = []
        self._answers_later = False
        self._loop: Any = None
        self._version = int(location.version)
        self._known: dict[bytes, ColumnsAsked] = {}
        """By content of a frame."""
        self._metas: dict[tuple[Any, ...], bytes] = {}
        """By form of outputs: the content of their frame."""
        self.decoupled = False
        """Whether its requests are answered by response senders only."""

    @property
    def model(self) -> str:
        """The model's name."""
        return self._location.name

    def auto_complete(self, config: str) -> str | None:
        """Return the completed configuration as JSON text; None when the model has no such function (P2)."""
        try:
            model_class = self._load()
            if not hasattr(model_class, "auto_complete_config"):
                return None
            completed = model_class.auto_complete_config(api.ModelConfig(config))
        except BaseException as error:
            raise _load_failure(error) from error
        if not isinstance(completed, api.ModelConfig):
            raise ModelFailure(
                f"auto_complete_config function in model '{self._location.name}' must return a valid pb.ModelConfig "
                "object."
            )
        try:
            return json.dumps(completed.as_dict())
        except (TypeError, ValueError) as error:
            raise ModelFailure(
                f"auto_complete_config function in model '{self._location.name}' gave a configuration that is not "
                f"JSON: {error}"
            ) from error

    def initialize(self, args: dict[str, str], outputs: list[str], *, answers_later: bool) -> bool:
        """Make the instance and initialise it (P3); return whether it has an `is_ready` (P6).

        `outputs` are the output names of requests that name none. With `answers_later` the model's code uses response
        senders.
        """
        self._outputs, self._answers_later = outputs, answers_later
        self.decoupled = api.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        try:
            model = self._load()()
            if hasattr(model, "initialize"):
                model.initialize(args)
        except BaseException as error:
            raise _load_failure(error) from error
        self._model = model
        return callable(getattr(model, "is_ready", None))

    def is_ready(self) -> bool:
        """Return what the model's `is_ready` returns (P6). Raises `ModelFailure` when it fails."""
        try:
            answer = self._model.is_ready()
            if hasattr(answer, "__await__"):
                answer = self._awaited(answer)
        except BaseException as error:
            raise ModelFailure(exception_text(error)) from error
        return answer is True

    def execute(self, execution: Execution, content: list[Any], data: memoryview) -> Reply:
        """Run the batch of an EXECUTE. `execution` answers the requests of a decoupled model.

        Raises `ModelFailure` when the whole batch fails (P12).
        """

        def fill(requests: list[InferenceRequest]) -> None:
            requests += [self._request(item) for item in content]
            for index, request in enumerate(requests):
                request.belongs_to(execution, index)
                if len(content[index]) > _WINDOW:
                    execution.limit(index, content[index][_WINDOW])
            self._attach(requests, content, data)

        return self._run(execution, fill, _replies)

    def execute_columns(self, execution: Execution, frame: Frame) -> Reply:
        """Run the batch of an EXECUTE_COLUMNS; for models that are not decoupled. Raises as `execute`."""
        asked = self._known.get(frame.meta) or self._columns_asked(frame)
        expected = asked.expected

        def fill(requests: list[InferenceRequest]) -> None:
            if asked.put is None or self.slots is None:
                data = frame.data
                parts = [data[begin:end] for begin, end in asked.places]
            else:
                index, generation = asked.put
                parts = self.slots.columns(index, generation, asked.sizes)
            requests += InferenceRequest.of_columns(
                execution,
                asked.count,
                inputs_of(asked.count, asked.described, parts),
                asked.ids,
                self._location.name,
                self._version,
                asked.outputs or self._outputs,
                asked.timeout_us,
                asked.parameters,
            )

        try:
            return self._run(execution, fill, partial(self._columns, expected and expected[0]))
        finally:
            if expected is not None and self.slots is not None:
                self.slots.done(*expected)

    def _columns_asked(self, frame: Frame) -> ColumnsAsked:
        """Read what an EXECUTE_COLUMNS asks for. The next one of the same form need not be read."""
        asked = ColumnsAsked(frame.content())
        if asked.put is None and asked.expected is None and asked.ids is None and len(frame.meta) <= _MOST_META_BYTES:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[frame.meta] = asked
        return asked

    def _columns(
        self, slot: int | None, requests: Sequence[InferenceRequest], answers: list[InferenceResponse | None]
    ) -> Reply:
        """Reply with columns, in the output slot if there is a suitable one, else in the frame."""
        found = columns_of(requests, answers)
        if found is None:
            return _replies(requests, answers)
        room = None
        if slot is not None and self.slots is not None:
            room = self.slots.output_views(slot, [column.size for column in found])
        described = (room is not None, *[column.described for column in found])
        meta = self._metas.get(described)
        if meta is None:
            if len(self._metas) >= _MOST_KNOWN:
                self._metas.clear()
            meta = self._metas[described] = msgpack.packb([room is not None, described[1:]])
        if room is None:
            return Reply(meta, [column.joined() for column in found], columns=True)
        for column, place in zip(found, room, strict=True):
            column.join_into(place)
        return Reply(meta, columns=True)

    def _run(
        self,
        execution: Execution,
        fill: Callable[[list[InferenceRequest]], None],
        reply: Callable[[Sequence[InferenceRequest], list[InferenceResponse | None]], Reply],
    ) -> Reply:
        requests: list[InferenceRequest] = []
        try:
            fill(requests)
            if not hasattr(self._model, "execute"):
                raise _WrongAnswer(f"Python model {self._location.file} does not implement `execute` method.")
            answers = self._model.execute(requests)
            if hasattr(answers, "__await__"):
                if self.decoupled:
                    self._begin(execution, requests, answers)
                    return Reply(_NIL)
                answers = self._awaited(answers)
            if self.decoupled:
                self._expect_none(answers)
                _reschedule(execution, requests)
                return Reply(_NIL)
            return reply(requests, _checked(requests, answers, answers_later=self._answers_later))
        except BaseException as error:
            _close(requests)
            text = str(error) if isinstance(error, _WrongAnswer) else exception_text(error)
            failure = self._batch_failure(text)
            api.Logger.log_error(failure)
            raise ModelFailure(failure) from (None if isinstance(error, _WrongAnswer) else error)

    def _begin(self, execution: Execution, requests: list[InferenceRequest], answers: Any) -> None:
        """Run a coroutine of a decoupled model in the background, concurrently with the next batches."""
        import asyncio

        asyncio.run_coroutine_threadsafe(self._carry(execution, requests, answers), self._coroutines())

    def _awaited(self, answers: Any) -> Any:
        """The result of a coroutine. What the model keeps of the event loop, as a lock, a session or a task, lasts."""
        import asyncio  # imported late: it is large, and most models never need it

        result, ending = asyncio.run_coroutine_threadsafe(_outcome_of(answers), self._coroutines()).result()
        if ending is not None:
            raise ending
        return result

    def _coroutines(self) -> Any:
        """The event loop of the model's coroutines, which runs in a thread of its own until the process ends."""
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_for_ever, args=(self._loop,), name="charonia coroutines", daemon=True).start()
        return self._loop

    async def _carry(self, execution: Execution, requests: list[InferenceRequest], answers: Any) -> None:
        try:
            self._expect_none(await answers)
            _reschedule(execution, requests)
        except BaseException as error:
            wrong = isinstance(error, _WrongAnswer)
            failure = self._batch_failure(str(error) if wrong else exception_text(error))
            # all its callers may have had their final response
            api.Logger.log_error(failure if wrong else "".join(traceback.format_exception(error)))
            for index in _close(requests):
                execution.fail(index, failure)

    def _expect_none(self, answers: Any) -> None:
        if answers is not None:
            raise _WrongAnswer(
                f"Python model '{self._instance_name}' is using the decoupled mode and the execute function must "
                "return None."
            )

    def finalize(self) -> None:
        """Call the model's `finalize`, if any (P5). Raises `ModelFailure` when it fails."""
        model, self._model = self._model, None
        if model is None or not hasattr(model, "finalize"):
            return
        try:
            model.finalize()
        except BaseException as error:
            raise ModelFailure(exception_text(error)) from error

    @property
    def _version_directory(self) -> str:
        return os.path.join(self._location.directory, self._location.version)

    def _load(self) -> Any:
        """Load the class. The file becomes module `<version>.<stem>`, so that both kinds of sibling imports work."""
        if self._class is not None:
            return self._class
        path = self._location.file
        code_directory, filename = os.path.split(path)
        if not filename.endswith(".py"):
            raise ModelFailure(f"Model name must end with '.py'. Model name is \"{filename}\".")
        if not os.path.isfile(path):
            raise ModelFailure(f"Python model file not found in '{path}'.")
        sys.modules["triton_python_backend_utils"] = api
        set_instance(self._instance_name)
        sys.argv = [""]  # a model may parse its arguments; it has none
        set_model_dir(self._version_directory)
        # at the end of the path: a model's `types.py` must not shadow the standard library's
        sys.path += dict.fromkeys((code_directory, self._version_directory, self._location.directory))
        package = ModuleType(self._location.version)
        package.__path__ = [code_directory]
        sys.modules[package.__name__] = package
        module = importlib.import_module(f"{self._location.version}.{filename.removesuffix('.py')}")
        self._class = module.TritonPythonModel
        return self._class

    def _request(self, item: list[Any]) -> InferenceRequest:
        request_id, correlation_id, outputs, parameters, timeout_us, flags = item[:6]
        traced = item[_TRACE:_WINDOW]
        return InferenceRequest.of_frame(
            request_id=request_id,
            correlation_id=correlation_id,
            outputs=outputs or self._outputs,
            parameters=parameters or "{}",
            timeout=timeout_us,
            flags=flags,
            model_name=self._location.name,
            model_version=self._version,
            trace=InferenceTrace(*traced) if traced and traced[0] else None,
        )

    @staticmethod
    def _attach(requests: list[InferenceRequest], content: list[Any], data: memoryview) -> None:
        tensors = [tensor for item in content for tensor in item[6]]
        offsets = iter(tensor_offsets([size for _, _, _, size in tensors]))
        for request, item in zip(requests, content, strict=True):
            for name, number, shape, size in item[6]:
                at = next(offsets)
                request.inputs().append(Tensor.received(name, number, tuple(shape), data[at : at + size]))

    def _batch_failure(self, text: str) -> str:
        return f"Failed to process the request(s) for model '{self._instance_name}', message: {text}"


class _WrongAnswer(Exception):
    """`execute` is missing or what it returned is not a list of responses (P4)."""


async def _outcome_of(awaitable: Any) -> tuple[Any, BaseException | None]:
    """The result, or what would end the event loop with the coroutine."""
    try:
        return await awaitable, None
    except (SystemExit, KeyboardInterrupt) as ending:
        return None, ending


def _run_for_ever(loop: Any) -> None:
    """Run an event loop although a task or callback of the model leaves it by `sys.exit`; what awaits that is told."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as ending:
            api.Logger.log_error(f"a task of the model wanted to end its process: {exception_text(ending)}")


def _checked(
    requests: Sequence[InferenceRequest], answers: Any, *, answers_later: bool
) -> list[InferenceResponse | None]:
    """What `execute` returned; None where a sender answers, perhaps one that the model takes later."""
    if answers is None and (answers_later or _has_sender(requests)):
        answers = [None] * len(requests)
    if not isinstance(answers, list):
        raise _WrongAnswer(f"Expected a list in the execute return, found type '{type(answers)}'.")
    if len(answers) != len(requests):
        raise _WrongAnswer(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(answers)}\n"
        )
    for place, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if type(answer) is InferenceResponse and request.sender is None and not request.is_rescheduled():
            continue  # the usual case
        if request.is_rescheduled() and not isinstance(answer, InferenceResponse):
            if answer is not None:
                raise _WrongAnswer(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(answer)}'."
                )
            answers[place] = InferenceResponse()
            continue
        if answer is None and (answers_later or _has_sender(requests)):
            request.get_response_sender()  # it notices when the model lets go of the request
            continue
        if not isinstance(answer, InferenceResponse):
            raise _WrongAnswer(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(answer)}'."
            )
        if request.sender is not None and request.sender.answered:
            raise _WrongAnswer(CLOSED)
    return answers


def _has_sender(requests: Sequence[InferenceRequest]) -> bool:
    return any(request.sender is not None for request in requests)


def _replies(requests: Sequence[InferenceRequest], answers: list[InferenceResponse | None]) -> Reply:
    replies: list[Any] = []
    data: list[Buffer] = []
    for request, answer in zip(requests, answers, strict=True):
        if answer is None:
            replies.append(None)
            continue
        if request.sender is not None:
            request.sender.close()
        reply, encoded = described(request.outputs, answer)
        replies.append([*reply, True] if request.is_rescheduled() else reply)
        data += encoded
    return Reply(msgpack.packb(replies), data)


def described(wanted: Sequence[str], answer: InferenceResponse) -> tuple[list[Any], list[Buffer]]:
    """Return a response as frame content, and its data. `wanted` are the requested outputs, empty for all (I6)."""
    error, parameters = answer.error(), answer.checked_parameters
    if parameters:
        for key, value in parameters.items():
            if fault := parameter_fault(key, value):
                error = error or TritonError(failure_text(f"response parameter {key!r} is {fault}"))
                parameters = {}
                break
    if error is not None:
        return [[error.code(), escaped(error.message())], parameters, []], []
    tensors = []
    data: list[Buffer] = []
    for tensor in answer.output_tensors():
        if wanted and tensor.name() not in wanted:
            continue
        encoded = tensor.encoded()
        tensors.append([tensor.name(), tensor.triton_dtype(), tensor.shape(), len(encoded)])
        data.append(encoded)
    return [None, parameters, tensors], data


def _reschedule(execution: Execution, requests: Sequence[InferenceRequest]) -> None:
    """Reschedule the requests of a decoupled model that ask for it and had no final response (S41)."""
    for index, request in enumerate(requests):
        if request.is_rescheduled() and request.sender is not None and request.sender.close():
            execution.reschedule(index)


def _close(requests: Sequence[InferenceRequest]) -> list[int]:
    """Forbid further responses to these requests; return the indices of those that were open."""
    return [index for index, request in enumerate(requests) if request.sender is not None and request.sender.close()]


def _load_failure(error: BaseException) -> ModelFailure:
    if isinstance(error, ModelFailure):
        return error
    if not isinstance(error, TritonModelException):
        traceback.print_exception(error)  # with chained causes, which the message leaves out
    return ModelFailure(exception_text(error))


def exception_text(error: BaseException) -> str:
    """`<Type>: <text>` and its locations, innermost first (P12)."""
    text = f"{type(error).__name__}: {str(error) or '<EMPTY MESSAGE>'}"
    at = _places(error.__traceback__)
    text = "\n".join([text, "", "At:", *at, ""]) if at else text
    return escaped(text)  # a file's name may be any bytes; the reply is UTF-8


def _places(trace: TracebackType | None) -> list[str]:
    found: list[str] = []
    while trace is not None:
        frame: FrameType = trace.tb_frame
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN_FILES, "<frozen importlib")):
            found.append(f"  {file}({trace.tb_lineno}): {frame.f_code.co_name}")
        trace = trace.tb_next
    return found[::-1]
