"""How long a connection lives: its first words, signs of life, its greatest age (G31)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from .codec.limits import KeepAlive

FIRST_WORDS_S = 20.0
"""A client that has opened no call by then has to have said that it speaks HTTP/2."""
_JITTER = 0.1
"""Connections of one age would all end at once (gRPC proposal A9)."""


class Living(Protocol):
    """The part of a connection that is kept or ended."""

    @property
    def has_calls(self) -> bool: ...

    @property
    def is_open(self) -> bool: ...

    def ping(self) -> None: ...

    def leave(self) -> None: ...

    def abort(self) -> None: ...


class Life:
    """The timers of one connection."""

    def __init__(self, connection: Living, keep_alive: KeepAlive) -> None:
        self._connection = connection
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.heard = False
        """Anything came since it was last looked at."""
        self.unanswered_pings = 0
        """Sent since anything came."""

    def begin(self) -> None:
        keep_alive = self._keep_alive
        self._after("first words", FIRST_WORDS_S, self._expect_words)
        if keep_alive.time_s < 1e6:
            self._after("keep alive", keep_alive.time_s, self._look)
        if keep_alive.max_age_s:
            age_s = keep_alive.max_age_s * random.uniform(1 - _JITTER, 1 + _JITTER)
            self._after("age", age_s, self._leave)

    def end(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _after(self, what: str, delay_s: float, do: Callable[[], None]) -> None:
        self._timers[what] = self._loop.call_later(delay_s, do)

    def _expect_words(self) -> None:
        if not self._connection.is_open:
            self._connection.abort()

    def _look(self) -> None:
        keep_alive = self._keep_alive
        if self.heard:
            self.unanswered_pings = 0
        may = keep_alive.permit_without_calls or self._connection.has_calls
        most = keep_alive.max_pings_without_data
        if not self.heard and may and (not most or self.unanswered_pings < most):
            self.unanswered_pings += 1
            self._connection.ping()
            self._after("keep alive", keep_alive.timeout_s, self._expect_sign)
            return
        self.heard = False
        self._after("keep alive", keep_alive.time_s, self._look)

    def _expect_sign(self) -> None:
        if not self.heard:
            self._connection.abort()
            return
        self.heard = False
        self._after("keep alive", self._keep_alive.time_s, self._look)

    def _leave(self) -> None:
        self._connection.leave()
        if self._keep_alive.max_age_grace_s:
            self._after("age", self._keep_alive.max_age_grace_s, self._connection.abort)
