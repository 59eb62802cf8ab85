"""Asks executors to write their counts of waves now, so that statistics include every answer that a caller has.

By themselves executors write the counts when they delete answered waves, up to 10 ms later, and what tenants have used
once a second.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import Entry, Streams
from charonia.facts.events import FIELD_FACT, StatisticsWanted, StatisticsWritten, facts_of, pack_fact

_PATIENCE_S = 0.5
"""An executor that is lost or stalled does not answer: its last written counts are used."""


class WaveStatistics:
    """Asks executors for one gateway; pass it the facts of its reply stream with `on_facts`."""

    def __init__(self, log: Streams, endpoint: str) -> None:
        self._log = log
        self._endpoint = endpoint
        self._waiting: dict[str, tuple[set[str], asyncio.Future[None]]] = {}

    async def written(self, executors: Iterable[str]) -> None:
        """Returns when these executors have written their counts, or do not answer in time."""
        waiting = set(executors)
        if not waiting:
            return
        token = secrets.token_hex(8)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (waiting, done)
        fact = [FIELD_FACT, pack_fact(StatisticsWanted(self._endpoint, token))]
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.gather(*(self._log.append(keys.batches(executor), fact) for executor in set(waiting)))
                await done
        except (TimeoutError, CharoniaError):
            pass
        finally:
            del self._waiting[token]

    def on_facts(self, entry: Entry) -> None:
        """Handle facts in the reply stream."""
        for fact in facts_of(entry):
            if isinstance(fact, StatisticsWritten) and fact.token in self._waiting:
                waiting, done = self._waiting[fact.token]
                waiting.discard(fact.executor)
                if not waiting and not done.done():
                    done.set_result(None)
