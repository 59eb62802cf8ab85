"""Ends jobs whose deadline has passed and that no batcher ended: their model has no owner, or they run.

A caller that asks for such a job reads that it has expired, and that is made true first. Jobs no caller asks for are
looked for once a second, so that their webhooks are called. Owners are given a little time, as they know what a queue
has cost whom.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from charonia import keys
from charonia.calls.request_endings import EXPIRED, active_jobs, count_failures, end_jobs
from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import EventLog
from charonia.facts.jobs import JobRecord

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_OWNERS_TIME_US = 500_000
_MODELS_AT_ONCE = 200
_PAGE = 500


def overdue_in_s(record: JobRecord, now_us: int) -> float | None:
    """Seconds until the deadline of an active job, not above 0 once it has passed; None without one."""
    deadline_us = record.about.get("deadline_us")
    if record.state.terminal or type(deadline_us) is not int or not deadline_us:
        return None
    return (deadline_us - now_us) / 1e6


class OverdueJobs:
    """What one gateway does about them."""

    def __init__(self, log: EventLog, catalog: Catalog) -> None:
        self._log = log
        self._catalog = catalog
        self._first = 0
        self.expired = 0
        """Jobs this gateway ended so."""

    async def seen(self, record: JobRecord) -> JobRecord | None:
        """The job as it is: ended if its deadline has passed. None if it is gone since. Raises what the log raises."""
        left_s = overdue_in_s(record, wall_ns() // 1000)
        if left_s is None or left_s > 0:
            return record
        await self.end(record.model, [record])
        return await self._log.job(record.model, record.id)

    async def end(self, model: str, records: Sequence[JobRecord]) -> None:
        """End active jobs of a model that are past their deadline, unless another process was faster."""
        if records:
            ended = await end_jobs(self._log, model, records, EXPIRED)
            self.expired += len(ended)
            await count_failures(self._log, model, self._catalog.content_hashes(model), ended, "REJECTED")

    async def keep_looking(self) -> None:
        """Until cancelled; gateways that started together do not stay so."""
        while True:
            await asyncio.sleep(_LOOK_S * random.uniform(0.75, 1.25))
            try:
                await self.look()
            except CharoniaError:
                continue  # the log is away: at the next look
            except Exception:
                _log.exception("jobs past their deadline could not be looked for")

    async def look(self) -> int:
        """End what has been due for a while, of some models in turn; how many jobs."""
        before = self.expired
        models = await self._log.job_models()
        if len(models) > _MODELS_AT_ONCE:
            at = self._first % len(models)
            self._first = at + _MODELS_AT_ONCE
            models = (models[at:] + models[:at])[:_MODELS_AT_ONCE]
        until_us = wall_ns() // 1000 - _OWNERS_TIME_US
        due = await asyncio.gather(*[self._log.due(keys.job_deadlines(model), until_us, _PAGE) for model in models])
        for model, job_ids in zip(models, due, strict=True):
            if job_ids:
                await self._end_due(model, job_ids)
        return self.expired - before

    async def _end_due(self, model: str, job_ids: list[bytes]) -> None:
        await self.end(model, await active_jobs(self._log, model, job_ids))
        # those that ended are out already, unless their record is gone
        await self._log.drop_times(keys.job_deadlines(model), job_ids)
