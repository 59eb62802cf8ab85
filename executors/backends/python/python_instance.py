"""A python model's instance: a `RequestInstance`, `ColumnInstance` and `StreamingInstance` over one model process.

`python_backend` starts the process and loads the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, cast

import msgpack

from charonia.backend import (
    ColumnOutput,
    InstanceDied,
    ModelCalls,
    ModelRequest,
    ModelResponse,
    RequestColumns,
    ResponseStream,
)
from charonia.datatypes import DataType
from charonia.errors import InternalError
from executors.configuration.time_parameters import MAX_EXECUTION

from .frame_calls import FrameCalls
from .frame_content import columns_content, failure_of, outputs_of, requests_content, response_of, responses_of
from .model_calls import Batch, PendingModelCalls
from .process_settings import Limits
from .protocol.frames import Buffer, Frame, FrameError, Kind, tensor_offsets
from .protocol.shared_slots import SHARED_BYTES, ExecutorSlots

_MOST_KNOWN = 256
"""So many forms of columns are remembered."""
_HEALTH_CEILING_S = 60.0
"""A longer `is_ready` counts as hung. Batches wait for it, and do not cause it."""


class PythonInstance:
    """An instance, made by `load_instance`. Calls may overlap; the process runs them one after another."""

    def __init__(self, child: FrameCalls, limits: Limits, model: str = "", calls: ModelCalls | None = None) -> None:
        self._child = child
        self._limits = limits
        self.answers_later = False
        """Whether its code uses response senders, whose responses may come after `execute` has returned."""
        self.reports_responses = False
        """False: Triton's python backend has no statistics of single responses."""
        self.checks_health = False
        """Whether the model has an `is_ready` function."""
        self.decoupled = False
        """Whether its requests are answered by response senders only."""
        self._check: asyncio.Future[Frame] | None = None
        self._batches: dict[int, Batch] = {}
        self._wanted: dict[int, int] = {}
        """By call with cancelled requests: how many of its requests are not settled."""
        self._asked = PendingModelCalls(child, model, calls, self._batches)
        self._executing: dict[int, tuple[int, int]] = {}
        """By `id` of a running request: (call, index)."""
        self._columns: dict[int, int] = {}
        """By `id` of running columns: the call."""
        self._forms: dict[Hashable, bytes] = {}
        """By form of columns: the content of the frame that asks for their execution."""
        self._answered: dict[tuple[bytes, int, int], list[tuple[str, DataType, tuple[int, ...], int, int]]] = {}
        """By content of a COLUMNS, number of requests and bytes: the outputs, and where they lie."""
        self._answers_are_large = False
        """Whether the last columns would have filled a slot: small ones need none."""

    @property
    def pid(self) -> int:
        """The id of the model process."""
        return self._child.pid

    @property
    def takes_columns(self) -> bool:
        """Whether its requests may be sent as columns: only when all responses are returned by `execute`."""
        return not (self.decoupled or self.answers_later)

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        """Return one response per request (P4). A failure of the whole batch is an error in each (P12).

        Raises `InstanceDied` when the process crashes or runs longer than `charonia.max_execution_s` (P19).
        """
        call, reply = self._begin_requests(requests)
        sent = SingleResponses()
        self._child.stream(call, sent)
        try:
            return await self._responses(await reply, len(requests), sent)
        except FrameError as error:
            raise self._broken(error) from None
        finally:
            self._end_requests(call, requests)

    async def execute_columns(self, columns: RequestColumns) -> list[ColumnOutput] | Sequence[ModelResponse]:
        """Return the outputs as columns when all answers have one form, else as `execute_requests`. Raises as above."""
        return await self.begin_columns(columns).answers()

    def begin_columns(self, columns: RequestColumns, replied: Callable[[], None] | None = None) -> ColumnCall:
        """Send columns; see `executors.batches.wave_columns.PromptInstance`. Raises `InstanceDied`."""
        return ColumnCall(self, columns, replied)

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        """Run until every request had its final response, sent (P11) or returned. Raises as above.

        A failure of `execute` is raised; it fails the requests without a final response (P12).
        """
        call, reply = self._begin_requests(requests)
        stream = StreamedResponses(self._child, responses, len(requests))
        self._child.stream(call, stream)
        try:
            frame = await reply
            if frame.kind is Kind.FAILED:
                raise failure_of(frame)
            if frame.content() is not None:  # the model is not decoupled
                stream.returned(responses_of(frame))
            responses.free()
            await stream.ended
        except FrameError as error:
            raise self._broken(error) from None
        finally:
            self._end_requests(call, requests)
            if stream.ended.done() and not stream.ended.cancelled():
                stream.ended.exception()

    def _begin(
        self,
        kind: Kind,
        meta: bytes,
        data: Sequence[Buffer],
        batch: Batch,
        replied: Callable[[], None] | None = None,
    ) -> tuple[int, asyncio.Future[Frame]]:
        call, reply = self._child.begin(
            kind, meta, data, ceiling_s=self._limits.max_execution_s, ceiling=MAX_EXECUTION, replied=replied
        )
        self._batches[call] = batch
        return call, reply

    def _begin_requests(self, requests: Sequence[ModelRequest]) -> tuple[int, asyncio.Future[Frame]]:
        content, data = requests_content(requests)
        call, reply = self._begin(Kind.EXECUTE, msgpack.packb(content), data, requests)
        for index, request in enumerate(requests):
            self._executing[id(request)] = (call, index)
        return call, reply

    def _end_requests(self, call: int, requests: Sequence[ModelRequest]) -> None:
        self._end(call)
        for request in requests:
            self._executing.pop(id(request), None)

    def _end(self, call: int) -> None:
        self._child.stream(call, None)
        del self._batches[call]
        self._wanted.pop(call, None)

    async def _responses(self, frame: Frame, count: int, sent: SingleResponses) -> Sequence[ModelResponse]:
        """The responses to a batch of `count` requests, from its reply and from senders. Raises `FrameError`."""
        if frame.kind is Kind.FAILED:
            failure = failure_of(frame)
            return [sent.get(index) or ModelResponse(error=failure) for index in range(count)]
        responses = responses_of(frame)
        if len(responses) != count:
            raise FrameError(f"{len(responses)} replies to {count} requests")
        if None in responses:
            return await self._with_sent(responses, sent)
        return cast("list[ModelResponse]", responses)

    async def _with_sent(
        self, responses: Sequence[ModelResponse | None], sent: SingleResponses
    ) -> Sequence[ModelResponse]:
        """Fill in the responses of senders, waiting for those that are missing."""
        missing = {index for index, response in enumerate(responses) if response is None}
        try:
            async with asyncio.timeout(self._limits.max_execution_s or None):
                await sent.wait_for(missing)
        except TimeoutError:
            text = f"it sent no response for {self._limits.max_execution_s:g} s ({MAX_EXECUTION})"
            return [one or sent.get(index) or _failure(text) for index, one in enumerate(responses)]
        return [one or sent.get(index) or _failure("") for index, one in enumerate(responses)]

    def _broken(self, error: FrameError) -> InstanceDied:
        self._child.kill(f"it does not keep to the protocol: {error}")
        return InstanceDied(f"Stub process '{self._child.name}' is not healthy. {error}.", self._child.last_lines())

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        """Make `is_cancelled()` of these requests return true from now on.

        The model's open calls for a batch are cancelled when the last of its requests is settled.
        """
        indices: dict[int, list[tuple[int, bool]]] = {}
        for request in requests:
            at = self._executing.pop(id(request), None) if request.settled else self._executing.get(id(request))
            if at is not None:
                indices.setdefault(at[0], []).append((at[1], request.settled))
        for call, found in indices.items():
            self._cancel(call, [index for index, _ in found], sum([settled for _, settled in found]))

    def cancel_columns(self, columns: RequestColumns, indices: Sequence[int]) -> None:
        """The same for some requests of running columns; each at most once."""
        call = self._columns.get(id(columns))
        if call is not None:
            self._cancel(call, indices, len(indices))

    def _cancel(self, call: int, cancelled: Sequence[int], settled: int) -> None:
        self._child.notify(Kind.CANCEL, call, list(cancelled))
        batch = self._batches[call]
        count = batch.count if isinstance(batch, RequestColumns) else len(batch)
        left = self._wanted[call] = self._wanted.get(call, count) - settled
        if left <= 0:
            self._asked.cancel_those_of(call)

    def allow_responses(self, request: ModelRequest, count: int) -> None:
        """Let a request's senders send responses below index `count`; waiting ones continue."""
        at = self._executing.get(id(request))
        if at is not None:
            self._child.notify(Kind.WINDOW, at[0], [[at[1], count]])

    async def check_health(self) -> bool:
        """Return what `is_ready` returns. While one check is unanswered, later calls wait for the same one.

        Raises what the model raised, and `InstanceDied`.
        """
        if self._check is None or self._check.done():
            _, self._check = self._child.begin(
                Kind.HEALTH, msgpack.packb(None), ceiling_s=_HEALTH_CEILING_S, ceiling="is_ready"
            )
        frame = await asyncio.shield(self._check)
        if frame.kind is Kind.FAILED:
            raise failure_of(frame)
        return frame.content() is True

    async def close_instance(self) -> None:
        """Finalize the model and end its process. A second call waits for the first."""
        await self._child.close(self._limits.finalize_s)


