"""The thread of an engine ends whenever it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from generation_bench import make_engine

from executors.generation.engine_thread import EngineThread


class ClearedLate(threading.Event):
    """Does something of another thread's just before it is cleared for the second time."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before
        self._clears = 0

    def clear(self) -> None:
        self._clears += 1
        if self._clears == 2:
            self._before()
        super().clear()


async def test_it_ends_although_it_is_told_while_it_begins_a_step() -> None:
    thread = EngineThread(make_engine(), "engine", lambda events: None, lambda error: None)

    def tell() -> None:
        thread._stopping = True
        thread._wake.set()

    thread._wake = ClearedLate(tell)
    thread.start()
    thread.wake()
    await asyncio.to_thread(thread._thread.join, 30)
    assert not thread._thread.is_alive()
