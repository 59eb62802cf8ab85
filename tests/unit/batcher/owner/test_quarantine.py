"""One quarantined batch at a time is at an executor; what a note says of suspects to the next owner."""

from __future__ import annotations

import asyncio
from typing import Any

from memory_log.log import MemoryLog

from batcher.owner.quarantine import Quarantine, SuspectNote
from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import RequestQueued


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


def _request(number: int) -> RequestQueued:
    return RequestQueued(bytes(15) + bytes([number]), 1, 0, 1, 7, 0, 0, 0)


async def test_requests_that_go_on_leave_the_note() -> None:
    log, requests = MemoryLog(), [_request(number) for number in range(3)]
    note = SuspectNote(log, "m", "x")
    for batch_id, members in (("1", requests[:2]), ("2", requests[2:])):
        await note.write(DispatchBatch(batch_id, "x", 1, "h", members, (2,) * len(members), False))

    async def noted() -> list[list[Any]]:
        lost = await SuspectNote(log, "m", "y").read({one.id: one for one in requests})
        return [list(one.requests) for one in lost]

    assert await noted() == [requests[:2], requests[2:]]
    await note.clear("1", frozenset({requests[1].id}))
    assert await noted() == [requests[:1], requests[2:]]
    await note.clear("1", frozenset({requests[1].id}))
    await note.clear("2", frozenset({requests[2].id, requests[1].id}))
    assert await noted() == [requests[:1]]
    await note.clear("1", frozenset({requests[0].id}))
    assert await noted() == []
    assert not note.aboard
    await note.clear("1", frozenset({requests[0].id}))  # said twice, or after the batch's end
    assert await noted() == []
