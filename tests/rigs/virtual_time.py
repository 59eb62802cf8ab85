"""An event loop whose time passes only when it is told to: timers without waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers are called in the order of their times."""

    _now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass up to each timer that is due, and call it."""
        end_s = self._now_s + seconds
        while due := [at_s for timer in self._scheduled if not timer.cancelled() and (at_s := timer.when()) <= end_s]:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, min(due))
            self.tick()
        self._now_s = end_s
        self.tick()

    def tick(self) -> None:
        """All that is to be called now, once."""
        self.call_soon(self.stop)
        self.run_forever()


def in_no_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on a loop where no time passes, however busy the machine is."""

    @wraps(test)
    def run() -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(test())
        finally:
            loop.close()

    return run
