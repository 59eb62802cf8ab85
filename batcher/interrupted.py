"""Jobs that had responses and may not be run again: what the log kept of them tells, whoever gave them out before.

Of other requests the owner knows only what it was told itself (`scheduling.model_state`); what slips through, because
the owner was lost together with the executor, is seen by who reads the responses: their attempt is another one.
"""

from __future__ import annotations

from charonia.errors import ErrorCode, StreamInterrupted
from charonia.eventlog.port import EventLog

from .carriers import carrier_of
from .scheduling.decisions import DispatchBatch, RejectRequest
from .scheduling.ledger import CUT_SHORT

_REASON = "what ran it was lost"


async def jobs_cut_short(log: EventLog, model: str, decision: DispatchBatch) -> list[RejectRequest]:
    """The jobs of a batch that were begun before and have kept responses, as refusals. Raises what the log raises."""
    cut: list[RejectRequest] = []
    for request, attempt in zip(decision.requests, decision.attempts, strict=True):
        if attempt > 1 and carrier_of(request).record.is_job and await log.job_responses(model, request.id, count=1):
            message = StreamInterrupted(CUT_SHORT.format(why=_REASON)).message
            cut.append(RejectRequest(request, ErrorCode.UNAVAILABLE, message, "BACKEND"))
    return cut


def without(decision: DispatchBatch, refused: list[RejectRequest]) -> DispatchBatch:
    """The batch without the refused requests."""
    return decision.without({one.request.id for one in refused})
