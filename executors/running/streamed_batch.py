"""A batch whose requests may have several responses: tracks each request and packs its responses.

The instance passes responses to a `StreamRun`; `executors.settling.response_writer` writes them to the log;
`executors.running.stream_workers` runs the batch. A request ends with its final response, the batch with its last
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec.structs import replace

from charonia.backend import CancellableInstance, ModelRequest, ModelResponse, StreamingInstance, WindowedInstance
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError, InternalError, ResourceExhausted, StreamInterrupted, error_of_model
from charonia.eventlog import port
from charonia.eventlog.refusal_texts import answer_too_large
from charonia.wire import FLAG_REPLY_BY_REFERENCE, RequestRecord, pack_failure, pack_response
from executors.batches.answers import check_parameters, request_outputs
from executors.batches.assembly import RequestPlan
from executors.batches.batch_results import (
    BACKEND,
    Executed,
    Execution,
    Failure,
    count_cancel,
    count_response,
    fail_response,
)
from executors.batches.execution import Batch, Planned
from executors.batches.sequence_batch import BatchSteps

from .response_order import MAX_HELD_BYTES, ResponseOrder

MAX_UNWRITTEN_BYTES = 4 << 20
"""Unwritten responses that one instance may have. The instance must wait when it has more."""
_RECORD_BYTES = 256
"""Overhead that is counted for each response."""

DISAGREES = "its executor was lost, and the next run does not give the same responses"
"""The end of a request of a resumable model that cannot go on as it began."""


class FlowControl:
    """Counts one instance's unwritten responses. After the limit is reached, half of them must be written first."""

    def __init__(self) -> None:
        self.full = False
        self._unwritten_bytes = 0
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()

    def add(self, record: bytes) -> None:
        self._unwritten_bytes += len(record) + _RECORD_BYTES
        if self._unwritten_bytes > MAX_UNWRITTEN_BYTES:
            self.full = True
            self._has_capacity.clear()

    def written(self, record: bytes) -> None:
        self._unwritten_bytes -= len(record) + _RECORD_BYTES
        if self.full and self._unwritten_bytes <= MAX_UNWRITTEN_BYTES // 2:
            self.full = False
            self._has_capacity.set()

    async def wait_for_capacity(self) -> None:
        await self._has_capacity.wait()


class RequestProgress:
    """The progress of one request."""

    __slots__ = (
        "accepted",
        "attempt",
        "begun",
        "cancelled_ns",
        "cut",
        "ended",
        "error",
        "first",
        "index",
        "kept",
        "last_response_ns",
        "plan",
        "record",
        "request",
        "response_index",
        "run_began",
        "sent_bytes",
        "tokens",
        "window",
    )

    def __init__(self, index: int, plan: RequestPlan, record: RequestRecord, attempt: int, response_index: int) -> None:
        self.index = index
        self.plan = plan
        self.record = record
        self.attempt = attempt
        self.response_index = self.first = response_index
        self.tokens = 0
        self.sent_bytes = 0
        """The tensor bytes of its responses before the final one."""
        self.run_began: tuple[int, int] | None = None
        """When the run began in which an instance got it (monotonic ns), and the rows of that run."""
        self.last_response_ns = 0
        """When it was passed to the instance, or had its last response (monotonic)."""
        self.window = record.window
        """The first response index that is not wanted yet; 0: all are wanted (S55)."""
        self.cancelled_ns = 0
        """When it was cancelled while its instance ran it (monotonic); 0: not cancelled."""
        self.begun = False
        self.ended = False
        self.cut = False
        """Whether it ended without a final response from its instance."""
        self.error: CharoniaError | None = None
        """The error of the last response; None when that succeeded."""
        self.request: ModelRequest | None = None
        self.accepted: Sequence[bytes] = ()
        """The progress of the responses that earlier attempts gave."""
        self.kept: list[bytes] = []
        """The progress of all responses of a resumable model."""

    @property
    def blocked(self) -> bool:
        """Whether it has sent all responses that are wanted for now."""
        return 0 < self.window <= self.response_index and not self.ended


