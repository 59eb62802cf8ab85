"""How tenants and hosts share turns."""

from __future__ import annotations

import asyncio
from collections import Counter

from gateway.webhooks.turns import Turns


class Calls:
    """Calls that have or await a turn; each ends when the test says so."""

    def __init__(self, total: int, per_host: int, *slow: bytes) -> None:
        """`slow` are the tenants that are known to have slow calls."""
        self.turns = Turns(total, per_host, lambda tenant, _: tenant in slow)
        self.running: list[tuple[bytes, bytes]] = []
        self.tasks: dict[asyncio.Task[None], tuple[bytes, bytes]] = {}
        self._ends: dict[tuple[bytes, bytes], list[asyncio.Event]] = {}

    async def begin(self, tenant: bytes, host: bytes, count: int = 1) -> None:
        for _ in range(count):
            self.tasks[asyncio.create_task(self._call(tenant, host))] = (tenant, host)
        await settled()

    async def end(self, tenant: bytes, host: bytes) -> None:
        self._ends[tenant, host].pop().set()
        await settled()

    async def cancel_all(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def by_tenant(self) -> Counter[bytes]:
        return Counter(tenant for tenant, _ in self.running)

    async def _call(self, tenant: bytes, host: bytes) -> None:
        async with self.turns.turn(tenant, host):
            ended = asyncio.Event()
            self._ends.setdefault((tenant, host), []).append(ended)
            self.running.append((tenant, host))
            try:
                await ended.wait()
            finally:
                self.running.remove((tenant, host))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_lone_tenant_has_three_of_four_turns_and_a_host_its_bound() -> None:
    calls = Calls(total=16, per_host=4)
    for n in range(8):
        await calls.begin(b"a", b"%d" % n, 10)
    assert calls.by_tenant() == {b"a": 12}
    assert max(Counter(calls.running).values()) == 4
    await calls.cancel_all()


async def test_a_tenant_that_comes_last_is_next() -> None:
    """Tenants with endless work for hosts that do not answer take all turns only from the fourth on."""
    calls = Calls(total=64, per_host=64)
    for n in range(4):
        await calls.begin(b"%d" % n, b"h", 100)
    assert calls.by_tenant() == {b"0": 48, b"1": 12, b"2": 3, b"3": 1}
    await calls.begin(b"last", b"h")
    assert b"last" not in calls.by_tenant()
    await calls.end(b"0", b"h")
    assert calls.by_tenant()[b"last"] == 1
    for _ in range(48):
        await calls.end(calls.by_tenant().most_common(1)[0][0], b"h")
    assert min(calls.by_tenant()[b"%d" % n] for n in range(4)) >= 14
    await calls.cancel_all()


async def test_the_next_turn_is_for_the_tenant_that_has_the_fewest() -> None:
    calls = Calls(total=2, per_host=1)
    await calls.begin(b"a", b"h", 3)
    await calls.begin(b"b", b"h")
    assert calls.running == [(b"a", b"h")]
    await calls.end(b"a", b"h")
    # both have none now: the first that came is first, then the other
    assert calls.running == [(b"a", b"h")]
    await calls.begin(b"a", b"other")
    await calls.end(b"a", b"h")
    assert sorted(calls.running) == [(b"a", b"other"), (b"b", b"h")]
    await calls.cancel_all()


async def test_more_tenants_than_turns_have_one_after_the_other() -> None:
    calls = Calls(total=4, per_host=4)
    for n in range(12):
        await calls.begin(b"%d" % n, b"%d" % n, 20)
    had = Counter(calls.by_tenant())
    for _ in range(44):
        await calls.end(*calls.running[0])
        had[calls.running[-1][0]] += 1
    assert len(had) == 12, had
    assert min(had.values()) >= 3, had
    await calls.cancel_all()


async def test_slow_calls_leave_a_turn_of_their_host_to_others() -> None:
    calls = Calls(64, 4, b"a", b"b", b"c", b"d")
    for tenant in (b"a", b"b", b"c", b"d"):
        await calls.begin(tenant, b"host", 10)
    assert calls.by_tenant() == {b"a": 3}
    await calls.begin(b"quick", b"host", 2)
    assert calls.by_tenant() == {b"a": 3, b"quick": 1}
    await calls.end(b"quick", b"host")
    assert calls.by_tenant() == {b"a": 3, b"quick": 1}
    await calls.end(b"quick", b"host")
    assert calls.by_tenant() == {b"a": 3}, "the turn stays free"
    await calls.end(b"a", b"host")
    assert calls.by_tenant() == {b"a": 2, b"b": 1}
    await calls.begin(b"a", b"another", 1)
    assert Counter(calls.running)[b"a", b"another"] == 1
    await calls.cancel_all()
    await calls.begin(b"b", b"host", 5)
    assert calls.by_tenant() == {b"b": 3}, "nothing is left of those that ended"
    await calls.cancel_all()


async def test_a_host_with_one_turn_gives_it_to_slow_calls_too() -> None:
    calls = Calls(64, 1, b"a")
    await calls.begin(b"a", b"host", 2)
    assert calls.by_tenant() == {b"a": 1}
    await calls.cancel_all()


async def test_hosts_of_a_tenant_take_turns() -> None:
    calls = Calls(total=1, per_host=1)
    await calls.begin(b"a", b"x", 3)
    await calls.begin(b"a", b"y")
    order = []
    for _ in range(4):
        ((_, host),) = calls.running
        order.append(host)
        await calls.end(b"a", host)
    assert order == [b"x", b"x", b"y", b"x"] or order == [b"x", b"y", b"x", b"x"]
    assert not calls.running


async def test_what_is_cancelled_gives_its_turn_back_and_nothing_is_left() -> None:
    calls = Calls(total=4, per_host=2)
    for tenant in (b"a", b"b"):
        await calls.begin(tenant, b"h", 4)
        await calls.begin(tenant, b"i", 4)
    # some are cancelled at the moment in which they get their turn
    first = list(calls.tasks)
    for task in first[::3]:
        task.cancel()
    while calls.running:
        await calls.end(*calls.running[0])
    await asyncio.gather(*calls.tasks, return_exceptions=True)
    turns = calls.turns
    assert (turns._running, turns._waiting, turns._of_tenants, turns._at_hosts) == (0, {}, {}, {})
