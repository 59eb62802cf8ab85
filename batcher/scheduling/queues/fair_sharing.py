"""Shares a priority level between tenants: deficit round robin over rows, new lanes first. Pure.

Each lane may send a quantum of rows (the largest batch, times its weight) before the next lane's turn, so that a batch
mostly belongs to one tenant and batching loses little. The first request of a lane that was empty goes before the
others; after that the lane takes turns with them. So a lane with one request waits only for running batches and the one
being formed, however much the others have queued; lanes that become active together wait for each other's first
requests. A served lane is new again only after the others have had their turns.

Sources: Shreedhar and Varghese, "Efficient fair queuing using deficit round robin" (1996); RFC 8290 for the new lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from batcher.scheduling.observations import RequestQueued

from .token_shares import TokenShares, TokenTurns

_FIRST_ROWS = 1


class TurnRules:
    """The rows a lane may send in one turn. `quantum_rows` is the largest batch; `weights` by lane, 1 by default."""

    __slots__ = ("quantum_rows", "shares", "weights")

    def __init__(self, weights: Mapping[int, int]) -> None:
        self.quantum_rows = 1
        self.weights = weights
        self.shares: TokenShares | None = None
        """Set for a model that generates text, whose lanes share tokens."""

    def turns(self) -> Turns | TokenTurns:
        """Turns for one level."""
        return Turns(self) if self.shares is None else TokenTurns(self.shares)

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
        """A copy, to look ahead without taking requests."""
        turns = Turns(self._rules)
        turns._new = self._new.copy()
        turns._old = self._old.copy()
        turns._credit = self._credit.copy()
        return turns

    def begin(self, lane: int) -> None:
        """The lane that has had the level to itself."""
        self._credit[lane] = self._rules.rows(lane)
        self._old.append(lane)

    def join(self, lane: int) -> None:
        """A lane has queued requests."""
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

    def spend(self, lane: int, request: RequestQueued) -> None:
        """The current lane is served; it may exceed its quantum, which its next turns make up for."""
        self._credit[lane] -= request.rows

    def pass_on(self, lane: int) -> bool:
        """The current lane is empty; returns whether it is forgotten, which it is not while it would count as new at
        once.
        """
        if self._new:
            self._old.append(self._new.popleft())
            return False
        self._old.popleft()
        del self._credit[lane]
        return True
