"""Ends requests of the lane at their deadlines: one timer for all of them, set to the earliest deadline outstanding.

Most requests are answered long before theirs, and a timer for each would cost more than the request's place in a wave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from charonia.clock import wall_ns

from .lane_calls import Call


class Expiry:
    """Calls `expire` once for each call whose deadline has passed.

    `outstanding` gives the calls that wait for an answer; one without a deadline has `deadline_ns` 0.
    """

    def __init__(self, outstanding: Callable[[], Iterable[Call]], expire: Callable[[Call], None]) -> None:
        self._outstanding = outstanding
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self._next_ns = 0
        """The deadline that the timer is set to, 0 without one."""

    def watch(self, deadline_ns: int) -> None:
        """A call with this deadline is outstanding from now on."""
        if not self._next_ns or deadline_ns < self._next_ns:
            self._set(deadline_ns)

    def _set(self, deadline_ns: int) -> None:
        self.close()
        self._next_ns = deadline_ns
        delay_s = max(0.0, (deadline_ns - wall_ns()) / 1e9)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)

    def _check(self) -> None:
        self._timer, self._next_ns = None, 0
        now_ns, next_ns = wall_ns(), 0
        late: list[Call] = []
        for call in self._outstanding():
            deadline_ns = call.deadline_ns
            if not deadline_ns or call.gone:
                continue
            if deadline_ns <= now_ns:
                late.append(call)
            elif not next_ns or deadline_ns < next_ns:
                next_ns = deadline_ns
        for call in late:
            call.deadline_ns = 0
            self._expire(call)
        if next_ns:
            self.watch(next_ns)

    def close(self) -> None:
        """Stop watching; what is outstanding expires no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next_ns = None, 0
