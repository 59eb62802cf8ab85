"""Whether a model's own time is small beside the way to it and back, as the door of its queue sees it. Pure.

Then its requests had better travel together: what an entry costs is more than what it carries. Where the model takes
its time they had better not, because entries that come one after the other keep several instances busy.
"""

from __future__ import annotations

_QUICK = 6
"""Answers that come within so many times what the log takes to accept an entry. With a model that does nothing it is
two or three: two more of the log's round trips, and the executor's work."""
_WEIGHT = 8
"""The newest measurement counts for an eighth."""


class Turnaround:
    """Two moving averages in ns: from sending an entry to its acceptance, and to its first answer."""

    __slots__ = ("_accepted_ns", "_answered_ns", "is_quick")

    def __init__(self) -> None:
        self._accepted_ns = 0
        self._answered_ns = 0
        self.is_quick = False

    def accepted(self, taken_ns: int) -> None:
        """An entry was accepted after so long."""
        self._accepted_ns = _mixed(self._accepted_ns, taken_ns)

    def answered(self, taken_ns: int) -> None:
        """Its first answer was there after so long."""
        self._answered_ns = _mixed(self._answered_ns, taken_ns)
        self.is_quick = self._answered_ns <= _QUICK * self._accepted_ns


def _mixed(average_ns: int, newest_ns: int) -> int:
    return average_ns + (newest_ns - average_ns) // _WEIGHT if average_ns else newest_ns
