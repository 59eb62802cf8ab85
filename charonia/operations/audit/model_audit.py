"""Audits a model: folds its journal (`charonia.operations.audit.journal_audit`), then compares what is unfinished with
the rest of the log.

    trimmed_unfinished  an unsettled request that is to be journalled and of which a trimmed journal knows nothing
    end_unrecorded      a request settled in the log whose end is not in the journal
    uncarried           an unsettled job that no entry of its queue carries: it would never run
    progress_left       progress of a request that has ended: a process of an older release has ended it

The log moves on meanwhile. What looks wrong is therefore looked at again: the facts of a settlement are written in its
own step, so a journal read on after the question holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from charonia import keys
from charonia.eventlog.port import START, AuditedLog
from charonia.operations.queued import known_models, must_be_known, queued_of_model

from .journal_audit import Finding, JournalAudit, Rule

_PAGE = 1000
_JOBS_AT_ONCE = 1000

OnFinding = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """What to audit. With `since_ms` above 0, facts about earlier requests are no findings."""

    since_ms: int = 0
    exact: bool = True
    compare: bool = True


async def audit_models(
    log: AuditedLog, models: Sequence[str], scope: Scope, on_finding: OnFinding, listed_unfinished: int
) -> dict[str, Any]:
    """Audit these models, or all in the log. `clean` is the verdict; `on_finding` gets each finding.

    Raises `NotFound` for an unknown model, as an empty audit must not look clean.
    """
    for model in models:
        await must_be_known(log, model)
    reports = []
    for model in models or await known_models(log):
        reports.append(await _Auditing(log, model, scope, on_finding).run(listed_unfinished))
    return {"clean": all(not report["findings"] for report in reports), "models": reports}


class _Auditing:
    """The audit of one model: the fold, and the position in the journal."""

    def __init__(self, log: AuditedLog, model: str, scope: Scope, on_finding: OnFinding) -> None:
        self._log = log
        self._model = model
        self._scope = scope
        self._on_finding = on_finding
        self._stream = keys.journal(model)
        self._after = b"%d-0" % (scope.since_ms - 1) if scope.since_ms > 0 else START
        self._first = ""
        self._complete = False
        self._audit = JournalAudit(model, complete=False)

    async def run(self, listed_unfinished: int) -> dict[str, Any]:
        # read first: what is trimmed during the audit was old enough to be read, or to be left out
        self._complete = not self._scope.since_ms and await self._log.journal_complete(self._model)
        self._audit = JournalAudit(self._model, complete=self._complete, exact=self._scope.exact)
        await self._read_on()
        if self._scope.compare:
            await self._ends_without_record()
            await self._compare_with_queue()
            await self._progress_of_ended()
        return self._report(listed_unfinished)

    async def _read_on(self) -> None:
        while entries := await self._log.range(self._stream, self._after, _PAGE):
            self._after = entries[-1].id
            if not self._first:
                self._first = entries[0].id.decode()
            for entry in entries:
                self._tell(self._audit.fold(entry.id, entry.fields))

    def _tell(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self._on_finding(finding)

    async def _ends_without_record(self) -> None:
        unfinished = list(self._audit.open)
        suspects = set(unfinished).difference(await self._still_unsettled(unfinished))
        await self._read_on()
        for request_id in sorted(suspects):
            if request_id in self._audit.open:
                text = "settled in the log, and the journal does not say how it ended"
                self._tell([self._audit.finding(Rule.END_UNRECORDED, request_id, text)])

    async def _compare_with_queue(self) -> None:
        """Journalled requests that the journal lacks, and jobs in no entry, found in one pass.

        Jobs are listed first: an unsettled one must then be in an entry, or be settled when it is checked at the end.
        """
        uncarried = await self._active_jobs()
        suspects: list[bytes] = []
        async for page in queued_of_model(self._log, self._model):
            uncarried.difference_update(request.record.id for request in page)
            unknown = [q.record for q in page if q.record.journalled and q.record.id not in self._audit.open]
            # with --since, earlier requests are not searched
            suspects += [r.id for r in unknown if r.accepted_ns // 1_000_000 >= self._scope.since_ms]
        await self._read_on()
        for request_id in await self._still_unsettled(suspects):
            if request_id not in self._audit.open:
                text = "unsettled, and the journal " + ("never knew it" if self._complete else "no longer knows it")
                self._tell([self._audit.finding(Rule.TRIMMED_UNFINISHED, request_id, text)])
        for request_id in await self._still_unsettled(list(uncarried)):
            text = "an active job that no queue entry carries"
            self._tell([self._audit.finding(Rule.UNCARRIED, request_id, text)])

    async def _progress_of_ended(self) -> None:
        ids = await self._log.progress_ids(self._model)
        ended = set(ids).difference(await self._still_unsettled(ids))
        # it goes in the step of the settlement, so what was settled meanwhile has none now
        for request_id in sorted(ended.intersection(await self._log.progress_ids(self._model) if ended else ())):
            text = "settled in the log, and its progress is there still"
            self._tell([self._audit.finding(Rule.PROGRESS_LEFT, request_id, text)])

    async def _active_jobs(self) -> set[bytes]:
        active: set[bytes] = set()
        after: tuple[int, bytes] | None = None
        while page := await self._log.jobs(self._model, ended=False, after=after, count=_JOBS_AT_ONCE):
            active.update(job.id for job in page)
            after = (page[-1].accepted_us, page[-1].id)
        return active

    async def _still_unsettled(self, ids: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for at in range(0, len(ids), _PAGE):
            page = ids[at : at + _PAGE]
            attempts = await self._log.unsettled(self._model, page)
            found += [request_id for request_id, attempt in zip(page, attempts, strict=True) if attempt >= 0]
        return found

    def _report(self, listed_unfinished: int) -> dict[str, Any]:
        totals = self._audit.totals
        counts = {f.name: value for f in fields(totals) if isinstance(value := getattr(totals, f.name), int)}
        unfinished = [
            {"id": request_id.hex(), "accepted": request.accepted, "attempt": request.attempt}
            for request_id, request in islice(self._audit.open.items(), listed_unfinished)
        ]
        return {
            "model": self._model,
            "complete": self._complete,
            "first_entry": self._first,
            **counts,
            "ended": {state.value: count for state, count in sorted(totals.ended.items())},
            "unfinished": len(self._audit.open),
            "oldest_unfinished": unfinished,
            "findings": {rule.value: count for rule, count in sorted(totals.findings.items())},
        }
