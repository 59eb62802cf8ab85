"""Requests that had responses and may not be run again: what the log kept of them tells, whichever owner dispatched
them before.

Executors tell an owner of first responses (`stateless.model_state`), and its successor finds them marked in the log. A
reader of responses recognises those of another run by their attempt. The responses of jobs are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from batcher.scheduling.decisions import DispatchBatch, RejectRequest
from batcher.scheduling.observations import RequestQueued
from batcher.scheduling.queues.ledger import CUT_SHORT
from charonia import keys
from charonia.errors import ErrorCode, StreamInterrupted
from charonia.eventlog.port import EventLog, Jobs

from .carriers import carrier_of

_REASON = "what ran it was lost"
_ALL_US = 1 << 52
_MOST = 10_000


async def visible_requests(log: EventLog, model: str, until_us: int = _ALL_US) -> frozenset[bytes]:
    """The unsettled requests that were marked until then; marks of others are removed. Raises what the log raises."""
    ids = await log.due(keys.visible(model), until_us, _MOST)
    attempts = await log.unsettled(model, ids)
    over = [i for i, attempt in zip(ids, attempts, strict=True) if attempt < 0]
    if over:
        await log.drop_times(keys.visible(model), over)
    return frozenset(ids) - frozenset(over)


async def jobs_unseen(
    log: Jobs, model: str, marked: Collection[bytes], queued: Mapping[bytes, RequestQueued]
) -> set[bytes]:
    """The jobs among those marked of which nothing is kept: their executor was lost in between, they may run again."""
    unseen: set[bytes] = set()
    for request_id in marked:
        request = queued.get(request_id)
        is_job = request is not None and carrier_of(request).record.is_job
        if is_job and not await log.job_responses(model, request_id, count=1):
            unseen.add(request_id)
    return unseen


async def jobs_cut_short(log: Jobs, model: str, decision: DispatchBatch) -> list[RejectRequest]:
    """The jobs of a batch that were begun before and have kept responses, as refusals. Raises what the log raises."""
    cut: list[RejectRequest] = []
    places = decision.sequences.places if decision.sequences is not None else (None,) * len(decision.requests)
    for request, attempt, place in zip(decision.requests, decision.attempts, places, strict=True):
        if place is not None and place.again:
            continue  # what it has had is of this very attempt
        if attempt > 1 and carrier_of(request).record.is_job and await log.job_responses(model, request.id, count=1):
            message = StreamInterrupted(CUT_SHORT.format(why=_REASON)).message
            cut.append(RejectRequest(request, ErrorCode.UNAVAILABLE, message, "BACKEND"))
    return cut
