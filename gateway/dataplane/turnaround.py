"""How a queue is used, as its gateway sees it: how many requests are under way, how quickly they end. Pure.

How many are under way at once is Little's law: requests in a time, times the time of an answer. Requests that still
wait in the gateway are not counted, as waiting would then be a reason to wait.

Where a model's own time is small compared with the way to it and back, its requests travel together, because an entry
costs more than the requests in it. Where the model takes long they do not, because entries that come one after the
other keep several instances busy.
"""

from __future__ import annotations

from math import exp

_QUICK = 6
"""Answers that come within so many times what the log takes to accept an entry. With a model that does nothing it is
two or three: two more of the log's round trips, and the executor's work."""
_WEIGHT = 8
"""The newest measurement counts for an eighth."""
_MEMORY_NS = 25_000_000
"""What was sent so long ago counts for a third."""


class Turnaround:
    """Moving averages: from sending an entry to its acceptance and to its first answer, in ns, and of what is sent."""

    __slots__ = ("_accepted_ns", "_answered_ns", "_sent_per_ns", "is_quick")

    def __init__(self) -> None:
        self._sent_per_ns = 0.0
        self._accepted_ns = 0
        self._answered_ns = 0
        self.is_quick = False

    @property
    def under_way(self) -> float:
        """Requests that are usually sent and not answered."""
        return self._sent_per_ns * self._answered_ns

    def sent(self, count: int, past_ns: int) -> None:
        """So many left, so long after those before them."""
        self._sent_per_ns = self._sent_per_ns * exp(-past_ns / _MEMORY_NS) + count / _MEMORY_NS

    def accepted(self, taken_ns: int) -> None:
        """An entry was accepted after so long."""
        self._accepted_ns = _mixed(self._accepted_ns, taken_ns)

    def answered(self, taken_ns: int) -> None:
        """Its first answer was there after so long."""
        self._answered_ns = _mixed(self._answered_ns, taken_ns)
        self.is_quick = self._answered_ns <= _QUICK * self._accepted_ns


def _mixed(average_ns: int, newest_ns: int) -> int:
    return average_ns + (newest_ns - average_ns) // _WEIGHT if average_ns else newest_ns
