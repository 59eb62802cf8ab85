"""How requests share entries: by tick, by what is outstanding, by size, and when the log refuses an entry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from memory_log.log import MemoryLog
from virtual_time import in_no_time

from charonia import keys
from charonia.calls.entry_packer import AppendCounts, Ids, Terms
from charonia.errors import CharoniaError, InternalError, LogUnavailable, ResourceExhausted
from charonia.eventlog.port import Fields, Limits
from charonia.wire import records_of
from gateway.dataplane import Coalescer, Turnaround


@dataclass
class Outgoing:
    id: bytes
    record: bytes
    size_bytes: int
    failed: Callable[[CharoniaError], None]
    withdrawn: bool = False
    sent: bool = False
    accepted: bool = False


class GatedLog(MemoryLog):
    """The log in memory, with appends that wait for `gate` and fail when `error` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def accept(
        self,
        model: str,
        level: int,
        lane: int,
        requests: Sequence[tuple[bytes, int]],
        fields: Fields,
        limits: Limits,
        **terms: Any,
    ) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        await super().accept(model, level, lane, requests, fields, limits, **terms)

    async def entries(self, lane: int = 0) -> list[list[bytes]]:
        return [[bytes(r) for r in records_of(e.fields)] for e in await self.range(keys.queue("m", 0, lane))]


