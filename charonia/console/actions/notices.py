"""Keeps the message of an action's outcome for the page that follows it, which shows it once.

The address of that page holds a word for it and no text: a link of another site could have the console say anything
otherwise. Nothing is kept for longer than the last thousand messages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from secrets import token_hex

_KEPT = 1000
MAX_LINES = 10
"""Details that a message has at most; the rest are counted."""
MAX_SIGNS = 500
"""Of each line: what was sent may stand in it, such as a long name that no model has."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What came of an action. `links` are addresses below the console's and their titles."""

    good: bool
    text: str
    details: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    def bounded(self) -> Notice:
        """With no more and no longer lines than a page has space for."""
        details, links = self.details, self.links
        if len(details) > MAX_LINES:
            details = (*details[:MAX_LINES], f"and {len(details) - MAX_LINES} more")
        return Notice(self.good, _cut(self.text), tuple(map(_cut, details)), links[:MAX_LINES])


class Notices:
    """Of one process."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, Notice]] = OrderedDict()

    def keep(self, token: str, notice: Notice) -> str:
        """The word for a message, which is for the viewer with this token alone."""
        word = token_hex(8)
        self._kept[word] = token, notice.bounded()
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return word

    def take(self, token: str, word: str) -> Notice | None:
        """The message, once; None if there is none for this viewer."""
        found = self._kept.get(word)
        if found is None or found[0] != token:
            return None
        del self._kept[word]
        return found[1]


def _cut(line: str) -> str:
    return line if len(line) <= MAX_SIGNS else f"{line[:MAX_SIGNS]}…"
