"""What is deleted of control facts and dead letters, and what is left for those who still read."""

from __future__ import annotations

from memory_log.log import MemoryLog

from batcher.housekeeping.stream_trimming import ControlTrimming, trim_dead_letters
from charonia import keys
from charonia.facts.events import FIELD_FACT, ModelRequested, ProcessJoined, ProcessLeft, facts_of, pack_fact


async def opened() -> MemoryLog:
    log = MemoryLog()
    await log.open()
    return log


async def test_needless_facts_go_at_the_second_look() -> None:
    log = await opened()
    told = [
        ProcessJoined("gateway", "g1"),
        ProcessJoined("gateway", "g2"),
        ProcessLeft("gateway", "g1", "lost"),
        ModelRequested("load", "m", "r"),
    ]
    for fact in told:
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
    await log.append(keys.CONTROL, [FIELD_FACT, b"not a fact"])
    await log.append(keys.CONTROL, [b"z", b"of a newer release"])
    trimming = ControlTrimming(log)
    assert await trimming.look() == 0
    await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(ModelRequested("load", "m", "young"))])
    assert await trimming.look() == 3
    left = await log.range(keys.CONTROL)
    assert [fact for entry in left for fact in facts_of(entry)] == [told[1], ModelRequested("load", "m", "young")]
    assert len(left) == 4
    assert await trimming.look() == 1
    assert await trimming.look() == 0


async def test_the_oldest_letters_go() -> None:
    log = await opened()
    stream = keys.dead_letters("m")
    for number in range(600):
        await log.append(stream, [b"r", bytes(99) + bytes((number % 256,))])
    assert await trim_dead_letters(log, "m", 100_000) == 0
    assert await trim_dead_letters(log, "m", 1010) == 590
    assert [bytes(entry.fields[1])[-1] for entry in await log.range(stream)] == [n % 256 for n in range(590, 600)]
    # one that is larger than all that may be kept is not lost
    assert await trim_dead_letters(log, "m", 1) == 9
    assert len(await log.range(stream)) == 1
