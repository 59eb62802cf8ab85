"""Executes a batch of waves on an instance, as columns. The counterpart of `executors.batches.execution` for waves.

What columns cannot represent (ragged inputs, BYTES outputs, answers that differ) is run or answered request by request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import cast

import numpy as np
from msgspec import Struct, field

from charonia.backend import (
    Array,
    BatchInstance,
    ColumnInstance,
    ColumnOutput,
    InstanceDied,
    ModelResponse,
    Outcome,
    RequestColumns,
    RequestInstance,
    timings_of,
)
from charonia.clock import monotonic_ns, wall_ns
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, InvalidRecord, error_of_model
from charonia.eventlog import port
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.eventlog.refusal_texts import answer_too_large
from charonia.tasks import MODEL_ERRORS, ends_caller
from charonia.tensors import Buffer, Tensor, check_bytes_elements, object_array, split_bytes_elements
from charonia.wire import (
    Reference,
    RequestRecord,
    Wave,
    failed_response,
    pack_failure,
    pack_response,
    pack_wave_reply,
    refer_response,
    reply_meta,
    response_data,
    unpack_response,
)

from .answers import SMALL_BYTES, OutputPart, request_outputs
from .assembly import JOINED_BYTES, InputPlan, Planner, RequestPlan, Workspace, array_of, parts_of
from .batch_results import BACKEND, OTHER, Executed, Execution, Failure, fail_answered
from .encoded_strings import takes_encoded
from .execution import Batch, with_moves
from .sized_batches import execute_sized
from .wave_columns import ColumnCall, PromptInstance, columns_of, has_columns, may_be_columns

_log = logging.getLogger(__name__)

_MOST_TOGETHER_BYTES = 262_144


PutColumns = Callable[[Wave, Sequence[Buffer]], Reference | None]
"""Stores the large answers to a wave out of band; returns None when they must be in its reply."""


class ExecutedWaves(Executed):
    """The results of a batch of waves. Indices are those of waves.

    `answers` has one reply per wave, or b"" when `singly` has one per request. A wave with neither has no result,
    because its instance died.
    """

    singly: dict[int, list[bytes]] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    """By wave with failed requests: how many failed."""
    shares: dict[int, dict[int, int]] = field(default_factory=dict)
    """By index in `executions`, for executions of single requests: how many of each wave succeeded in it."""

    sent: set[int] | None = None
    """The waves that the instance's thread has answered; None when the event loop answers all."""

    def left(self) -> Collection[int]:
        """The waves without a result."""
        if all(self.answers):
            return ()
        return [index for index, answer in enumerate(self.answers) if not answer and index not in self.singly]

    def successes(self, waves: Sequence[Wave]) -> list[int]:
        """How many requests of each wave succeeded."""
        counts = [0] * len(waves)
        for place, execution in enumerate(self.executions):
            for index in execution.indices:
                counts[index] += self.succeeded(place, index, waves[index].count)
        return counts

    def succeeded(self, place: int, index: int, count: int) -> int:
        """How many of the `count` requests of a wave succeeded in the execution with index `place`: none of one that is
        `left`, for it runs again.
        """
        if not self.answers[index] and index not in self.singly:
            return 0
        if place in self.shares:
            return self.shares[place][index]
        return count - self.failed.get(index, 0) if self.failed else count


class _ColumnRun(Struct):
    """Waves that run as columns. Times in ns, `start_wall` of the wall clock."""

    run: list[tuple[int, RequestPlan]]
    waves: list[Wave]
    columns: RequestColumns
    start_wall: int
    started: int
    joined: int
    call: ColumnCall | None = None
    """Set when it runs and no task waits for it."""


