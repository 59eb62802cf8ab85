"""A gateway's lease: waves are counted in it, it grows before it is full, and hinders nobody."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from memory_log.log import MemoryLog

from charonia.errors import LogUnavailable, ResourceExhausted
from charonia.eventlog.port import Limits
from gateway.lane.leases import Lease, Leases

WIDE = Limits(requests=100_000, size_bytes=1 << 30)


async def leased(limits: Limits = WIDE, holder: str = "g", log: MemoryLog | None = None) -> Lease:
    lease = Lease(log or MemoryLog(), "m", holder, limits)
    assert await lease.grow()
    return lease


async def test_waves_are_counted_within_the_lease() -> None:
    asked: list[Coroutine[Any, Any, Any]] = []
    leases = Leases(MemoryLog(), "g", WIDE, asked.append)
    assert not leases.take("m", 1, 1), "nothing is reserved"
    assert await leases.reserve("m")
    lease = leases._held["m"]
    held = lease.held_requests
    assert leases.take("m", held, 10)
    assert not leases.take("m", 1, 0)
    leases.give_back("m", held, 10)
    assert leases.take("m", 1, lease.held_bytes)
    assert not leases.take("m", 1, 1)
    leases.give_back("m", 1, lease.held_bytes)
    assert lease.is_idle
    assert asked, "it has been asked for more"
    for one in asked:
        one.close()


async def test_it_asks_for_more_before_it_is_full() -> None:
    lease = await leased()
    held = lease.held_requests
    assert not lease.is_short
    assert lease.take(held // 2 + 1, 0)
    assert lease.is_short
    assert await lease.grow()
    assert lease.held_requests == 2 * held
    assert not lease.is_short


async def test_one_that_others_ended_asks_for_more_at_once() -> None:
    lease = await leased()
    lease.held_requests = lease.held_bytes = 0
    assert lease.is_short
    assert await lease.grow()
    assert not lease.is_short
    assert lease.take(1, 1)


async def test_it_leaves_room_for_others() -> None:
    log, limits = MemoryLog(), Limits(requests=4096, size_bytes=1 << 23)
    leases = [await leased(limits, f"g{number}", log) for number in range(8)]
    for lease in leases:
        for _ in range(8):
            await lease.grow()
        assert lease.held_requests <= 4096 // 8
        assert lease.held_bytes <= (1 << 23) // 8
    other = Lease(log, "m", "g9", limits)
    assert not await other.grow()
    assert (other.held_requests, other.held_bytes) == (0, 0)
    with pytest.raises(ResourceExhausted):
        await log.accept("m", 0, 0, [(b"a" * 16, 1)], [b"r", b"x"], limits)
    await leases[0].end()
    assert not leases[0].take(1, 1)
    await log.accept("m", 0, 0, [(b"a" * 16, 1)], [b"r", b"x"], limits)


@pytest.mark.parametrize(
    ("limits", "possible"),
    [
        (Limits(), True),
        (WIDE, True),
        (Limits(requests=4095), False),
        (Limits(size_bytes=(1 << 23) - 1), False),
        (Limits(requests=4096, size_bytes=1 << 23), True),
    ],
)
def test_where_few_requests_may_wait_each_is_counted_by_itself(limits: Limits, possible: bool) -> None:
    assert Lease(MemoryLog(), "m", "g", limits).is_possible is possible


async def test_a_log_that_is_away_leases_nothing_and_is_asked_again() -> None:
    log = MemoryLog()
    waves = log.waves

    class Away:
        async def lease(self, *_: Any) -> bool:
            raise LogUnavailable("away")

    log.waves = Away()  # type: ignore[assignment]
    lease = Lease(log, "m", "g", WIDE)
    assert not await lease.grow()
    assert not lease.take(1, 1)
    assert lease.is_idle
    log.waves = waves
    assert await lease.grow()
    assert lease.take(1, 1)
