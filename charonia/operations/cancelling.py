"""Ends unsettled requests from outside: the settlement decides, then the owner and the waiting callers are notified.

A caller who loses the race against a completion has cancelled nothing: the first settlement wins (ADR 0004).
"""

from __future__ import annotations

from collections.abc import Sequence

from charonia import keys
from charonia.errors import Cancelled
from charonia.eventlog.port import QueueLog
from charonia.facts.events import FIELD_FACT, RequestsEnded, pack_fact
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState
from charonia.tensors import Buffer
from charonia.wire import RequestRecord, pack_failure, record_fields

_AT_ONCE = 500
_ANY_ATTEMPT = 2**31 - 1
"""Larger than every attempt: an end from outside is fenced by nothing but an earlier end."""
_NOT_JOURNALLED = b"-"


async def cancel(log: QueueLog, model: str, records: Sequence[RequestRecord], reason: str) -> list[bytes]:
    """Cancel these requests; the ids of those that were still unsettled and are cancelled now."""
    won: list[bytes] = []
    for at in range(0, len(records), _AT_ONCE):
        won += await _settle(log, model, records[at : at + _AT_ONCE], reason)
    return won


async def _settle(log: QueueLog, model: str, records: Sequence[RequestRecord], reason: str) -> list[bytes]:
    end = JobEnd(JobState.CANCELLED, b"", {"error": reason, "by": "operator"})
    ends = {record.id: end for record in records if record.is_job}
    requests = [(record.id, _ANY_ATTEMPT) for record in records]
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
                failure = pack_failure(record.id, model, record.meta.version, Cancelled(reason))
                answers.setdefault(record.endpoint, []).append(failure)
        for endpoint, failed in answers.items():
            await log.append(keys.replies(endpoint), record_fields(failed))
    return [record.id for record in won]
