"""Settles and answers requests of an ensemble that completed or failed.

All that end in one turn of the event loop are settled together, in the form that executors use: keyless requests are
answered by the write that settles them (ADR 0002), jobs after it, only those this settlement won (ADR 0004). `refusals`
settles refused requests. Several responses of one request are sent in order, each after it is in the log, the last one
once settled; those of a job are kept in its record before they are sent, as executors do for other models.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batcher.entries.carriers import carried_of
from batcher.scheduling.ensembles.ensemble_planner import AnswerRequest, FailRequest
from batcher.scheduling.observations import RequestQueued
from charonia import keys
from charonia.calls.entry_packer import Spawn, inputs_of, replies_of, reported_response, reports_to_gateways
from charonia.calls.unsent_counts import FAILURES_IN_ENSEMBLE
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.eventlog.port import JobLog, Reply, SettlementLog
from charonia.eventlog.refusal_texts import answer_too_large
from charonia.facts import counters
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState
from charonia.inference import RECEIPT, Parameters
from charonia.metrics.latencies import Latencies, ModelLatencies
from charonia.models.names import name_of
from charonia.tasks import insist
from charonia.tensors import Tensor
from charonia.traces.contexts import TENSORS
from charonia.traces.reports import QUEUE_INPUT, QUEUE_START, REQUEST_END, REQUEST_START, Report, tensors_of
from charonia.wire import (
    FLAG_REPLY_BY_REFERENCE,
    RequestRecord,
    failed_response,
    pack_failure,
    pack_response,
    record_fields,
    refer_response,
    response_data,
    with_parameters,
)

from .ensemble_statistics import Tally, Totals

_log = logging.getLogger(__name__)

_RETRY_S = 0.2


@dataclass(slots=True)
class _End:
    """How one request ends: its answer, and the error when it failed."""

    request: RequestQueued
    answer: bytes
    tally: Tally
    error: CharoniaError | None
    sent: bytes = b""
    """The packed answer, once made: a retry must not write its payload again."""

    @property
    def record(self) -> RequestRecord:
        return carried_of(self.request).record

    @property
    def state(self) -> JobState:
        return JobState.SUCCEEDED if self.error is None else JobState.FAILED


class Endings:
    """The completions of one ensemble's requests. `settled` is called with the requests whose outcome is in the log."""

    def __init__(
        self,
        log: SettlementLog,
        model: str,
        directory: PayloadDirectory,
        spawn: Spawn,
        settled: Callable[[Sequence[RequestQueued]], None],
        latencies: Latencies,
    ) -> None:
        self._log = log
        self._model = model
        self._directory = directory
        self._spawn = spawn
        self._settled = settled
        self._latencies = latencies
        self._ending: list[_End] = []
        self._outboxes: dict[bytes, Outbox] = {}
        self.counted: dict[int, dict[str, int]] = {}
        """What was added to the statistics of each version."""

    def answer(
        self,
        decision: AnswerRequest,
        outputs: Sequence[Tensor],
        parameters: Parameters,
        tally: Tally,
        *,
        several: bool,
    ) -> None:
        """A request completed: it has all its outputs, under the ensemble's names, or one of `several` responses."""
        record = carried_of(decision.request).record
        outbox = self._outbox(decision.request) if several else None
        place = outbox.place if outbox is not None else None
        if self._latencies.measures and (place is None or (place[1] == 0 and not decision.is_flag)):
            self._responded(record)
        if decision.final and record.meta.wants_receipt:
            parameters = {**parameters, RECEIPT: _receipt(decision.request, tally, failed=False)}
        answer = pack_response(
            *(record.id, self._model, record.meta.version, outputs, parameters),
            final=decision.final,
            place=place,
            is_flag=decision.is_flag,
        )
        if decision.final:
            self._end_after(outbox, _End(decision.request, answer, tally, None))
        elif outbox is not None:
            sent = self._referred(record, answer)
            error = answer_too_large(len(sent), name_of(self._model))
            if outbox.put(sent if error is None else failed_response(answer, error)):
                self._spawn(outbox.drain())

    def _responded(self, record: RequestRecord) -> None:
        """Counts requests for M4 that no gateway counts."""
        latencies = self._latencies.of(self._model, record.meta.version)
        if latencies is not None and not keys.counts_its_requests(record.endpoint):
            latencies.responded(max(0, wall_ns() - record.accepted_ns))

    def fail(self, decision: FailRequest, tally: Tally, *, several: bool) -> None:
        """A step of a request failed, or an output cannot be built."""
        record = carried_of(decision.request).record
        outbox = self._outbox(decision.request) if several else None
        place = outbox.place if outbox is not None else None
        if self._latencies.measures and (place is None or place[1] == 0):
            self._responded(record)
        answer = pack_failure(record.id, self._model, record.meta.version, decision.error, place=place)
        if record.meta.wants_receipt:
            answer = with_parameters(answer, {RECEIPT: _receipt(decision.request, tally, failed=True)})
        self._end_after(outbox, _End(decision.request, answer, tally, decision.error))

    def release(self, request_id: bytes) -> None:
        """A request is settled."""
        self._outboxes.pop(request_id, None)

    def _outbox(self, request: RequestQueued) -> Outbox:
        outbox = self._outboxes.get(request.id)
        if outbox is None:
            carried = carried_of(request)
            outbox = Outbox(self._log, self._model, carried.record, max(1, carried.begun))
            self._outboxes[request.id] = outbox
        return outbox

    def _end_after(self, outbox: Outbox | None, end: _End) -> None:
        """Its last answer is sent after all others."""
        if outbox is None:
            self._add(end)
        elif outbox.end(lambda: self._add(end)):
            self._spawn(outbox.drain())

    def _add(self, end: _End) -> None:
        self._ending.append(end)
        if len(self._ending) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        ending, self._ending = self._ending, []
        self._spawn(self._end(ending))

    async def _end(self, ending: list[_End]) -> None:
        """Repeat the settlement until the log has it."""
        for end in ending:
            self._check(end)
        complaint = f"{len(ending)} requests of '{self._model}' cannot be settled"
        await insist(lambda: self._settle(ending), complaint, first_s=_RETRY_S, last_s=_RETRY_S)
        self._settled([end.request for end in ending])

    def _check(self, end: _End) -> None:
        """A request fails whose answer could not be stored out of band and is more than the log takes."""
        record, size = end.record, len(end.answer)
        if not record.is_job:  # a job's result is its whole answer
            if not record.endpoint:
                return
            self._make_sent(end)
            size = min(size, len(end.sent))  # a report always fits
        error = answer_too_large(size, name_of(self._model))
        if error is None:
            return
        end.answer, end.error, end.sent = failed_response(end.answer, error), error, b""
        if record.meta.wants_receipt:
            end.answer = with_parameters(end.answer, {RECEIPT: _receipt(end.request, end.tally, failed=True)})

    async def _settle(self, ending: list[_End]) -> None:
        now_ns = wall_ns()
        totals = self._totals(ending, now_ns)
        together = next(iter(totals.by_key.items())) if len(totals.by_key) == 1 else None
        ends = {
            end.record.id: JobEnd(end.state, end.answer, _detail(end, now_ns)) for end in ending if end.record.is_job
        }
        outcomes = b"".join(OUTCOME_CODES[end.state] if end.record.journalled else b"-" for end in ending)
        won = await self._log.settle(
            self._model,
            [(end.record.id, max(1, carried_of(end.request).begun)) for end in ending],
            together,
            self._replies([end for end in ending if not end.record.is_job]),
            ends=ends or None,
            outcomes=outcomes if outcomes.strip(b"-") else b"",
        )
        mine = [end for end, is_won in zip(ending, won, strict=True) if is_won]
        if together is None or len(mine) < len(ending):
            totals = self._totals(mine, now_ns)
            for key, increments in totals.by_key.items():
                await self._log.add_statistics(key, increments)
        self._count(mine, now_ns)
        jobs = [end for end in mine if end.record.is_job]
        for reply in [
            *self._replies(jobs),
            *reports_to_gateways((end.record, self._reported(end)) for end in jobs if end.record.trace is not None),
        ]:
            await self._log.append(reply.stream, reply.fields)

    def _totals(self, ending: Sequence[_End], now_ns: int) -> Totals:
        totals = Totals()
        for end in ending:
            record = end.record
            key = keys.statistics(self._model, record.meta.version, record.meta.content_hash)
            if end.error is None:
                totals.succeeded(key, record.rows, record.accepted_ns, end.tally, now_ns)
            else:
                totals.failed(key, record.accepted_ns, now_ns)
        return totals

    def _count(self, mine: Sequence[_End], now_ns: int) -> None:
        """Counts settled requests for the metrics of this process, which exports the ones it settled."""
        for end in mine:
            totals = Totals()
            if end.error is not None:
                if not keys.counts_its_requests(end.record.endpoint):
                    counts = self.counted.setdefault(end.record.meta.version, {})
                    counts["unawaited_failures"] = counts.get("unawaited_failures", 0) + FAILURES_IN_ENSEMBLE
            else:
                totals.succeeded(b"", end.record.rows, end.record.accepted_ns, end.tally, now_ns)
                counts = self.counted.setdefault(end.record.meta.version, {})
                counters.add(counts, totals.by_key[b""])
                latencies = self._latencies.of(self._model, end.record.meta.version)
                if latencies is not None:
                    self._observe(latencies, end)
                if not keys.counts_its_requests(end.record.endpoint):
                    taken_ns = max(0, now_ns - end.record.accepted_ns)
                    if latencies is not None:
                        latencies.observe("request", taken_ns, monotonic_ns())
                    counters.add(counts, {"unawaited_count": 1, "unawaited_ns": taken_ns})

    @staticmethod
    def _observe(latencies: ModelLatencies, end: _End) -> None:
        now_ns, tally = monotonic_ns(), end.tally
        latencies.observe("queue", max(0, tally.start_ns - end.record.accepted_ns), now_ns)
        latencies.observe("compute_input", tally.input_ns, now_ns)
        latencies.observe("compute_infer", tally.infer_ns, now_ns)
        latencies.observe("compute_output", tally.output_ns, now_ns)

    def _replies(self, ending: Sequence[_End]) -> list[Reply]:
        for end in ending:
            self._make_sent(end)
        return replies_of((end.record.endpoint, end.sent) for end in ending)

    def _make_sent(self, end: _End) -> None:
        if end.record.endpoint and not end.sent:
            answer = end.answer if end.record.trace is None else self._reported(end)
            end.sent = self._referred(end.record, answer)

    def _reported(self, end: _End) -> bytes:
        """The answer of a traced request."""
        try:
            return reported(end.record, end.answer, name_of(self._model), end.tally.start_ns, end.error)
        except Exception:  # without the trace the answer is still valid
            _log.exception("what happened to a request of '%s' cannot be reported", self._model)
            return end.answer

    def _referred(self, record: RequestRecord, answer: bytes) -> bytes:
        """The answer; a large one by reference when its client reads the same payload directory."""
        if len(answer) < BY_REFERENCE_BYTES or not record.flags & FLAG_REPLY_BY_REFERENCE:
            return answer
        data = response_data(answer)
        if len(data) < BY_REFERENCE_BYTES:
            return answer
        reference = self._directory.write([data], owner=record.endpoint)
        return answer if reference is None else refer_response(answer, reference)


