"""Trims the streams that are not trimmed elsewhere: control facts no reader needs, and dead letters.

Both are read whole, so this runs seldom. `compaction` decides which control facts may go.
"""

from __future__ import annotations

import logging

from charonia import keys
from charonia.eventlog.port import START, Streams
from charonia.facts.events import Fact, facts_of

from .compaction import superseded

_log = logging.getLogger(__name__)

_PAGE = 500


class ControlTrimming:
    """Deletes control facts that the previous check found needless as well: followers have read them by then."""

    def __init__(self, log: Streams) -> None:
        self._log = log
        self._needless: set[bytes] = set()

    async def look(self) -> int:
        """How many entries it deleted. Raises what the log raises."""
        ids: list[bytes] = []
        facts: list[Fact] = []
        after = START
        while entries := await self._log.range(keys.CONTROL, after, _PAGE):
            after = entries[-1].id
            for entry in entries:
                found = facts_of(entry)
                if len(found) == 1:  # each is written by one writer; kinds newer than this release are kept
                    ids.append(bytes(entry.id))
                    facts.append(found[0])
        needless = {ids[at] for at in superseded(facts)}
        old = sorted(needless & self._needless)
        self._needless = needless - set(old)
        for at in range(0, len(old), _PAGE):
            await self._log.delete_entries(keys.CONTROL, old[at : at + _PAGE])
        return len(old)


async def trim_dead_letters(log: Streams, model: str, limit_bytes: int) -> int:
    """Delete a model's oldest letters while they exceed this many bytes; returns how many. The newest stays."""
    sizes: list[tuple[bytes, int]] = []
    after = START
    while entries := await log.range(keys.dead_letters(model), after, _PAGE):
        after = entries[-1].id
        sizes += [(bytes(entry.id), sum(len(field) for field in entry.fields)) for entry in entries]
    surplus = sum(size for _, size in sizes) - limit_bytes
    dropped: list[bytes] = []
    for entry_id, size in sizes[:-1]:
        if surplus <= 0:
            break
        surplus -= size
        dropped.append(entry_id)
    if dropped:
        _log.warning("%d dead letters of model '%s' are dropped: it has too many", len(dropped), model)
        await log.delete_entries(keys.dead_letters(model), dropped)
    return len(dropped)
