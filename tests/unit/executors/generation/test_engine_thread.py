"""The thread of an engine ends whenever it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
from generation_bench import make_engine

from charonia.generation.parameters import SamplingParameters
from executors.generation import engine_thread
from executors.generation.engine import GenerationRequest, TokenEvent
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


async def test_requests_that_come_together_share_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wakes the idle engine; it begins when none has come for a while, or after a limit."""
    monkeypatch.setattr(engine_thread, "_GAP_S", 1.0)
    monkeypatch.setattr(engine_thread, "_GATHER_S", 30.0)
    given: list[TokenEvent] = []
    ended = asyncio.Event()

    def deliver(events: Sequence[TokenEvent]) -> None:
        given.extend(events)
        if sum(bool(event.finish) for event in given) == 3:
            ended.set()

    engine = make_engine()
    thread = EngineThread(engine, "engine", deliver, lambda error: None)
    thread.start()
    for number in range(3):
        parameters = SamplingParameters(seed=0, temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.admit(GenerationRequest(bytes([number]), [1, 2, 3], parameters))
        thread.wake()
    await asyncio.wait_for(ended.wait(), 30)
    await asyncio.to_thread(thread.stop)
    assert [event.key for event in given] == [b"\0", b"\1", b"\2"]
    assert engine.counters.steps == 1


async def test_it_ends_although_it_waits_for_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "_GAP_S", 600.0)
    monkeypatch.setattr(engine_thread, "_GATHER_S", 600.0)
    thread = EngineThread(make_engine(), "engine", lambda events: None, lambda error: None)
    thread.start()
    thread.wake()
    await asyncio.wait_for(asyncio.to_thread(thread.stop), 30)