def _receipt(request: RequestQueued, tally: Tally, *, failed: bool) -> str:
    """What the steps that have ended have used."""
    record = carried_of(request).record
    return tally.steps.receipt(record.rows, record.meta.tenant, max(1, carried_of(request).begun), failed=failed)


def _detail(end: _End, now_ns: int) -> dict[str, object]:
    record, tally = end.record, end.tally
    detail: dict[str, object] = {
        "attempt": max(1, carried_of(end.request).begun),
        "queue_us": max(0, (tally.start_ns or now_ns) - record.accepted_ns) // 1000,
    }
    if end.error is not None:
        detail |= {"error": end.error.message, "code": end.error.code.name}
    else:
        detail |= {"start_us": tally.start_ns // 1000, "infer_us": tally.infer_ns // 1000}
    return detail


def reported(record: RequestRecord, answer: bytes, model: str, start_ns: int, error: CharoniaError | None) -> bytes:
    """The answer with its report. The traced request began at `start_ns`, 0 if it never began."""
    trace = record.trace
    assert trace is not None
    about = (("charonia.steps_begun_after_us", (start_ns - record.accepted_ns) // 1000),) if start_ns else ()
    report = Report(
        trace.context.span_id,
        model,
        record.meta.version,
        record.client_id,
        ((REQUEST_START, record.accepted_ns), (QUEUE_START, record.accepted_ns), (REQUEST_END, wall_ns())),
        error.message if error is not None else "",
        about,
        tensors_of(QUEUE_INPUT, inputs_of(record)) if trace.context.flags & TENSORS else (),
        tuple(trace.children),
    )
    return reported_response(answer, report)


class Outbox:
    """The outbox of one request. `attempt` is part of every place, so every owner gives a response the same place."""

    def __init__(self, log: JobLog, model: str, record: RequestRecord, attempt: int) -> None:
        self.attempt = attempt
        self.count = 0
        """How many responses were made so far: the index of the next one."""
        self._log = log
        self._model = model
        self._record = record
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._then: Callable[[], None] | None = None
        self.running = False

    @property
    def place(self) -> tuple[int, int]:
        """The place of the next response."""
        return (self.attempt, self.count)

    def put(self, answer: bytes) -> bool:
        """Queue a response that is not the last, at `place`. Returns whether `drain` must be started."""
        self._waiting.append((self.count, answer))
        self.count += 1
        return self._start()

    def end(self, then: Callable[[], None]) -> bool:
        """Call `then` when all earlier responses are sent. Returns whether `drain` must be started."""
        self._then = then
        return self._start()

    def _start(self) -> bool:
        started, self.running = self.running, True
        return not started

    async def drain(self) -> None:
        """Send the queued responses; repeat until the log has them."""
        try:
            while self._waiting:
                index, answer = self._waiting[0]
                try:
                    if self._record.is_job:
                        await self._log.add_job_responses(self._model, self._record.id, self.attempt, index, [answer])
                    if self._record.endpoint:
                        await self._log.append(keys.replies(self._record.endpoint), record_fields([answer]))
                except CharoniaError as error:
                    _log.warning("a response of '%s' cannot be sent, trying again: %s", self._model, error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._waiting.popleft()
        finally:
            self.running = False
        if self._then is not None:
            then, self._then = self._then, None
            then()
