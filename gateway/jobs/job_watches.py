"""Watches jobs for callers that wait for them, and ends jobs whose deadline has passed.

There is one watch per job, for any number of callers. Its source is the job's record, read when the model's journal
reports a change, and otherwise slowly: the journal is followed from "now" and does not carry every event. Without a
journal the record is polled.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from charonia import keys
from charonia.calls.request_endings import EXPIRED, active_jobs, count_failures, end_jobs
from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InternalError, InvalidRecord, ResourceExhausted
from charonia.eventlog.port import Entry, EventLog, JobLog
from charonia.facts.jobs import JobRecord
from charonia.facts.journal import read_facts
from charonia.tasks import periodic
from charonia.tensors import Buffer
from gateway.requests.delivery import ANYONE, Caller

_log = logging.getLogger(__name__)

MAX_WAITING = 10_000
MAX_WAITING_OF_TENANT = 1000

_LATEST = b"$"
_AFTER_WAKING_S = (0.02, 0.1, 0.5)
"""Pauses before the first reads: changes before the follower's start do not wake it."""
_SLOWLY_S = 1.0
_POLL_S = 0.1
_VISIBLE_EVENTS = frozenset(("batched", "ended"))
_CHECK_INTERVAL_S = 1.0
_OWNERS_TIME_US = 500_000
_MODELS_AT_ONCE = 200
_PAGE = 500


class JobWatch:
    """One watched job. `record` is the one read last, None if the log does not know the job."""

    def __init__(self, model: str, job_id: bytes) -> None:
        self.model = model
        self.job_id = job_id
        self.record: JobRecord | None = None
        self.readers = 0
        self.woken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._version = 0
        self._error: CharoniaError | None = None
        self._changed = asyncio.Event()
        self.followers: set[asyncio.Event] = set()
        """Set whenever the record changes."""

    def check(self) -> None:
        """Raise the error of the last read, if it failed."""
        if self._error is not None:
            raise self._error.again()

    @property
    def gone(self) -> bool:
        """Whether the log does not know the job."""
        return self._version > 0 and self._error is None and self.record is None

    async def wait(self, seen: int) -> int:
        """Wait for a version after `seen` (0 at first); returns the new version.

        Raises the error of the last read, if it failed.
        """
        while self._version <= seen:
            await self._changed.wait()
        self.check()
        return self._version

    def read(self, record: JobRecord | None) -> None:
        known = self.record
        fresh = self._version == 0 or self._error is not None
        if (
            fresh
            or record is None
            or known is None
            or (known.state, len(known.events)) != (record.state, len(record.events))
        ):
            self.record = record
            self._notify(None)

    def failed(self, error: CharoniaError) -> None:
        self._notify(error)

    def _notify(self, error: CharoniaError | None) -> None:
        self._error = error
        self._version += 1
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()
        for follower in self.followers:
            follower.set()

    @property
    def over(self) -> bool:
        return self._version > 0 and self._error is None and (self.record is None or self.record.state.terminal)


