"""Settles requests from outside before they are done: cancels and deadlines (ADR 0004).

Whoever settles first wins, so the log decides at once; the fact that goes with it only saves the owner and its
executors work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from charonia import keys
from charonia.eventlog.port import EventLog, Reply
from charonia.events import FIELD_FACT, RequestsEnded, pack_fact
from charonia.jobs import OUTCOME_CODES, JobEnd, JobState

ANY_ATTEMPT = 2**31 - 1
"""Larger than every attempt: an end from outside is fenced by nothing but an earlier end."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How requests end: cancelled or expired, with the words their callers read. `by` is caller, disconnect, ..."""

    state: JobState
    error: str
    by: str


async def end_requests(
    log: EventLog,
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
