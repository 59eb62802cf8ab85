"""Reports batches that wait long for resources, so that batchers can detect cycles of calls between models.

Used only with rate limits (Q1), and only while models of this executor have open calls: else no holder of a resource
waits for anything. The report is a note in the log (`charonia.facts.resource_waits`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import Notes
from charonia.facts.resource_waits import TTL_S, TurnsNote
from executors.running.loaded_version import LoadedVersion
from executors.running.rate_limiter import RateLimiter
from executors.running.submitted_batch import SubmittedBatch

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0


class WaitReports:
    """Writes one executor's reports. `open_calls` returns how many calls its models wait for."""

    def __init__(
        self,
        log: Notes,
        executor: str,
        limiter: RateLimiter,
        loaded_versions: Callable[[], Iterable[LoadedVersion]],
        open_calls: Callable[[], int],
    ) -> None:
        self._log = log
        self._key = keys.turns(executor)
        self._limiter = limiter
        self._loaded_versions = loaded_versions
        self._open_calls = open_calls
        self._number = 0
        self._waited: set[SubmittedBatch] = set()

    async def run(self) -> None:
        """Check periodically until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            try:
                await self.check()
            except CharoniaError as error:
                _log.warning("a note of turns was not written: %s", error)
            except Exception:
                _log.exception("batches that wait for their turn could not be looked at")

    async def check(self) -> None:
        """Write a report when a batch has waited since the last check. Raises what the log raises."""
        pools = [(one, one.pool.limited_queue) for one in self._loaded_versions() if one.pool.limited_queue is not None]
        waiting = {batch for _, queue in pools if queue is not None for batch in queue.waiting}
        before, self._waited = self._waited, waiting
        if waiting.isdisjoint(before) or not self._open_calls():
            return
        snapshots = [queue.snapshot(one.model, one.version) for one, queue in pools if queue is not None]
        self._number += 1
        note = TurnsNote(
            self._number,
            self._limiter.counts(),
            tuple([turn for queue, _ in snapshots for turn in queue]),
            tuple([batch for _, batches in snapshots for batch in batches]),
        )
        await self._log.put_note(self._key, note.pack(), TTL_S)
