"""What every adapter of the log port promises about notes and times."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from log_adapters import ADAPTERS, opened

from charonia import keys
from charonia.eventlog.port import MOST_TAKEN, EventLog

TIMES = keys.webhook_times("m")


@pytest.fixture(params=ADAPTERS)
async def log(request: pytest.FixtureRequest) -> AsyncIterator[EventLog]:
    async with opened(request) as subject:
        yield subject.log


async def test_a_note_is_the_last_one_put(log: EventLog) -> None:
    one, other = keys.webhook_state("m", b"1" * 16), keys.webhook_state("m", b"2" * 16)
    assert await log.notes([]) == []
    assert await log.notes([one, other]) == [None, None]
    await log.put_note(one, b"first", 60)
    await log.put_note(one, b"second\0\xff", 60)
    assert await log.notes([other, one]) == [None, b"second\0\xff"]
    await log.delete_keys([one])
    assert await log.notes([one]) == [None]


async def test_a_count_begins_at_nothing(log: EventLog) -> None:
    one, other = keys.trace_count("a1"), keys.trace_count("b2")
    assert await log.add_to_count(one, 0) == 0
    assert [await log.add_to_count(one, amount) for amount in (1, 2, 0)] == [1, 3, 3]
    assert await log.add_to_count(other, 5) == 5
    await log.delete_keys([one])
    assert await log.add_to_count(one, 1) == 1


async def test_what_is_due_comes_in_the_order_of_time(log: EventLog) -> None:
    now_us = 1_763_700_000_000_000
    assert await log.due(TIMES, now_us, 10) == []
    await log.set_times(TIMES, {})
    await log.set_times(TIMES, {b"c": now_us + 1, b"b\0\xff": now_us, b"a": now_us - 1})
    assert await log.count_times(TIMES) == 3
    assert await log.due(TIMES, now_us, 10) == [b"a", b"b\0\xff"]
    assert await log.due(TIMES, now_us, 1) == [b"a"]
    await log.set_times(TIMES, {b"a": now_us + 2})
    assert await log.due(TIMES, now_us + 2, 10) == [b"b\0\xff", b"c", b"a"]
    await log.drop_times(TIMES, [b"c", b"unknown"])
    await log.drop_times(TIMES, [])
    assert await log.due(TIMES, now_us + 2, 10) == [b"b\0\xff", b"a"]
    await log.delete_keys([TIMES])
    assert await log.count_times(TIMES) == 0


RECENT = keys.CACHE_USES


async def test_the_oldest_are_taken_out_while_all_are_too_large(log: EventLog) -> None:
    now_us = 1_763_700_000_000_000
    assert await log.keep_recent(RECENT, {}, 0) == []
    assert await log.keep_recent(RECENT, {b"a": (now_us, 40), b"b\0\xff": (now_us + 1, 40)}, 100) == []
    assert await log.keep_recent(RECENT, {b"c": (now_us + 2, 30)}, 100) == [b"a"]
    # one that is used again is young again, an earlier use changes nothing, a new size takes the old one's place
    assert await log.keep_recent(RECENT, {b"b\0\xff": (now_us + 3, 40)}, 100) == []
    assert await log.keep_recent(RECENT, {b"b\0\xff": (now_us, 60)}, 100) == []
    assert await log.keep_recent(RECENT, {b"d": (now_us + 4, 20)}, 100) == [b"c"]
    assert await log.keep_recent(RECENT, {b"e": (now_us + 5, 100)}, 100) == [b"b\0\xff", b"d"]
    # what is larger than all is taken out as well
    assert await log.keep_recent(RECENT, {b"f": (now_us + 6, 101)}, 100) == [b"e", b"f"]
    assert await log.keep_recent(RECENT, {b"g": (now_us, 100)}, 100) == []


async def test_a_use_alone_puts_nothing_in(log: EventLog) -> None:
    await log.keep_recent(RECENT, {b"a": (1, 50), b"b": (2, 50)}, 100)
    assert await log.keep_recent(RECENT, {b"a": (3, -1), b"unknown": (4, -1)}, 100) == []
    assert await log.keep_recent(RECENT, {b"c": (5, 50)}, 100) == [b"b"]
    assert await log.keep_recent(RECENT, {}, 0) == [b"a", b"c"]


async def test_what_is_dropped_makes_room(log: EventLog) -> None:
    await log.keep_recent(RECENT, {b"a": (1, 50), b"b": (2, 50)}, 100)
    assert await log.keep_recent(RECENT, {b"c": (3, 50)}, 100, drop=[b"b", b"unknown"]) == []
    assert await log.keep_recent(RECENT, {}, 99) == [b"a"]
    await log.delete_keys([RECENT, keys.sizes(RECENT)])
    assert await log.keep_recent(RECENT, {b"d": (4, 100)}, 100) == []


async def test_so_many_are_taken_out_at_once(log: EventLog) -> None:
    members = {b"%04d" % n: (n, 1) for n in range(MOST_TAKEN + 5)}
    await log.keep_recent(RECENT, members, 10_000)
    assert len(await log.keep_recent(RECENT, {}, 0)) == MOST_TAKEN
    assert await log.keep_recent(RECENT, {}, 2) == [b"%04d" % (MOST_TAKEN + n) for n in range(3)]


async def test_sets_go_at_the_latest_time_that_was_said(log: EventLog) -> None:
    later_us, past_us = 4_102_444_800_000_000, 1_763_700_000_000_000
    await log.keep_until(TIMES, past_us)  # there is none
    for key, until_us, left in ((TIMES, [later_us, past_us], 1), (keys.webhook_times("n"), [past_us], 0)):
        await log.set_times(key, {b"a": 1})
        for at_us in until_us:
            await log.keep_until(key, at_us)
        assert await log.count_times(key) == left
    await log.keep_recent(RECENT, {b"a": (1, 50)}, 100)
    await log.keep_until(RECENT, past_us)
    assert await log.keep_recent(RECENT, {b"b": (2, 100)}, 100) == [], "its sizes are forgotten too"


@pytest.mark.parametrize("tenant", ["", "a", "b", "c"])
async def test_streams_go_as_sets_do(log: EventLog, tenant: str) -> None:
    later_us, past_us = 4_102_444_800_000_000, 1_763_700_000_000_000
    for stream, until_us, left in ((keys.batch_facts(tenant), later_us, 1), (keys.ending_files(tenant), past_us, 0)):
        await log.append(stream, [b"f", b"x"])
        await log.keep_until(stream, until_us)
        assert len(await log.range(stream)) == left