class WaveBatch:
    """The execution of a batch of waves. Used like `executors.batches.execution.Batch`."""

    planned = ()

    def __init__(
        self,
        planner: Planner,
        version: int,
        waves: Sequence[Wave],
        put: PutColumns | None = None,
        unwanted: Collection[bytes] = (),
        soon: Callable[..., object] | None = None,
    ) -> None:
        """`unwanted` are the ids of requests that were cancelled before; `soon` is the event loop's `call_soon`."""
        self._planner = planner
        self._put = put
        self._unwanted = set(unwanted)
        self._soon = soon
        self._divided: list[list[tuple[int, RequestPlan]]] | None = None
        """Its parts (`_runs`), once it was tried to begin it."""
        self._begun: _ColumnRun | None = None
        """What an instance runs that no task waits for yet."""
        self._running: Batch | tuple[RequestColumns, list[Wave]] | None = None
        """What a `RequestInstance` runs now."""
        self._notified: set[int] = set()
        """The indices of requests in running columns of which the model knows that they are not wanted."""
        self._interface = planner.interface
        self._version = version
        self._waves = waves
        self.executed = ExecutedWaves([b""] * len(waves))
        self.stored: list[Reference] = []
        """Where large answers lie out of band."""

    # -- running ------------------------------------------------------------------------------------------------------

    @property
    def has_many_strings(self) -> bool:
        """As that of `Batch`."""
        strings = self._planner.strings
        if not strings.occur:
            return False
        return strings.are_many([(wave.meta.inputs, wave.meta.outputs, wave.rows, wave.count) for wave in self._waves])

    def run_on(self, instance: BatchInstance, workspace: Workspace) -> Executed:
        """Execute in the calling thread. Raises `InstanceDied`; the caller then handles the unanswered waves."""
        singly = self._planner.needs_requests or (self.has_many_strings and takes_encoded(instance))
        lone = self._lone() if len(self._waves) == 1 else None
        for run in self._runs() if lone is None else (lone,):
            if singly or not self._has_payloads(run):
                batch = self._requests_of(run)
                try:
                    self._take(run, batch, batch.run_on(instance, workspace))
                except InstanceDied:
                    self._take(run, batch, batch.executed)
                    raise
            else:
                self._run_arrays(instance, workspace, run)
        return self.executed

    async def run_requests_on(self, instance: RequestInstance) -> Executed:
        """Execute on a `RequestInstance`. Raises `InstanceDied` as `run_on` does."""
        for run in self._runs() if self._divided is None else self._divided:
            if has_columns(instance) and instance.takes_columns:
                begun, self._begun = self._begun or self._column_run(run), None
                if begun is not None:
                    await self._run_columns(instance, begun)
                    continue
            batch = self._requests_of(run)
            self._starts(batch, instance)
            try:
                self._take(run, batch, await batch.run_requests_on(instance))
            except InstanceDied:
                self._take(run, batch, batch.executed)
                raise
        return self.executed

    def fail_all(self, error: CharoniaError) -> Executed:
        """Answer every wave that has no answer yet with an error of the backend."""
        self._fail(range(len(self._waves)), error, BACKEND)
        return self.executed

    def cancel(self, ids: Collection[bytes], instance: RequestInstance) -> None:
        """Tell the model that requests are not wanted any more. They are answered like the others of their wave."""
        self._unwanted.update(ids)
        running = self._running
        if isinstance(running, Batch):
            running.notify(ids, instance)
        elif running is not None and has_columns(instance):
            columns, waves = running
            every = [request_id for wave in waves for request_id in wave.ids()]
            if indices := [i for i, one in enumerate(every) if one in ids and i not in self._notified]:
                self._notified.update(indices)
                instance.cancel_columns(columns, indices)

    def _starts(self, running: Batch | tuple[RequestColumns, list[Wave]], instance: RequestInstance) -> None:
        """Notify the model, once it runs these, of those among them that are not wanted by now."""
        self._running = running
        self._notified = set()
        if self._unwanted and self._soon is not None:
            self._soon(self.cancel, set(self._unwanted), instance)

    def _runs(self) -> Iterable[list[tuple[int, RequestPlan]]]:
        """The parts of the batch that fit one execution each: one, unless the model was reloaded."""
        planned: list[tuple[int, RequestPlan]] = []
        for index, wave in enumerate(self._waves):
            try:
                planned.append((index, self._planner.plan(wave)))
            except CharoniaError as error:
                self._fail([index], error, OTHER)
            except Exception as error:  # a wave that should not have been accepted must not take the instance down
                _log.exception("a wave for model %r cannot be read", self._interface.name)
                self._fail([index], InternalError(f"{type(error).__name__}: {error}"), OTHER)
        limit = max(1, self._interface.max_batch_size)
        run: list[tuple[int, RequestPlan]] = []
        rows = 0
        for index, plan in planned:
            more = plan.rows * self._waves[index].count
            if more > limit:
                self._fail([index], InvalidArgument(_too_many(limit, self._interface.name)), OTHER)
                continue
            if run and (rows + more > limit or plan.group != run[0][1].group or plan.outputs != run[0][1].outputs):
                yield run
                run, rows = [], 0
            run.append((index, plan))
            rows += more
        if run:
            yield run

    def _lone(self) -> list[tuple[int, RequestPlan]] | None:
        """The run of the only wave; None when that cannot run as it is."""
        (wave,) = self._waves
        try:
            plan = self._planner.plan(wave)
        except Exception:  # `_runs` answers it
            return None
        return [(0, plan)] if plan.rows * wave.count <= max(1, self._interface.max_batch_size) else None

    def _run_arrays(self, instance: BatchInstance, workspace: Workspace, run: list[tuple[int, RequestPlan]]) -> None:
        start_wall, started = wall_ns(), monotonic_ns()
        waves: list[Wave] = []
        indices: list[int] = []
        rows = 0
        for index, plan in run:
            wave = self._waves[index]
            waves.append(wave)
            indices.append(index)
            rows += plan.rows * wave.count
        plan = run[0][1]
        try:
            arrays = {
                place.name: self._joined(position, place, run, waves, rows, workspace)
                for position, place in enumerate(plan.inputs)
            }
        except CharoniaError:
            if len(run) > 1:  # run each wave alone, so that only one with malformed strings fails
                for single in run:
                    self._run_arrays(instance, workspace, [single])
            else:
                self._run_singly(instance, workspace, run)
            return
        joined = monotonic_ns()
        timings = None
        sizes = getattr(instance, "batch_sizes", ()) if self._interface.batching else ()
        outputs = plan.outputs
        try:
            results = execute_sized(instance, sizes, arrays, outputs) if sizes else instance.execute(arrays, outputs)
            inferred = monotonic_ns()
            if isinstance(results, Outcome):
                if results.failures:
                    self._run_singly(instance, workspace, run)
                    return
                timings = timings_of(results)
                results = results.arrays
            infer_ns = inferred - joined if timings is None else timings.infer_ns
            form = _form(plan, waves[0].count, results) if len(run) == 1 else None
            known = self._planner.answers.get(form)
            if known is None:
                parts = [OutputPart.of(self._interface, name, results, rows) for name in outputs]
                self._answer(run, waves, parts, infer_ns, (started, rows))
                if form is not None and all(_is_plain(part, results) for part in parts):
                    self._planner.remember(form, (self._meta_of(parts, plan.rows), []))
            else:  # checked before, with the first results of this form
                columns = [results[name].tobytes() for name in outputs]
                self._answer_one(indices[0], known[0], columns, infer_ns, (started, rows))
            if self._planner.strings.learns:
                self._planner.strings.learn(sum([wave.meta.size_bytes * wave.count for wave in waves]), results)
        except InstanceDied:
            raise
        except MODEL_ERRORS as error:
            if rows > plan.rows and getattr(instance, "rows_fail_alone", False) and not self._any_answered(indices):
                self._run_singly(instance, workspace, run)
                return
            if not isinstance(error, CharoniaError):
                _log.exception("model %r failed to execute a batch", self._interface.name)
            self._fail(indices, error_of_model(error), BACKEND, (started, rows))
        if self.executed.failed and not (indices := self._succeeded(indices)):
            return
        ended = monotonic_ns()
        durations = joined - started, inferred - joined, ended - inferred
        if timings is not None:
            durations = with_moves(durations, timings)
        execution = Execution(tuple(indices), rows, start_wall, start_wall + ended - started, *durations)
        self.executed.executions.append(execution)

    def _joined(
        self,
        position: int,
        place: InputPlan,
        run: list[tuple[int, RequestPlan]],
        waves: list[Wave],
        rows: int,
        workspace: Workspace,
    ) -> Array:
        """Join one input of all waves, with the model's shape. Raises `InvalidArgument` for malformed BYTES."""
        shape = (rows, *place.tail) if self._interface.batching else place.shape
        columns = parts_of(run, waves, position)
        if place.datatype is DataType.BYTES:
            elements, total = [], 0
            for column, (_, plan), wave in zip(columns, run, waves, strict=True):
                expected = prod(plan.inputs[position].shape) * wave.count
                check_bytes_elements(column, expected, name=place.name, model=self._interface.name)
                elements.append(split_bytes_elements(column))
                total += expected
            return object_array(chain.from_iterable(elements), total).reshape(shape)
        if len(columns) == 1:
            return array_of(columns[0], place.dtype, shape)
        total_bytes = sum(map(len, columns))
        flat = workspace.flat(place.name, total_bytes)
        target = flat.data
        if total_bytes <= JOINED_BYTES:
            target[:] = b"".join(columns)
        else:
            at = 0
            for column in columns:
                target[at : at + len(column)] = column
                at += len(column)
        return flat.view(place.dtype).reshape(shape)

    # -- answering ----------------------------------------------------------------------------------------------------

    def _answer(
        self,
        run: list[tuple[int, RequestPlan]],
        waves: list[Wave],
        parts: list[OutputPart],
        infer_ns: int,
        ran: tuple[int, int],
    ) -> None:
        name, version = self._interface.name, self._version
        has_strings = any(part.elements is not None for part in parts)
        metas: dict[int, bytes] = {}
        start = 0
        for (index, plan), wave in zip(run, waves, strict=True):
            end = start + plan.rows * wave.count
            if has_strings:
                answers = [
                    self._referred(wave, part_record(name, version, request_id, parts, at, at + plan.rows))
                    for request_id, at in zip(wave.ids(), range(start, end, plan.rows), strict=True)
                ]
                for number, answer in enumerate(answers):
                    error = answer_too_large(len(answer), name)
                    if error is not None:
                        answers[number] = failed_response(answer, error)
                        self._count_failures(index, 1, error, BACKEND, ran)
                self.executed.singly[index] = answers
            else:
                meta = metas.get(plan.rows)
                if meta is None:
                    meta = metas[plan.rows] = self._meta_of(parts, plan.rows)
                columns = [part.raw[start * part.row_bytes : end * part.row_bytes] for part in parts]
                self._answer_one(index, meta, columns, infer_ns, ran)
            start = end

    def _answer_one(
        self, index: int, meta: bytes, columns: Sequence[Buffer], infer_ns: int, ran: tuple[int, int]
    ) -> None:
        """Answer a wave with columns. Where the log would not take these, this wave of its run fails and no other."""
        reply = self._reply(self._waves[index], meta, columns, infer_ns)
        if isinstance(reply, InternalError):
            self._fail([index], reply, BACKEND, ran)
        else:
            self.executed.answers[index] = reply

    def _any_answered(self, indices: Sequence[int]) -> bool:
        return any(self.executed.answers[index] or index in self.executed.singly for index in indices)

    def _succeeded(self, indices: Sequence[int]) -> list[int]:
        """Those of these waves that have answers which are not all failures."""
        executed = self.executed
        return [
            index
            for index in indices
            if executed.answers[index] or executed.failed.get(index, 0) < self._waves[index].count
        ]

    def _meta_of(self, parts: Sequence[OutputPart], rows: int) -> bytes:
        return reply_meta(self._interface.name, self._version, tuple([part.described(rows) for part in parts]))

    def _reply(self, wave: Wave, meta: bytes, columns: Sequence[Buffer], infer_ns: int) -> bytes | InternalError:
        """Pack the answers to a wave; large ones are stored out of band.

        Returns an error for answers that could not be stored and are more than the log takes.
        """
        size, reference = sum(map(len, columns)), None
        if size >= BY_REFERENCE_BYTES * wave.count and wave.reply_by_reference:
            reference = self._store(wave, columns)
        if size > port.MAX_RECORD_BYTES and reference is None:
            error = answer_too_large(size, self._interface.name)
            assert error is not None
            return error
        return pack_wave_reply(wave.prefix, wave.count, meta, columns, infer_ns, reference)

    def _referred(self, wave: Wave, answer: bytes) -> bytes:
        """Store the large answer to one request of a wave out of band."""
        if len(answer) < BY_REFERENCE_BYTES:
            return answer
        reference = self._store(wave, [response_data(answer)])
        return answer if reference is None else refer_response(answer, reference)

    def _store(self, wave: Wave, columns: Sequence[Buffer]) -> Reference | None:
        reference = self._put(wave, columns) if self._put is not None else None
        if reference is not None:
            self.stored.append(reference)
        return reference

    def _run_singly(
        self,
        instance: BatchInstance,
        workspace: Workspace,
        run: list[tuple[int, RequestPlan]],
    ) -> None:
        """Run waves as requests, so that only those that are malformed or refused fail."""
        batch = self._requests_of(run)
        self._take(run, batch, batch.run_on(instance, workspace))

    def _has_payloads(self, run: list[tuple[int, RequestPlan]]) -> bool:
        """Whether no request's tensors are gone. Of those whose are, only these requests fail."""
        return True not in [self._waves[index].lacks_tensors for index, _ in run]

    def _column_run(self, run: list[tuple[int, RequestPlan]]) -> _ColumnRun | None:
        """Join waves to columns; None when they cannot be joined, or one of them has malformed strings."""
        start_wall, started = wall_ns(), monotonic_ns()
        waves = [self._waves[index] for index, _ in run]
        if (len(waves) > 1 and not may_be_columns(waves)) or not self._has_payloads(run):
            return None
        try:
            columns = columns_of(run, waves, self._interface.name)
        except CharoniaError:
            return None
        return _ColumnRun(run, waves, columns, start_wall, started, monotonic_ns())

    def begin_on(self, instance: PromptInstance, replied: Callable[[], None]) -> bool:
        """Send the batch to an instance, if that takes all of it as one set of columns.

        `replied` is called in the event loop, once: then there is a reply (`ended`), or none will come. Whatever
        becomes of it, `run_requests_on` completes the batch from here, unless `ended` has. Raises `InstanceDied`.
        """
        if not instance.takes_columns:
            return False
        run = self._lone() if len(self._waves) == 1 else None
        divided = list(self._runs()) if run is None else [run]
        self._divided = divided
        begun = self._column_run(divided[0]) if len(divided) == 1 else None
        if begun is None:
            return False
        begun.call = instance.begin_columns(begun.columns, replied)
        self._begun = begun
        self._starts((begun.columns, begun.waves), cast(RequestInstance, instance))
        return True

    def look(self) -> None:
        """Wait for the reply to what has begun for a moment, in the event loop."""
        if self._begun is not None and self._begun.call is not None:
            self._begun.call.look()

    def ended(self) -> Executed | None:
        """The results, if what has begun was answered with columns; else None, and `run_requests_on` is to be used."""
        begun = self._begun
        answers = begun.call.columns() if begun is not None and begun.call is not None else None
        if begun is None or answers is None:
            return None
        self._begun = None
        self._end_columns(begun, answers)
        return self.executed

    async def _run_columns(self, instance: ColumnInstance, begun: _ColumnRun) -> None:
        """Run waves as columns, or wait for what has begun."""
        run = begun.run
        try:
            if begun.call is None:
                self._starts((begun.columns, begun.waves), cast(RequestInstance, instance))
                answers = await instance.execute_columns(begun.columns)
            else:
                answers = await begun.call.answers()
        except InstanceDied:
            raise
        except BaseException as error:
            if ends_caller(error):
                raise
            self._fail_columns(begun, error)
            return
        if answers and isinstance(answers[0], ColumnOutput):
            self._end_columns(begun, cast(list[ColumnOutput], answers))
            return
        inferred = monotonic_ns()
        batch = self._requests_of(run)
        responses = cast(Sequence[ModelResponse], answers)
        count = begun.columns.count
        if len(responses) != count:
            text = f"model '{self._interface.name}' answered {len(responses)} of {count} requests"
            self._fail_columns(begun, InternalError(text))
            return
        self._take(run, batch, batch.take(responses, begun.start_wall, (begun.started, begun.joined, inferred)))

    def _fail_columns(self, begun: _ColumnRun, error: BaseException) -> None:
        """Fail the waves of a run that have no answer yet."""
        if not isinstance(error, CharoniaError):
            _log.error("model %r failed to execute a batch", self._interface.name, exc_info=error)
        rows = sum([plan.rows * wave.count for (_, plan), wave in zip(begun.run, begun.waves, strict=True)])
        self._fail([index for index, _ in begun.run], error_of_model(error), BACKEND, (begun.started, rows))

    def _end_columns(self, begun: _ColumnRun, answers: list[ColumnOutput]) -> None:
        """Answer the waves of a run, and count it."""
        inferred = monotonic_ns()
        started, joined, count = begun.started, begun.joined, begun.columns.count
        rows = count * begun.run[0][1].rows
        try:
            self._answer_columns(begun.run, begun.waves, answers, count, inferred - joined, (started, rows))
        except Exception as error:
            self._fail_columns(begun, error)
        indices = [index for index, _ in begun.run]
        if self.executed.failed and not (indices := self._succeeded(indices)):
            return
        ended = monotonic_ns()
        self.executed.executions.append(
            Execution(
                *(tuple(indices), rows),
                *(begun.start_wall, begun.start_wall + ended - started),
                *(joined - started, inferred - joined, ended - inferred),
            )
        )

    def _answer_columns(
        self,
        run: list[tuple[int, RequestPlan]],
        waves: list[Wave],
        answers: list[ColumnOutput],
        count: int,
        infer_ns: int,
        ran: tuple[int, int],
    ) -> None:
        """Answer waves with columns, after the checks of `request_outputs`."""
        plan = run[0][1]
        form = (plan.outputs, count, *[(a.name, a.datatype.number, a.shape, len(a.data)) for a in answers])
        known = self._planner.answers.get(form)
        if known is None:
            first = [Tensor(a.name, a.datatype, a.shape, a.data[: len(a.data) // count]) for a in answers]
            chosen = request_outputs(self._interface, plan, first)
            described = tuple([(t.name, t.datatype, t.shape, len(t.data)) for t in chosen])
            meta = reply_meta(self._interface.name, self._version, described)
            names = [answer.name for answer in answers]
            known = meta, [(len(names) - 1 - names[::-1].index(t.name), len(t.data)) for t in chosen]
            self._planner.remember(form, known)
        meta, places = known
        if len(run) == 1:
            columns = [answers[number].data for number, _ in places]
            self._answer_one(run[0][0], meta, columns, infer_ns, ran)
            return
        start = 0
        for (index, _), wave in zip(run, waves, strict=True):
            end = start + wave.count
            columns = [answers[number].data[start * size : end * size] for number, size in places]
            self._answer_one(index, meta, columns, infer_ns, ran)
            start = end

    def _requests_of(self, run: list[tuple[int, RequestPlan]]) -> Batch:
        records: list[RequestRecord] = []
        for index, _ in run:
            records += self._waves[index].requests()
        return Batch(self._planner, self._version, records)

    def _take(self, run: list[tuple[int, RequestPlan]], batch: Batch, executed: Executed) -> None:
        """Take over the results of a batch of requests as results of their waves."""
        at = 0
        wave_of: list[int] = []
        left: set[int] = set()
        for index, _ in run:
            count = self._waves[index].count
            answers = executed.answers[at : at + count]
            wave_of += [index] * count
            at += count
            if not all(answers):
                left.add(index)
            else:
                infer_ns = executed.executions[0].infer_ns if executed.executions else 0
                together = self._together(self._waves[index], answers, infer_ns)
                if together:
                    self.executed.answers[index] = together
                else:
                    self.executed.singly[index] = self._singly(executed, at - count, self._waves[index])
        for failure in executed.failures:
            index = wave_of[failure.index]
            if index in left:
                continue  # its instance died: it runs again, or fails whole
            self.executed.failed[index] = self.executed.failed.get(index, 0) + 1
            self.executed.failures.append(replace(failure, index=index))
        for execution in executed.executions:
            shares = Counter(wave_of[index] for index in execution.indices)
            execution.indices = tuple(shares)
            self.executed.shares[len(self.executed.executions)] = shares
            self.executed.executions.append(execution)

    def _singly(self, executed: Executed, first: int, wave: Wave) -> list[bytes]:
        """The answers to the requests of a wave, which begin at index `first` of those executed. A request fails whose
        answer could not be stored out of band and is more than the log takes.
        """
        answers: list[bytes] = []
        for index in range(first, first + wave.count):
            answer = self._referred(wave, executed.answers[index])
            error = answer_too_large(len(answer), self._interface.name)
            if error is not None:
                answer = failed_response(answer, error)
                fail_answered(executed, index, answer, error, wall_ns())
            answers.append(answer)
        return answers

    def _together(self, wave: Wave, answers: list[bytes], infer_ns: int) -> bytes:
        """Pack the responses to all requests of a wave as one reply; b"" when they differ in more than tensor bytes, or
        are more than the log takes.
        """
        if sum(map(len, answers)) > _MOST_TOGETHER_BYTES and len(answers) > 1:
            return b""
        try:
            responses = [unpack_response(answer) for answer in answers]
        except InvalidRecord:  # by reference
            return b""
        first = responses[0]
        outputs = tuple([(t.name, t.datatype, t.shape, len(t.data)) for t in first.outputs])
        if not outputs or any(datatype is DataType.BYTES for _, datatype, _, _ in outputs):
            return b""
        for response in responses:
            if response.error is not None or response.parameters or response.times or response.report:
                return b""
            if tuple([(t.name, t.datatype, t.shape, len(t.data)) for t in response.outputs]) != outputs:
                return b""
        columns: list[Buffer] = [tensor.data for tensor in first.outputs]
        if len(responses) > 1:
            columns = [b"".join([r.outputs[number].data for r in responses]) for number in range(len(columns))]
        reply = self._reply(wave, reply_meta(first.model, first.version, outputs), columns, infer_ns)
        return b"" if isinstance(reply, InternalError) else reply

    def _fail(
        self, indices: Sequence[int], error: CharoniaError, reason: str, run: tuple[int, int] | None = None
    ) -> None:
        """Answer waves that have no answer yet with an error. `run` as in `_count_failures`."""
        for index in indices:
            wave = self._waves[index]
            if self.executed.answers[index] or index in self.executed.singly:
                continue
            failed = [pack_failure(i, self._interface.name, self._version, error) for i in wave.ids()]
            self.executed.singly[index] = failed
            self._count_failures(index, wave.count, error, reason, run)

    def _count_failures(
        self, index: int, count: int, error: CharoniaError, reason: str, run: tuple[int, int] | None
    ) -> None:
        """Count failed requests of a wave. `run`: when the run that failed began (monotonic ns), and its rows."""
        ran_ns, rows = (monotonic_ns() - run[0], run[1]) if run is not None else (0, 0)
        error.__traceback__ = None  # it is kept, and its frames hold the batch's bytes
        self.executed.failed[index] = self.executed.failed.get(index, 0) + count
        self.executed.failures += [Failure(index, error, reason, wall_ns(), ran_ns, rows)] * count


def _form(plan: RequestPlan, count: int, results: Mapping[str, Array]) -> Hashable:
    """What the reply to a wave of `count` requests depends on but for its bytes; None for results that are not small
    arrays.
    """
    found: list[object] = [plan.outputs, plan.rows, count]
    if not hasattr(results, "get"):
        return None  # it is refused with its first output
    for name in plan.outputs:
        array = results.get(name)
        if not isinstance(array, np.ndarray) or array.nbytes > SMALL_BYTES:
            return None
        found += (array.dtype, array.shape)
    return tuple(found)


def _is_plain(part: OutputPart, results: Mapping[str, Array]) -> bool:
    """Whether the bytes of an output are those of the model's array."""
    return part.elements is None and results[part.name].dtype == part.datatype.numpy


def part_record(
    model: str, version: int, request_id: bytes, parts: Sequence[OutputPart], start: int, end: int
) -> bytes:
    """The response record of one request, from rows `start` to `end` of the results."""
    return pack_response(request_id, model, version, [part.tensor(start, end) for part in parts], {})


def _too_many(limit: int, model: str) -> str:
    return f"inference request batch-size must be <= {limit} for '{model}'"
