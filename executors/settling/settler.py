"""Settles executed batches in the log, repeating until the log takes it, and reports on them to owners and journals.
`executors.settling.settlement` makes the records.

One write settles a batch, answers its keyless requests, adds to the statistics and frees the slot (ADR 0002). Jobs are
answered afterwards, if their settlement was won (ADR 0004). A lost settlement (another attempt, a cancellation or a
deadline was faster) is only counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from charonia import keys
from charonia.calls.entry_packer import replies_of, reports_to_gateways
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InternalError, LogUnavailable
from charonia.eventlog import port
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.eventlog.port import Fields, Reply, SettlementLog, Streams
from charonia.eventlog.refusal_texts import answer_too_large
from charonia.facts import counters
from charonia.facts.events import FIELD_FACT, BatchFinished
from charonia.facts.jobs import OUTCOME_CODES, JobState
from charonia.facts.journal import Ran
from charonia.facts.processor_use import Packed
from charonia.models.names import name_of
from charonia.tasks import Tasks, insist
from charonia.wire import (
    FLAG_JOB,
    FLAG_JOURNALLED,
    FLAG_REPLY_BY_REFERENCE,
    FLAG_TIMED,
    FLAG_TRACED,
    BatchHeader,
    failed_response,
    unpack_response,
)
from executors.batches.batch_payloads import BatchPayloads
from executors.batches.batch_results import Executed, fail_answered, fail_response
from executors.host.processor_meter import ProcessorMeter
from executors.metrics import ExecutorMetrics
from executors.running.instance_pool import LoadedVersion
from executors.running.submitted_batch import SubmittedBatch

from .settlement import (
    Settlement,
    batch_died,
    batch_finished,
    increments,
    replies,
    requests_rescheduled,
    rows_of,
    settlement,
    start_entry,
    with_durations,
)
from .trace_reports import with_reports
from .usage_counts import UsageCounts, with_receipts

_log = logging.getLogger(__name__)

Won = dict[int, bool]
"""By index in the batch: whether this executor's settlement of the request was the first."""
Outcome = list[bool] | CharoniaError
"""The log's answer to a settlement: which requests were won, or the error."""

_SUCCEEDED = OUTCOME_CODES[JobState.SUCCEEDED]
_LONG_COPY_BYTES = 8 * 1024 * 1024
"""Answers that are not stored yet and take 4 ms or more to copy."""
_SPECIAL = FLAG_JOB | FLAG_TIMED | FLAG_TRACED


