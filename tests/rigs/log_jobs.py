"""Jobs of one model `m` as the contract's suites put them into a log and end them."""

from __future__ import annotations

from typing import Any

from log_adapters import NO_LIMITS

from charonia import keys
from charonia.eventlog.port import EventLog, Limits
from charonia.facts.jobs import JobEnd, JobState, JobTicket, NewJob
from charonia.facts.journal import JournalFact, read_facts

NOW_US = 1_763_700_000_000_000
HUGE = 2**31 - 1


def made(number: int = 1, **fields: Any) -> NewJob:
    return NewJob(
        **{"id": b"%016d" % number, "size_bytes": 10, "accepted_us": NOW_US + number, "retention_s": 60, **fields}
    )


async def accept(log: EventLog, job: NewJob, limits: Limits = NO_LIMITS, journalled: bool = True) -> JobTicket:
    return await log.accept_job("m", 0, 0, job, [b"r", b"record of " + job.id], limits, journalled=journalled)


async def end(
    log: EventLog,
    *jobs: NewJob,
    state: JobState = JobState.SUCCEEDED,
    result: bytes = b"",
    attempt: int = 1,
    **detail: Any,
) -> list[bool]:
    ends = {job.id: JobEnd(state, result, detail) for job in jobs}
    return await log.settle("m", [(job.id, attempt) for job in jobs], None, [], ends=ends)


async def journal(log: EventLog, model: str = "m") -> list[JournalFact]:
    return [fact for entry in await log.range(keys.journal(model)) for fact in read_facts(entry.fields)]
