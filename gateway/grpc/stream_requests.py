"""Answers the requests of one `ModelStreamInfer` call (G22-G25, G36).

Models that answer once answer in the order of the requests; decoupled models and followed jobs as responses arrive.
`AnswerStream` orders and bounds answers: it stops reading from a client that does not read its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence, Sized
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from charonia.catalog.served import ServedVersion
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InternalError, Unavailable
from charonia.inference import InferenceResponse, earlier
from charonia.offload.pool import OFF_LOOP_BYTES
from charonia.tensors import Buffer
from gateway.deferral import Accepted
from gateway.handler import Handler
from gateway.requests.delivery import ANYONE, Caller
from gateway.tracing.trace import Trace
from protos import grpc_service_pb2 as pb

from .calling import Context, Reply, Write, headers_of, metadata_of
from .convert import EMPTY_FINAL, RequestReader, ResponseEncoder, flag_reply, parse, stream_answer, stream_error
from .job_calls import JobCalls, asks_for_job, placed, words_of_parameters
from .large_messages import LargeMessage
from .statuses import INTERNAL
from .trace_metadata import begin_trace, sent

_log = logging.getLogger(__name__)

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
"""Answers requests of a stream that arrive while the gateway stops (G36)."""

ENDS_ON_ERROR = ("triton_grpc_error", "true")
"""Metadata with which the first error ends the stream with its status (G25)."""

_NOTHING = pb.ModelInferRequest()
_SEQUENCE = "sequence_id"


class Inferring(Protocol):
    """The part of the servicer that streams share with unary calls."""

    draining: bool
    encoder: ResponseEncoder
    reader: RequestReader
    flush_interval_s: float

    async def infer(self, message: pb.ModelInferRequest, context: Context, *, raw: Sequence[Buffer] = ()) -> Reply: ...

    async def infer_traced(
        self,
        message: pb.ModelInferRequest,
        context: Context,
        metadata: Iterable[tuple[str, str | bytes]],
        trace: Trace,
        raw: Sequence[Buffer] = (),
    ) -> Reply: ...


class StreamRequests:
    """The requests of one call."""

    def __init__(self, front: Inferring, handler: Handler, jobs: JobCalls, context: Context) -> None:
        self._front = front
        self._handler = handler
        self._jobs = jobs
        self._context = context
        self._ends_on_error = ENDS_ON_ERROR in metadata_of(context)
        self._last: dict[tuple[str, bytes], asyncio.Event] = {}
        """Set when the latest request of an ordered group (`_order_of`) is fully answered."""

    def answer(self, data: bytes | LargeMessage) -> Answering:
        """The answers to one message, as `AnswerStream` takes them."""
        message = _NOTHING
        raw: Sequence[Buffer] = ()
        try:
            if isinstance(data, LargeMessage):
                message, raw = data.message, data.raw
                if data.error is not None:
                    return self._refused(data.error, message)
            else:
                message = parse(pb.ModelInferRequest, data)
            if self._front.draining:
                raise Unavailable(SHUTTING_DOWN)
            if message.parameters and asks_for_job(message):
                return self._with_error(named(message), self._jobs.follow(message, self._caller()))
            served = self._handler.served_model(message.model_name, message.model_version)
            if served.interface.decoupled:
                answers = self._with_error(named(message), self._responses(message, served, raw))
                group = _order_of(message, served)
                return answers if group is None else self._in_turn(group, answers)
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
        """The answer of a model that answers once."""
        try:
            trace = self._trace(message)
            if trace is not None:
                return stream_answer(await self._front.infer_traced(message, self._context, (), trace, raw))
            return stream_answer(await self._front.infer(message, self._context, raw=raw))
        except CharoniaError as error:
            return self._error(error, message)
        except Exception:
            _log.exception("a request of a stream failed")
            return self._error(InternalError(INTERNAL), message)

    async def _responses(
        self, message: pb.ModelInferRequest, served: ServedVersion, raw: Sequence[Buffer]
    ) -> AsyncGenerator[Reply]:
        """The answers of a decoupled model. A failed response is an answer; if the request fails, this raises."""
        caller = self._caller()
        request, classes, deadline_ns = self._front.reader.read(message, served, self._context, raw)
        del raw
        words = words_of_parameters(message) if message.parameters else {}
        empty_final = EMPTY_FINAL in message.parameters and message.parameters[EMPTY_FINAL].bool_param
        about = named(message)
        trace = request.trace = self._trace(about)
        del message  # free its memory: the stream may take long
        responses: AsyncGenerator[InferenceResponse | Accepted]
        if words or self._handler.identifies:
            responses = self._jobs.stream(request, classes, served, words, caller, deadline_ns)
        else:
            request.deadline_ns = earlier(request.deadline_ns, deadline_ns)
            responses = self._handler.stream(request, flush_interval_s=self._front.flush_interval_s)
        async with contextlib.AsyncExitStack() as ending:
            await ending.enter_async_context(contextlib.aclosing(responses))
            if trace is not None:
                ending.callback(sent, trace)
            async for response in responses:
                # a routing rule may have chosen another version at admission
                served = request.served or served
                if isinstance(response, Accepted):
                    yield stream_answer(self._jobs.describe(response, request.id, served.version))
                elif response.error is not None:
                    if self._ends_on_error:
                        raise response.error
                    yield stream_error(response.error, about, final=response.final)
                elif not response.is_flag or (empty_final and words):
                    if words:
                        response.parameters |= placed(response)
                    if classes:
                        encoded = await self._jobs.encode(response, classes, served)
                    else:
                        encoded = self._front.encoder.encode(response, classes, served)
                    yield stream_answer(encoded, final=response.final)
                elif empty_final:
                    yield stream_answer(flag_reply(about))
                del response  # free its memory while waiting for the next one

    def _trace(self, message: pb.ModelInferRequest) -> Trace | None:
        tracer = self._handler.tracer
        if tracer is None or not tracer.on:
            return None
        return begin_trace(tracer, message.model_name, metadata_of(self._context), wall_ns())

    def _in_turn(self, group: tuple[str, bytes], answers: AsyncGenerator[Answer]) -> AsyncGenerator[Answer]:
        """Hold answers back until the previous request of this group is fully answered, in the batcher's order (S6)."""
        before = self._last.get(group)
        done = self._last[group] = asyncio.Event()
        return self._after(group, before, answers, done)

    async def _after(
        self,
        group: tuple[str, bytes],
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
            if self._last.get(group) is done:
                del self._last[group]

    async def _with_error(self, about: pb.ModelInferRequest, answers: AsyncGenerator[Reply]) -> AsyncGenerator[Answer]:
        """The answers, and a raised error as the last one."""
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
            error.__traceback__ = None  # its frames hold the message
            return error
        return stream_error(error, message)


def _order_of(message: pb.ModelInferRequest, served: ServedVersion) -> tuple[str, bytes] | None:
    """The group within which answers of a decoupled model keep their order: its model, its sequence, or None."""
    interface = served.interface
    block = interface.dynamic_batching
    if block is not None and block.preserve_ordering:
        return interface.name, b""
    if interface.sequence_batching is not None and _SEQUENCE in message.parameters:
        return interface.name, message.parameters[_SEQUENCE].SerializeToString()
    return None


def named(message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """The part of a request that its answers repeat, without tensors."""
    return pb.ModelInferRequest(id=message.id, model_name=message.model_name, model_version=message.model_version)


MAX_OPEN_REQUESTS = 256
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Bytes of running requests and waiting answers; a larger request is served alone."""

Answer = Reply | CharoniaError
"""A message, or the error that ends the stream."""

Answering = Coroutine[Any, Any, Answer] | AsyncGenerator[Answer]
"""One answer, sent in the order of the requests, or several, sent as they arrive."""


Message = TypeVar("Message", bound=Sized)


class _Open:
    """A request whose answers are not all written; `size_bytes` is that of the message, then of the answer."""

    __slots__ = ("size_bytes", "task", "written")

    task: asyncio.Task[Answer] | asyncio.Task[None]

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.written = False


class AnswerStream(Generic[Message]):
    """Orders and bounds the answers of a stream.

    `answer` takes a message and raises nothing; an error among its answers ends the stream. `write` sends an answer and
    returns when the transport accepts it. `read_large` parses a large message before `answer`; messages behind it wait.
    """

    def __init__(
        self,
        answer: Callable[[Message], Answering],
        write: Write,
        *,
        read_large: Callable[[Any], Awaitable[Message]] | None = None,
        max_open_requests: int = MAX_OPEN_REQUESTS,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._answer = answer
        self._write = write
        self._read_large = read_large
        self._max_open_requests = max_open_requests
        self._max_held_bytes = max_held_bytes
        self._ordered: deque[tuple[_Open, asyncio.Task[Answer]]] = deque()
        self._free: set[_Open] = set()
        self._held_bytes = 0
        self._arrived = asyncio.Event()
        self._capacity = asyncio.Event()
        self._writing = asyncio.Lock()
        self._over: asyncio.Future[CharoniaError | None] = asyncio.get_running_loop().create_future()

    async def run(self, messages: AsyncIterator[Any]) -> CharoniaError | None:
        """Run until all messages are answered, or an answer is an error, which is returned.

        At its end, for whatever reason (an error, a failure of `messages` or `write`, cancellation), all requests of
        the stream are cancelled (G25, G26).
        """
        reading = asyncio.create_task(self._read(messages))
        reading.add_done_callback(lambda _: self._arrived.set())
        ordering = asyncio.create_task(self._ending_with(partial(self._write_ordered, reading)))
        try:
            return await self._over
        finally:
            for task in (reading, ordering, *(one.task for one, _ in self._ordered), *(one.task for one in self._free)):
                task.cancel()
            if reading.done() and not reading.cancelled():
                reading.exception()  # retrieved, so that asyncio does not log it

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            if self._read_large is not None:
                message = await self._read_large(message) if len(message) > OFF_LOOP_BYTES else bytes(message)
            one = _Open(len(message))
            answering = self._answer(message)
            if isinstance(answering, AsyncGenerator):
                self._free.add(one)
                one.task = asyncio.create_task(self._ending_with(partial(self._write_all, one, answering)))
            else:
                task = one.task = asyncio.create_task(answering)
                task.add_done_callback(partial(self._answered, one))
                self._ordered.append((one, task))
            del message, answering  # free their memory while waiting for the next one
            self._held_bytes += one.size_bytes
            self._arrived.set()
            while (
                len(self._ordered) + len(self._free) >= self._max_open_requests
                or self._held_bytes >= self._max_held_bytes
            ):
                self._capacity.clear()
                await self._capacity.wait()

    async def _ending_with(self, work: Callable[[], Awaitable[None]]) -> None:
        """End the stream with what `work` raises. Not started if the stream is over before."""
        try:
            await work()
        except asyncio.CancelledError:
            self._over.cancel()
        except Exception as error:
            if not self._over.done():
                self._over.set_exception(error)

    def _end(self, error: CharoniaError | None) -> None:
        if not self._over.done():
            self._over.set_result(error)

    # -- answers in the order of the requests -------------------------------------------------------------------------

    def _answered(self, one: _Open, task: asyncio.Task[Answer]) -> None:
        if one.written or task.cancelled() or task.exception() is not None:
            return
        answer = task.result()
        size = 0 if isinstance(answer, CharoniaError) else len(answer)
        self._held_bytes += size - one.size_bytes
        one.size_bytes = size
        self._capacity.set()

    async def _write_ordered(self, reading: asyncio.Task[None]) -> None:
        """Write answers in order, until there are no more requests of any kind."""
        while True:
            while self._ordered:
                one, task = self._ordered[0]
                answer = await task
                if isinstance(answer, CharoniaError):
                    self._end(answer)
                    return
                async with self._writing:
                    await self._write(answer)
                del answer
                self._ordered.popleft()
                one.written = True
                self._held_bytes -= one.size_bytes
                self._capacity.set()
            if reading.done() and not self._free:
                reading.result()
                self._end(None)
                return
            self._arrived.clear()
            await self._arrived.wait()

    # -- answers as they come -----------------------------------------------------------------------------------------

    async def _write_all(self, one: _Open, answers: AsyncGenerator[Answer]) -> None:
        try:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    if isinstance(answer, CharoniaError):
                        self._end(answer)
                        return
                    async with self._writing:
                        await self._write(answer)
                    del answer  # free its memory while waiting for the next one
        finally:
            self._free.discard(one)
            self._held_bytes -= one.size_bytes
            self._capacity.set()
            self._arrived.set()
