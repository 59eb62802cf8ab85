"""One quarantined batch at a time is at an executor."""

from __future__ import annotations

import asyncio

from batcher.owner.quarantine import Quarantine


async def test_batches_enter_one_after_the_other() -> None:
    quarantine = Quarantine()
    await quarantine.enter("x", "1")
    await quarantine.enter("y", "2")
    waiting = [asyncio.ensure_future(quarantine.enter("x", batch)) for batch in ("3", "4", "5")]
    await asyncio.sleep(0)
    quarantine.leave("4")  # given up before it entered
    quarantine.leave("2")
    quarantine.leave("unknown")
    await waiting[1]
    assert not waiting[0].done()
    quarantine.leave("1")
    await waiting[0]
    assert not waiting[2].done()
    quarantine.leave("3")
    await waiting[2]
    quarantine.leave("5")
    await quarantine.enter("x", "6")