@dataclass(slots=True)
class Outgoing:
    """One response to write, of the request at `index` in its batch. `begins`: it is the first of several.

    An empty record only ends the request: its caller has gone.
    """

    batch: StreamedBatch
    index: int
    response_index: int
    record: bytes
    final: bool
    begins: bool = False
    rescheduled: bool = False
    """The request has not ended: the model rescheduled it (S41)."""
    progress: bytes | None = None
    """What the log must accept before the response is visible; None for nothing."""


class Writer(Protocol):
    """Writes responses in order."""

    def put(self, outgoing: Outgoing) -> None: ...

    def freed(self, batch: StreamedBatch) -> None:
        """Called when the batch's instance is free although the batch has not ended."""


class StreamedBatch:
    """The requests of one batch until each has had its final response.

    `over` is set then; `freed` is set when its instance takes another batch. `last_response_ns` is the time of the last
    response (monotonic).
    """

    def __init__(
        self, batch: Batch, attempts: Iterable[int], unwanted: Collection[bytes], flow: FlowControl, writer: Writer
    ) -> None:
        self.batch = batch
        self.flow = flow
        self.over = asyncio.Event()
        self.freed = asyncio.Event()
        self.last_response_ns = monotonic_ns()
        self.several = batch.interface.decoupled
        self.resumable = batch.interface.resumable and self.several
        self.on_first: Callable[[RequestRecord], None] | None = None
        """Called for each request's first response, unless that is only the final flag."""
        self._unwanted = set(unwanted)
        self._asked: set[bytes] = set()
        """The ids of requests whose callers cancelled them and read on."""
        self._writer = writer
        self._open = len(batch.records)
        block = batch.interface.dynamic_batching
        self.ordered = self.several and block is not None and block.preserve_ordering
        self._order: ResponseOrder[Outgoing] | None = ResponseOrder(len(batch.records)) if self.ordered else None
        self._counted: set[int] = set()
        """The runs, by start time, that were counted with one of their requests."""
        self.reports = False
        """Whether its single responses are counted."""
        self.instance: object = None
        """The instance that was called with its requests."""
        self.tokens = 0
        """How many tokens its requests had so far, of prompts and answers."""
        self.interrupted: dict[int, bytes] = {}
        """The final responses of requests of which the log has other progress, by index: whatever they had."""
        self._allowed = asyncio.Event()
        numbers = list(attempts)
        steps = batch.steps
        self._requests: dict[int, RequestProgress] = {
            index: RequestProgress(
                index,
                plan,
                batch.records[index],
                numbers[index],
                steps.steps[index].responses_sent if steps is not None else 0,
            )
            for index, plan in batch.planned
        }

    def resume(self, progress: Mapping[bytes, Sequence[bytes]]) -> None:
        """Have requests go on after the responses that the log accepted from earlier attempts."""
        for one in self._requests.values():
            one.accepted = progress.get(one.record.id, ())

    def accepted(self, index: int) -> Sequence[bytes]:
        """The progress of the responses that earlier attempts of a request gave."""
        return self._requests[index].accepted

    def kept(self, index: int, first: int, last: int) -> list[bytes]:
        """The progress of a request's responses from index `first` up to `last`, without that."""
        return self._requests[index].kept[first:last]

    def interrupt(self, index: int) -> None:
        """End a request of which the log has other progress than this run's, even if it has ended unwritten."""
        one = self._requests[index]
        if one.ended:
            one.error = StreamInterrupted(DISAGREES)
            self._count_failure(one, one.error)
        else:
            self._end_disagreeing(one)
        assert one.error is not None
        self.interrupted[index] = self._failure(one, one.error, final=True)

    def begin(self) -> None:
        """Pass on the requests that ended before they could run: rejected, left out, or past their deadline."""
        for index, answer in enumerate(self.batch.executed.answers):
            if index not in self._requests:
                self._put(Outgoing(self, index, 0, answer, True))

    def begun_ids(self) -> list[bytes]:
        """The ids of requests that had a response but no final one."""
        return [one.record.id for one in self._requests.values() if one.begun and not one.ended]

    def wanted(self, index: int) -> bool:
        return not self._unwanted or self.batch.records[index].id not in self._unwanted

    def cancel(self, ids: Collection[bytes], instance: StreamingInstance | None) -> None:
        """Cancel requests that were settled elsewhere, and notify the model."""
        self._unwanted.update(ids)
        self._notify_windows()
        found = [one for one in self._requests.values() if one.record.id in ids and not one.ended]
        for one in found:
            if one.request is not None:
                one.request.settled = True
        self.notify_cancelled(instance, ids)
        for one in found:
            if one.request is not None:
                one.cancelled_ns = one.cancelled_ns or monotonic_ns()
            else:  # it will not start
                one.cut = True
                self._end_request(one, b"")

    def ask_to_end(self, ids: Collection[bytes], instance: object) -> None:
        """Notify the model that requests are cancelled, those that it has not got yet once it has them."""
        self._asked.update(ids)
        if ids:
            self.notify_cancelled(instance, ids)

    def begun(self, instance: object) -> None:
        """An instance gets requests in this moment."""
        if self._asked:
            asyncio.get_running_loop().call_soon(self.notify_cancelled, instance, frozenset(self._asked))

    def notify_cancelled(self, instance: object, ids: Collection[bytes] | None = None) -> None:
        """Notify the model that open requests (all, or these) are cancelled."""
        found = [one for one in self._requests.values() if not one.ended and (ids is None or one.record.id in ids)]
        self._notify(found, instance)

    @staticmethod
    def _notify(cancelled: Iterable[RequestProgress], instance: object) -> None:
        requests = [one.request for one in cancelled if one.request is not None]
        if requests and isinstance(instance, CancellableInstance):
            instance.cancel_requests(requests)

    def allow(self, request_id: bytes, count: int) -> None:
        """Let a request send its responses below index `count` (S55)."""
        for one in self._requests.values():
            if one.record.id == request_id and count > one.window > 0:
                one.window = count
                self._notify_window(one)
        self._notify_windows()

    def _notify_window(self, one: RequestProgress) -> None:
        """Pass the window on to the instance, which counts responses from the first of this execution."""
        if one.request is not None and one.window:
            one.request.window = one.window - one.first
            if isinstance(self.instance, WindowedInstance):
                self.instance.allow_responses(one.request, one.request.window)

    def _notify_windows(self) -> None:
        allowed, self._allowed = self._allowed, asyncio.Event()
        allowed.set()

    @property
    def blocked(self) -> bool:
        """Whether an open request waits until more responses are wanted."""
        return any(one.blocked for one in self._requests.values())

    async def unblocked(self, requests: Collection[RequestProgress]) -> None:
        """Wait until none of these requests does."""
        while any(one.blocked and self.wanted(one.index) for one in requests):
            await self._allowed.wait()

    def is_open(self, index: int) -> bool:
        return not self._requests[index].ended

    def run_of(self, run: list[Planned]) -> StreamRun:
        return StreamRun(self, {index: self._requests[index] for index, _ in run})

    def fail_open(self, error: CharoniaError, indices: Collection[int] | None = None, *, reason: str = BACKEND) -> None:
        """Fail open requests (all, or these)."""
        for one in list(self._requests.values()):
            if not one.ended and (indices is None or one.index in indices):
                one.error, one.cut = error, True
                self._count_failure(one, error, reason)
                self._answer(one, self._failure(one, error, final=True), final=True)

    # -- for runs ------------------------------------------------------------------------------------------------------

    def respond(self, one: RequestProgress, response: ModelResponse | None, *, final: bool) -> bool:
        """Take one response of an open request; return whether it was the final one."""
        since_ns, self.last_response_ns = one.last_response_ns, monotonic_ns()
        one.last_response_ns = self.last_response_ns
        final = final or not self.several
        if self.resumable and response is not None and len(response.progress) > port.MAX_RECORD_BYTES:
            text = f"the progress of a response of model '{self.batch.interface.name}' is more than the log takes"
            response = ModelResponse(error=InternalError(text))
        if self._unwanted and not self.wanted(one.index):
            if final:
                self._count_cancel(one)
                self._end_request(one, b"")
            return final
        if response is not None:
            tokens = max(0, int(response.tokens))  # a plug-in's may be of another type
            self.tokens += tokens
            one.tokens += tokens
            one.error = None if response.error is None else error_of_model(response.error)
            if self.on_first is not None and one.response_index == 0 and not one.accepted:
                self.on_first(one.record)
        try:
            if response is not None and response.again:
                self._reschedule(one)
                return False
            steps = self.batch.steps
            if response is not None and steps is not None and not self._is_for_caller(steps, one, response):
                if not final:
                    one.first -= 1
                    self._notify_window(one)
                    return False
                response = None
            record = self._packed(one, response, final=final)
        except Exception as failure:  # a plug-in may give anything
            one.error = error = error_of_model(failure)
            record = self._failure(one, error, final=final)
        if one.response_index < len(one.accepted) and not self._agrees(one, response, final=final):
            self._end_disagreeing(one)
            return True
        if self.resumable and response is not None and not final:
            one.kept.append(response.progress)
        if self.reports and response is not None:
            kind: Literal["success", "fail", "empty"] = "success" if response.outputs else "empty"
            counts = self.batch.executed.responses.setdefault(one.index, {})
            count_response(
                *(counts, one.response_index, kind if one.error is None else "fail"),
                *(self.last_response_ns - since_ns, monotonic_ns() - self.last_response_ns),
            )
        if final and one.error is not None:
            self._count_failure(one, one.error)
        self._answer(one, record, final=final)
        return final

    def _packed(self, one: RequestProgress, response: ModelResponse | None, *, final: bool) -> bytes:
        record, interface = one.record, self.batch.interface
        if response is None:
            if not self.several:
                raise InternalError(f"model '{interface.name}' gave no response")
            place = (one.attempt, one.response_index)
            return pack_response(record.id, interface.name, self.batch.version, [], {}, place=place, is_flag=True)
        if response.error is not None:
            return self._failure(one, error_of_model(response.error), final=final)
        tensors = request_outputs(interface, one.plan, response.outputs)
        if response.parameters:
            check_parameters(interface.name, response.parameters)
        packed = pack_response(
            record.id,
            interface.name,
            self.batch.version,
            tensors,
            response.parameters,
            final=final,
            place=self._wire_place(one),
        )
        # one that may be sent by reference is checked by its writer, once it has tried to store it
        if record.is_job or not record.flags & FLAG_REPLY_BY_REFERENCE:
            error = answer_too_large(len(packed), interface.name)
            if error is not None:
                raise error
        if not final:
            one.sent_bytes += sum([len(tensor.data) for tensor in tensors])
        return packed

    def _failure(self, one: RequestProgress, error: CharoniaError, *, final: bool) -> bytes:
        error.__traceback__ = None
        name, version = self.batch.interface.name, self.batch.version
        return pack_failure(one.record.id, name, version, error, final=final, place=self._wire_place(one))

    def _is_for_caller(self, steps: BatchSteps, one: RequestProgress, response: ModelResponse) -> bool:
        """Keep the states of a response; return whether it holds more for the caller. Raises `InternalError`."""
        if response.error is not None:
            return True
        if self.several:
            return steps.keep_from_response(one.index, response)
        steps.keep(one.index, response)
        return True

    def _reschedule(self, one: RequestProgress) -> None:
        """End this execution of a request that the model reschedules (S41). Raises `InternalError` if it may not."""
        self.batch.check_again()
        if self.batch.steps is not None:
            self.batch.steps.keep_partial(one.index)
            self.batch.steps.steps[one.index].responses_sent = one.response_index
        self.batch.executed.rescheduled.add(one.index)
        one.ended = True
        self._put(Outgoing(self, one.index, one.response_index, b"", True, rescheduled=True))

    def _wire_place(self, one: RequestProgress) -> tuple[int, int] | None:
        return (one.attempt, one.response_index) if self.several else None

    def _answer(self, one: RequestProgress, record: bytes, *, final: bool) -> None:
        if self._unwanted and not self.wanted(one.index):
            record = b""
        if record and self._order is not None and self._too_much(self._order, one, record):
            return
        if final:
            self._end_request(one, record)
        elif record and self.resumable:
            is_new = one.response_index >= len(one.accepted)
            progress = one.kept[-1] if is_new else None
            begins = is_new and not one.begun
            self._put(Outgoing(self, one.index, one.response_index, record, False, begins, progress=progress))
            one.begun |= is_new
        elif record:
            self._put(Outgoing(self, one.index, one.response_index, record, False, not one.begun))
            one.begun = True
        one.response_index += 1

    @staticmethod
    def _agrees(one: RequestProgress, response: ModelResponse | None, *, final: bool) -> bool:
        """Whether a response is what an earlier attempt gave in its place, or an error that ends the request."""
        if final:
            return response is not None and response.error is not None
        return response is not None and response.progress == one.accepted[one.response_index]

    def _end_disagreeing(self, one: RequestProgress) -> None:
        """End a request whose responses were not repeated: no reader may get those of two runs mixed."""
        one.cut = True
        one.error = StreamInterrupted(DISAGREES)
        self._count_failure(one, one.error)
        self._end_request(one, self._failure(one, one.error, final=True))
        self._notify([one], self.instance)

    def _end_request(self, one: RequestProgress, record: bytes) -> None:
        one.ended = True
        if one.window:
            self._notify_windows()
        self._put(Outgoing(self, one.index, one.response_index, record, True))

    def _put(self, outgoing: Outgoing) -> None:
        """Pass a response to the writer, or hold it back for order. The batch may be over with it."""
        self._open -= outgoing.final
        out = [outgoing]
        if self._order is not None:
            out = self._order.put(outgoing.index, outgoing, len(outgoing.record), final=outgoing.final)
        for one in out:
            self.flow.add(one.record)  # held responses do not count: those they wait for may be of the same instance
            self._writer.put(one)
        if self._open == 0:
            self.over.set()

    def _too_much(self, order: ResponseOrder[Outgoing], one: RequestProgress, record: bytes) -> bool:
        """End the request and return True when a response cannot be held back because too many bytes are."""
        if not order.holds_back(one.index) or order.held_bytes + len(record) <= MAX_HELD_BYTES:
            return False
        last_index = one.response_index
        one.response_index -= order.drop(one.index)
        self._count_unsent(one, range(one.response_index, last_index + 1))
        one.sent_bytes = 0  # all of its responses were held back
        one.cut = True
        text = f"more than {MAX_HELD_BYTES} bytes of responses wait for those of requests before (preserve_ordering)"
        one.error = ResourceExhausted(text)
        self._count_failure(one, one.error)
        self._end_request(one, self._failure(one, one.error, final=True))
        return True

    def _count_unsent(self, one: RequestProgress, indices: Iterable[int]) -> None:
        """Responses that were counted as they were made cannot be sent."""
        counts = self.batch.executed.responses.get(one.index, {})
        for index in indices:
            fail_response(counts, index)

    def _count_cancel(self, one: RequestProgress) -> None:
        """Count a cancelled request that its instance has ended."""
        if self.reports and one.cancelled_ns:
            executed = self.batch.executed
            counts = executed.responses.setdefault(one.index, {})
            count_cancel(counts, one.response_index, monotonic_ns() - one.cancelled_ns)
            executed.cancelled.add(one.index)

    def _count_failure(self, one: RequestProgress, error: CharoniaError, reason: str = BACKEND) -> None:
        began_ns, rows = one.run_began if one.run_began is not None else (0, 0)
        ran_ns = monotonic_ns() - began_ns if rows else 0
        self.batch.executed.failures.append(Failure(one.index, error, reason, wall_ns(), ran_ns, rows))

    # -- for the writer ------------------------------------------------------------------------------------------------

    def not_sent(self, index: int, response_index: int, size_bytes: int) -> None:
        """An error was sent in the place of a response with so many tensor bytes, which the log would not take."""
        one = self._requests[index]
        one.sent_bytes -= size_bytes
        self._count_unsent(one, (response_index,))

    @property
    def all_ended(self) -> bool:
        return self._open == 0

    def part(self, ended: dict[int, bytes]) -> Executed:
        """Return the results of requests that have ended, to settle and count. Every request is in one part.

        Of requests that are no longer wanted, only the responses are counted, if they were cancelled while they ran.
        """
        executed = self.batch.executed
        finals = {index: record for index, record in ended.items() if self.wanted(index)}
        part = Executed([b""] * len(self.batch.records))
        part.rescheduled = executed.rescheduled & finals.keys()
        for index, record in finals.items():
            part.answers[index] = record
        part.failures = [failure for failure in executed.failures if failure.index in finals]
        executed.failures = [failure for failure in executed.failures if failure.index not in finals]
        failed = {failure.index for failure in part.failures}
        for one in executed.executions:
            if one.indices[0] in finals and one.indices[0] not in failed:
                part.executions.append(replace(one, first=one.start_ns not in self._counted))
                self._counted.add(one.start_ns)
        executed.executions = [one for one in executed.executions if one.indices[0] not in finals]
        part.cancelled = executed.cancelled & ended.keys()
        counted = [index for index in executed.responses if index in finals or index in part.cancelled]
        part.responses = {index: executed.responses.pop(index) for index in counted}
        for index in finals.keys() & self._requests.keys():
            progress = self._requests[index]
            part.tokens[index], part.sent_bytes[index] = progress.tokens, progress.sent_bytes
        return part

    def set_freed(self) -> None:
        """Record that the instance can take another batch."""
        if not self.freed.is_set():
            self.freed.set()
            if not self.all_ended:
                self._writer.freed(self)


