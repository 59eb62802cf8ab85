"""One timer ends each request of the lane at its own deadline."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_time import MemoryLoop

from charonia.clock import wall_ns
from gateway.lane.door import Expiry

MS = 1_000_000


def outstanding(*delays_ms: int) -> list[Any]:
    now_ns = wall_ns()
    return [SimpleNamespace(deadline_ns=now_ns + ms * MS if ms else 0, gone=False) for ms in delays_ms]


def test_each_expires_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(MemoryLoop()) as loop:
        monkeypatch.setattr("gateway.lane.door.wall_ns", lambda: began_ns + round(loop.time() * 1e9))
        began_ns = wall_ns()
        calls = [SimpleNamespace(deadline_ns=began_ns + ms * MS if ms else 0, gone=False) for ms in (60, 0, 20)]
        ended: list[Any] = []
        expiry = Expiry(lambda: calls, ended.append)
        for call in calls:
            if call.deadline_ns:
                loop.call_soon(expiry.watch, call.deadline_ns)
        loop.advance(0.019)
        assert ended == []
        loop.advance(0.002)
        assert ended == [calls[2]]
        loop.advance(0.040)
        assert ended == [calls[2], calls[0]]
        loop.advance(10.0)
        assert len(ended) == 2


async def test_what_was_answered_or_given_up_does_not_expire() -> None:
    calls, ended = outstanding(10, 10, 40), []
    expiry = Expiry(lambda: calls, ended.append)
    for call in calls:
        expiry.watch(call.deadline_ns)
    last = calls[2]
    calls[1].gone = True
    del calls[0]
    async with asyncio.timeout(30):
        while not ended:
            await asyncio.sleep(0.005)
    assert ended == [last]


async def test_one_that_cannot_be_notified_costs_no_other_call() -> None:
    calls, ended = outstanding(1, 1, 10), []

    def expire(call: Any) -> None:
        ended.append(call)
        if call is calls[0]:
            raise ValueError("a defect")

    expiry = Expiry(lambda: calls, expire)
    for call in calls:
        expiry.watch(call.deadline_ns)
    async with asyncio.timeout(30):
        while len(ended) < 3:
            await asyncio.sleep(0.005)
    assert ended == calls


async def test_nothing_expires_after_the_end() -> None:
    calls, ended = outstanding(10), []
    expiry = Expiry(lambda: calls, ended.append)
    expiry.watch(calls[0].deadline_ns)
    expiry.close()
    await asyncio.sleep(0.03)
    assert not ended
