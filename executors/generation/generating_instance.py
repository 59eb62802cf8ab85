"""An instance that serves requests for text over an engine, with the tensors of `charonia.generation.text_tensors`.

Requests are admitted in the event loop, the engine steps in a thread (`engine_thread`), and what a step gave comes back
in one callback, as one response to each request (`text_answer`). A slow reader, or a slow log, holds back its
responses, not the steps: what waits for it is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.backend import InstanceDied, ModelRequest, ModelResponse, ResponseStream
from charonia.errors import CANCELLED, Cancelled, CharoniaError, as_error
from charonia.generation.tokenizer import Tokenizer

from .engine import Engine, EngineLoad, EngineObserver, GenerationRequest, TokenEvent
from .engine_thread import EngineThread
from .progress_codec import unpack_progress
from .text_answer import TextAnswer
from .text_requests import TextRequest, prepare, read_text_request

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """`context` is the most tokens of prompt and answer; `max_open` how many requests are taken before some have ended:
    those that run and those that wait in the engine, which should have the next ones at hand.
    """

    context: int
    max_open: int = 64
    name: str = "engine"


class _Open:
    """One request of a call until its final response."""

    __slots__ = ("answer", "call", "ended", "index", "is_admitted", "key", "request")

    def __init__(self, call: _Call, index: int, request: ModelRequest, key: bytes) -> None:
        self.call = call
        self.index = index
        self.request = request
        self.key = key
        self.answer: TextAnswer | None = None
        self.is_admitted = False
        """Whether the engine has it, and all was given that an earlier attempt gave."""
        self.ended = False


class _Call:
    """The requests of one `execute_stream`."""

    def __init__(self, responses: ResponseStream) -> None:
        self.responses = responses
        self.requests: list[_Open] = []
        self.open = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draining: asyncio.Task[None] | None = None


class GeneratingInstance:
    """Also a `WindowedInstance`, `CancellableInstance` and `SelfCheckingInstance`. To be made in the event loop."""

    reports_responses = False
    """As Triton's vLLM backend, a python model. Counts of single responses, six for each token of a text, took two
    fifths of the executor's time and most of the log server's.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: InstanceSettings,
        observer: EngineObserver | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._open: dict[bytes, _Open] = {}
        self._by_request: dict[int, _Open] = {}
        self._calls: set[_Call] = set()
        self._admissions: set[asyncio.Task[None]] = set()
        self._number = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._death: InstanceDied | None = None
        self._observer = observer
        self._thread = EngineThread(engine, settings.name, self._deliver, self._died, observer)
        self._thread.start()

    @property
    def load(self) -> EngineLoad | None:
        """What the engine said after its last step; None before the first."""
        return self._thread.load

    @property
    def open(self) -> int:
        """How many requests have no final response yet."""
        return len(self._open)

    # -- charonia.backend ----------------------------------------------------------------------------------------------

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        """See `StreamingInstance`."""
        if self._death is not None:
            raise InstanceDied(str(self._death), blameless=True)
        call = _Call(responses)
        self._calls.add(call)
        try:
            read = [self._begin(call, index, request) for index, request in enumerate(requests)]
            # goes on if this call is cancelled: the engine must not keep what it takes in a thread meanwhile
            admission = asyncio.get_running_loop().create_task(self._admit_all(call, read))
            self._admissions.add(admission)
            admission.add_done_callback(self._admissions.discard)
            await self._wait_for_room(call)
            responses.free()  # the inputs were read
            await asyncio.shield(admission)
            await call.over
        finally:
            self._leave(call)

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        """See `CancellableInstance`."""
        for request in requests:
            one = self._by_request.get(id(request))
            if one is not None:
                self._give_up([one])
                self._end(one, Cancelled(CANCELLED))

    def allow_responses(self, request: ModelRequest, count: int) -> None:
        """See `WindowedInstance`."""
        one = self._by_request.get(id(request))
        if one is not None:
            one.request.window = count
            self._send_due(one)

    @property
    def checks_health(self) -> bool:
        """See `SelfCheckingInstance`."""
        return True

    async def check_health(self) -> bool:
        """See `SelfCheckingInstance`: an engine that ended while nothing ran is found out before the next request."""
        return self._death is None

    async def close_instance(self) -> None:
        """See `StreamingInstance`. The engine is closed in its thread."""
        if self._death is None:
            self._end_calls(InstanceDied("it was closed", blameless=True))
        await asyncio.to_thread(self._thread.stop)

    # -- beginning requests --------------------------------------------------------------------------------------------

    def _begin(self, call: _Call, index: int, request: ModelRequest) -> TextRequest | None:
        """Register a request and read its inputs; one that is wrong is answered, and None returned."""
        self._number += 1
        one = _Open(call, index, request, self._number.to_bytes(8, "big"))
        call.requests.append(one)
        call.open += 1
        self._open[one.key] = self._by_request[id(request)] = one
        if self._observer is not None:
            self._observer.arrived(one.key)
        try:
            return read_text_request(request)
        except CharoniaError as error:
            self._end(one, error)
        return None

    async def _wait_for_room(self, call: _Call) -> None:
        while len(self._open) >= self._settings.max_open and not call.over.done():
            self._has_room.clear()
            room = asyncio.ensure_future(self._has_room.wait())
            waited: set[asyncio.Future[Any]] = {room, call.over}
            try:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                room.cancel()

    async def _admit_all(self, call: _Call, read: Sequence[TextRequest | None]) -> None:
        for one, text in zip(call.requests, read, strict=True):
            if text is not None:
                await self._admit(one, text)

    async def _admit(self, one: _Open, text: TextRequest) -> None:
        """Give again what was given by an earlier attempt, and have the engine go on after it."""
        progress = [bytes(packed) for packed in one.request.progress]
        try:
            if text.is_large or progress:
                given = await asyncio.to_thread(self._prepare, one, text, progress)
            else:
                given = self._prepare(one, text, progress)
        except Exception as error:
            self._end(one, as_error(error))
            return
        if one.ended:  # cancelled meanwhile
            self._engine.cancel([one.key])
        else:
            for response in given:
                one.call.responses.send(one.index, response, final=False)
            one.is_admitted = True
            self._send_due(one)  # the engine may have been quick
        self._thread.wake()

    def _prepare(self, one: _Open, text: TextRequest, progress: Sequence[bytes]) -> list[ModelResponse]:
        """Tokenise, parse, replay and admit; returns what was given already. May run in another thread."""
        seed = unpack_progress(progress[0]).seed if progress else None
        seed = secrets.randbits(63) if seed is None else seed
        prepared = prepare(text, self._tokenizer, self._settings.context, seed)
        one.answer = answer = TextAnswer(text, prepared, self._tokenizer)
        given, emitted = answer.replay(progress)
        parameters, request = prepared.parameters, one.request
        if self._observer is not None:
            self._observer.admitted(one.key, len(prepared.prompt))
        self._engine.admit(
            GenerationRequest(one.key, prepared.prompt, parameters, parameters.lora_name, request.priority, emitted)
        )
        return given

    # -- responses -----------------------------------------------------------------------------------------------------

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        """What steps gave, in the event loop."""
        due: dict[_Open, TextAnswer] = {}
        for event in events:
            one = self._open.get(event.key)
            if one is None or one.answer is None:
                continue  # it was cancelled
            if event.error is not None:
                self._end(one, as_error(event.error))
            else:
                one.answer.take(event)
                due[one] = one.answer
        if not due:
            return
        # those of a step go together, if this stream can send them so (`executors.isolation.child.request_server`)
        hold = getattr(next(iter(due)).call.responses, "hold", contextlib.nullcontext)
        with hold():
            for one in due:
                self._send_due(one)

    def _send_due(self, one: _Open) -> None:
        """Send the next response of a request, unless its reader or the log has to catch up first."""
        answer, call = one.answer, one.call
        if one.ended or not one.is_admitted or answer is None or not answer.is_due:
            return
        if 0 < one.request.window <= answer.sent:
            return  # until `allow_responses`
        if call.responses.full:
            if call.draining is None:
                call.draining = asyncio.get_running_loop().create_task(self._drain(call))
            return
        final = bool(answer.finish)
        try:
            call.responses.send(one.index, answer.response(), final=final)
        except Exception:  # those of other requests have to go on
            _log.exception("a response could not be sent")
            self._give_up([one])
            final = True
        if final:
            self._forget(one)

    async def _drain(self, call: _Call) -> None:
        """Wait until the log has caught up, then send what waits."""
        await call.responses.drain()
        call.draining = None
        for one in call.requests:
            self._send_due(one)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end(self, one: _Open, error: CharoniaError) -> None:
        """Give a request its final response."""
        if not one.ended:
            self._forget(one)
            one.call.responses.send(one.index, ModelResponse(error=error), final=True)

    def _forget(self, one: _Open) -> None:
        one.ended = True
        del self._open[one.key]
        if self._observer is not None:
            self._observer.left(one.key)
        del self._by_request[id(one.request)]
        self._has_room.set()
        one.call.open -= 1
        if not one.call.open and not one.call.over.done():
            one.call.over.set_result(None)

    def _give_up(self, requests: Iterable[_Open]) -> None:
        """Free what the engine has for them."""
        keys = [one.key for one in requests if not one.ended]
        if keys:
            self._engine.cancel(keys)
            self._thread.wake()

    def _leave(self, call: _Call) -> None:
        """A call is over, or its executor does not wait for it any more."""
        self._calls.discard(call)
        if call.draining is not None:
            call.draining.cancel()
        left = [one for one in call.requests if not one.ended]
        self._give_up(left)
        for one in left:
            self._forget(one)

    def _died(self, error: BaseException) -> None:
        text = f"its engine ended: {type(error).__name__}: {error}"
        self._death = InstanceDied(text, shared=len(self._calls) > 1)
        self._end_calls(self._death)

    def _end_calls(self, death: InstanceDied) -> None:
        for call in self._calls:
            if not call.over.done():
                call.over.set_exception(InstanceDied(str(death), blameless=death.blameless, shared=death.shared))
                call.over.exception()  # the call may have been cancelled
