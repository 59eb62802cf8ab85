"""An event loop whose time passes only when it is told to: timers without waiting for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

_T = TypeVar("_T")


class _NoFiles:
    """In the place of a selector: there are no files to wait for, only what other threads have called."""

    def __init__(self) -> None:
        self.called = threading.Event()

    def select(self, timeout: float | None) -> list[Any]:
        if timeout != 0:
            self.called.wait(timeout)
        self.called.clear()
        return []


class _Virtual(asyncio.BaseEventLoop):
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

    def is_idle(self) -> bool:
        """Whether nothing is to be called now, but for what the caller goes on with."""
        return not self._ready  # type: ignore[attr-defined]

    def tick(self) -> None:
        """All that is to be called now, once."""
        self.call_soon(self.stop)
        self.run_forever()


class VirtualLoop(_Virtual, asyncio.SelectorEventLoop):
    """With sockets and pipes, where time stands still as well."""


class MemoryLoop(_Virtual):
    """Has no files, so that one is made in microseconds."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _NoFiles()

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        self._selector.called.set()


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


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """The result of `main` on a loop of its own, whose tasks end with it. As `asyncio.run`, in a tenth of its time."""
    loop = MemoryLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def settle(max_turns: int) -> None:
    """Let everything happen that can, in so many turns of the loop at most; the others are saved where it shows that
    nothing is left to happen.
    """
    loop = asyncio.get_running_loop()
    for _ in range(max_turns):
        await asyncio.sleep(0)
        if isinstance(loop, _Virtual) and loop.is_idle():
            return
