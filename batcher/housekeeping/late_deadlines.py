"""Ends jobs at their deadline that wait behind the window of what an owner has read (`windows`).

What is in the window is the scheduler's, and a caller who waits has a timer at its gateway. The log keeps the deadlines
of active jobs in an order of their own, so nothing is read that is not due; who has read all asks nothing.
"""

from __future__ import annotations

import asyncio
import logging

from batcher.owner.owned import OwnedModel
from batcher.scheduling.queues.ledger import DEADLINE_PASSED
from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import DeadlineExceeded, InternalError
from charonia.eventlog.port import Reply
from charonia.facts.events import FIELD_FACT, RequestsEnded, pack_fact
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobRecord, JobState
from charonia.wire import pack_failure, record_fields

_log = logging.getLogger(__name__)

LOOK_S = 0.1
_PAGE = 500
_ANY_ATTEMPT = 2**31 - 1
"""As of every end from outside: fenced by nothing but an earlier end."""


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
        records = await asyncio.gather(*[_readable(owned, job_id) for job_id in unread])
        jobs = [record for record in records if record is not None and not record.state.terminal]
        if jobs:
            total += await _expire(owned, jobs)
        # those that ended are out already, unless their record is gone
        await owned.log.drop_times(key, unread)
        if len(due) < _PAGE:
            return total
    return total


async def _readable(owned: OwnedModel, job_id: bytes) -> JobRecord | None:
    try:
        return await owned.log.job(owned.model, job_id)
    except InternalError as error:
        _log.error("job %s of model '%s' does not expire: %s", job_id.hex(), owned.model, error)
        return None


async def _expire(owned: OwnedModel, jobs: list[JobRecord]) -> int:
    ends, outcomes = {}, b""
    for job in jobs:
        # E10
        error = DeadlineExceeded(f"[request id: {job.about.get('client_id') or '<id_unknown>'}] {DEADLINE_PASSED}")
        answer = pack_failure(job.id, owned.model, _version(job), error)
        ends[job.id] = JobEnd(JobState.EXPIRED, answer, {"error": error.message, "by": "deadline"})
        outcomes += b"-" if job.about.get("unjournalled") else OUTCOME_CODES[JobState.EXPIRED]
    fact = RequestsEnded(b"".join(ends), JobState.EXPIRED.value)
    won = await owned.log.settle(
        owned.model,
        [(job.id, _ANY_ATTEMPT) for job in jobs],
        None,
        (),
        [Reply(keys.facts(owned.model), [FIELD_FACT, pack_fact(fact)])],  # some may have been read meanwhile
        ends=ends,
        outcomes=outcomes if outcomes.strip(b"-") else b"",
    )
    expired = [job for job, wins in zip(jobs, won, strict=True) if wins]
    for job in expired:
        endpoint = job.about.get("endpoint")
        if endpoint and not owned.is_gone(endpoint):
            # its gateway's timer may have come second
            await owned.log.append(keys.replies(endpoint), record_fields([ends[job.id].result]))
    await _count(owned, expired)
    return len(expired)


async def _count(owned: OwnedModel, expired: list[JobRecord]) -> None:
    """X4, as `refusals` counts what it refuses."""
    now_us = wall_ns() // 1000
    counts: dict[bytes, dict[str, int]] = {}
    hashes = owned.content_hashes()
    for job in expired:
        version = _version(job)
        if version in hashes:
            key = keys.statistics(owned.model, version, hashes[version])
            of_key = counts.setdefault(key, {"fail_count": 0, "fail_ns": 0, "fail_REJECTED": 0})
            of_key["fail_count"] += 1
            of_key["fail_ns"] += max(0, now_us - job.accepted_us) * 1000
            of_key["fail_REJECTED"] += 1
    for key, increments in counts.items():
        await owned.log.add_statistics(key, increments)


def _version(job: JobRecord) -> int:
    version = job.about.get("version")
    return version if type(version) is int else 0
