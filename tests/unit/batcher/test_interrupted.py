"""What a new owner learns of responses that were seen, from the marks in the log."""

from __future__ import annotations

from batcher.interrupted import visible_requests
from charonia import keys
from charonia.eventlog.memory import MemoryLog
from charonia.eventlog.port import Limits


async def test_marks_of_what_has_ended_are_removed() -> None:
    log = MemoryLog()
    ids = [bytes([number]) * 16 for number in range(4)]
    for one in ids[:3]:
        await log.accept("m", 0, 0, [(one, 1)], [b"r", b"x"], Limits())
    await log.set_times(keys.visible("m"), {one: 10 * number for number, one in enumerate(ids)})
    assert await visible_requests(log, "m", 5) == {ids[0]}
    await log.settle("m", [(ids[1], 1)], None, [])
    assert await visible_requests(log, "m") == {ids[0], ids[2]}
    assert await log.due(keys.visible("m"), 1000, 10) == [ids[0], ids[2]]
    assert await visible_requests(log, "other") == frozenset()
