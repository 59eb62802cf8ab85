"""Requests of quick models leave together, and no queue is held up for long by another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from charonia.clock import monotonic_ns
from gateway.lane.gathering import SLOW_NS, Gathering, Round

QUICK_NS = 100_000


class Waves:
    """Counts the writes to the log."""

    def __init__(self) -> None:
        self.flushes = 0

    def flush(self) -> None:
        self.flushes += 1


class Door:
    """A door whose requests make one wave."""

    most = 64

    def __init__(self, gathering: Gathering) -> None:
        self.gathering = gathering
        self.waiting: list[int] = []
        self.sent: list[int] = []

    def come(self, count: int) -> None:
        self.waiting += [0] * count
        self.gathering.came(self)  # type: ignore[arg-type]

    def send(self, *, full_only: bool = False) -> int:
        if not self.waiting or full_only:
            return 0
        self.sent.append(len(self.waiting))
        self.waiting.clear()
        return 1

    def leave_all(self) -> None:
        raise AssertionError("too many wait")


class Bench:
    """Two queues of one gateway, both of quick models."""

    def __init__(self) -> None:
        self.waves: Any = Waves()
        shared = Round(self.waves, is_shared=True)
        self.a, self.b = (Door(Gathering(self.waves, name, 1, shared, may_gather=True)) for name in (b"a", b"b"))

    def prove(self) -> None:
        for door in (self.a, self.b):
            for _ in range(4):
                assert door.gathering.measured(QUICK_NS)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_lone_request_leaves_at_once(bench: Bench) -> None:
    bench.a.come(1)
    assert bench.a.sent == [1]
    bench.a.gathering.ended(1)
    bench.prove()
    bench.a.come(1)
    assert bench.a.sent == [1, 1]


async def test_requests_of_several_queues_leave_in_one_write(bench: Bench) -> None:
    bench.prove()
    bench.a.come(5)
    await until(lambda: bench.a.sent == [5])
    bench.a.come(4)
    bench.b.come(3)
    writes = bench.waves.flushes
    bench.a.gathering.ended(5)
    await until(lambda: bool(bench.b.sent))
    assert (bench.a.sent, bench.b.sent) == ([5, 4], [3])
    assert bench.waves.flushes == writes + 1


async def test_the_next_waves_wait_for_all_who_were_answered_together(bench: Bench) -> None:
    bench.prove()
    bench.a.come(10)
    bench.b.come(10)
    await until(lambda: bool(bench.a.sent and bench.b.sent))
    bench.a.gathering.ended(10)
    assert bench.a.sent == bench.b.sent == [10], "the other queue's callers are about to be answered"
    bench.b.gathering.ended(10)
    bench.a.come(17)
    assert len(bench.a.sent) == 1
    bench.b.come(1)
    assert (bench.a.sent, bench.b.sent) == ([10, 17], [10, 1]), "nine tenths of them are here"


async def test_a_queue_without_answers_holds_no_other_up(bench: Bench) -> None:
    bench.prove()
    bench.a.come(2)
    await until(lambda: bool(bench.a.sent))  # and is never answered
    for number in range(20):
        bench.b.come(2)
        await until(lambda wanted=number: len(bench.b.sent) > wanted)  # type: ignore[misc]
        bench.b.gathering.ended(2)
    bench.b.come(2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await until(lambda: len(bench.b.sent) == 21)
    assert bench.a.sent == [2]


async def test_a_slow_model_is_tried_again_sooner_than_one_that_stays_slow(bench: Bench) -> None:
    queue = bench.a.gathering
    waits_s = []
    for _ in range(7):
        assert [queue.measured(SLOW_NS + 1) for _ in range(4)] == [True, True, True, False]
        waits_s.append(round((queue.closed_until_ns - monotonic_ns()) / 1e9))
    assert waits_s == [1, 2, 4, 8, 16, 30, 30]
    bench.prove()
    assert [queue.measured(SLOW_NS + 1) for _ in range(4)] == [True, True, True, False]
    assert queue.closed_until_ns - monotonic_ns() < 2e9