class Settler:
    """Settles the batches of one executor."""

    def __init__(
        self,
        log: SettlementLog,
        executor: str,
        metrics: ExecutorMetrics,
        payloads: BatchPayloads,
        starts: JournalledStarts,
        reports: OwnerReports,
        usage: UsageCounts,
        meter: ProcessorMeter | None = None,
    ) -> None:
        """`meter` tells the reports of traced requests what the processors do."""
        self._log = log
        self._meter = meter
        self._starts = starts
        self._payloads = payloads
        self._executor = executor
        self._metrics = metrics
        self._reports = reports
        self._usage = usage

    async def settle(
        self,
        batch: SubmittedBatch,
        executed: Executed,
        loaded: LoadedVersion,
        *,
        before: Sequence[tuple[str, bytes]] = (),
        last: bool = True,
        outcome: Outcome | None = None,
    ) -> None:
        """Write the end of a batch, its replies and its facts. Returns when the log has all of it.

        For a streamed batch: the end of some requests. `before` are (endpoint, record) responses to write first, `last`
        says that all requests have ended. `outcome` is the outcome of an earlier `settle_plain`.
        """
        header, records = batch.header, batch.records
        assert header is not None
        if batch.flags & FLAG_TIMED:  # jobs keep what they are answered, receipts included
            executed.answers = with_receipts(self._executor, header, records, executed)
        via_owner = header.via_owner and batch.stream is None
        whole = answers = self._reported(batch, executed)
        if via_owner:
            whole = answers = self._together(batch, executed, answers)
        elif batch.flags & FLAG_REPLY_BY_REFERENCE:
            if sum(map(len, answers)) > _LONG_COPY_BYTES:
                answers = await asyncio.to_thread(self._referred, batch, executed, answers)
            else:
                answers = self._referred(batch, executed, answers)
        ending = settlement(self._executor, header, records, executed, batch.flags)
        key = keys.statistics(loaded.model, loaded.version, loaded.content_hash)
        counted = increments(records, executed)
        together: tuple[bytes, Mapping[str, int]] | None = (key, counted) if counted else None
        rows = rows_of(records, executed)
        won: Won = {}
        ran = None if via_owner else self._starts.reported_with(batch, ending.indices)
        await self._starts.report(batch)
        if via_owner:
            if executed.death is not None:  # answers would be out of order: all requests run again
                ending, together = Settlement(), None
            elif ending.jobs:  # the fact, written with the others' settlement, may name only jobs that were won
                jobs, ending = ending.split_jobs()
                won = await self._write(batch, executed, jobs, [], None)
                together = None
        if together is None or len(ending.requests) != len(records):
            rows = ()
        answered = [] if via_owner else [index for index in ending.indices if index not in ending.jobs]
        # in one entry: an owner that read only the batch's end would take rescheduled requests for ended
        fields = requests_rescheduled(self._executor, header, records, executed) if executed.rescheduled else []
        if last:
            fields += self._fact(batch, executed, answers, ending, won)
        now = [*replies_of(before), *replies(records, answers, answered)]
        won |= await self._write(batch, executed, ending, now, together, fields, ran, outcome, rows)
        if ran is not None and True not in won.values():  # then no end was written that reports the start
            batch.start_unreported = True
            await self._starts.report(batch)
        if batch.steps is not None:
            self._settle_sequences(batch, won, loaded)
        lost = [index for index, is_won in won.items() if not is_won]
        if together is None or (lost and not rows) or (counted and not ending.requests):
            counted = await self._add_statistics(key, batch, executed, won)
        elif lost:  # the log has left them out
            left_rows = sum([rows[index] for index in lost])
            counted = counters.without(counted, len(lost), left_rows) if len(lost) < len(won) else {}
        self._count(batch, executed, loaded, counted, won)
        if not via_owner and ending.jobs:
            await self._append_all(replies(records, answers, [index for index in ending.jobs if won[index]]))
        if batch.flags & FLAG_TRACED:
            mine = [(records[index], whole[index]) for index, is_won in won.items() if is_won]
            await self._append_all(reports_to_gateways(mine))

    def settle_plain(
        self, batch: SubmittedBatch, executed: Executed, loaded: LoadedVersion, done: Callable[[Outcome | None], None]
    ) -> bool:
        """Settle a batch without special cases, and without a task. Returns False when it did nothing.

        `done` is called with None when the log has all of it, otherwise with the log's answer, with which `settle` must
        continue.
        """
        header, records = batch.header, batch.records
        assert header is not None
        special = executed.death is not None or executed.rescheduled or batch.steps is not None or header.via_owner
        if special or batch.flags & _SPECIAL or batch.stream is not None or not all(executed.answers):
            return False
        stores = batch.flags & FLAG_REPLY_BY_REFERENCE and batch.referred is None
        if stores and sum(map(len, executed.answers)) > _LONG_COPY_BYTES:
            return False  # in a thread
        answers: Sequence[bytes] = executed.answers
        if batch.flags & FLAG_REPLY_BY_REFERENCE:
            # if this settlement fails, `settle` must not store them again: no reader would remove those
            answers = batch.referred = self._referred(batch, executed, answers)
        outcomes, ran, start_unreported = b"", None, batch.start_unreported
        if batch.flags & FLAG_JOURNALLED:
            if executed.failures or not all(record.journalled for record in records):
                return False
            outcomes = _SUCCEEDED * len(records)
            ran = self._starts.reported_with(batch, range(len(records)))
            if batch.start_unreported:
                return False
        counted = increments(records, executed)

        here = not header.report_to
        fields = (batch_finished_here if here else batch_finished)(self._executor, header.batch_id)

        def settled(outcome: Outcome) -> None:
            if isinstance(outcome, CharoniaError) or False in outcome:
                batch.start_unreported = start_unreported
                done(outcome)
                return
            try:
                self._count(batch, executed, loaded, counted, outcome)
            finally:
                done(None)

        def settled_here(outcome: Outcome) -> None:
            try:
                settled(outcome)
            finally:  # it is settled even if `settled` has failed, so the owner must be notified
                if isinstance(outcome, list):
                    self._reports.hand(header, fields)

        written = self._log.settle_now(
            header.model,
            [(record.id, attempt) for record, attempt in zip(records, header.attempts, strict=True)],
            (keys.statistics(loaded.model, loaded.version, loaded.content_hash), counted),
            replies(records, answers, range(len(records))),
            () if here else (Reply(header.report_to, fields),),
            settled_here if here else settled,
            outcomes=outcomes,
            ran=ran,
            rows=rows_of(records, executed),
        )
        batch.start_unreported = batch.start_unreported or (start_unreported and not written)
        return written

    def _count(
        self,
        batch: SubmittedBatch,
        executed: Executed,
        loaded: LoadedVersion,
        counted: Mapping[str, int],
        won: Won | list[bool],
    ) -> None:
        """Update this process's metrics. `counted` are the increments that were added to the statistics."""
        self._metrics.settled(loaded.model, loaded.version, counted)
        self._usage.add_batch(loaded.model, loaded.version, batch.records, executed, won)
        if self._metrics.measures:
            by_index = dict(enumerate(won)) if isinstance(won, list) else won
            self._metrics.observe(loaded.model, loaded.version, batch.records, executed, by_index)
        self._count_unawaited(batch, executed, won)

    @staticmethod
    def _settle_sequences(batch: SubmittedBatch, won: Won, loaded: LoadedVersion) -> None:
        """Roll back the sequences of requests that were not won, as the log has not recorded their steps."""
        sequences = loaded.pool.sequences
        assert sequences is not None
        lost = {index: known for index, known in batch.before.items() if not won.get(index, False)}
        sequences.roll_back(batch.records, lost)
        # requests that were reported as unwanted before were cancelled, or past their deadline
        sequences.forget_if_logged(
            batch.records, [index for index in lost if batch.records[index].id not in batch.unwanted]
        )
        if batch.unsure:
            sequences.forget(batch.records, batch.before)

    def _fact(
        self, batch: SubmittedBatch, executed: Executed, answers: Sequence[bytes], ending: Settlement, won: Won
    ) -> list[bytes]:
        header, records = batch.header, batch.records
        assert header is not None
        if executed.death is not None:
            ended = set(ending.indices)
            gone = batch.unwanted | batch.ended
            left = [r.id for i, r in enumerate(records) if i not in ended and r.id not in gone]
            return batch_died(self._executor, header.batch_id, executed.death, left)
        if not header.via_owner or batch.stream is not None:
            tokens = batch.stream.tokens if batch.stream is not None else 0
            if header.report_to:
                return batch_finished(self._executor, header.batch_id, tokens=tokens)
            return batch_finished_here(self._executor, header.batch_id, tokens)
        answered = sorted([*ending.indices, *(index for index, is_won in won.items() if is_won)])
        return batch_finished(self._executor, header.batch_id, ((records[i].endpoint, answers[i]) for i in answered))

    def _reported(self, batch: SubmittedBatch, executed: Executed) -> Sequence[bytes]:
        """The answers, with durations and reports for the requests that want them."""
        answers: Sequence[bytes] = executed.answers
        if batch.flags & FLAG_TIMED:
            answers = with_durations(batch.records, executed)
        if batch.flags & FLAG_TRACED:
            use = self._meter.due("reports", batch.header.model) if self._meter and batch.header else None
            answers = with_reports(batch, executed, answers, self._executor, use)
        return answers

    def _referred(self, batch: SubmittedBatch, executed: Executed, answers: Sequence[bytes]) -> Sequence[bytes]:
        """The answers, with large ones stored out of band, unless these are already. A request fails whose answer could
        not be stored and is more than the log takes.
        """
        if batch.referred is not None or max(map(len, answers), default=0) < BY_REFERENCE_BYTES:
            return answers if batch.referred is None else batch.referred
        sent = [self._payloads.refer(record, answer) for record, answer in zip(batch.records, answers, strict=True)]
        errors: dict[int, CharoniaError] = {}
        for index, (answer, unreported) in enumerate(zip(sent, executed.answers, strict=True)):
            error = answer_too_large(min(len(answer), len(unreported)), _model_of(batch))  # a report always fits
            if error is not None:
                errors[index] = error
        return self._failed(batch, executed, sent, errors)

    def _together(self, batch: SubmittedBatch, executed: Executed, answers: Sequence[bytes]) -> Sequence[bytes]:
        """The answers that go to the owner in one record: those that do not fit in it are replaced by errors."""
        size = sum(map(len, answers))
        if size <= port.MAX_RECORD_BYTES or executed.death is not None:
            return answers
        text = (
            f"the answers of a batch of model '{_model_of(batch)}' are sent in order, as one record, and have {size} "
            f"bytes: the log takes no more than {port.MAX_RECORD_BYTES}"
        )
        errors: dict[int, CharoniaError] = {}
        fits_bytes = port.MAX_RECORD_BYTES
        for index, answer in enumerate(answers):
            if len(answer) > fits_bytes:
                errors[index] = InternalError(text)
            else:
                fits_bytes -= len(answer)
        return self._failed(batch, executed, answers, errors)

    def _failed(
        self, batch: SubmittedBatch, executed: Executed, answers: Sequence[bytes], errors: Mapping[int, CharoniaError]
    ) -> Sequence[bytes]:
        """The answers, with these errors in the place of some, which then count as failures."""
        if not errors:
            return answers
        assert batch.header is not None
        now_ns = wall_ns()
        for index, error in errors.items():
            failure = failed_response(answers[index], error)
            fail_answered(executed, index, failure, error, now_ns)
            if (counts := executed.responses.get(index)) and (place := unpack_response(failure).place) is not None:
                fail_response(counts, place[1])
        if batch.flags & FLAG_TIMED:
            receipted = with_receipts(self._executor, batch.header, batch.records, executed)
            for index in errors:
                executed.answers[index] = receipted[index]
        failures = [answer if index in errors else b"" for index, answer in enumerate(executed.answers)]
        if batch.flags & FLAG_TRACED:
            failures = with_reports(batch, executed, failures, self._executor)
        return [failure or answer for failure, answer in zip(failures, answers, strict=True)]

    async def _write(
        self,
        batch: SubmittedBatch,
        executed: Executed,
        ending: Settlement,
        keyless: Sequence[Reply],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        report: list[bytes] | None = None,
        ran: Ran | None = None,
        outcome: Outcome | None = None,
        rows: Sequence[int] = (),
    ) -> Won:
        """Write one settlement, repeating until the log answers. Without requests, write only the replies and `report`.

        `outcome` is the outcome of an earlier try.
        """
        header = batch.header
        assert header is not None
        facts = [Reply(header.report_to, report)] if report and header.report_to else []
        here = report if report and not header.report_to and not isinstance(outcome, list) else None
        if not ending.requests:
            await self._append_all((*keyless, *facts))
            if here:
                self._reports.hand(header, here)
            return {}
        won: list[bool] = []
        unsure = False

        async def settle() -> None:
            nonlocal won, unsure, outcome
            first, outcome = outcome, None
            try:
                if isinstance(first, CharoniaError):
                    raise first
                won = first or await self._log.settle(
                    header.model,
                    ending.requests,
                    statistics,
                    keyless,
                    facts,
                    ends=ending.ends or None,
                    outcomes=ending.outcomes,
                    ran=ran,
                    sequences=batch.written or None,
                    rows=rows,
                )
            except LogUnavailable:
                unsure = batch.unsure = True
                raise

        await insist(settle, f"batch {header.batch_id} of '{header.model}' cannot be settled")
        if here:
            self._reports.hand(header, here)
        if False in won:
            if unsure:
                won = [w or await self._is_ours(header.model, ending, executed, i) for i, w in enumerate(won)]
            else:
                self._count_fenced(batch, ending, won)
        return dict(zip(ending.indices, won, strict=True))

    async def _is_ours(self, model: str, ending: Settlement, executed: Executed, position: int) -> bool:
        """Whether a job was ended by an earlier try of this settlement that the log did not answer."""
        request_id = ending.requests[position][0]
        if request_id not in ending.ends:
            return False
        found: list[bytes | None] = []

        async def ask() -> None:
            found.append(await self._log.job_result(model, request_id))

        await insist(ask, "the result of a job cannot be read")
        return found[-1] == executed.answers[ending.indices[position]]

    def _count_fenced(self, batch: SubmittedBatch, ending: Settlement, won: Sequence[bool]) -> None:
        lost = [request_id for (request_id, _), is_won in zip(ending.requests, won, strict=True) if not is_won]
        late = sum(request_id not in batch.unwanted for request_id in lost)
        if late and batch.header is not None:
            self._metrics.fenced(batch.header.model, batch.header.version, late)
            _log.warning("%d requests of batch %s were settled by others first", late, batch.header.batch_id)

    async def _add_statistics(self, key: bytes, batch: SubmittedBatch, executed: Executed, won: Won) -> dict[str, int]:
        """Add the won requests to the statistics, where the settlement did not."""
        mine = increments(batch.records, executed, [won.get(index, False) for index in range(len(batch.records))])
        if mine:
            await insist(lambda: self._log.add_statistics(key, mine), "statistics cannot be added")
        return mine

    def _count_unawaited(self, batch: SubmittedBatch, executed: Executed, won: Won | list[bool]) -> None:
        """Count requests that no gateway counts: jobs without a waiting caller, ensemble steps, calls of models."""
        endpoints = {record.endpoint for record in batch.records}
        if all(map(keys.counts_its_requests, endpoints)):
            return
        others = {endpoint for endpoint in endpoints if not keys.counts_its_requests(endpoint)}
        mine = [i for i, record in enumerate(batch.records) if record.endpoint in others]
        assert batch.header is not None
        failed = {failure.index: failure.reason for failure in executed.failures}
        now_ns = wall_ns()
        for index in mine:
            if won[index] if isinstance(won, list) else won.get(index, False):
                taken_ns = max(0, now_ns - batch.records[index].accepted_ns)
                self._metrics.unawaited(batch.header.model, batch.header.version, failed.get(index, ""), taken_ns)
                if batch.stream is None or not batch.stream.several:  # else its first response was measured
                    self._metrics.responded(batch.header.model, batch.header.version, taken_ns)

    async def _append_all(self, entries: Iterable[Reply]) -> None:
        for one in entries:
            await self._append(one)

    async def _append(self, reply: Reply) -> None:
        await insist(lambda: self._log.append(reply.stream, reply.fields), "the end of a batch cannot be written")


