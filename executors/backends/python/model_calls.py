"""Handles a model process's calls of other models (P13), and its loads and unloads (P14).

It decodes the frames, makes the calls through `charonia.backend.ModelCalls`, and answers, with Triton's error texts.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence

import msgspec

from charonia.backend import ModelCalls, ModelRequest, ModelResponse, OpenCall, RequestColumns
from charonia.errors import (
    Cancelled,
    CharoniaError,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from charonia.inference import leading_number
from charonia.traces.contexts import Traced

from .frame_calls import FrameCalls
from .frame_content import CallFrame, answer_content, call_of, files_of
from .protocol.frames import Frame, FrameError, Kind

_log = logging.getLogger(__name__)

Batch = Sequence[ModelRequest] | RequestColumns
"""The requests of one EXECUTE."""

MAX_OPEN = 4096
"""The limit of concurrent calls and loads of one model process."""

CALLED_NOT_READY = "Failed for execute the inference request. Model '{model}' is not ready."
DECOUPLED = (
    "Model {model} is using the decoupled. The current BLS request call doesn't support models using the decoupled "
    "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
    "models.'"
)
REFUSED = "Model {model} - Error when running inference: {why}"


class PendingModelCalls:
    """The pending calls and loads of one model process.

    `batches` are the requests of each running EXECUTE, by its number.
    """

    def __init__(self, child: FrameCalls, model: str, calls: ModelCalls | None, batches: Mapping[int, Batch]) -> None:
        self._child = child
        self._model = model
        self._calls = calls
        self._batches = batches
        self._open: dict[int, asyncio.Task[None]] = {}
        self._opened_calls: dict[int, OpenCall] = {}
        self._asked_to_end: set[int] = set()
        """The numbers of calls that were cancelled gently before they were opened."""
        self._made_by: dict[int, set[int]] = {}
        child.on_model_requests(self._asked, self._process_gone)

    @property
    def open_calls(self) -> int:
        return len(self._open)

    def cancel_those_of(self, execute_call: int) -> None:
        """Cancel the open calls of an EXECUTE whose answers are no longer wanted."""
        for number in list(self._made_by.get(execute_call, ())):
            self._open[number].cancel()

    def _process_gone(self) -> None:
        for task in list(self._open.values()):
            task.cancel()

    def _asked(self, frame: Frame) -> None:
        """Handle a frame of the model's. Called in the event loop. Raises `FrameError`."""
        number = frame.call
        if frame.kind is Kind.GIVE_UP:
            if frame.content() is True:
                self._ask_to_end(number)
            elif number in self._open:
                self._open[number].cancel()
            return
        if number in self._open:
            raise FrameError(f"call {number} is open already")
        if len(self._open) >= MAX_OPEN:
            error = ResourceExhausted(f"model '{self._model}' has {MAX_OPEN} calls open")
            self._answer(number, frame.kind, error)
            return
        parent = 0
        if frame.kind is Kind.CALL:
            asked = call_of(frame)
            parent = self._made_for(asked)
            work = self._call(number, asked, self._batches.get(parent, ()))
        else:
            work = self._control(number, frame)
        task = self._open[number] = asyncio.get_running_loop().create_task(work)
        self._made_by.setdefault(parent, set()).add(number)
        task.add_done_callback(lambda done: self._ended(number, frame.kind, parent, done))

    def _ask_to_end(self, number: int) -> None:
        """Have the called model notified that a call is cancelled; its answers go on until that ends it."""
        if number in self._opened_calls:
            self._opened_calls[number].ask_to_end()
        elif number in self._open:
            self._asked_to_end.add(number)

    def _ended(self, number: int, kind: Kind, parent: int, task: asyncio.Task[None]) -> None:
        del self._open[number]
        self._opened_calls.pop(number, None)
        self._asked_to_end.discard(number)
        made = self._made_by[parent]
        made.discard(number)
        if not made:
            del self._made_by[parent]
        if task.cancelled():
            # here, because a task that is cancelled before it starts cannot answer
            self._answer(number, kind, Cancelled(""))
        elif (error := task.exception()) is not None:
            _log.error("a call of model %s failed", self._model, exc_info=error)

    # -- calls of models ----------------------------------------------------------------------------------------------

    def _made_for(self, asked: CallFrame) -> int:
        """The number of the EXECUTE that a call belongs to, 0 when that is unknown.

        A wrong one would be worse than none: the call would be cancelled with it, or be taken for a deadlock.
        """
        if asked.surely or (len(self._batches) == 1 and asked.execute_call in self._batches):
            return asked.execute_call
        return 0

    async def _call(self, number: int, asked: CallFrame, made_for: Batch) -> None:
        call: OpenCall | None = None
        caller = self._traced(asked.span_id) if asked.span_id else None
        if caller is not None:
            asked.request.trace = Traced(caller.context.child(os.urandom(8)))
        try:
            call = self._opened_calls[number] = await self._opened_or_refused(asked, made_for)
            if number in self._asked_to_end:
                call.ask_to_end()
            while (response := await call.next()) is not None:
                if not asked.decoupled:
                    self._say(number, Kind.LAST_ANSWER, response)
                    return
                self._say(number, Kind.ANSWER, response)
                await self._child.drained()
            self._child.answer(Kind.LAST_ANSWER, number, None)
        except CharoniaError as error:
            self._say(number, Kind.LAST_ANSWER, ModelResponse(error=error))
        except Exception as error:
            self._say(number, Kind.LAST_ANSWER, ModelResponse(error=InternalError(f"{type(error).__name__}: {error}")))
            raise
        finally:
            if call is not None:
                call.cancel()
            if caller is not None and asked.request.trace is not None:
                caller.add(asked.request.trace.report)

    def _traced(self, span_id: bytes) -> Traced | None:
        """The trace of the running request with this span."""
        for batch in self._batches.values():
            for one in () if isinstance(batch, RequestColumns) else batch:
                if one.trace is not None and one.trace.context.span_id == span_id:
                    return one.trace
        return None

    async def _opened_or_refused(self, asked: CallFrame, made_for: Batch) -> OpenCall:
        """Triton's python backend gives all that refuses a call one code and a beginning."""
        try:
            return await self._opened(asked, made_for)
        except CharoniaError as error:
            raise InternalError(REFUSED.format(model=asked.request.model, why=error.message)) from None

    async def _opened(self, asked: CallFrame, made_for: Batch) -> OpenCall:
        if self._calls is None:
            raise Unsupported("models cannot be called here")
        request = asked.request
        try:
            interface = await self._calls.find(request.model, request.version)
        except CharoniaError:
            raise Unavailable(CALLED_NOT_READY.format(model=request.model)) from None
        if interface.decoupled and not asked.decoupled:
            raise Unsupported(DECOUPLED.format(model=request.model))
        if isinstance(made_for, RequestColumns):
            origins = list(made_for.origins)
        else:
            origins = [one.origin for one in made_for]
        return await self._calls.open(request, self._model, origins, blocks=asked.blocks)

    def _say(self, number: int, kind: Kind, response: ModelResponse) -> None:
        content, data = answer_content(response)
        self._child.answer(kind, number, content, data)

    def _answer(self, number: int, kind: Kind, error: CharoniaError) -> None:
        if kind is Kind.CALL:
            self._say(number, Kind.LAST_ANSWER, ModelResponse(error=error))
        else:
            self._child.answer(Kind.LAST_ANSWER, number, [[int(error.code), error.message], None])

    # -- loading and unloading ----------------------------------------------------------------------------------------

    async def _control(self, number: int, frame: Frame) -> None:
        try:
            value = await self._controlled(frame)
        except CharoniaError as error:
            self._answer(number, frame.kind, error)
        except Exception as error:  # the model waits for an answer without a time limit
            self._answer(number, frame.kind, InternalError(f"{type(error).__name__}: {error}"))
            raise
        else:
            self._child.answer(Kind.LAST_ANSWER, number, [None, value])

    async def _controlled(self, frame: Frame) -> bool | bytes | None:
        if self._calls is None:
            raise Unsupported("models cannot be loaded or unloaded from here")
        verb, model, *words = frame.content()
        if verb == "load":
            config, described = words
            if not model:
                raise InternalError("failed to load '', failed to poll from model repository")
            await self._calls.load(model, config, files_of(frame, described))
        elif verb == "unload":
            await self._calls.unload(model, unload_dependents=bool(words[0]))
        elif verb == "is_ready":
            return await self._calls.is_ready(model, _version(words[0]))
        elif verb == "find":
            return msgspec.msgpack.encode(await self._calls.find(model, int(words[0])))
        else:
            raise InternalError(f"a model process cannot ask for '{verb}'")
        return None


def _version(text: str) -> str:
    """The version that a text begins with; "" for an empty text. Raises `InvalidArgument` with the python backend's
    text."""
    if not text:
        return ""
    number = leading_number(text)
    said = f"failed to get model version from specified version string '{text[:64]}'"
    if number is None:
        raise InvalidArgument(f"{said} (details: stol), version should be an integral value > 0")
    if number < 0:
        raise InvalidArgument(f"{said}, version should be an integral value > 0")
    return str(number)
