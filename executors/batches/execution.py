"""Executes one batch on one instance: plan, join, run, split, pack.

Everything from a batch's records to its answers is here, so that it can be measured and tested without threads.
An error of one request fails that request (I13); an error of the model fails all requests of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from charonia.backend import (
    Array,
    BatchInstance,
    CancellableInstance,
    InstanceDied,
    ModelRequest,
    ModelResponse,
    Outcome,
    RequestInstance,
    Timings,
    timings_of,
)
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError, DeadlineExceeded, InternalError, Unavailable, error_of_model
from charonia.eventlog import port
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.eventlog.refusal_texts import answer_too_large
from charonia.inference import RECEIPT, Parameters
from charonia.models.interface import ModelInterface
from charonia.tasks import MODEL_ERRORS, ends_caller
from charonia.tensors import Tensor
from charonia.wire import FLAG_REPLY_BY_REFERENCE, RequestRecord, pack_failure, pack_response, response_template

from .answers import Put, check_parameters, pack_answers, request_outputs
from .assembly import (
    Planner,
    RequestPlan,
    Workspace,
    are_many_strings,
    groups,
    join,
    request_inputs,
    wanted_outputs,
)
from .batch_results import BACKEND, OTHER, REJECTED, Executed, Execution, Failure
from .encoded_strings import EncodedStrings, row_bounds, takes_encoded
from .ragged import batch_inputs
from .sequence_batch import BatchSteps
from .sized_batches import execute_sized

_log = logging.getLogger(__name__)

Planned = tuple[int, RequestPlan]


def model_request(record: RequestRecord, plan: RequestPlan, inputs: list[Tensor]) -> ModelRequest:
    """Make the request that a `RequestInstance` gets. `BatchSteps.prepare` adds the tensors of a sequence batcher."""
    mark = record.sequence
    parameters = dict(record.meta.parameters)
    parameters.pop(RECEIPT, None)  # models that know all their parameters refuse this one
    return ModelRequest(
        id=record.client_id,
        correlation_id=0 if mark is None else mark.correlation_id,
        inputs=inputs,
        outputs=plan.outputs,
        parameters=parameters,
        timeout_us=record.timeout_us,
        flags=0 if mark is None else mark.flags,
        origin=record,
        trace=record.trace,
        window=record.window,
        priority=record.level,
    )


def with_moves(durations: tuple[int, int, int], timings: Timings) -> tuple[int, int, int]:
    """Input, inference and output time in ns, with what the instance says of its part."""
    return durations[0] + timings.input_ns, timings.infer_ns, durations[2] + timings.output_ns


def are_alike(records: Sequence[RequestRecord]) -> bool:
    """Whether one plan holds for all: they share one meta, have no deadline, and carry their tensors."""
    meta, rows = records[0].meta, records[0].rows
    return not any(
        True for r in records if r.meta is not meta or r.rows != rows or r.deadline_ns or r.reference is not None
    )


class Batch:
    """The execution of a batch: its records, their plans and answers. Requests with ids in `unwanted` are left out."""

    def __init__(
        self,
        planner: Planner,
        version: int,
        records: Sequence[RequestRecord],
        unwanted: Collection[bytes] = (),
        steps: BatchSteps | None = None,
        put: Put | None = None,
        apart: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        """`apart` runs a function in another thread; without it long work is done where the batch is."""
        self.records = records
        self._put = put
        self._apart = apart
        self._strings = planner.strings
        self.steps = steps
        self.interface: ModelInterface = planner.interface
        self.executed = Executed([b""] * len(records))
        self._model = planner.interface.name
        self.version = version
        self.planned: list[Planned] = []
        self._running: list[tuple[bytes, ModelRequest]] = []
        self._cancelled: set[bytes] = set()
        self._run_began: tuple[int, int] | None = None
        """When the present run began (monotonic ns), and its rows."""
        self.on_running: Callable[[], None] | None = None
        """Called when a model is about to get requests."""
        every = range(len(records))
        if len(records) > 1 and not unwanted and steps is None and are_alike(records):
            self._plan(planner, every[:1], unwanted)
            if self.planned:
                plan = self.planned[0][1]
                self.planned = [(index, plan) for index in every]
                return
            every = every[1:]
        self._plan(planner, every, unwanted)

    def _plan(self, planner: Planner, indices: Iterable[int], unwanted: Collection[bytes]) -> None:
        """Plan these requests, and fail those that cannot run."""
        steps, now = self.steps, wall_ns()
        for index in indices:
            record = self.records[index]
            if unwanted and record.id in unwanted:
                continue
            try:
                if steps is not None and index in steps.errors:
                    raise steps.errors[index]
                if 0 < record.deadline_ns <= now:
                    raise DeadlineExceeded("request deadline exceeded before execution")
                if record.reference is not None and len(record.data) != record.reference.size_bytes:
                    raise Unavailable("the request's tensors, which are stored outside the log, cannot be read")
                self.planned.append((index, planner.plan(record)))
            except CharoniaError as error:
                self.fail([index], error, REJECTED if isinstance(error, DeadlineExceeded) else OTHER)
            except Exception as error:  # a malformed record must not take the instance down
                _log.exception("request for model %r cannot be read", self._model)
                self.fail([index], InternalError(f"{type(error).__name__}: {error}"), OTHER)

    def fail(self, indices: Sequence[int], error: CharoniaError, reason: str) -> None:
        """Answer requests with an error. `reason` is counted (`batch_results`)."""
        end = wall_ns()
        ran_ns, rows = (0, 0) if self._run_began is None else (monotonic_ns() - self._run_began[0], self._run_began[1])
        # the error is kept, and its traceback's frames hold it: a reference cycle that would keep the batch's bytes
        error.__traceback__ = None
        for index in indices:
            self.executed.answers[index] = pack_failure(self.records[index].id, self._model, self.version, error)
            self.executed.failures.append(Failure(index, error, reason, end, ran_ns, rows))

    def fail_all(self, error: CharoniaError) -> Executed:
        """Answer every planned request that has no answer yet with an error of the backend."""
        self._run_began = None  # which of them it had begun is unknown
        self.fail([index for index, _ in self.planned if not self.executed.answers[index]], error, BACKEND)
        return self.executed

    def cancel(self, ids: Collection[bytes], instance: RequestInstance) -> None:
        """Cancel requests: notify the instance of those that run now; the others will not start."""
        self._cancelled.update(ids)
        for request_id, request in self._running:
            request.settled |= request_id in ids
        self.notify(ids, instance)

    def notify(self, ids: Collection[bytes], instance: RequestInstance) -> None:
        """Tell the instance that requests which run now are cancelled."""
        cancelled = [request for request_id, request in self._running if request_id in ids]
        if cancelled and isinstance(instance, CancellableInstance):
            instance.cancel_requests(cancelled)

    def run_on(self, instance: BatchInstance, workspace: Workspace) -> Executed:
        """Execute in the calling thread. Raises `InstanceDied`; the caller then handles the unanswered requests."""
        for run in self.runs():
            self._run_arrays(instance, workspace, run)
        return self.executed

    @property
    def has_many_strings(self) -> bool:
        """Whether it is to run where its strings keep no lock of this process. Never with a sequence batcher."""
        if not self._strings.occur or self.steps is not None:
            return False
        return self._strings.are_many([(plan.inputs, plan.outputs, plan.rows, 1) for _, plan in self.planned])

    def runs(self) -> Iterator[list[Planned]]:
        """Yield the parts of the batch that fit one execution each, in order."""
        if self.steps is None:
            return groups(self.interface, self.planned)
        return self.steps.groups(groups(self.interface, self.planned))

    def _run_arrays(self, instance: BatchInstance, workspace: Workspace, run: list[Planned]) -> None:
        records, interface = self.records, self.interface
        start_wall, started = wall_ns(), monotonic_ns()
        self._run_began = started, self._rows_of(run)
        pairs = [(plan, records[index]) for index, plan in run]
        other = instance if self.has_many_strings and takes_encoded(instance) else None
        try:
            arrays = join(interface, pairs, workspace, encoded=other is not None)
            if interface.batch_inputs:
                arrays |= batch_inputs(interface, [plan for _, plan in run])
        except CharoniaError as error:
            if len(run) == 1:
                self.fail([run[0][0]], error, OTHER)
            else:  # one request has malformed strings: run each alone, so that only that one fails
                for single in run:
                    self._run_arrays(instance, workspace, [single])
            return
        outputs = wanted_outputs(interface, pairs)
        indices = [index for index, _ in run]
        if self.steps is not None:
            if self.steps.clears_slots:
                self._run_empty_slots(instance, self.steps, arrays, outputs)
            arrays, outputs = self.steps.feed(indices, arrays, outputs)
        joined = monotonic_ns()
        rows, timings = self._rows_of(run), None
        sizes = getattr(instance, "batch_sizes", ()) if interface.batching else ()
        try:
            if other is not None:
                results = other.execute_encoded(arrays, outputs, row_bounds([plan.rows for plan, _ in pairs]))
            elif sizes:
                results = execute_sized(instance, sizes, arrays, outputs)
            else:
                results = instance.execute(arrays, outputs)
            inferred = monotonic_ns()
            if isinstance(results, Outcome):
                timings = timings_of(results)
                run, results = self._without_failed(run, results)
                if not run:
                    return
                pairs = [(plan, records[index]) for index, plan in run]
                indices = [index for index, _ in run]
            if self.steps is not None:
                results = self.steps.take(indices, results)
            packed = pack_answers(interface, self.version, pairs, results, self._put)
            if self._strings.learns:
                self._strings.learn(sum([record.meta.size_bytes for _, record in pairs]), results)
        except InstanceDied:
            raise
        except MODEL_ERRORS as error:
            alone = (other is not None and self._strings.taken) or getattr(instance, "rows_fail_alone", False)
            if len(run) > 1 and self.steps is None and alone:
                for single in run:
                    self._run_arrays(instance, workspace, [single])
            else:
                self.fail(indices, self._error_of(error), BACKEND)
            return
        answers = self.executed.answers
        if len(packed) == len(answers):
            answers[:] = packed
        else:
            for index, answer in zip(indices, packed, strict=True):
                answers[index] = answer
        if max(map(len, packed), default=0) > port.MAX_RECORD_BYTES:
            indices = [index for index in indices if self._is_in_bounds(index)]
        self._count(indices, rows, start_wall, (started, joined, inferred), timings)

    def _error_of(self, error: BaseException) -> CharoniaError:
        """What callers get for an exception of the model."""
        if not isinstance(error, CharoniaError):
            _log.error("model %r failed to execute a batch", self._model, exc_info=error)
        return error_of_model(error)

    def _without_failed(self, run: list[Planned], outcome: Outcome) -> tuple[list[Planned], Mapping[str, Array]]:
        """Fail the requests with a row that failed; return the others, and the arrays with their rows alone.

        Raises the first failure where rows cannot be told apart, `InternalError` for a row that the batch has not.
        """
        failures, arrays = outcome.failures, outcome.arrays
        if not failures:
            return run, arrays
        if self.steps is not None or self.interface.scattered_outputs:
            raise failures[min(failures)]
        total = sum([plan.rows for _, plan in run])
        if not all(0 <= row < total for row in failures):
            raise InternalError(f"model '{self._model}' failed rows {sorted(failures)} of a batch of {total}")
        kept: list[Planned] = []
        bounds: list[tuple[int, int]] = []
        start = 0
        for index, plan in run:
            end = start + plan.rows
            failed = [failures[row] for row in range(start, end) if row in failures]
            if failed:
                self.fail([index], self._error_of(failed[0]), BACKEND)
            else:
                kept.append((index, plan))
                bounds.append((start, end))
            start = end
        rows = [row for start, end in bounds for row in range(start, end)]

        def rest(array: Array | EncodedStrings) -> Any:
            if not array.shape or array.shape[0] != total:
                return array
            return array.only(bounds) if isinstance(array, EncodedStrings) else array[rows]

        return kept, {name: rest(array) for name, array in arrays.items()}

    def _run_empty_slots(
        self, instance: BatchInstance, steps: BatchSteps, arrays: Mapping[str, Array], outputs: Sequence[str]
    ) -> None:
        """Run the model with empty slots, as new sequences start in slots of sequences that have not ended (S33)."""
        steps.clears_slots = False
        try:
            empty, wanted = steps.feed_empty(arrays, outputs)
            sizes = getattr(instance, "batch_sizes", ()) if self.interface.batching else ()
            if sizes:
                execute_sized(instance, sizes, empty, wanted)
            else:
                instance.execute(empty, wanted)
        except InstanceDied:
            raise
        except MODEL_ERRORS as error:  # no request is affected
            _log.warning("model '%s' failed to execute empty slots: %s", self._model, error)

    async def run_requests_on(self, instance: RequestInstance) -> Executed:
        """Execute on a `RequestInstance`. Raises `InstanceDied` as `run_on` does."""
        for run in self.runs():
            await self._run_requests(instance, run)
        return self.executed

    async def _run_requests(self, instance: RequestInstance, run: list[Planned]) -> None:
        start_wall, started = wall_ns(), monotonic_ns()
        self._run_began = started, self._rows_of(run)
        if self._apart is not None and self._strings.taken and are_many_strings(self.records[i] for i, _ in run):
            sent, requests = await self._apart(self._requests_of, run)
        else:
            sent, requests = self._requests_of(run)
        if not sent:
            return
        indices = [index for index, _ in sent]
        joined = monotonic_ns()
        self._running = [(self.records[index].id, request) for index, request in zip(indices, requests, strict=True)]
        if self.on_running is not None:
            self.on_running()
        try:
            responses = await self._call_model(instance, indices, requests)
        except InstanceDied:
            raise
        except BaseException as error:
            if ends_caller(error):
                raise
            self.fail(indices, self._error_of(error), BACKEND)
            return
        finally:
            self._running = []
        inferred = monotonic_ns()
        if len(responses) != len(sent):
            text = f"model '{self._model}' answered {len(responses)} of {len(sent)} requests"
            self.fail(indices, InternalError(text), BACKEND)
            return
        succeeded = self._keep(sent, responses)
        if succeeded:
            self._count(succeeded, self._rows_of(sent), start_wall, (started, joined, inferred))

    def take(self, responses: Sequence[ModelResponse], start_wall: int, marks: tuple[int, int, int]) -> Executed:
        """Pack a model's responses to all planned requests, which ran elsewhere. `marks` as in `_count`."""
        self._run_began = marks[0], self._rows_of(self.planned)
        succeeded = self._keep(self.planned, responses)
        if succeeded:
            self._count(succeeded, self._rows_of(self.planned), start_wall, marks)
        return self.executed

    def _rows_of(self, run: list[Planned]) -> int:
        """The batch size that one execution of these requests has in statistics: empty slots count, as in Triton."""
        rows = self.steps.rows if self.steps is not None else 0
        return rows or sum([plan.rows for _, plan in run])

    def _requests_of(self, run: list[Planned]) -> tuple[list[Planned], list[ModelRequest]]:
        """Make the model's requests. Requests with malformed strings fail here and are left out."""
        sent: list[Planned] = []
        requests: list[ModelRequest] = []
        for index, plan in run:
            record = self.records[index]
            if record.id in self._cancelled:
                continue
            try:
                inputs = request_inputs(self.interface, plan, record)
            except CharoniaError as error:
                self.fail([index], error, OTHER)
                continue
            sent.append((index, plan))
            requests.append(model_request(record, plan, inputs))
            if self.steps is not None:
                self.steps.prepare(index, requests[-1])
        return sent, requests

    async def _call_model(
        self, instance: RequestInstance, indices: list[int], requests: list[ModelRequest]
    ) -> Sequence[ModelResponse]:
        """Call the model and return its responses. With a sequence batcher, empty slots get null requests (S33)."""
        if self.steps is None:
            return await instance.execute_requests(requests)
        if self.steps.clears_slots:
            await self._run_null_requests(instance, self.steps, requests[0])
        spread = self.steps.spread(indices, requests)
        found = await instance.execute_requests(spread)
        real = {id(request) for request in requests}
        return [response for request, response in zip(spread, found, strict=False) if id(request) in real]

    def _keep(self, sent: list[Planned], responses: Sequence[ModelResponse]) -> list[int]:
        """Pack the model's responses; return the indices of requests that succeeded and were not rescheduled."""
        succeeded: list[int] = []
        for (index, plan), response in zip(sent, responses, strict=True):
            try:
                if response.error is not None:
                    raise response.error
                if self.steps is not None:
                    self.steps.keep(index, response)
                if response.again:
                    self.check_again()
                    self.executed.rescheduled.add(index)
                    continue
                tensors = request_outputs(self.interface, plan, response.outputs)
                if response.parameters:
                    check_parameters(self._model, response.parameters)
                self.executed.answers[index] = self._pack(self.records[index], tensors, response.parameters)
            except Exception as error:  # a plug-in may give anything
                self.fail([index], self._error_of(error), BACKEND)
                continue
            if self._is_in_bounds(index):
                succeeded.append(index)
        return succeeded

    def _is_in_bounds(self, index: int) -> bool:
        """Whether the answer to a request can be sent; one that the log would not take is an error of that request.

        One that may be sent by reference is checked when it has been tried to store it (`executors.settling.settler`).
        """
        size, record = len(self.executed.answers[index]), self.records[index]
        if record.flags & FLAG_REPLY_BY_REFERENCE and not record.is_job:
            return True
        error = answer_too_large(size, self._model)
        if error is not None:
            self.fail([index], error, BACKEND)
        return error is None

    def _pack(self, record: RequestRecord, tensors: Sequence[Tensor], parameters: Parameters) -> bytes:
        if self._put is not None and not parameters and sum([len(t.data) for t in tensors]) >= BY_REFERENCE_BYTES:
            described = tuple([(t.name, t.datatype, t.shape, len(t.data)) for t in tensors])
            template = response_template(self._model, self.version, described)
            head = b"".join((template.head, record.id, template.meta))
            packed = self._put(record, head, [t.data for t in tensors])
            if packed is not None:
                return packed
        return pack_response(record.id, self._model, self.version, tensors, parameters)

    async def _run_null_requests(self, instance: RequestInstance, steps: BatchSteps, like: ModelRequest) -> None:
        """`_run_empty_slots` for a `RequestInstance`."""
        steps.clears_slots = False
        try:
            await instance.execute_requests(steps.null_requests(like))
        except InstanceDied:
            raise
        except BaseException as error:
            if ends_caller(error):
                raise
            _log.warning("model '%s' failed to execute empty slots: %s", self._model, error)

    def check_again(self) -> None:
        """Raise `InternalError` when the model reschedules a request but is not iterative (S41)."""
        block = self.interface.sequence_batching
        if block is None or not block.iterative:
            raise InternalError(f"model '{self._model}' reschedules a request but does not set 'iterative_sequence'")

    def _count(
        self,
        indices: list[int],
        rows: int,
        start_wall: int,
        marks: tuple[int, int, int],
        timings: Timings | None = None,
    ) -> None:
        started, joined, inferred = marks
        ended = monotonic_ns()
        durations = joined - started, inferred - joined, ended - inferred
        self.executed.executions.append(
            Execution(
                tuple(indices),
                rows,
                start_wall,
                start_wall + ended - started,
                *(durations if timings is None else with_moves(durations, timings)),
            )
        )
