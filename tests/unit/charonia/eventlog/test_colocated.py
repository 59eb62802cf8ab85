"""Which log gets what. The port's promises over both are in tests/contract."""

from __future__ import annotations

import asyncio

import pytest

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.colocated import ColocatedLog
from charonia.eventlog.memory.log import MemoryLog
from charonia.eventlog.port import Limits, Reply


async def test_only_local_streams_stay_in_the_process() -> None:
    shared, local = MemoryLog(), MemoryLog()
    log = ColocatedLog(shared, local)
    await log.accept("m", 0, 0, [(b"a", 1)], [b"r", b"x"], Limits())

    replies, facts = [Reply(b"r:1", [b"r", b"far"])], [Reply(b"local:f", [b"e", b"near"])]
    assert await log.settle("m", [(b"a", 0)], None, replies, facts) == [True]

    assert [entry.fields[1] for entry in await local.range(b"local:f")] == [b"near"]
    assert [entry.fields[1] for entry in await shared.range(b"r:1")] == [b"far"]
    assert await shared.range(b"local:f") == []
    assert await local.range(b"r:1") == []
    assert await local.range(keys.queue("m", 0)) == []


async def test_a_settlement_that_was_not_recorded_is_not_told_to_the_process() -> None:
    class Lost(MemoryLog):
        async def settle(self, *_: object, **__: object) -> list[bool]:
            raise LogUnavailable("lost")

    local = MemoryLog()
    with pytest.raises(LogUnavailable):
        await ColocatedLog(Lost(), local).settle("m", [(b"a", 0)], None, [], [Reply(b"local:f", [b"e", b"x"])])
    assert await local.range(b"local:f") == []


async def test_an_owner_hears_of_a_settlement_although_its_executor_fails_over_it() -> None:
    log, heard = ColocatedLog(MemoryLog(), MemoryLog()), asyncio.Event()
    log.take_over(b"local:f", lambda _fields: heard.set())
    await log.accept("m", 0, 0, [(b"a", 1)], [b"r", b"x"], Limits())
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context["exception"]))
    failure = KeyError("what is counted")

    def fail(_outcome: object) -> None:
        raise failure

    assert log.settle_now("m", [(b"a", 0)], None, [], [Reply(b"local:f", [b"e", b"x"])], fail)
    await asyncio.wait_for(heard.wait(), 10)
    assert failures == [failure]
