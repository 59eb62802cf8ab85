"""Settles and answers the requests of an ensemble that have come through their graph, or failed in it.

What ends in one turn of the loop is one settlement, written as executors write theirs: keyless requests are answered in
the write that settles them (ADR 0002), jobs after it, those that were won (ADR 0004). Refusals are `refusals`'.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batcher.entries.carriers import carrier_of
from batcher.scheduling.ensembles.ensemble_planner import AnswerRequest, FailRequest
from batcher.scheduling.observations import QueuedRequest
from charonia import keys
from charonia.calls.queue_entrance import Spawn
from charonia.calls.refused import FAILURES_IN_ENSEMBLE
from charonia.calls.reporting import replies_of, reports_to_gateways
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.payloads import BY_REFERENCE_BYTES, PayloadDirectory
from charonia.eventlog.port import Reply, SettlementLog
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState
from charonia.inference import Parameters
from charonia.metrics.latencies import Latencies, ModelLatencies
from charonia.models.names import name_of
from charonia.tensors import Tensor
from charonia.wire import (
    FLAG_REPLY_BY_REFERENCE,
    RequestRecord,
    pack_failure,
    pack_response,
    refer_response,
    response_data,
)

from .ensemble_statistics import Tally, Totals
from .ensemble_traces import reported
from .response_outbox import Outbox

_log = logging.getLogger(__name__)

_RETRY_S = 0.2


@dataclass(slots=True)
class _End:
    """How one request ends: its answer, and the error when it failed."""

    request: QueuedRequest
    answer: bytes
    tally: Tally
    error: CharoniaError | None
    sent: bytes = b""
    """The answer as it travels, once it was made: a repetition must not put it beside the log again."""

    @property
    def record(self) -> RequestRecord:
        return carrier_of(self.request).record

    @property
    def state(self) -> JobState:
        return JobState.SUCCEEDED if self.error is None else JobState.FAILED


class Endings:
    """The ends of one ensemble's requests. `settled` is called with those the log has an outcome of."""

    def __init__(
        self,
        log: SettlementLog,
        model: str,
        directory: PayloadDirectory,
        spawn: Spawn,
        settled: Callable[[Sequence[QueuedRequest]], None],
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
        """A request has all its outputs, which are named as the ensemble names them, or one of `several` responses."""
        record = carrier_of(decision.request).record
        outbox = self._outbox(decision.request) if several else None
        place = outbox.place if outbox is not None else None
        if self._latencies.measures and (place is None or (place[1] == 0 and outputs)):
            self._responded(record)
        answer = pack_response(
            record.id, self._model, record.meta.version, outputs, parameters, final=decision.final, place=place
        )
        if decision.final:
            self._end_after(outbox, _End(decision.request, answer, tally, None))
        elif outbox is not None and outbox.put(self._referred(record, answer)):
            self._spawn(outbox.drain())

    def _responded(self, record: RequestRecord) -> None:
        """M4, of requests that no gateway counts."""
        latencies = self._latencies.of(self._model, record.meta.version)
        if latencies is not None and not keys.counts_its_requests(record.endpoint):
            latencies.responded(max(0, wall_ns() - record.accepted_ns))

    def fail(self, decision: FailRequest, tally: Tally, *, several: bool) -> None:
        """A step of a request failed, or an output cannot be made."""
        record = carrier_of(decision.request).record
        outbox = self._outbox(decision.request) if several else None
        place = outbox.place if outbox is not None else None
        if self._latencies.measures and (place is None or place[1] == 0):
            self._responded(record)
        answer = pack_failure(record.id, self._model, record.meta.version, decision.error, place=place)
        self._end_after(outbox, _End(decision.request, answer, tally, decision.error))

    def release(self, request_id: bytes) -> None:
        """A request is settled."""
        self._outboxes.pop(request_id, None)

    def _outbox(self, request: QueuedRequest) -> Outbox:
        outbox = self._outboxes.get(request.id)
        if outbox is None:
            carried = carrier_of(request)
            outbox = Outbox(self._log, self._model, carried.record, max(1, carried.begun))
            self._outboxes[request.id] = outbox
        return outbox

    def _end_after(self, outbox: Outbox | None, end: _End) -> None:
        """Its last answer goes after all others."""
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
        """Insist until the log has them."""
        while True:
            try:
                await self._settle(ending)
                break
            except CharoniaError as error:
                _log.warning("%d requests of '%s' cannot be settled, trying again: %s", len(ending), self._model, error)
            await asyncio.sleep(_RETRY_S)
        self._settled([end.request for end in ending])

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
            [(end.record.id, max(1, carrier_of(end.request).begun)) for end in ending],
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
        """For the metrics of this process, which exports what it did."""
        for end in mine:
            totals = Totals()
            if end.error is not None:
                if not keys.counts_its_requests(end.record.endpoint):
                    counts = self.counted.setdefault(end.record.meta.version, {})
                    counts["unawaited_failures"] = counts.get("unawaited_failures", 0) + FAILURES_IN_ENSEMBLE
            else:
                totals.succeeded(b"", end.record.rows, end.record.accepted_ns, end.tally, now_ns)
                counts = self.counted.setdefault(end.record.meta.version, {})
                for name, amount in totals.by_key[b""].items():
                    counts[name] = counts.get(name, 0) + amount
                latencies = self._latencies.of(self._model, end.record.meta.version)
                if latencies is not None:
                    self._observe(latencies, end)
                if not keys.counts_its_requests(end.record.endpoint):
                    taken_ns = max(0, now_ns - end.record.accepted_ns)
                    if latencies is not None:
                        latencies.observe("request", taken_ns, monotonic_ns())
                    counts["unawaited_count"] = counts.get("unawaited_count", 0) + 1
                    counts["unawaited_ns"] = counts.get("unawaited_ns", 0) + taken_ns

    @staticmethod
    def _observe(latencies: ModelLatencies, end: _End) -> None:
        now_ns, tally = monotonic_ns(), end.tally
        latencies.observe("queue", max(0, tally.start_ns - end.record.accepted_ns), now_ns)
        latencies.observe("compute_input", tally.input_ns, now_ns)
        latencies.observe("compute_infer", tally.infer_ns, now_ns)
        latencies.observe("compute_output", tally.output_ns, now_ns)

    def _replies(self, ending: Sequence[_End]) -> list[Reply]:
        for end in ending:
            if end.record.endpoint and not end.sent:
                answer = end.answer if end.record.trace is None else self._reported(end)
                end.sent = self._referred(end.record, answer)
        return replies_of((end.record.endpoint, end.sent) for end in ending)

    def _reported(self, end: _End) -> bytes:
        """The answer of a traced request."""
        try:
            return reported(end.record, end.answer, name_of(self._model), end.tally.start_ns, end.error)
        except Exception:  # a trace less; the answer is none the worse
            _log.exception("what happened to a request of '%s' cannot be reported", self._model)
            return end.answer

    def _referred(self, record: RequestRecord, answer: bytes) -> bytes:
        """The answer; a large one by reference where who waits for it reads the same directory."""
        if len(answer) < BY_REFERENCE_BYTES or not record.flags & FLAG_REPLY_BY_REFERENCE:
            return answer
        data = response_data(answer)
        if len(data) < BY_REFERENCE_BYTES:
            return answer
        reference = self._directory.write([data], owner=record.endpoint)
        return answer if reference is None else refer_response(answer, reference)


def _detail(end: _End, now_ns: int) -> dict[str, object]:
    record, tally = end.record, end.tally
    detail: dict[str, object] = {
        "attempt": max(1, carrier_of(end.request).begun),
        "queue_us": max(0, (tally.start_ns or now_ns) - record.accepted_ns) // 1000,
    }
    if end.error is not None:
        detail |= {"error": end.error.message, "code": end.error.code.name}
    else:
        detail |= {"start_us": tally.start_ns // 1000, "infer_us": tally.infer_ns // 1000}
    return detail
