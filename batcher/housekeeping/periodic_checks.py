"""Schedules one batcher's periodic checks of all models it owns: batches, deadlines, old streams.

`model_checks`, `deadlock_watch` and `stream_trimming` do the checks; this module decides when. A failure for one model
does not stop the checks of others.

Jobs behind the window of a queue, which no scheduler has yet, end at their deadline here. The scheduler ends jobs
inside the window, and a waiting caller has a timer at its gateway. The log keeps the deadlines of active jobs sorted,
so only due ones are read; an owner that has read all entries asks nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from batcher.deadlock.deadlock_watch import DeadlockChecks
from batcher.entries.carriers import RETRY_S
from batcher.owner.demand import has_room
from batcher.owner.owned import OwnedModel
from batcher.scheduling.queues.ledger import DEADLINE_PASSED
from batcher.takeover import ownership
from charonia import keys
from charonia.calls.request_endings import EXPIRED, active_jobs, answer_gateways, count_failures, end_jobs, version_of
from charonia.catalog.catalog import Catalog
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, DeadlineExceeded
from charonia.eventlog.port import Streams
from charonia.facts.jobs import JobEnd, JobRecord
from charonia.tasks import Tasks, insist
from charonia.wire import pack_failure

from .departed_endpoints import DepartedEndpoints
from .model_checks import ModelChecks, verify
from .stream_trimming import ControlTrimming

_log = logging.getLogger(__name__)

_VERIFY_S = 1.0
_VERIFY_AGE_NS = 5_000_000_000
_TRIM_S = 300.0


class PeriodicChecks:
    """Runs the periodic checks of one batcher, whose process incarnation is `incarnation`.

    `owned` and `checks` have an entry for each model that the batcher owns; the caller adds and removes them.
    """

    def __init__(
        self,
        log: Streams,
        catalog: Catalog,
        incarnation: str,
        owned: Mapping[str, OwnedModel],
        checks: Mapping[str, ModelChecks],
        departed: DepartedEndpoints,
        deadlocks: DeadlockChecks,
    ) -> None:
        self._catalog = catalog
        self._incarnation = incarnation
        self._owned = owned
        self._checks = checks
        self._departed = departed
        self._deadlocks = deadlocks
        self._trimming = ControlTrimming(log)
        self._trim_at_s = asyncio.get_running_loop().time() + _TRIM_S
        self._forgotten = False
        """The log was unreachable: it may have lost accepted writes."""
        self._behind = asyncio.Event()
        self._tasks = Tasks()

    def look_behind(self) -> None:
        """Reading of some stream may pause for a while."""
        self._behind.set()

    def start(self) -> None:
        self._tasks.spawn(self._recall(), "those that left unheard")
        self._tasks.spawn(self._verify(), "verification of batches")
        self._tasks.spawn(self._expire(), "deadlines behind windows")

    async def close(self) -> None:
        await self._tasks.close()

    def log_came_back(self) -> None:
        """Check all batches, however young."""
        self._forgotten = True

    async def _recall(self) -> None:
        complaint = "those that left unheard cannot be read"
        await insist(self._departed.recall, complaint, first_s=RETRY_S, last_s=RETRY_S)

    async def _verify(self) -> None:
        """Check batches that no process reports any more: old ones periodically, all of them after the log was
        unreachable.
        """
        while True:
            await asyncio.sleep(_VERIFY_S)
            min_age_ns = 0 if self._forgotten else _VERIFY_AGE_NS
            self._forgotten = False
            for owned in list(self._owned.values()):
                await self._looked(partial(self._verify_one, owned, min_age_ns))
            for checks in list(self._checks.values()):
                await self._looked(checks.look)
            await self._looked(self._deadlocks.look)
            await self._looked(self._trim)

    async def _looked(self, look: Callable[[], Awaitable[None]]) -> None:
        try:
            await look()
        except CharoniaError:
            self._forgotten = True
        except Exception:
            _log.exception("something could not be looked after")

    async def _verify_one(self, owned: OwnedModel, min_age_ns: int) -> None:
        await verify(owned, min_age_ns)
        await owned.look_after()
        if owned.demand.has_on_demand_versions:
            owned.demand.tend(owned.scheduler.queued_by_version(), partial(has_room, self._catalog))

    async def _expire(self) -> None:
        """End jobs at their deadline that do not fit into a window."""
        while True:
            await self._behind.wait()
            await asyncio.sleep(LOOK_S)
            behind = [owned for owned in self._owned.values() if not owned.windows.all_read]
            if not behind:
                self._behind.clear()
            for owned in behind:
                try:
                    await expire_behind_window(owned)
                except CharoniaError:
                    pass  # checked again soon
                except Exception:
                    _log.exception("deadlines of '%s' could not be looked at", owned.model)

    async def _trim(self) -> None:
        """One batcher is enough to shorten the control stream; several would only repeat the work."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._trim_at_s:
            return
        self._trim_at_s = now_s + _TRIM_S
        if min(ownership.live_batchers(self._catalog), default="") == self._incarnation:
            await self._trimming.look()
            await self._departed.sweep_remembered()


LOOK_S = 0.1
_PAGE = 500


async def expire_behind_window(owned: OwnedModel) -> int:
    """End the jobs that are due and were not read yet; returns how many. Raises what the log raises."""
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
        # ended jobs are removed already, unless their record is gone
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
    # its gateway's timer may have been first
    await answer_gateways(owned.log, [(job.about.get("endpoint", ""), ends[job.id].result) for job in expired])
    await count_failures(owned.log, owned.model, owned.content_hashes(), expired, "REJECTED")
    return len(expired)
