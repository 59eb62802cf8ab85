"""Ends requests from outside before they are done: cancels and deadlines (ADR 0004).

The first settlement wins, so the log decides at once; the fact that is written with it only saves the owner and its
executors work. A cancel that loses the race against a completion has ended nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CANCELLED, DEADLINE_EXCEEDED, Cancelled, InternalError
from charonia.eventlog.port import ControlLog, Jobs, QueueLog, Reply, Statistics, Work
from charonia.facts import counters
from charonia.facts.events import FIELD_FACT, RequestsEnded, pack_fact
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobRecord, JobState
from charonia.wire import RequestRecord, pack_failure

from .entry_packer import replies_of

_log = logging.getLogger(__name__)

_ANY_ATTEMPT = 2**31 - 1
"""Larger than every attempt: an end from outside is fenced only by an earlier end."""
_CANCELLED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Ending:
    """How requests end: cancelled or expired, with the error text for their callers. `by` is caller, disconnect, ..."""

    state: JobState
    error: str
    by: str

    def of_jobs(self, ids: Iterable[bytes]) -> dict[bytes, JobEnd]:
        """The job ends for these jobs."""
        return dict.fromkeys(ids, JobEnd(self.state, b"", {"error": self.error, "by": self.by}))


BY_CALLER = Ending(JobState.CANCELLED, CANCELLED, "caller")
EXPIRED = Ending(JobState.EXPIRED, DEADLINE_EXCEEDED, "deadline")


async def end_requests(
    log: Work,
    model: str,
    ids: Sequence[bytes],
    state: JobState,
    *,
    journalled: Sequence[bool] = (),
    ends: Mapping[bytes, JobEnd] | None = None,
    statistics: tuple[bytes, Mapping[str, int]] | None = None,
) -> list[bool]:
    """End unsettled requests; returns those that this call ended. Raises `LogUnavailable`. `ends` are those of the jobs
    among them. `statistics` is counted if all were ended.
    """
    fact = RequestsEnded(b"".join(ids), state.value)
    code = OUTCOME_CODES[state]
    return await log.settle(
        model,
        [(request_id, _ANY_ATTEMPT) for request_id in ids],
        statistics,
        (),
        [Reply(keys.facts(model), [FIELD_FACT, pack_fact(fact)])],
        ends=ends or None,
        outcomes=b"".join([code if one else b"-" for one in journalled]) if any(journalled) else b"",
    )


async def end_jobs(
    log: Work, model: str, records: Sequence[JobRecord], ending: Ending, ends: Mapping[bytes, JobEnd] | None = None
) -> list[JobRecord]:
    """End unsettled jobs of a model; returns those that this call ended. Raises what the log raises. `ends` are given
    if each has its own.
    """
    ids = [record.id for record in records]
    journalled = [not record.about.get("unjournalled") for record in records]
    ends = ends if ends is not None else ending.of_jobs(ids)
    won = await end_requests(log, model, ids, ending.state, journalled=journalled, ends=ends)
    return [record for record, wins in zip(records, won, strict=True) if wins]


async def cancel_requests(log: QueueLog, model: str, records: Sequence[RequestRecord], ending: Ending) -> list[bytes]:
    """End queued requests, jobs or not, and answer their callers; returns the ids of those that this call ended."""
    cancelled: list[bytes] = []
    for at in range(0, len(records), _CANCELLED_AT_ONCE):
        part = records[at : at + _CANCELLED_AT_ONCE]
        ids, journalled = [record.id for record in part], [record.journalled for record in part]
        ends = ending.of_jobs([record.id for record in part if record.is_job])
        won = await end_requests(log, model, ids, ending.state, journalled=journalled, ends=ends)
        ended = [record for record, wins in zip(part, won, strict=True) if wins]
        error = Cancelled(ending.error)
        answers = [(one.endpoint, pack_failure(one.id, model, one.meta.version, error)) for one in ended]
        for reply in replies_of(answers):
            await log.append(reply.stream, reply.fields)
        cancelled += [record.id for record in ended]
    return cancelled


async def answer_gateways(log: ControlLog, answers: Iterable[tuple[str, bytes]]) -> None:
    """Send the callers of ended jobs their answers, each to the gateway with an incarnation. A gateway that has left
    gets none: the reply would create its stream again, and no process would remove it.
    """
    waiting = [answer for answer in answers if answer[0]]
    if waiting:
        endpoints = list({endpoint for endpoint, _ in waiting})
        alive = dict(zip(endpoints, await log.alive("gateway", endpoints), strict=True))
        for reply in replies_of(answer for answer in waiting if alive[answer[0]]):
            await log.append(reply.stream, reply.fields)


async def active_jobs(log: Jobs, model: str, ids: Iterable[bytes]) -> list[JobRecord]:
    """The records of unsettled jobs; unreadable ones are logged. Raises what the log raises."""

    async def read(job_id: bytes) -> JobRecord | None:
        try:
            return await log.job(model, job_id)
        except InternalError as error:
            _log.error("job %s of model '%s' does not expire: %s", job_id.hex(), model, error)
            return None

    records = await asyncio.gather(*[read(job_id) for job_id in ids])
    return [record for record in records if record is not None and not record.state.terminal]


async def count_failures(
    log: Statistics, model: str, hashes: Mapping[int, str], records: Sequence[JobRecord], reason: str
) -> None:
    """Count ended jobs as failures of their versions (X4): of those in `hashes`, because statistics end with the
    incarnation whose content hash is given there.
    """
    now_us = wall_ns() // 1000
    increments: dict[bytes, dict[str, int]] = {}
    for record in records:
        version = version_of(record)
        if version in hashes:
            key = keys.statistics(model, version, hashes[version])
            waited_ns = max(0, now_us - record.accepted_us) * 1000
            counters.add(increments.setdefault(key, {}), counters.of_failures(1, waited_ns, reason))
    for key, counts in increments.items():
        await log.add_statistics(key, counts)


def version_of(record: JobRecord) -> int:
    """The version of a job, 0 if its record does not name one."""
    version = record.about.get("version")
    return version if type(version) is int else 0
