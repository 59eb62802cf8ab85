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
from charonia.eventlog.port import EventLog
from executors.running.submitted_batch import SubmittedBatch

from .settlement import started

_log = logging.getLogger(__name__)

_SOON_S = 0.01


class JournalledStarts:
    """The batches of one executor of which some requests are journalled. Called in the event loop alone."""

    def __init__(self, log: EventLog, executor: str) -> None:
        self._log = log
        self._executor = executor
        self._watched: dict[SubmittedBatch, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, batch: SubmittedBatch) -> None:
        """Tell of a batch that is about to begin, 10 to 20 ms after it has, unless it has ended by then."""
        batch.start_unreported = True
        self._watched[batch] = None
        self._arm()

    def forget(self, batch: SubmittedBatch) -> None:
        """It is over, or it was given back: nobody is to be told by the clock."""
        self._watched.pop(batch, None)

    def reported_with(self, batch: SubmittedBatch, ending: Collection[int]) -> tuple[str, str] | None:
        """Who ran these requests in which batch, when their end says for all who began that they did; else None."""
        if not batch.start_unreported or batch.header is None:
            return None
        began = _journalled(batch)
        if not began or began != [index for index in sorted(ending) if batch.records[index].journalled]:
            return None
        batch.start_unreported = False
        return self._executor, batch.header.batch_id

    async def report(self, batch: SubmittedBatch) -> None:
        """Tell of a batch now, unless that was done. A log that is away is not told: later would be after the end."""
        if not batch.start_unreported or batch.header is None:
            return
        batch.start_unreported = False
        indices = _journalled(batch)
        if not indices:
            return
        try:
            entry = started(self._executor, batch.header, batch.records, indices)
            await self._log.append(keys.journal(batch.header.model), entry)
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
            self._timer = asyncio.get_running_loop().call_later(_SOON_S, self._report_begun)

    def _report_begun(self) -> None:
        self._timer = None
        for batch in [batch for batch in self._watched if batch.planned]:
            del self._watched[batch]
            task = asyncio.get_running_loop().create_task(self.report(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._watched:
            self._arm()


def _journalled(batch: SubmittedBatch) -> list[int]:
    """The journalled requests of a batch that began, by their index, in order."""
    return [index for index, _ in batch.planned if batch.records[index].journalled]
