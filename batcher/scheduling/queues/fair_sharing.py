"""Whose turn it is where tenants share a priority level: deficit round robin over rows, new lanes first. Pure.

Each lane may spend a quantum of rows (the largest batch, times its weight) before the next one's turn, so that a batch
is mostly one tenant's and batching loses little. A lane that had nothing queued comes before those that had, with its
first request; after that it takes turns with them. So a lane with one request waits for what runs and for the batch
that is being formed, however much the others have queued; lanes that become active together wait for each other's
first requests. A lane that was served is not new again before the others have had their turns.

Sources: Shreedhar and Varghese, "Efficient fair queuing using deficit round robin" (1996); RFC 8290 for the new lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_FIRST_ROWS = 1


class TurnRules:
    """How many rows a lane may spend in one turn. `quantum_rows` is the largest batch; `weights` by lane, 1 else."""

    __slots__ = ("quantum_rows", "weights")

    def __init__(self, weights: Mapping[int, int]) -> None:
        self.quantum_rows = 1
        self.weights = weights

    def rows(self, lane: int) -> int:
        return self.quantum_rows * max(1, self.weights.get(lane, 1))


class Turns:
    """The lanes of one level in the order of their turns."""

    __slots__ = ("_credit", "_new", "_old", "_rules")

    def __init__(self, rules: TurnRules) -> None:
        self._rules = rules
        self._new: deque[int] = deque()
        self._old: deque[int] = deque()
        self._credit: dict[int, int] = {}

    def copy(self) -> Turns:
        """To look ahead without taking anything."""
        turns = Turns(self._rules)
        turns._new = self._new.copy()
        turns._old = self._old.copy()
        turns._credit = self._credit.copy()
        return turns

    def begin(self, lane: int) -> None:
        """The lane that had the level for itself so far."""
        self._credit[lane] = self._rules.rows(lane)
        self._old.append(lane)

    def join(self, lane: int) -> None:
        """A lane has something queued."""
        if lane not in self._credit:
            self._credit[lane] = _FIRST_ROWS
            self._new.append(lane)

    def current(self) -> int | None:
        """The lane whose turn it is; None when there is none."""
        while lanes := self._new or self._old:
            lane = lanes[0]
            if self._credit[lane] > 0:
                return lane
            self._credit[lane] += self._rules.rows(lane)
            lanes.popleft()
            self._old.append(lane)
        return None

    def spend(self, lane: int, rows: int) -> None:
        """The current lane was served; it may overdraw and pays with its next turns."""
        self._credit[lane] -= rows

    def pass_on(self, lane: int) -> bool:
        """The current lane has nothing; whether it is forgotten: not while it would be new again at once."""
        if self._new:
            self._old.append(self._new.popleft())
            return False
        self._old.popleft()
        del self._credit[lane]
        return True
