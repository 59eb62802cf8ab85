"""Request ids that share a log entry's group: 15 random bytes per entry, then 0, 1, 2, ... (docs/adr/0007).

Requests whose ids differ in the last byte alone are one field among the unsettled of the log. Only ids that never leave
the server are made so; a job's id is all random, as knowing one must not mean knowing its neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Callable

MOST_IN_GROUP = 64
"""More members than this the log's scripts would look at one by one."""

_LAST_BYTES = [bytes((last,)) for last in range(MOST_IN_GROUP)]


def _random() -> bytes:
    return os.urandom(16)


class EntryIds:
    """Of one queue's door. `draw` gives 16 random bytes."""

    __slots__ = ("_draw", "_given", "_prefix")

    def __init__(self, draw: Callable[[], bytes] = _random) -> None:
        self._draw = draw
        self._prefix = b""
        self._given = MOST_IN_GROUP

    def next(self, most: int) -> bytes:
        """An id for the next request of an entry that takes `most` of them."""
        given = self._given
        if given >= most or given >= MOST_IN_GROUP:
            self._prefix = self._draw()[:15]
            given = 0
        self._given = given + 1
        return self._prefix + _LAST_BYTES[given]

    def turn(self) -> None:
        """An entry has left: the next id begins another one."""
        self._given = MOST_IN_GROUP