class ColumnCall:
    """Columns that the process of an instance has got; a `executors.batches.wave_columns.ColumnCall`."""

    __slots__ = ("_call", "_child", "_columns", "_expected", "_instance", "_reply", "_sent")

    def __init__(
        self, instance: PythonInstance, columns: RequestColumns, replied: Callable[[], None] | None = None
    ) -> None:
        """Send them. Raises `InstanceDied`."""
        self._child = child = instance._child
        self._instance = instance
        self._columns = columns
        put = self._expected = None
        meta = instance._forms.get(columns.form) if columns.form is not None else None
        if meta is not None and not instance._answers_are_large:
            data: Sequence[Buffer] = [column.data for column in columns.inputs]
        else:
            content, data = columns_content(columns)
            is_small = sum(map(len, data)) < SHARED_BYTES
            if child.slots is not None:
                put = child.slots.put(data)
                if instance._answers_are_large or not is_small:
                    self._expected = child.slots.expect()
            meta = msgpack.packb([*content, put, self._expected])
            if columns.form is not None and is_small and put is None and self._expected is None:
                remember(instance._forms, columns.form, meta)
        self._call, self._reply = instance._begin(Kind.EXECUTE_COLUMNS, meta, () if put else data, columns, replied)
        instance._columns[id(columns)] = self._call
        self._sent = SingleResponses()
        child.stream(self._call, self._sent)

    def look(self) -> None:
        """Wait for the reply for a moment, in the event loop."""
        self._child.look()

    def columns(self) -> list[ColumnOutput] | None:
        """The outputs, if the reply has come and has them as columns, which ends the call; else see `answers`."""
        reply = self._reply
        if not reply.done() or reply.cancelled() or reply.exception() is not None:
            return None
        frame = reply.result()
        if frame.kind is not Kind.COLUMNS:
            return None
        try:
            outputs = self._outputs(frame)
        except FrameError:  # `answers` ends the process
            return None
        self._end()
        return outputs

    async def answers(self) -> list[ColumnOutput] | Sequence[ModelResponse]:
        """Wait for the reply; see `PythonInstance.execute_columns`. Call it once."""
        instance = self._instance
        try:
            frame = await self._reply
            if frame.kind is Kind.COLUMNS:
                return self._outputs(frame)
            return await instance._responses(frame, self._columns.count, self._sent)
        except FrameError as error:
            raise instance._broken(error) from None
        finally:
            self._end()

    def _outputs(self, frame: Frame) -> list[ColumnOutput]:
        instance, count, data = self._instance, self._columns.count, frame.data
        places = instance._answered.get((frame.meta, count, len(data)))
        if places is not None:
            instance._answers_are_large = False
            return [
                ColumnOutput(name, datatype, shape, data[begin:end]) for name, datatype, shape, begin, end in places
            ]
        outputs = outputs_of(frame, count, partial(outputs_in, self._child.slots, self._expected))
        sizes = [len(output.data) for output in outputs]
        instance._answers_are_large = sum(sizes) >= SHARED_BYTES
        if not instance._answers_are_large and len(data):
            places = [
                (output.name, output.datatype, output.shape, at, at + size)
                for output, size, at in zip(outputs, sizes, tensor_offsets(sizes), strict=True)
            ]
            remember(instance._answered, (frame.meta, count, len(data)), places)
        return outputs

    def _end(self) -> None:
        self._instance._end(self._call)
        self._instance._columns.pop(id(self._columns), None)
        slots = self._child.slots
        if slots is not None and self._expected is not None:
            slots.drop(self._expected[0])


