"""Reads of a model's journal what a request's story needs, within a bound: busy models write thousands a second.

The log reads forwards alone, so what lies before a time is read in windows, the nearest first.
"""

from __future__ import annotations

from charonia import keys
from charonia.errors import InvalidRecord
from charonia.eventlog.port import Streams
from charonia.facts.journal import JournalFact, read_facts

MOST_ENTRIES = 20_000
_PAGE = 1000
_LAST_OF_MS = 2**64 - 1
_BEFORE_S = (1, 5, 20, 60)
"""Where windows before an acceptance begin, for the requests that were before it."""
_BACK_S = (0.1, 0.5, 2, 10, 60, 600, 3_600, 21_600, 86_400)
"""Where windows before now begin, in which an acceptance is looked for. Each is read forwards: of a first one of ten
seconds a busy model's newest entries, which are asked for most, would be beyond the bound."""
_AFTER_END_US = 1_000_000
_CLOCKS_US = 50_000
"""How far the clock of a process that accepts may be before the log's."""

Facts = list[tuple[int, JournalFact]]
"""Facts in the order of the journal, each with its time in microseconds."""


def entry_us(entry_id: bytes) -> int:
    """The time of an entry: its id begins with milliseconds."""
    return int(entry_id.partition(b"-")[0]) * 1000


class JournalReader:
    """One reading of a model's journal, of at most `most` entries altogether."""

    def __init__(self, log: Streams, model: str, most: int = MOST_ENTRIES) -> None:
        self._log = log
        self._stream = keys.journal(model)
        self._left = most

    async def around(self, request_id: bytes, accepted_us: int, ended_us: int = 0) -> tuple[Facts, bool]:
        """From a minute before a request's acceptance to its end, and whether some of that was left unread.

        The request's own time comes first, then what was before it, the nearest first. `ended_us` 0: not known.
        """
        begin_us = max(0, accepted_us - _CLOCKS_US)
        found, whole = await self._read(begin_us, ended_us + _AFTER_END_US if ended_us else 0, request_id)
        for seconds in _BEFORE_S:
            earlier_us = max(0, accepted_us - seconds * 1_000_000)
            before, read = await self._read(earlier_us, begin_us)
            found, whole, begin_us = before + found, whole and read, earlier_us
        return found, not whole

    async def acceptance(self, request_id: bytes, now_us: int) -> int:
        """When the journal says that a request was accepted, looked for from now backwards; 0 if that was not found."""
        end_us = 0
        for seconds in (*_BACK_S, 0):
            begin_us = max(0, now_us - round(seconds * 1_000_000)) if seconds else 0
            found, _ = await self._read(begin_us, end_us)
            for at_us, fact in found:
                if fact.kind == "accepted" and request_id in fact.ids:
                    return at_us
            end_us = begin_us
            if not self._left or not end_us:
                break
        return 0

    async def _read(self, begin_us: int, end_us: int, until: bytes = b"") -> tuple[Facts, bool]:
        """The facts of a window, whose end does not belong to it, and whether they are all. `end_us` 0: to its
        end, or to the end of the request `until`.
        """
        begin_ms, end_ms = begin_us // 1000, end_us // 1000
        after = b"%d-%d" % (begin_ms - 1, _LAST_OF_MS) if begin_ms else b"0-0"
        found: Facts = []
        while self._left:
            entries = await self._log.range(self._stream, after, min(_PAGE, self._left))
            if not entries:
                return found, True
            self._left -= len(entries)
            after = entries[-1].id
            ended = False
            for entry in entries:
                at_us = entry_us(entry.id)
                if end_ms and at_us >= end_ms * 1000:
                    return found, True
                try:
                    facts = read_facts(entry.fields)
                except InvalidRecord:
                    continue
                found += [(at_us, fact) for fact in facts]
                ended = ended or any(fact.kind == "ended" and until in fact.ids for fact in facts)
            if ended and not end_ms:
                return found, True
        return found, False
