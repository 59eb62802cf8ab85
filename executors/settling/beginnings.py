"""Tells journals that batches have begun: those that last on their own, the others along with their end.

Nearly every batch ends within milliseconds, and each write costs the log more than what it says. Until a batch is told
of, its attempt is known from `batched`, which the owner had written before the batch was given out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.port import Streams
from executors.running.job import Job

from .settlement import started

_log = logging.getLogger(__name__)

_SOON_S = 0.01


class Beginnings:
    """The batches of one executor of which some requests are journalled. Called in the event loop alone."""

    def __init__(self, log: Streams, executor: str) -> None:
        self._log = log
        self._executor = executor
        self._watched: dict[Job, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, job: Job) -> None:
        """Tell of a batch that is about to begin, 10 to 20 ms after it has, unless it has ended by then."""
        job.untold = True
        self._watched[job] = None
        self._arm()

    def forget(self, job: Job) -> None:
        """It is over, or it was given back: nobody is to be told by the clock."""
        self._watched.pop(job, None)

    def told_with(self, job: Job, ending: Collection[int]) -> tuple[str, str] | None:
        """Who ran these requests in which batch, when their end says for all who began that they did; else None."""
        if not job.untold or job.header is None:
            return None
        began = _journalled(job)
        if not began or began != [index for index in sorted(ending) if job.records[index].journalled]:
            return None
        job.untold = False
        return self._executor, job.header.batch_id

    async def tell(self, job: Job) -> None:
        """Tell of a batch now, unless that was done. A log that is away is not told: later would be after the end."""
        if not job.untold or job.header is None:
            return
        job.untold = False
        indices = _journalled(job)
        if not indices:
            return
        try:
            entry = started(self._executor, job.header, job.records, indices)
            await self._log.append(keys.journal(job.header.model), entry)
        except LogUnavailable as error:
            _log.warning("the beginning of a batch is not in its journal: %s", error)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._watched.clear()
        for task in self._tasks:
            task.cancel()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SOON_S, self._look)

    def _look(self) -> None:
        self._timer = None
        for job in [job for job in self._watched if job.planned]:
            del self._watched[job]
            task = asyncio.get_running_loop().create_task(self.tell(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._watched:
            self._arm()


def _journalled(job: Job) -> list[int]:
    """The journalled requests of a batch that began, by their index, in order."""
    return [index for index, _ in job.planned if job.records[index].journalled]
