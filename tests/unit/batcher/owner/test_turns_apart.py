"""One suspect at a time runs apart at an executor."""

from __future__ import annotations

import asyncio

from batcher.owner.turns_apart import TurnsApart


async def test_turns_are_taken_one_after_the_other() -> None:
    turns = TurnsApart()
    await turns.take("x", "1")
    await turns.take("y", "2")
    waiting = [asyncio.ensure_future(turns.take("x", batch)) for batch in ("3", "4", "5")]
    await asyncio.sleep(0)
    turns.give("4")  # given up before its turn
    turns.give("2")
    turns.give("unknown")
    await waiting[1]
    assert not waiting[0].done()
    turns.give("1")
    await waiting[0]
    assert not waiting[2].done()
    turns.give("3")
    await waiting[2]
    turns.give("5")
    await turns.take("x", "6")
