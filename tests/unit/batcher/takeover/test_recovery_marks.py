"""What a new owner learns of responses that were seen, from the marks in the log."""

from __future__ import annotations

from log_jobs import accept, made
from memory_log.log import MemoryLog

from batcher.entries.carriers import Carried, CarrierEntry
from batcher.scheduling.observations import RequestQueued
from batcher.takeover.recovery import jobs_unseen, visible_requests
from charonia import keys
from charonia.eventlog.port import Limits
from charonia.wire import FLAG_JOB, pack_request, request_meta, unpack_request


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


def queued(request_id: bytes, flags: int) -> RequestQueued:
    meta = request_meta(1, "", [], (), {})
    packed = pack_request(request_id, b"", b"", meta, [], rows=1, signature=0, level=0, accepted_ns=1, flags=flags)
    carried = Carried(unpack_request(packed), CarrierEntry(b"q", b"1-0", 1), 1)
    return RequestQueued(request_id, 1, 0, 1, 0, 0, 0, 1, 1, carried)


async def test_a_job_that_was_marked_and_of_which_nothing_is_kept_may_run_again() -> None:
    """Its executor was lost between the two; of others the mark is all there is."""
    log = MemoryLog()
    jobs = [made(1), made(2)]
    for job in jobs:
        await accept(log, job)
    assert await log.add_job_responses("m", jobs[1].id, 1, 0, [b"seen"])
    other = bytes(16)
    marked = {jobs[0].id, jobs[1].id, other, b"behind the window"}
    known = {job.id: queued(job.id, FLAG_JOB) for job in jobs} | {other: queued(other, 0)}
    assert await jobs_unseen(log, "m", marked, known) == {jobs[0].id}