class Door:
    def __init__(
        self, limits: Limits | None = None, max_requests: int = 4, max_size_bytes: int = 1000, lane: int = 0
    ) -> None:
        self.log = GatedLog()
        self.counts = AppendCounts()
        self.failures: dict[bytes, CharoniaError] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.coalescer = Coalescer(
            self.log,
            "m",
            0,
            Terms(lane, f"tenant {lane}" if lane else "", limits or Limits(), lane > 0, "memory"),
            self.spawn,
            Ids().next,
            max_requests=max_requests,
            max_size_bytes=max_size_bytes,
            counts=self.counts,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def submit(self, name: bytes, size: int = 1, interval_s: float = 0.0) -> Outgoing:
        outgoing = Outgoing(name, name, size, lambda error: self.failures.__setitem__(name, error))
        self.coalescer.submit(outgoing, interval_s)
        return outgoing

    def usually(self, under_way: int) -> None:
        """So many are under way at once."""
        turnaround = self.coalescer._turnaround
        turnaround.answered(1_000_000)
        turnaround.sent(25 * under_way, 60 * 10**9)

    async def quiet(self) -> None:
        """Return once nothing is scheduled or under way."""
        async with asyncio.timeout(30):
            while self.coalescer._scheduled or self.coalescer._outstanding or self.coalescer._waiting:
                await asyncio.sleep(0)


async def test_requests_of_one_tick_share_an_entry_up_to_the_bounds() -> None:
    door = Door(max_size_bytes=10)
    sent = [door.submit(b"%d" % n) for n in range(6)]
    sent.append(door.submit(b"big", size=9))
    await door.quiet()
    assert await door.log.entries() == [[b"0", b"1", b"2", b"3"], [b"4", b"5"], [b"big"]]
    assert all(outgoing.accepted for outgoing in sent)
    assert (door.counts.requests, door.counts.entries) == (7, 3)
    assert await door.log.pending("m") == (7, 15)


async def test_the_requests_of_an_entry_have_ids_of_one_group_and_no_two_entries_have() -> None:
    door = Door()
    for count in (6, 1, 3):
        for _ in range(count):
            door.submit(door.coalescer.next_id())
        await door.quiet()
    entries = await door.log.entries()
    assert [[request_id[15] for request_id in entry] for entry in entries] == [[0, 1, 2, 3], [0, 1], [0], [0, 1, 2]]
    assert [len({request_id[:15] for request_id in entry}) for entry in entries] == [1, 1, 1, 1]
    assert len({entry[0][:15] for entry in entries}) == 4


async def test_what_comes_while_an_append_is_outstanding_waits_and_joins() -> None:
    door = Door()
    door.log.gate.clear()
    door.submit(b"a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting = [door.submit(name) for name in (b"b", b"c")]
    await asyncio.sleep(0)
    assert not any(outgoing.accepted for outgoing in waiting)
    door.log.gate.set()
    await door.quiet()
    assert await door.log.entries() == [[b"a"], [b"b", b"c"]]


async def test_withdrawn_requests_are_not_written() -> None:
    door = Door()
    door.submit(b"a").withdrawn = True
    door.submit(b"b")
    await door.quiet()
    assert await door.log.entries() == [[b"b"]]
    door.submit(b"c").withdrawn = True
    await door.quiet()
    assert await door.log.entries() == [[b"b"]]


async def test_a_limited_rate_gathers_over_ticks() -> None:
    door = Door()
    door.submit(b"a", interval_s=0.02)
    await door.quiet()
    door.usually(9)
    for name in (b"b", b"c", b"d"):
        door.submit(name, interval_s=0.02)
        await asyncio.sleep(0)
    await door.quiet()
    assert await door.log.entries() == [[b"a"], [b"b", b"c", b"d"]]


async def test_a_lone_request_does_not_wait_for_the_interval() -> None:
    door = Door()
    door.coalescer.open_requests = 1
    door.submit(b"a", interval_s=60.0)
    await door.quiet()
    door.submit(b"b", interval_s=60.0)
    await door.quiet()
    assert await door.log.entries() == [[b"a"], [b"b"]]


async def test_when_all_open_requests_wait_they_leave_together() -> None:
    """Nobody else is under way who could join them: the interval would only be lost time."""
    door = Door(max_requests=32)
    door.coalescer.open_requests = 1
    door.submit(b"a", interval_s=60.0)
    await door.quiet()
    door.usually(9)
    names = [b"%d" % n for n in range(9)]
    for name in names[:8]:
        door.coalescer.open_requests += 1
        door.submit(name, interval_s=60.0)
    await asyncio.sleep(0)
    assert await door.log.entries() == [[b"a"]]
    # the first has its answer, and its caller asks again: as many are open as before
    door.submit(names[8], interval_s=60.0)
    await door.quiet()
    assert await door.log.entries() == [[b"a"], names]


async def test_as_many_are_waited_for_as_were_lately_open_at_once() -> None:
    door = Door(max_requests=32)
    door.coalescer.open_requests = 12
    door.submit(b"a", interval_s=60.0)
    await door.quiet()
    door.usually(12)
    door.coalescer.open_requests = 9  # some have their answers, and their callers may ask again
    names = [b"%d" % n for n in range(12)]
    for name in names[:9]:
        door.submit(name, interval_s=60.0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert await door.log.entries() == [[b"a"]]
    for name in names[9:]:
        door.coalescer.open_requests += 1
        door.submit(name, interval_s=60.0)
    await door.quiet()
    assert await door.log.entries() == [[b"a"], names]


@in_no_time
async def test_callers_that_do_not_come_again_are_waited_for_in_vain_only_for_a_while() -> None:
    door = Door(max_requests=32)
    door.coalescer.open_requests = 12
    door.submit(b"a", interval_s=60.0)
    await door.quiet()
    door.usually(12)
    door.coalescer.open_requests = 8
    in_vain = 0
    for _ in range(5):
        for n in range(8):
            door.submit(b"%d" % n, interval_s=60.0)
        if (timer := door.coalescer._timer) is not None:
            in_vain += 1
            timer.cancel()
            door.coalescer._flush_late()  # as the timer would
        await door.quiet()
    assert in_vain == 2
    assert [len(entry) for entry in await door.log.entries()] == [1, 8, 8, 8, 8, 8]


async def test_after_a_wave_was_answered_its_first_caller_waits_for_the_others() -> None:
    door = Door(max_requests=32)
    door.coalescer.open_requests = 12
    door.submit(b"a", interval_s=60.0)
    await door.quiet()
    door.usually(12)
    door.coalescer.open_requests = 0  # all have their answers
    names = [b"%d" % n for n in range(12)]
    for name in names[:11]:
        door.coalescer.open_requests += 1
        door.submit(name, interval_s=60.0)
        await asyncio.sleep(0)
    assert await door.log.entries() == [[b"a"]]
    door.coalescer.open_requests += 1
    door.submit(names[11], interval_s=60.0)
    await door.quiet()
    assert await door.log.entries() == [[b"a"], names]


@in_no_time
async def test_one_that_is_left_of_many_soon_waits_for_nobody() -> None:
    door = Door(max_requests=64)
    door.coalescer.open_requests = 64
    door.submit(b"a", interval_s=60.0)
    await door.quiet()
    door.usually(64)
    door.coalescer.open_requests = 1
    in_vain = 0
    for _ in range(20):
        door.submit(b"b", interval_s=60.0)
        if (timer := door.coalescer._timer) is None:
            break
        in_vain += 1
        timer.cancel()
        door.coalescer._turnaround.sent(0, 16_000_000)  # as long as it waits at most
        door.coalescer._flush_late()  # as the timer would
        await door.quiet()
    assert in_vain == 6
    await door.quiet()


async def measure(door: Door, monkeypatch: pytest.MonkeyPatch, answered_us: int) -> None:
    """One request, accepted after 1,000 us and answered so long after it was sent."""
    now_ns = 0
    monkeypatch.setattr("gateway.dataplane.monotonic_ns", lambda: now_ns)
    door.log.gate.clear()
    door.coalescer.open_requests = 1
    sent = door.submit(b"first")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    now_ns = 1_000_000
    door.log.gate.set()
    await door.quiet()
    now_ns = 1_000 * answered_us
    door.coalescer.ended(sent)


@pytest.mark.parametrize(("answered_us", "shared"), [(3_000, True), (30_000, False)])
async def test_where_answers_are_quick_ticks_that_bring_requests_share_an_entry(
    monkeypatch: pytest.MonkeyPatch, answered_us: int, shared: bool
) -> None:
    door = Door(max_requests=2)
    door.coalescer.max_quick_requests = 8
    await measure(door, monkeypatch, answered_us)
    names = [b"%d" % n for n in range(5)]
    for name in names:
        door.coalescer.open_requests += 1
        door.submit(name)
        await asyncio.sleep(0)
    await door.quiet()
    # one by itself waits for nobody
    others = [names[1:]] if shared else [[b"1"], [b"2"], [b"3"], [b"4"]]
    assert await door.log.entries() == [[b"first"], [b"0"], *others]


async def test_an_entry_that_is_full_waits_for_no_other_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, most in ((1, 2), (600, 8)):
        door = Door()
        door.coalescer.max_quick_requests = most
        await measure(door, monkeypatch, 3_000)
        door.coalescer.open_requests = 9
        for n in range(2):
            door.submit(b"%d" % n, size=size)
        await asyncio.sleep(0)
        assert not door.coalescer._waiting


async def test_a_full_entry_does_not_wait_for_the_interval() -> None:
    door = Door(max_requests=2)
    door.coalescer.open_requests = 9
    door.submit(b"a", interval_s=60.0)
    await door.quiet()
    door.submit(b"b", interval_s=60.0)
    door.submit(b"c", interval_s=60.0)
    await door.quiet()
    assert await door.log.entries() == [[b"a"], [b"b", b"c"]]


async def test_an_entry_over_the_bound_is_split_so_that_the_bound_is_exact() -> None:
    door = Door(Limits(requests=5), max_requests=4)
    for n in range(8):
        door.submit(b"%d" % n)
    await door.quiet()
    assert await door.log.pending("m") == (5, 5)
    assert len(door.failures) == 3
    assert {type(error) for error in door.failures.values()} == {ResourceExhausted}
    assert door.counts.requests == 5


async def test_failures_reach_their_callers_and_the_door_stays_usable() -> None:
    door = Door()
    door.log.error = LogUnavailable("gone")
    failed = door.submit(b"a")
    await door.quiet()
    door.log.error = ValueError("odd")
    door.submit(b"b")
    await door.quiet()
    door.log.error = None
    door.submit(b"c")
    await door.quiet()
    assert not failed.accepted
    assert {name: type(error) for name, error in door.failures.items()} == {b"a": LogUnavailable, b"b": InternalError}
    assert await door.log.entries() == [[b"c"]]


async def test_requests_are_accepted_on_their_doors_terms() -> None:
    door = Door(Limits(tenant_requests=2), lane=7)
    sent = [door.submit(b"%016d" % n) for n in range(3)]
    assert not any(outgoing.sent for outgoing in sent)
    await door.quiet()
    assert all(outgoing.sent for outgoing in sent)
    assert await door.log.entries(lane=7) == [[b"%016d" % 0], [b"%016d" % 1]]
    assert await door.log.pending_of_tenants("m", ["tenant 7"]) == [(2, 2)]
    assert len(await door.log.range(keys.journal("m"))) == 2
    assert [type(error) for error in door.failures.values()] == [ResourceExhausted]


async def test_in_order_nothing_passes_an_entry_that_is_refused_and_split() -> None:
    """For sequences: a bound has room again while an entry's halves are tried, and what came later still waits."""
    door = Door(limits=Limits(requests=3), max_requests=4)
    door.coalescer.in_order = True
    await door.log.accept("m", 0, 7, [(b"x" * 16, 1)], [b"r", b"other"], Limits())
    gate, door.log.gate = door.log.gate, asyncio.Event()
    for n in range(4):
        door.submit(b"%d" % n)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for n in range(4, 6):
        door.submit(b"%d" % n, interval_s=0.001)
    door.log.gate.set()
    await door.quiet()
    assert gate.is_set()
    entries = await door.log.entries()
    accepted = [record for entry in entries for record in entry]
    assert accepted == sorted(accepted)
    assert entries[0] == [b"0", b"1"]
    assert sorted([*accepted, *door.failures]) == [b"%d" % n for n in range(6)]


async def test_in_order_several_entries_of_a_tick_are_accepted_one_after_the_other() -> None:
    door = Door(max_requests=2)
    door.coalescer.in_order = True
    open_at_once = most = 0
    accept = door.log.accept

    async def counted(*arguments: Any, **terms: Any) -> None:
        nonlocal open_at_once, most
        open_at_once += 1
        most = max(most, open_at_once)
        await asyncio.sleep(0)
        await accept(*arguments, **terms)
        open_at_once -= 1

    door.log.accept = counted  # type: ignore[method-assign]
    for n in range(7):
        door.submit(b"%d" % n, interval_s=0.0 if n % 2 else 0.001)
    await door.quiet()
    assert most == 1
    assert [record for entry in await door.log.entries() for record in entry] == [b"%d" % n for n in range(7)]


def test_nothing_is_quick_before_it_was_measured() -> None:
    turnaround = Turnaround()
    assert not turnaround.is_quick
    turnaround.accepted(400_000)
    assert not turnaround.is_quick
    unaccepted = Turnaround()
    unaccepted.answered(400_000)
    assert not unaccepted.is_quick


def test_answers_are_measured_by_what_the_log_takes_not_by_the_clock() -> None:
    for scale in (1, 1000):
        quick, slow = Turnaround(), Turnaround()
        for turnaround, answered_ns in ((quick, 6_000), (slow, 7_000)):
            turnaround.accepted(1_000 * scale)
            turnaround.answered(answered_ns * scale)
        assert quick.is_quick
        assert not slow.is_quick


def test_it_follows_a_model_that_becomes_slow_and_quick_again() -> None:
    turnaround = Turnaround()
    turnaround.accepted(400)
    turnaround.answered(1_000)
    turnaround.accepted(400)
    turnaround.answered(3_000)
    assert turnaround.is_quick  # one late answer is none too many
    for _ in range(10):
        turnaround.accepted(400)
        turnaround.answered(8_000)
    assert not turnaround.is_quick
    for _ in range(20):
        turnaround.accepted(400)
        turnaround.answered(1_000)
    assert turnaround.is_quick


def test_how_many_are_under_way_is_what_is_sent_in_the_time_of_an_answer() -> None:
    turnaround = Turnaround()
    assert turnaround.under_way == 0
    for _ in range(200):
        turnaround.sent(4, 1_000_000)
    assert turnaround.under_way == 0  # nothing was answered
    for _ in range(40):
        turnaround.answered(3_000_000)
    assert 11.9 < turnaround.under_way < 12.4
    turnaround.sent(0, 25_000_000)
    assert 4.3 < turnaround.under_way < 4.6
    turnaround.sent(0, 10**12)
    assert turnaround.under_way < 1e-9