class JobWatches:
    """The watches of one gateway. `journal`: jobs are written to the journal."""

    def __init__(self, log: JobLog, overdue: OverdueJobs, *, journal: bool) -> None:
        self._log = log
        self._overdue = overdue
        self._journal = journal
        self._reader = log.reader() if journal else None
        self._reading = False
        self._watches: dict[bytes, dict[bytes, JobWatch]] = {}
        self._waiting: dict[str, int] = {}
        self._all_waiting = 0

    async def close(self) -> None:
        tasks = [w.task for watches in self._watches.values() for w in watches.values() if w.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._reader is not None and self._reading:
            await self._reader.close()

    def check_capacity(self, caller: Caller) -> None:
        """Raises `ResourceExhausted` if a caller may not watch another job."""
        waiting = self._waiting.get(caller.tenant, 0)
        if self._all_waiting >= MAX_WAITING or (caller.scoped and waiting >= MAX_WAITING_OF_TENANT):
            raise ResourceExhausted("too many callers wait for jobs here at the moment; ask again later")

    @asynccontextmanager
    async def watching(self, model: str, job_id: bytes, caller: Caller = ANYONE) -> AsyncIterator[JobWatch]:
        """Watch a job for the duration of the block. Raises `ResourceExhausted` if too many callers do."""
        self.check_capacity(caller)
        self._waiting[caller.tenant] = self._waiting.get(caller.tenant, 0) + 1
        self._all_waiting += 1
        try:
            async with self._watching(model, job_id) as watch:
                yield watch
        finally:
            self._all_waiting -= 1
            self._waiting[caller.tenant] -= 1
            if not self._waiting[caller.tenant]:
                del self._waiting[caller.tenant]

    @asynccontextmanager
    async def _watching(self, model: str, job_id: bytes) -> AsyncIterator[JobWatch]:
        stream = keys.journal(model)
        watches = self._watches.get(stream)
        if watches is None:
            watches = self._watches[stream] = {}
            self._follow(stream)
        watch = watches.get(job_id)
        if watch is None:
            watch = watches[job_id] = JobWatch(model, job_id)
            watch.task = asyncio.get_running_loop().create_task(self._keep_reading(watch))
        watch.readers += 1
        try:
            yield watch
        finally:
            watch.readers -= 1
            if not watch.readers:
                if watch.task is not None:
                    watch.task.cancel()
                watches.pop(job_id, None)
                if not watches:
                    self._watches.pop(stream, None)
                    if self._reader is not None:
                        self._reader.remove(stream)

    def _follow(self, stream: bytes) -> None:
        if self._reader is None:
            return
        if not self._reading:
            self._reading = True
            self._reader.start(self._on_journal)
        self._reader.add(stream, _LATEST)

    def _on_journal(self, stream: bytes, entries: list[Entry]) -> None:
        watches = self._watches.get(stream)
        if not watches:
            return
        for entry in entries:
            for job_id in _changed_jobs(entry.fields):
                watch = watches.get(job_id)
                if watch is not None:
                    watch.woken.set()

    async def _keep_reading(self, watch: JobWatch) -> None:
        pauses = iter(_AFTER_WAKING_S if self._journal else ())
        while True:
            watch.woken.clear()
            try:
                record = await self._log.job(watch.model, watch.job_id)
                watch.read(await self._overdue.seen(record) if record is not None else None)
            except CharoniaError as error:
                watch.failed(error)
            except Exception as error:
                watch.failed(InternalError(f"the job's record cannot be read: {error}"))
            if watch.over:
                return
            pause_s = next(pauses, _SLOWLY_S if self._journal else _POLL_S)
            left_s = overdue_in_s(watch.record, wall_ns() // 1000) if watch.record is not None else None
            if left_s is not None and left_s > 0:
                pause_s = min(pause_s, left_s)  # it ends on time even if its model has no owner
            try:
                async with asyncio.timeout(pause_s):
                    await watch.woken.wait()
            except TimeoutError:
                continue


def _changed_jobs(fields: list[Buffer]) -> list[bytes]:
    """The ids of the jobs in a journal entry whose records have changed; none for an entry of another form."""
    try:
        return [request_id for fact in read_facts(fields) if fact.kind in _VISIBLE_EVENTS for request_id in fact.ids]
    except InvalidRecord:
        return []


def overdue_in_s(record: JobRecord, now_us: int) -> float | None:
    """Seconds until the deadline of an active job, not above 0 once it has passed; None without a deadline."""
    deadline_us = record.about.get("deadline_us")
    if record.state.terminal or type(deadline_us) is not int or not deadline_us:
        return None
    return (deadline_us - now_us) / 1e6


class OverdueJobs:
    """Ends jobs whose deadline has passed and that no batcher ended: their model has no owner, or they run.

    A job that a caller asks for is ended first, then reported as expired. The others are searched once a second, so
    that their webhooks are called. Owners get some time to end them, because they count what expired in a queue.
    """

    def __init__(self, log: EventLog, catalog: Catalog) -> None:
        self._log = log
        self._catalog = catalog
        self._first = 0
        self.expired = 0
        """Number of jobs that this gateway has ended."""

    async def seen(self, record: JobRecord) -> JobRecord | None:
        """The job, ended if its deadline has passed; None if the log forgot it. Raises what the log raises."""
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

    async def keep_checking(self) -> None:
        """Check until cancelled, at intervals that vary, so that gateways do not check at the same time."""
        complaint = "jobs past their deadline could not be looked for"
        await periodic(self.check, lambda: _CHECK_INTERVAL_S * random.uniform(0.75, 1.25), complaint)

    async def check(self) -> int:
        """End jobs that were due for a while, of some models in turn; returns their number."""
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
        # those that ended are removed already, unless their record is gone
        await self._log.drop_times(keys.job_deadlines(model), job_ids)