def _model_of(batch: SubmittedBatch) -> str:
    assert batch.header is not None
    return name_of(batch.header.model)


_DELAY_S = 0.01


class OwnerReports:
    """Sends one executor's reports to owners through the log, or over `link` to the batcher in this process."""

    def __init__(self, log: Streams, link: LocalLink | None) -> None:
        self._log = log
        self.link = link

    async def send(self, header: BatchHeader, fields: Fields) -> None:
        """Report facts, given as fields of an entry, repeating until the log takes them."""
        if header.report_to:
            await insist(lambda: self._log.append(header.report_to, fields), "the report of a batch cannot be written")
        else:
            self.hand(header, fields)

    def hand(self, header: BatchHeader, fields: Fields) -> None:
        """Report facts at once to an owner in this process. Does nothing for a forged header that names no owner."""
        if self.link is not None:
            self.link.reports[header.model].hand(fields)


def batch_finished_here(executor: str, batch_id: str, tokens: int = 0) -> list[bytes]:
    """The end of a batch as a fact for an owner in this process, which gets it unpacked."""
    fields: list[Any] = [FIELD_FACT, BatchFinished(executor, batch_id, tokens=tokens)]
    return fields


class JournalledStarts:
    """Reports the starts of one executor's batches that have journalled requests: long ones separately, short ones
    together with their end. Used in the event loop only.

    Nearly every batch ends within milliseconds, and a separate write for each would cost more than it tells. Until the
    start is recorded, the attempt is known from the `batched` entry that the owner wrote before the dispatch.
    """

    def __init__(self, log: Streams, executor: str, meter: ProcessorMeter | None = None) -> None:
        """`meter` says what the processors do, for some of the entries."""
        self._log = log
        self._meter = meter
        self._executor = executor
        self._watched: dict[SubmittedBatch, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks()

    def watch(self, batch: SubmittedBatch) -> None:
        """Report the start of a batch 10 to 20 ms after it starts, unless it has ended by then."""
        batch.start_unreported = True
        self._watched[batch] = None
        self._arm()

    def forget(self, batch: SubmittedBatch) -> None:
        """Stop watching a batch that has ended or was returned."""
        self._watched.pop(batch, None)

    def reported_with(self, batch: SubmittedBatch, ending: Collection[int]) -> Ran | None:
        """Return where they ran, to write with the end of these requests if that reports every start, else None.

        `ending` are the indices of the requests that end.
        """
        if not batch.start_unreported or batch.header is None:
            return None
        began = _journalled(batch)
        if not began or began != [index for index in sorted(ending) if batch.records[index].journalled]:
            return None
        batch.start_unreported = False
        use = self._use(batch.header)
        where = self._executor, batch.header.batch_id
        return where if use is None else (*where, use)

    def _use(self, header: BatchHeader) -> Packed | None:
        use = self._meter.due("journal", header.model) if self._meter is not None else None
        return None if use is None else use.packed()

    async def report(self, batch: SubmittedBatch) -> None:
        """Report the start of a batch now, once. Skipped when the log is unavailable: later would be after the end."""
        if not batch.start_unreported or batch.header is None:
            return
        batch.start_unreported = False
        indices = _journalled(batch)
        if not indices:
            return
        try:
            entry = start_entry(self._executor, batch.header, batch.records, indices, self._use(batch.header))
            await self._log.append(keys.journal(batch.header.model), entry)
        except LogUnavailable as error:
            _log.warning("the beginning of a batch is not in its journal: %s", error)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._watched.clear()
        self._tasks.cancel()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._report_begun)

    def _report_begun(self) -> None:
        self._timer = None
        for batch in [batch for batch in self._watched if batch.planned]:
            del self._watched[batch]
            self._tasks.spawn(self.report(batch))
        if self._watched:
            self._arm()


def _journalled(batch: SubmittedBatch) -> list[int]:
    """The indices of a batch's journalled requests that have started, in order."""
    return [index for index, _ in batch.planned if batch.records[index].journalled]
