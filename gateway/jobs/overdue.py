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
from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InternalError
from charonia.eventlog.port import EventLog
from charonia.facts.jobs import JobRecord
from gateway.dataplane.deadlines import EXPIRED
from gateway.dataplane.request_endings import count_failures, end_requests

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
        for unjournalled in (False, True):
            some = [record for record in records if bool(record.about.get("unjournalled")) == unjournalled]
            if not some:
                continue
            ids = [record.id for record in some]
            won = await end_requests(self._log, model, ids, EXPIRED, are_jobs=True, journalled=not unjournalled)
            ended = [record for record, wins in zip(some, won, strict=True) if wins]
            self.expired += len(ended)
            await count_failures(self._log, self._catalog, model, ended, "REJECTED")

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
        found = await asyncio.gather(*[self._readable(model, job_id) for job_id in job_ids])
        await self.end(model, [record for record in found if record is not None and not record.state.terminal])
        # those that ended are out already, unless their record is gone
        await self._log.drop_times(keys.job_deadlines(model), job_ids)

    async def _readable(self, model: str, job_id: bytes) -> JobRecord | None:
        try:
            return await self._log.job(model, job_id)
        except InternalError as error:
            _log.error("job %s of model '%s' does not expire: %s", job_id.hex(), model, error)
            return None
