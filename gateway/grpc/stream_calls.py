"""What the requests of one `ModelStreamInfer` call mean and how their answers look (G22-G25, G36).

Models that answer once answer in the order of the requests; decoupled ones, and jobs that are followed, as they come.
Who waits for whom is `answer_streams`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

from charonia.catalog.served import ServedVersion
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InternalError, Unavailable
from charonia.inference import InferenceRequest
from charonia.tensors import Buffer
from gateway.deferral import Accepted
from gateway.handler import Handler
from gateway.requests.delivery import ANYONE, Caller
from gateway.requests.large_tensors import check_elements
from gateway.tracing.trace import Trace
from protos import grpc_service_pb2 as pb

from .answer_streams import Answer, Answering
from .calling import Context, headers_of, metadata_of, parse
from .convert import EMPTY_FINAL, Classes, stream_answer, stream_error
from .job_calls import JobCalls, asks_for_job, placed, words_of_parameters
from .large_messages import LargeMessage
from .statuses import INTERNAL
from .trace_metadata import begin_trace, sent

_log = logging.getLogger(__name__)

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
"""Answers requests of a stream that come while the gateway stops (G36)."""

ENDS_ON_ERROR = ("triton_grpc_error", "true")
"""Metadata by which the first error ends the stream with its status (G25)."""

_NOTHING = pb.ModelInferRequest()
_SEQUENCE = "sequence_id"


class Inferring(Protocol):
    """The part of the front that a stream shares with unary calls."""

    draining: bool

    async def infer(self, message: pb.ModelInferRequest, context: Context, *, raw: Sequence[Buffer] = ()) -> bytes: ...

    async def infer_traced(
        self,
        message: pb.ModelInferRequest,
        context: Context,
        metadata: Iterable[tuple[str, str | bytes]],
        came_ns: int,
        raw: Sequence[Buffer] = (),
    ) -> bytes: ...

    def read(
        self, message: pb.ModelInferRequest, served: ServedVersion, context: Context, raw: Sequence[Buffer] = ()
    ) -> tuple[InferenceRequest, Classes, int]: ...


class StreamCalls:
    """The requests of one call."""

    def __init__(self, front: Inferring, handler: Handler, jobs: JobCalls, context: Context) -> None:
        self._front = front
        self._handler = handler
        self._jobs = jobs
        self._context = context
        self._ends_on_error = ENDS_ON_ERROR in metadata_of(context)
        self._last: dict[tuple[str, bytes], asyncio.Event] = {}
        """By model, and by sequence of a model that has them: when the last request is answered to its end."""

    def answer(self, data: bytes | LargeMessage) -> Answering:
        """The answers to one message, as `answer_streams.AnswerStream` takes them."""
        message = _NOTHING
        raw: Sequence[Buffer] = ()
        try:
            if isinstance(data, LargeMessage):
                message, raw = data.message, data.raw
                if data.error is not None:
                    raise data.error
            else:
                message = parse(pb.ModelInferRequest, data)
            if self._front.draining:
                raise Unavailable(SHUTTING_DOWN)
            if asks_for_job(message):
                return self._told(named(message), self._jobs.follow(message, self._caller()))
            served = self._handler.served_model(message.model_name, message.model_version)
            if served.interface.decoupled:
                told = self._told(named(message), self._responses(message, served, raw))
                row = _row_of(message, served)
                return told if row is None else self._in_turn(row, told)
        except CharoniaError as error:
            return self._refused(error, message)
        except Exception:
            _log.exception("a request of a stream failed")
            return self._refused(InternalError(INTERNAL), message)
        return self._one(message, raw)

    def _caller(self) -> Caller:
        return self._handler.identify(headers_of(self._context)) if self._handler.identifies else ANYONE

    async def _refused(self, error: CharoniaError, message: pb.ModelInferRequest) -> Answer:
        return self._error(error, message)

    async def _one(self, message: pb.ModelInferRequest, raw: Sequence[Buffer]) -> Answer:
        """The answer of a model that gives one."""
        try:
            if self._is_traced():
                return stream_answer(await self._front.infer_traced(message, self._context, (), wall_ns(), raw))
            return stream_answer(await self._front.infer(message, self._context, raw=raw))
        except CharoniaError as error:
            return self._error(error, message)
        except Exception:
            _log.exception("a request of a stream failed")
            return self._error(InternalError(INTERNAL), message)

    async def _responses(
        self, message: pb.ModelInferRequest, served: ServedVersion, raw: Sequence[Buffer]
    ) -> AsyncGenerator[bytes]:
        """The answers of a decoupled model. A failed response is an answer, a failure of the request is raised."""
        caller = self._caller()
        request, classes, deadline_ns = self._front.read(message, served, self._context, raw)
        if raw:
            await check_elements(self._handler.offload, request)
            del raw
        words = words_of_parameters(message) if message.parameters else {}
        empty_final = EMPTY_FINAL in message.parameters and message.parameters[EMPTY_FINAL].bool_param
        about = named(message)
        trace = request.trace = self._trace(about)
        del message  # its tensors may be large, and the stream long
        responses = self._jobs.stream(request, classes, served, words, caller, deadline_ns)
        async with contextlib.AsyncExitStack() as ending:
            await ending.enter_async_context(contextlib.aclosing(responses))
            if trace is not None:
                ending.callback(sent, trace)
            async for response in responses:
                if isinstance(response, Accepted):
                    yield stream_answer(self._jobs.describe(response, request.id, served.version))
                elif response.error is not None:
                    if self._ends_on_error:
                        raise response.error
                    yield stream_error(response.error.message, about)
                elif empty_final or not response.is_flag:
                    if words:
                        response.parameters |= placed(response)
                    yield stream_answer(await self._jobs.encode(response, classes, served), final=response.final)
                del response  # the next one may be long in coming

    def _is_traced(self) -> bool:
        tracer = self._handler.tracer
        return tracer is not None and tracer.on

    def _trace(self, message: pb.ModelInferRequest) -> Trace | None:
        tracer = self._handler.tracer
        if tracer is None or not tracer.on:
            return None
        return begin_trace(tracer, message.model_name, metadata_of(self._context), wall_ns())

    def _in_turn(self, row: tuple[str, bytes], answers: AsyncGenerator[Answer]) -> AsyncGenerator[Answer]:
        """The answers once those of the request before are written (S6): its batcher gives them in this order."""
        before = self._last.get(row)
        done = self._last[row] = asyncio.Event()
        return self._after(row, before, answers, done)

    async def _after(
        self,
        row: tuple[str, bytes],
        before: asyncio.Event | None,
        answers: AsyncGenerator[Answer],
        done: asyncio.Event,
    ) -> AsyncGenerator[Answer]:
        try:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    if before is not None:
                        await before.wait()
                    yield answer
            if before is not None:
                await before.wait()
        finally:
            done.set()
            if self._last.get(row) is done:
                del self._last[row]

    async def _told(self, about: pb.ModelInferRequest, answers: AsyncGenerator[bytes]) -> AsyncGenerator[Answer]:
        """The answers, and what is raised as the last one."""
        error: CharoniaError
        try:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    yield answer
            return
        except CharoniaError as known:
            error = known
        except Exception:
            _log.exception("a request of a stream failed")
            error = InternalError(INTERNAL)
        yield self._error(error, about)

    def _error(self, error: CharoniaError, message: pb.ModelInferRequest) -> Answer:
        if self._ends_on_error:
            error.__traceback__ = None  # it holds frames, and they the message
            return error
        return stream_error(error.message, message)


def _row_of(message: pb.ModelInferRequest, served: ServedVersion) -> tuple[str, bytes] | None:
    """What answers of a decoupled model keep an order with: all of the model, of its sequence, or nothing."""
    interface = served.interface
    block = interface.dynamic_batching
    if block is not None and block.preserve_ordering:
        return interface.name, b""
    if interface.sequence_batching is not None and _SEQUENCE in message.parameters:
        return interface.name, message.parameters[_SEQUENCE].SerializeToString()
    return None


def named(message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """What answers say of their request, without its tensors."""
    return pb.ModelInferRequest(id=message.id, model_name=message.model_name, model_version=message.model_version)
