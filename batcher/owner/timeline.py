"""Writes into the records of jobs that a batch came back without their outcome: they wait again.

What begins and ends a job is written by scripts with the deed; this is only for who looks, so it is tried once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from batcher.entries.carriers import carrier_of
from batcher.scheduling.observations import RequestQueued
from charonia.errors import CharoniaError
from charonia.eventlog.port import Jobs


def waiting_jobs(requests: Iterable[RequestQueued]) -> list[bytes]:
    """The ids of the jobs among requests of a batch that are not settled."""
    carriers = [carrier_of(request) for request in requests]
    return [carrier.record.id for carrier in carriers if carrier.record.is_job and not carrier.settled]


async def tell_returned(log: Jobs, model: str, job_id: bytes, executor: str, reason: str) -> None:
    """Add the event to a job. Started before the next attempt is, it is written before that."""
    with contextlib.suppress(CharoniaError):
        await log.add_job_event(model, job_id, "returned", {"executor": executor, "reason": reason})
