"""Tells batchers of batches that wait for resources for long, where a circle of calls may be the reason.

Only where rates are limited (Q1), and only while models of this executor have calls open: else nothing that holds a
resource here waits for anybody. What an executor tells is a note in the log (`charonia.facts.resource_waits`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import Notes
from charonia.facts.resource_waits import TTL_S, TurnsNote
from executors.running.incarnation import Incarnation
from executors.running.job import Job
from executors.running.rate_limiter import RateLimiter

_log = logging.getLogger(__name__)

_LOOK_S = 1.0


class TurnNotes:
    """Of one executor; `open_calls` is how many calls its models wait for."""

    def __init__(
        self,
        log: Notes,
        executor: str,
        limiter: RateLimiter,
        incarnations: Callable[[], Iterable[Incarnation]],
        open_calls: Callable[[], int],
    ) -> None:
        self._log = log
        self._key = keys.turns(executor)
        self._limiter = limiter
        self._incarnations = incarnations
        self._open_calls = open_calls
        self._number = 0
        self._waited: set[Job] = set()

    async def run(self) -> None:
        """Look now and then, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except CharoniaError as error:
                _log.warning("a note of turns was not written: %s", error)
            except Exception:
                _log.exception("batches that wait for their turn could not be looked at")

    async def look(self) -> None:
        """Tell of who waits for what, if somebody has waited since the last look. Raises what the log raises."""
        pools = [(one, one.pool.turns) for one in self._incarnations() if one.pool.turns is not None]
        waiting = {job for _, turns in pools if turns is not None for job in turns.waiting}
        before, self._waited = self._waited, waiting
        if waiting.isdisjoint(before) or not self._open_calls():
            return
        told = [turns.told(one.model, one.version) for one, turns in pools if turns is not None]
        self._number += 1
        note = TurnsNote(
            self._number,
            self._limiter.counts(),
            tuple([turn for turns, _ in told for turn in turns]),
            tuple([batch for _, batches in told for batch in batches]),
        )
        await self._log.put_note(self._key, note.pack(), TTL_S)
