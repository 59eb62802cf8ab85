"""Verifies the hash chain over a model's journal (`charonia.facts.seals`): each seal against the entries it covers, and
against the seal before it.

Pure. The first seal that is kept may have no entries any more: they were trimmed, and the chain begins with its link.
Of a journal that was never trimmed the first seal must be number 1. What was written after the last seal is counted,
not verified. Trimming goes on meanwhile, in whole seals from the oldest: a seal whose entries are not there counts as
trimmed only if the log's first seal then is that one or a later one, and no entry of it is left either.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from charonia import keys
from charonia.errors import InvalidRecord
from charonia.eventlog.port import START, Entry, JobLog
from charonia.facts.seals import Seal, SegmentDigest, in_order, origin, read_seal

_PAGE = 1000

OnProgress = Callable[[str, int], None]
"""Called with a model and how many of its entries were read."""


class Fault(StrEnum):
    """How a chain is broken."""

    ENTRIES_MISSING = "entries_missing"
    """Fewer entries than were sealed."""
    ENTRIES_ADDED = "entries_added"
    """More entries than were sealed."""
    ENTRIES_CHANGED = "entries_changed"
    """As many entries as were sealed, and others."""
    SEAL_UNLINKED = "seal_unlinked"
    """A seal does not continue the one before: one was changed, deleted or inserted."""
    SEAL_UNREADABLE = "seal_unreadable"
    """A record that is no seal, or a seal that a newer release has written."""
    HEAD_DIFFERS = "head_differs"
    """A seal is not the one that was recorded outside the log."""
    HEAD_LOST = "head_lost"
    """A seal that was recorded outside the log is later than all that the log has."""
    HEAD_TRIMMED = "head_trimmed"
    """All seals that were recorded outside the log are trimmed: nothing connects them with what is left."""


@dataclass(frozen=True, slots=True)
class Break:
    """The first broken place of a chain. `first` and `last` are ids of journal entries, the span of the broken seal."""

    fault: Fault
    seal: int
    first: str
    last: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Head:
    """A seal as it is recorded outside the log; `link` is its hash in hex, `entry` its id."""

    model: str
    seal: int
    entry: str
    link: str
    sealed_ms: int


class _Broken(Exception):
    def __init__(self, broken: Break) -> None:
        super().__init__(broken.fault)
        self.broken = broken


class ChainVerification:
    """One pass over one model's chain. `recorded` are its heads that were recorded outside the log, by number."""

    def __init__(
        self, log: JobLog, model: str, recorded: Mapping[int, Head], on_progress: OnProgress | None = None
    ) -> None:
        self._log = log
        self._model = model
        self._recorded = recorded
        self._on_progress = on_progress
        self._entries = _EntryPages(log, keys.journal(model))
        self._begin: Seal | None = None
        """The first seal of the chain as it is kept."""
        self._before: Seal | None = None
        self._first = ""
        self._seals = self._verified = self._compared = self._unsealed = 0
        self._unsealed_since = ""

    @property
    def head(self) -> Head | None:
        """The last verified seal, after `run`; None if there is none."""
        seal = self._before
        if seal is None:
            return None
        return Head(self._model, seal.number, seal.last.decode(), seal.link.hex(), seal.sealed_ms)

    async def run(self) -> dict[str, Any]:
        """Verify; returns the report. Raises what the log raises."""
        broken: Break | None = None
        try:
            async for entry in self._seal_entries():
                await self._verify(entry)
            self._compare_ends()
        except _Broken as error:
            broken = error.broken
        else:
            await self._count_unsealed()
        return self._report(broken)

    async def _seal_entries(self) -> AsyncIterator[Entry]:
        after = START
        while page := await self._log.range(keys.journal_seals(self._model), after, _PAGE):
            for entry in page:
                yield entry
            after = page[-1].id

    async def _verify(self, entry: Entry) -> None:
        seal = self._read(entry)
        number, previous = seal.number, seal.previous
        if self._before is not None:
            number, previous = self._before.number + 1, self._before.link
        elif seal.number == 1 or await self._log.journal_complete(self._model):  # nothing was trimmed
            number, previous = 1, origin(self._model)
        linked = (seal.number, seal.previous) == (number, previous)
        if not linked and self._before is not None and await self._trimmed_to() >= seal.number:
            self._begin, self._before, self._seals, self._verified, self._first = None, None, 0, 0, ""
            linked = True  # all that was read so far has been trimmed
        if not linked:
            expected = f"seal {number} after {previous.hex()}"
            raise self._broken(Fault.SEAL_UNLINKED, seal, expected, f"seal {seal.number} after {seal.previous.hex()}")
        segment = await self._entries.until(seal.last)
        self._seals += 1
        self._begin = self._begin or seal
        await self._compare(seal, segment)
        recorded = self._recorded.get(seal.number)
        if recorded is not None:
            self._compared += 1
            if recorded.link != seal.link.hex():
                raise self._broken(Fault.HEAD_DIFFERS, seal, recorded.link, seal.link.hex())
        self._before = seal
        if self._on_progress is not None:
            self._on_progress(self._model, self._verified)

    async def _compare(self, seal: Seal, segment: SegmentDigest) -> None:
        """Compare a seal with the entries in its place."""
        if segment.count == seal.count and segment.digest == seal.digest:
            self._first = self._first or seal.first.decode()
            self._verified += seal.count
            return
        if await self._trimmed_to() >= seal.number:  # before, of the first seal, or while this read
            self._begin, self._seals, self._verified, self._first = seal, 1, 0, ""
            return
        fault = Fault.ENTRIES_CHANGED
        if segment.count != seal.count:
            fault = Fault.ENTRIES_MISSING if segment.count < seal.count else Fault.ENTRIES_ADDED
        expected = f"{seal.count} entries from {seal.first.decode()} with the digest {seal.digest.hex()}"
        found = f"{segment.count} entries"
        if segment.count:
            found += f" from {segment.first.decode()} to {segment.last.decode()} with the digest {segment.digest.hex()}"
        raise self._broken(fault, seal, expected, found)

    async def _trimmed_to(self) -> int:
        """The number of the seal up to which the log says that the journal is trimmed by now; 0 if it is not."""
        if await self._log.journal_complete(self._model):
            return 0
        seals = await self._log.range(keys.journal_seals(self._model), START, 1)
        oldest = await self._log.range(keys.journal(self._model), START, 1)
        if not seals or (oldest and in_order(oldest[0].id) <= in_order(seals[0].id)):
            return 0
        return self._read(seals[0]).number

    def _compare_ends(self) -> None:
        """What was recorded outside the log and is not among the seals."""
        if not self._recorded:
            return
        begin, last = self._begin, self._before
        newest = self._recorded[max(self._recorded)]
        if last is None or newest.seal > last.number:
            found = f"{last.number} as the last one" if last is not None else "no seals"
            expected = f"seal {newest.seal}, {newest.link}"
            raise _Broken(Break(Fault.HEAD_LOST, newest.seal, "", newest.entry, expected, found))
        if begin is not None and newest.seal < begin.number:
            expected, found = f"seal {newest.seal}, {newest.link}", f"{begin.number} as the first one"
            raise _Broken(Break(Fault.HEAD_TRIMMED, newest.seal, "", newest.entry, expected, found))

    async def _count_unsealed(self) -> None:
        after = self._before.last if self._before is not None else START
        while page := await self._entries.after(after):
            self._unsealed_since = self._unsealed_since or page[0].id.decode()
            self._unsealed += len(page)
            after = page[-1].id

    def _read(self, entry: Entry) -> Seal:
        try:
            return read_seal(self._model, entry.id, entry.fields)
        except InvalidRecord as error:
            number = self._before.number + 1 if self._before is not None else 0
            last = entry.id.decode(errors="replace")
            raise _Broken(Break(Fault.SEAL_UNREADABLE, number, "", last, "a seal", str(error))) from None

    @staticmethod
    def _broken(fault: Fault, seal: Seal, expected: str, found: str) -> _Broken:
        return _Broken(Break(fault, seal.number, seal.first.decode(), seal.last.decode(), expected, found))

    def _report(self, broken: Break | None) -> dict[str, Any]:
        begin, last = self._begin, self._before
        return {
            "model": self._model,
            "intact": broken is None,
            "from": self._first,
            "to": last.last.decode() if last is not None and self._first else "",
            "sealed": self._verified,
            "unsealed": self._unsealed,
            "unsealed_since": self._unsealed_since,
            "seals": self._seals,
            "first_seal": begin.number if begin is not None else 0,
            "last_seal": last.number if last is not None else 0,
            "head": last.link.hex() if last is not None else "",
            "compared": self._compared,
            "broken": asdict(broken) | {"fault": broken.fault.value} if broken is not None else None,
        }


class _EntryPages:
    """Reads the journal once, in pages, up to one seal after the other."""

    def __init__(self, log: JobLog, stream: bytes) -> None:
        self._log = log
        self._stream = stream
        self._page: Sequence[Entry] = ()
        self._at = 0
        self._after = START

    async def until(self, last: bytes) -> SegmentDigest:
        """The next entries, those up to the id `last`."""
        segment, bound = SegmentDigest(), in_order(last)
        while True:
            if self._at == len(self._page):
                self._page, self._at = await self._log.range(self._stream, self._after, _PAGE), 0
                if not self._page:
                    return segment
            entry = self._page[self._at]
            if in_order(entry.id) > bound:
                return segment
            segment.add(entry.id, entry.fields)
            self._after = entry.id
            self._at += 1

    async def after(self, entry_id: bytes) -> Sequence[Entry]:
        """A page of entries after an id."""
        return await self._log.range(self._stream, entry_id, _PAGE)
