"""Ends unsettled requests from outside: the settlement decides, then the owner and whoever waits are told.

A caller who loses the race against a completion has cancelled nothing: the first settlement wins (ADR 0004).
"""

from __future__ import annotations

from collections.abc import Sequence

from charonia import keys
from charonia.errors import Cancelled
from charonia.eventlog.port import EventLog
from charonia.events import FIELD_FACT, RequestsEnded, pack_fact
from charonia.jobs import OUTCOME_CODES, JobEnd, JobState
from charonia.tensors import Buffer
from charonia.wire import RequestRecord, pack_failure, record_fields

_AT_ONCE = 500
_TRIES = 8
_NOT_JOURNALLED = b"-"


async def cancel(log: EventLog, model: str, records: Sequence[RequestRecord], reason: str) -> list[bytes]:
    """Cancel these requests; the ids of those that were still unsettled and are cancelled now."""
    won: list[bytes] = []
    for at in range(0, len(records), _AT_ONCE):
        waiting = {record.id: record for record in records[at : at + _AT_ONCE]}
        for _ in range(_TRIES):  # an attempt that begins between the question and the settlement fences it
            attempts = await log.unsettled(model, list(waiting))
            waiting = {i: record for (i, record), a in zip(waiting.items(), attempts, strict=True) if a >= 0}
            if not waiting:
                break
            requests = [(i, a) for i, a in zip(waiting, [a for a in attempts if a >= 0], strict=True)]
            won += await _settle(log, model, list(waiting.values()), requests, reason)
    return won


async def _settle(
    log: EventLog, model: str, records: Sequence[RequestRecord], requests: Sequence[tuple[bytes, int]], reason: str
) -> list[bytes]:
    error = Cancelled(reason)
    failures = {record.id: pack_failure(record.id, model, record.meta.version, error) for record in records}
    ends = {
        record.id: JobEnd(JobState.CANCELLED, failures[record.id], {"error": reason, "by": "operator"})
        for record in records
        if record.is_job
    }
    code = OUTCOME_CODES[JobState.CANCELLED]
    outcomes = b"".join([code if record.journalled else _NOT_JOURNALLED for record in records])
    journalled = any(record.journalled for record in records)
    mask = await log.settle(model, requests, None, [], ends=ends, outcomes=outcomes if journalled else b"")
    won = [record for record, wins in zip(records, mask, strict=True) if wins]
    if won:
        ids = b"".join([record.id for record in won])
        await log.append(keys.facts(model), [FIELD_FACT, pack_fact(RequestsEnded(ids, "cancelled"))])
        answers: dict[str, list[Buffer]] = {}
        for record in won:
            if record.endpoint:
                answers.setdefault(record.endpoint, []).append(failures[record.id])
        for endpoint, failed in answers.items():
            await log.append(keys.replies(endpoint), record_fields(failed))
    return [record.id for record in won]
