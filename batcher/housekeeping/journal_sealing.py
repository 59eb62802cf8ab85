"""Seals an owned model's journal from time to time (`charonia.facts.seals`, ADR 0061).

Nothing of it is on the path of a request: the entries since the last seal are read, and one seal is written for each
page of them. `model_checks` calls it, and trims only what is sealed.
"""

from __future__ import annotations

import logging

from charonia import keys
from charonia.clock import monotonic_ns, wall_ns
from charonia.errors import InvalidRecord, LogRefused
from charonia.eventlog.port import START, JobLog
from charonia.facts.seals import Seal, SegmentDigest, make_seal, read_seal

_log = logging.getLogger(__name__)

MOST_OF_SEAL = 500
"""Entries of a seal, unless seals were deleted: a page of the log, digested without a pause in about a millisecond. A
seal is trimmed as a whole."""
_MOST_PAGES = 40
"""Of one call. The rest of a long journal, as one from before there were seals, is the next call's."""


class JournalSealing:
    """The sealer of one model. Each owner has one; a stalled former owner's seals are refused by the log."""

    def __init__(self, log: JobLog, model: str) -> None:
        self._log = log
        self._model = model
        self._last: Seal | None = None
        self._known = False
        self._pages = 1
        """Of the next seal."""
        self.refused = False
        """The log allows no seals, so none are waited for."""
        self.sealed_entries = 0
        """Under this owner."""
        self.failures = 0
        """Seals that the log refused, or that could not be made; after a refusal for good, one whenever one is due."""
        self.complete_ns = monotonic_ns()
        """When all that was written had a seal; before that was ever so, when this owner began."""

    async def seal(self) -> bool:
        """Seal what was written since the last seal, or the oldest part of it; returns whether some is left. Raises
        what the log raises, but for a refusal for good.
        """
        if self.refused:
            self.failures += 1
            return False
        try:
            return await self._seal()
        except LogRefused as error:
            self.failures += 1
            if error.passes:
                raise
            self.refused = True
            _log.warning("the journal of model '%s' is not sealed: %s", self._model, error)
        except InvalidRecord as error:
            self.failures += 1
            self.refused = True
            _log.error("the journal of model '%s' is not sealed: its last seal is none: %s", self._model, error)
        return False

    async def _seal(self) -> bool:
        if not self._known:
            await self._recall()
        for _ in range(_MOST_PAGES):
            before = self._last
            after = before.last if before is not None else START
            segment, is_left = await self._read(after)
            if not segment.count:
                self.complete_ns = monotonic_ns()
                return False
            seal, packed = make_seal(self._model, before, segment, wall_ns() // 1_000_000)
            if not await self._log.seal_journal(self._model, after, seal.last, packed):
                await self._recall()
                if self._last != before:  # another owner has sealed, or a restarted log has lost the last seal
                    return True
                # later seals were deleted by hand, and a stream takes no id up to its last one again: take in more
                if self._pages == 1:
                    _log.warning("the last seals of the journal of model '%s' were deleted", self._model)
                self._pages *= 2
                return False
            self._last, self._pages = seal, 1
            self.sealed_entries += segment.count
            if not is_left:
                self.complete_ns = monotonic_ns()
                return False
        return True

    async def _read(self, after: bytes) -> tuple[SegmentDigest, bool]:
        """The entries of the next seal, and whether the journal may have more."""
        segment = SegmentDigest()
        for _ in range(self._pages):
            entries = await self._log.range(keys.journal(self._model), after, MOST_OF_SEAL)
            for entry in entries:
                segment.add(entry.id, entry.fields)
            if len(entries) < MOST_OF_SEAL:
                return segment, False
            after = entries[-1].id
        return segment, True

    async def _recall(self) -> None:
        """Read the last seal. Raises `InvalidRecord`."""
        entry = await self._log.last_seal(self._model)
        found = read_seal(self._model, entry.id, entry.fields) if entry is not None else None
        expected = self._last
        if expected is not None and (found is None or found.number < expected.number):
            have = found.number if found is not None else 0
            text = "the log has lost seals of the journal of model '%s': the last one is %d, not %d"
            _log.warning(text, self._model, have, expected.number)
        self._last, self._known = found, True
