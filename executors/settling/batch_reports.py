"""Reports on batches besides their results: to the owners that dispatched them, and starts to journals.

Nearly every batch ends within milliseconds, and a separate write for each would cost more than it tells. Until the
start is recorded, the attempt is known from the `batched` entry that the owner wrote before it dispatched the batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import Fields, Streams
from charonia.tasks import Tasks, insist
from charonia.wire import BatchHeader
from executors.running.submitted_batch import SubmittedBatch

from .settlement import start_entry

_log = logging.getLogger(__name__)

_DELAY_S = 0.01


class OwnerReports:
    """Sends one executor's reports to owners through the log, or over `link` to the batcher in this process."""

    def __init__(self, log: Streams, link: LocalLink | None) -> None:
        self._log = log
        self._link = link

    async def send(self, header: BatchHeader, fields: Fields) -> None:
        """Report facts, given as fields of an entry, repeating until the log takes them."""
        if header.report_to:
            await insist(lambda: self._log.append(header.report_to, fields), "the report of a batch cannot be written")
        else:
            self.hand(header, fields)

    def hand(self, header: BatchHeader, fields: Fields) -> None:
        """Report facts at once to an owner in this process. Does nothing for a forged header that names no owner."""
        if self._link is not None:
            self._link.reports[header.model].hand(fields)


class JournalledStarts:
    """Reports the starts of one executor's batches that have journalled requests: long ones separately, short ones
    together with their end. Used in the event loop only.
    """

    def __init__(self, log: Streams, executor: str) -> None:
        self._log = log
        self._executor = executor
        self._watched: dict[SubmittedBatch, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks()

    def watch(self, batch: SubmittedBatch) -> None:
        """Report the start of a batch 10 to 20 ms after it starts, unless it has ended by then."""
        batch.start_unreported = True
        self._watched[batch] = None
        self._arm()

    def forget(self, batch: SubmittedBatch) -> None:
        """Stop watching a batch that has ended or was returned."""
        self._watched.pop(batch, None)

    def reported_with(self, batch: SubmittedBatch, ending: Collection[int]) -> tuple[str, str] | None:
        """Return (executor, batch id) to write with the end of these requests if that reports every start, else None.

        `ending` are the indices of the requests that end.
        """
        if not batch.start_unreported or batch.header is None:
            return None
        began = _journalled(batch)
        if not began or began != [index for index in sorted(ending) if batch.records[index].journalled]:
            return None
        batch.start_unreported = False
        return self._executor, batch.header.batch_id

    async def report(self, batch: SubmittedBatch) -> None:
        """Report the start of a batch now, once. Skipped when the log is unavailable: later would be after the end."""
        if not batch.start_unreported or batch.header is None:
            return
        batch.start_unreported = False
        indices = _journalled(batch)
        if not indices:
            return
        try:
            entry = start_entry(self._executor, batch.header, batch.records, indices)
            await self._log.append(keys.journal(batch.header.model), entry)
        except LogUnavailable as error:
            _log.warning("the beginning of a batch is not in its journal: %s", error)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._watched.clear()
        self._tasks.cancel()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._report_begun)

    def _report_begun(self) -> None:
        self._timer = None
        for batch in [batch for batch in self._watched if batch.planned]:
            del self._watched[batch]
            self._tasks.spawn(self.report(batch))
        if self._watched:
            self._arm()


def _journalled(batch: SubmittedBatch) -> list[int]:
    """The indices of a batch's journalled requests that have started, in order."""
    return [index for index, _ in batch.planned if batch.records[index].journalled]