class StreamRun:
    """Takes the responses of one call of an instance. Implements `charonia.backend.ResponseStream`."""

    def __init__(self, batch: StreamedBatch, planned: dict[int, RequestProgress]) -> None:
        self._batch = batch
        self._windows = False
        self._planned = planned
        self._requests: list[RequestProgress] = []
        self._start_ns = wall_ns()
        self._started_ns = monotonic_ns()
        self._begun_ns = self._started_ns
        self._rows = 0
        self.freed = asyncio.Event()

    def begin(self, indices: list[int], requests: list[ModelRequest], instance: object = None) -> None:
        """Called just before the instance gets these requests, which are at `indices` of the batch."""
        self._batch.instance = instance
        self._batch.reports = self._batch.several and getattr(instance, "reports_responses", True)
        self._requests = [self._planned[index] for index in indices]
        for one, request in zip(self._requests, requests, strict=True):
            one.request = request
            one.last_response_ns = monotonic_ns()
            if one.window:
                request.window = one.window - one.first
                self._windows = not isinstance(instance, WindowedInstance)
        steps = self._batch.batch.steps
        # empty slots count, as in Triton
        self._rows = (steps.rows if steps is not None else 0) or sum(one.plan.rows for one in self._requests)
        for one in self._requests:
            one.run_began = self._started_ns, self._rows
        self._batch.last_response_ns = self._begun_ns = monotonic_ns()

    def send(self, index: int, response: ModelResponse | None, *, final: bool) -> None:
        if response is None and not final:
            raise ValueError("neither a response nor a final flag")
        one = self._requests[index]
        if one.ended:
            if not one.cut and self._batch.several:
                raise InternalError("a response came after the final one of its request")
            return
        if self._batch.respond(one, response, final=final) and one.error is None and self._batch.wanted(one.index):
            self._count(one)

    @property
    def full(self) -> bool:
        return self._batch.flow.full

    @property
    def blocked(self) -> bool:
        return any(one.blocked for one in self._requests)

    async def drain(self) -> None:
        await self._batch.flow.wait_for_capacity()
        if self._windows:
            await self._batch.unblocked(self._requests)

    def free(self) -> None:
        self.freed.set()

    def _count(self, one: RequestProgress) -> None:
        now_ns = monotonic_ns()
        execution = Execution(
            (one.index,),
            self._rows,
            self._start_ns,
            self._start_ns + now_ns - self._started_ns,
            self._begun_ns - self._started_ns,
            one.last_response_ns - self._begun_ns,
            now_ns - one.last_response_ns,  # packing its last response
        )
        self._batch.batch.executed.executions.append(execution)
