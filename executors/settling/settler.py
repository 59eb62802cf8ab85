"""Settles executed batches in the log, however long that takes; what is written is `executors.settling.settlement`'s.

One write settles a batch, answers its keyless requests, counts and frees the slot (ADR 0002). Its jobs are answered
after it, those that were won (ADR 0004). A settlement that was lost (another attempt, a cancel, a deadline was faster)
is only counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from charonia import keys
from charonia.calls.reporting import replies_of, reports_to_gateways
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.port import Reply, SettlementLog
from charonia.facts.jobs import OUTCOME_CODES, JobState
from charonia.wire import FLAG_JOB, FLAG_JOURNALLED, FLAG_REPLY_BY_REFERENCE, FLAG_TIMED, FLAG_TRACED
from executors.announcing import insist
from executors.batches.accounting import Executed, increments
from executors.batches.batch_payloads import Payloads
from executors.metrics import ExecutorMetrics
from executors.running.incarnation import Incarnation
from executors.running.job import Job

from .beginnings import Beginnings
from .owner_reports import OwnerReports
from .settlement import (
    Settlement,
    batch_died,
    batch_finished,
    batch_finished_here,
    replies,
    requests_rescheduled,
    settlement,
    timed,
)
from .trace_reports import reported

_log = logging.getLogger(__name__)

Won = dict[int, bool]
"""Whether this executor ended a request, by its index in the batch."""
Outcome = list[bool] | CharoniaError
"""What the log said to a settlement: which requests were won, or why it could not be made."""

_SUCCEEDED = OUTCOME_CODES[JobState.SUCCEEDED]
_SPECIAL = FLAG_JOB | FLAG_TIMED | FLAG_TRACED


class Settler:
    """The settlements of one executor."""

    def __init__(
        self,
        log: SettlementLog,
        executor: str,
        metrics: ExecutorMetrics,
        payloads: Payloads,
        beginnings: Beginnings,
        reports: OwnerReports,
    ) -> None:
        self._log = log
        self._beginnings = beginnings
        self._payloads = payloads
        self._executor = executor
        self._metrics = metrics
        self._reports = reports

    async def settle(
        self,
        job: Job,
        executed: Executed,
        incarnation: Incarnation,
        *,
        before: Sequence[tuple[str, bytes]] = (),
        last: bool = True,
        outcome: Outcome | None = None,
    ) -> None:
        """Record the end of a batch and tell everybody whom it concerns. Returns when the log has all of it.

        Of a batch whose requests end one by one: the end of some of them, with the (endpoint, record) responses that go
        before theirs; `last` when with them all have ended. `outcome` is what `settle_plain` came to.
        """
        header, records = job.header, job.records
        assert header is not None
        ending = settlement(self._executor, header, records, executed, job.flags)
        key = keys.statistics(incarnation.model, incarnation.version, incarnation.content_hash)
        counted = increments(records, executed)
        together: tuple[bytes, Mapping[str, int]] | None = (key, counted) if counted else None
        won: Won = {}
        via_owner = header.via_owner and job.stream is None
        ran = None if via_owner else self._beginnings.told_with(job, ending.indices)
        await self._beginnings.tell(job)
        if via_owner:
            if executed.death is not None:  # what has an answer already cannot be answered in order: it runs again
                ending, together = Settlement(), None
            elif ending.jobs:  # only those that are won may be in the fact, which comes with the others' settlement
                jobs, ending = ending.parted()
                won = await self._write(job, executed, jobs, [], None)
                together = None
        answers: Sequence[bytes] = executed.answers
        if job.flags & FLAG_TIMED:
            answers = timed(records, executed)
        if job.flags & FLAG_TRACED:
            answers = reported(job, executed, answers, self._executor)
        whole = answers
        if job.flags & FLAG_REPLY_BY_REFERENCE and not via_owner:
            answers = self._payloads.refer(records, answers) if job.referred is None else job.referred
        answered = [] if via_owner else [index for index in ending.indices if index not in ending.jobs]
        # in one entry: an owner that heard only of the batch's end would take those for ended that go on
        told = requests_rescheduled(self._executor, header, records, executed) if executed.again else []
        if last:
            told += self._fact(job, executed, answers, ending, won)
        now = [*replies_of(before), *replies(records, answers, answered)]
        won |= await self._write(job, executed, ending, now, together, told, ran, outcome)
        if ran is not None and True not in won.values():  # then there is no fact of their end
            job.untold = True
            await self._beginnings.tell(job)
        if job.steps is not None:
            self._settle_sequences(job, won, incarnation)
        if together is None or False in won.values() or (counted and not ending.requests):
            counted = await self._add_statistics(key, job, executed, won)
        self._count(job, executed, incarnation, counted, won)
        if not via_owner and ending.jobs:
            await self._append_all(replies(records, answers, [index for index in ending.jobs if won[index]]))
        if job.flags & FLAG_TRACED:
            mine = [(records[index], whole[index]) for index, is_won in won.items() if is_won]
            await self._append_all(reports_to_gateways(mine))

    def settle_plain(
        self, job: Job, executed: Executed, incarnation: Incarnation, done: Callable[[Outcome | None], None]
    ) -> bool:
        """`settle` without a task, for a batch of which nothing is special. False: nothing was done.

        `done` is called when all of it is in the log; or with the outcome that `settle` has to go on from.
        """
        header, records = job.header, job.records
        assert header is not None
        special = executed.death is not None or executed.again or job.steps is not None or header.via_owner
        if special or job.flags & _SPECIAL or job.stream is not None or not all(executed.answers):
            return False
        outcomes, ran, untold = b"", None, job.untold
        if job.flags & FLAG_JOURNALLED:
            if executed.failures or not all(record.journalled for record in records):
                return False
            outcomes = _SUCCEEDED * len(records)
            ran = self._beginnings.told_with(job, range(len(records)))
            if job.untold:
                return False
        counted = increments(records, executed)
        answers: Sequence[bytes] = executed.answers
        if job.flags & FLAG_REPLY_BY_REFERENCE:
            # should this come to nothing, `settle` must not put them there once more: nobody would take those away
            answers = job.referred = self._payloads.refer(records, answers)

        here = not header.report_to
        told = (batch_finished_here if here else batch_finished)(self._executor, header.batch_id)

        def settled(outcome: Outcome) -> None:
            if isinstance(outcome, CharoniaError) or False in outcome:
                job.untold = untold
                done(outcome)
                return
            try:
                self._count(job, executed, incarnation, counted, outcome)
            finally:
                done(None)

        def settled_here(outcome: Outcome) -> None:
            try:
                settled(outcome)
            finally:  # it is settled, whatever becomes of who settled it: the owner must hear of that
                if isinstance(outcome, list):
                    self._reports.hand(header, told)

        written = self._log.settle_now(
            header.model,
            [(record.id, attempt) for record, attempt in zip(records, header.attempts, strict=True)],
            (keys.statistics(incarnation.model, incarnation.version, incarnation.content_hash), counted),
            replies(records, answers, range(len(records))),
            () if here else (Reply(header.report_to, told),),
            settled_here if here else settled,
            outcomes=outcomes,
            ran=ran,
        )
        job.untold = job.untold or (untold and not written)
        return written

    def _count(
        self,
        job: Job,
        executed: Executed,
        incarnation: Incarnation,
        counted: Mapping[str, int],
        won: Won | list[bool],
    ) -> None:
        """For the metrics of this process; `counted` is what the statistics got."""
        self._metrics.settled(incarnation.model, incarnation.version, counted)
        if self._metrics.measures:
            told = dict(enumerate(won)) if isinstance(won, list) else won
            self._metrics.observe(incarnation.model, incarnation.version, job.records, executed, told)
        self._count_unawaited(job, executed, won)

    @staticmethod
    def _settle_sequences(job: Job, won: Won, incarnation: Incarnation) -> None:
        """What was not won has not happened: the log does not have it either."""
        sequences = incarnation.pool.sequences
        assert sequences is not None
        lost = {index: known for index, known in job.before.items() if not won.get(index, False)}
        sequences.go_back(job.records, lost)
        # who was told of beforehand was cancelled, or too late
        sequences.doubt(job.records, [index for index in lost if job.records[index].id not in job.unwanted])
        if job.unsure:
            sequences.forget(job.records, job.before)

    def _fact(
        self, job: Job, executed: Executed, answers: Sequence[bytes], ending: Settlement, won: Won
    ) -> list[bytes]:
        header, records = job.header, job.records
        assert header is not None
        if executed.death is not None:
            ended = set(ending.indices)
            gone = job.unwanted | job.ended
            left = [r.id for i, r in enumerate(records) if i not in ended and r.id not in gone]
            return batch_died(self._executor, header.batch_id, executed.death, left)
        if not header.via_owner or job.stream is not None:
            finished = batch_finished if header.report_to else batch_finished_here
            return finished(self._executor, header.batch_id)
        told = sorted([*ending.indices, *(index for index, is_won in won.items() if is_won)])
        return batch_finished(self._executor, header.batch_id, ((records[i].endpoint, answers[i]) for i in told))

    async def _write(
        self,
        job: Job,
        executed: Executed,
        ending: Settlement,
        keyless: Sequence[Reply],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        told: list[bytes] | None = None,
        ran: tuple[str, str] | None = None,
        outcome: Outcome | None = None,
    ) -> Won:
        """One settlement; again until the log has answered. Without requests the replies and what is `told` alone.

        `outcome` is that of a first time.
        """
        header = job.header
        assert header is not None
        facts = [Reply(header.report_to, told)] if told and header.report_to else []
        here = told if told and not header.report_to and not isinstance(outcome, list) else None
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
                    sequences=job.written or None,
                )
            except LogUnavailable:
                unsure = job.unsure = True
                raise

        await insist(settle, f"batch {header.batch_id} of '{header.model}' cannot be settled")
        if here:
            self._reports.hand(header, here)
        if False in won:
            if unsure:
                won = [w or await self._is_ours(header.model, ending, executed, i) for i, w in enumerate(won)]
            else:
                self._count_fenced(job, ending, won)
        return dict(zip(ending.indices, won, strict=True))

    async def _is_ours(self, model: str, ending: Settlement, executed: Executed, position: int) -> bool:
        """Whether a job was ended by a settlement of ours that went unanswered: it lost its repetition to itself."""
        request_id = ending.requests[position][0]
        if request_id not in ending.ends:
            return False
        found: list[bytes | None] = []

        async def ask() -> None:
            found.append(await self._log.job_result(model, request_id))

        await insist(ask, "the result of a job cannot be read")
        return found[-1] == executed.answers[ending.indices[position]]

    def _count_fenced(self, job: Job, ending: Settlement, won: Sequence[bool]) -> None:
        lost = [request_id for (request_id, _), is_won in zip(ending.requests, won, strict=True) if not is_won]
        late = sum(request_id not in job.unwanted for request_id in lost)
        if late and job.header is not None:
            self._metrics.fenced(job.header.model, job.header.version, late)
            _log.warning("%d requests of batch %s were settled by others first", late, job.header.batch_id)

    async def _add_statistics(self, key: bytes, job: Job, executed: Executed, won: Won) -> dict[str, int]:
        """Count what was won, where the settlement did not."""
        mine = increments(job.records, executed, [won.get(index, False) for index in range(len(job.records))])
        if mine:
            await insist(lambda: self._log.add_statistics(key, mine), "statistics cannot be added")
        return mine

    def _count_unawaited(self, job: Job, executed: Executed, won: Won | list[bool]) -> None:
        """Jobs nobody waits for, steps of ensembles and models' own requests end here: no gateway counts them."""
        endpoints = {record.endpoint for record in job.records}
        if all(map(keys.counts_its_requests, endpoints)):
            return
        others = {endpoint for endpoint in endpoints if not keys.counts_its_requests(endpoint)}
        mine = [i for i, record in enumerate(job.records) if record.endpoint in others]
        assert job.header is not None
        failed = {failure.index: failure.reason for failure in executed.failures}
        now_ns = wall_ns()
        for index in mine:
            if won[index] if isinstance(won, list) else won.get(index, False):
                taken_ns = max(0, now_ns - job.records[index].accepted_ns)
                self._metrics.unawaited(job.header.model, job.header.version, failed.get(index, ""), taken_ns)

    async def _append_all(self, entries: Iterable[Reply]) -> None:
        for one in entries:
            await self._append(one)

    async def _append(self, reply: Reply) -> None:
        await insist(lambda: self._log.append(reply.stream, reply.fields), "the log does not take the end of a batch")