def remember(known: dict[Any, Any], key: Hashable, value: object) -> None:
    """Add to what is known, which is forgotten when it is much."""
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = value


def outputs_in(
    slots: ExecutorSlots | None, expected: tuple[int, int] | None, sizes: Sequence[int]
) -> Sequence[memoryview]:
    """The outputs of a reply in the slot that is expected to hold them. Raises `ValueError` without one."""
    if slots is None or expected is None:
        raise ValueError("there is no slot")
    return slots.take(expected[0], sizes)


def _failure(text: str) -> ModelResponse:
    return ModelResponse(error=InternalError(text))


class StreamedResponses:
    """Passes responses on. `ended` is done when each request had its final one, or the process has died."""

    def __init__(self, child: FrameCalls, responses: ResponseStream, count: int) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._child = child
        self._responses = responses
        self._count = count
        self._open = set(range(count))
        self._waiting: asyncio.Task[None] | None = None

    def response(self, frame: Frame) -> None:
        """Take one response. Raises `FrameError`."""
        index, final, response = response_of(frame)
        self.take(index, response, final=final)

    def take(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        """Take one response that was read. Raises `FrameError`."""
        if index not in self._open:
            raise FrameError(f"a response to request {index}, which has had its final one")
        if final:
            self._open.discard(index)
        elif response is None:
            raise FrameError("a response that is none, and is not final")
        self._responses.send(index, response, final=final)
        if not self._open:
            self._end(None)
        if self._responses.full and self._waiting is None:
            self._child.read(False)
            self._waiting = asyncio.get_running_loop().create_task(self._drain())

    @property
    def blocked(self) -> bool:
        """Whether a sender waits until more responses are wanted."""
        return self._responses.blocked

    def returned(self, responses: Sequence[ModelResponse | None]) -> None:
        """Take the responses that `execute` of a model that is not decoupled returned. None: a sender answers.

        Raises `FrameError`.
        """
        if len(responses) != self._count:
            raise FrameError(f"{len(responses)} replies to {self._count} requests")
        for index, response in enumerate(responses):
            if response is not None and index in self._open:
                self._open.discard(index)
                self._responses.send(index, response, final=True)
        if not self._open:
            self._end(None)

    def died(self, death: InstanceDied) -> None:
        self._end(death)

    def _end(self, death: InstanceDied | None) -> None:
        if self.ended.done():
            return
        if death is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(death)

    async def _drain(self) -> None:
        try:
            await self._responses.drain()
        finally:
            self._waiting = None
            self._child.read(True)


class SingleResponses:
    """Gathers the responses of senders of a model that is not decoupled: at most one per request."""

    def __init__(self) -> None:
        self._found: dict[int, ModelResponse] = {}
        self._death: InstanceDied | None = None
        self._changed: Callable[[], None] | None = None

    def response(self, frame: Frame) -> None:
        """Take one response. Raises `FrameError`."""
        index, final, response = response_of(frame)
        self.take(index, response, final=final)

    def take(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        """Take one response that was read. Raises `FrameError`."""
        if response is None:
            raise FrameError("a response that is none")
        self._found[index] = response
        self._tell()

    blocked = False

    def died(self, death: InstanceDied) -> None:
        self._death = death
        self._tell()

    def get(self, index: int) -> ModelResponse | None:
        return self._found.get(index)

    async def wait_for(self, indices: set[int]) -> None:
        """Wait until all of these have a response. Raises `InstanceDied`."""
        while not indices <= self._found.keys():
            if self._death is not None:
                raise self._death
            changed = asyncio.Event()
            self._changed = changed.set
            await changed.wait()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()
