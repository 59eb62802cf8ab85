"""Settles requests from outside before they are done: cancels and deadlines (ADR 0004).

The first settlement wins, so the log decides at once; the fact that goes with it only saves the owner and its
executors work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from charonia import keys
from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.eventlog.port import Reply, Statistics, Work
from charonia.facts.events import FIELD_FACT, RequestsEnded, pack_fact
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobRecord, JobState

ANY_ATTEMPT = 2**31 - 1
"""Larger than every attempt: an end from outside is fenced by nothing but an earlier end."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How requests end: cancelled or expired, with the words their callers read. `by` is caller, disconnect, ..."""

    state: JobState
    error: str
    by: str


async def end_requests(
    log: Work,
    model: str,
    ids: Sequence[bytes],
    ending: Ending,
    *,
    are_jobs: bool,
    journalled: bool,
    statistics: tuple[bytes, Mapping[str, int]] | None = None,
) -> list[bool]:
    """End requests that have not ended; which of them this call ended. Raises `LogUnavailable`.

    `statistics` is counted when all were.
    """
    end = JobEnd(ending.state, b"", {"error": ending.error, "by": ending.by})
    fact = RequestsEnded(b"".join(ids), ending.state.value)
    return await log.settle(
        model,
        [(request_id, ANY_ATTEMPT) for request_id in ids],
        statistics,
        (),
        [Reply(keys.facts(model), [FIELD_FACT, pack_fact(fact)])],
        ends=dict.fromkeys(ids, end) if are_jobs else None,
        outcomes=OUTCOME_CODES[ending.state] * len(ids) if journalled else b"",
    )


async def count_failures(
    log: Statistics, catalog: Catalog, model: str, records: Sequence[JobRecord], reason: str
) -> None:
    """X4 of jobs that were ended, for the versions that are still there: statistics end with their incarnation."""
    held = catalog.held(model)
    now_us = wall_ns() // 1000
    increments: dict[bytes, dict[str, int]] = {}
    for record in records:
        served = held.get(record.about.get("version", 0))
        if served is not None:
            key = keys.statistics(model, served.version, served.content_hash)
            counts = increments.setdefault(key, {"fail_count": 0, "fail_ns": 0, f"fail_{reason}": 0})
            counts["fail_count"] += 1
            counts["fail_ns"] += max(0, now_us - record.accepted_us) * 1000
            counts[f"fail_{reason}"] += 1
    for key, counts in increments.items():
        await log.add_statistics(key, counts)
