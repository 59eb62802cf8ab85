"""Ends jobs at their deadline that wait behind the window of what an owner has read (`windows`).

What is in the window is the scheduler's, and a caller who waits has a timer at its gateway. The log keeps the deadlines
of active jobs in an order of their own, so nothing is read that is not due; who has read all asks nothing.
"""

from __future__ import annotations

from batcher.owner.owned import OwnedModel
from batcher.scheduling.queues.ledger import DEADLINE_PASSED
from charonia import keys
from charonia.calls.request_endings import EXPIRED, active_jobs, answer_gateways, count_failures, end_jobs, version_of
from charonia.clock import wall_ns
from charonia.errors import DeadlineExceeded
from charonia.facts.jobs import JobEnd, JobRecord
from charonia.wire import pack_failure

LOOK_S = 0.1
_PAGE = 500


async def expire_behind_window(owned: OwnedModel) -> int:
    """End the jobs that are due and were not read yet; how many. Raises what the log raises."""
    if owned.windows.all_read:
        return 0
    key, total = keys.job_deadlines(owned.model), 0
    while not owned.closed:
        due = await owned.log.due(key, wall_ns() // 1000, _PAGE)
        unread = [job_id for job_id in due if owned.scheduler.find(job_id) is None]
        if not unread:
            return total
        if jobs := await active_jobs(owned.log, owned.model, unread):
            total += await _expire(owned, jobs)
        # those that ended are out already, unless their record is gone
        await owned.log.drop_times(key, unread)
        if len(due) < _PAGE:
            return total
    return total


async def _expire(owned: OwnedModel, jobs: list[JobRecord]) -> int:
    ends = {}
    for job in jobs:
        # E10
        error = DeadlineExceeded(f"[request id: {job.about.get('client_id') or '<id_unknown>'}] {DEADLINE_PASSED}")
        answer = pack_failure(job.id, owned.model, version_of(job), error)
        ends[job.id] = JobEnd(EXPIRED.state, answer, {"error": error.message, "by": EXPIRED.by})
    expired = await end_jobs(owned.log, owned.model, jobs, EXPIRED, ends)
    # its gateway's timer may have come second
    await answer_gateways(owned.log, [(job.about.get("endpoint", ""), ends[job.id].result) for job in expired])
    await count_failures(owned.log, owned.model, owned.content_hashes(), expired, "REJECTED")
    return len(expired)
