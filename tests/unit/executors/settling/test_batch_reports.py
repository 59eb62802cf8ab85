"""Journals hear of a batch that lasts, and of a short one along with its end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import LogUnavailable
from charonia.eventlog.port import Fields
from charonia.facts.journal import JournalFact, read_facts
from charonia.facts.processor_use import use_of
from charonia.tensors import Tensor
from charonia.wire import FLAG_JOURNALLED, BatchHeader, RequestRecord, pack_request, request_meta, unpack_request
from executors.host.processor_meter import ProcessorMeter
from executors.running.submitted_batch import SubmittedBatch
from executors.settling.settler import JournalledStarts


def record(number: int, flags: int = FLAG_JOURNALLED) -> RequestRecord:
    tensor = Tensor.of("x", np.zeros((1, 1), np.float32))
    meta = request_meta(1, "", [tensor], (), {})
    name = bytes([number]) * 16
    return unpack_request(
        pack_request(
            name, b"", b"", meta, [tensor.data], rows=1, signature=0, level=0, accepted_ns=1, deadline_ns=0, flags=flags
        )
    )


def job_of(*records: RequestRecord) -> SubmittedBatch:
    header = BatchHeader("batch-1", "m", 1, "h", 1, tuple(range(1, len(records) + 1)), b"f:{m}")
    return SubmittedBatch(records, lambda _job, _executed: None, header, b"1-0", FLAG_JOURNALLED)


def begin(batch: SubmittedBatch, *indices: int) -> None:
    batch.planned = [(index, None) for index in indices]  # type: ignore[misc]


async def journal(log: MemoryLog) -> list[JournalFact]:
    return [fact for entry in await log.range(keys.journal("m")) for fact in read_facts(entry.fields)]


async def test_a_batch_that_lasts_is_told_of_once() -> None:
    log = MemoryLog()
    starts = JournalledStarts(log, "executor-1")
    batch = job_of(record(1), record(2, 0), record(3))
    starts.watch(batch)
    await asyncio.sleep(0.05)  # it waits for its instance
    assert await journal(log) == []
    begin(batch, 1, 2)
    async with asyncio.timeout(30):
        while not (told := await journal(log)):
            await asyncio.sleep(0.005)
    assert told == [JournalFact("started", (bytes([3]) * 16,), (3,), (), "executor-1", "batch-1")]
    assert starts.reported_with(batch, [0, 1, 2]) is None
    await starts.report(batch)
    assert await journal(log) == told
    starts.close()


async def test_the_end_of_a_short_batch_tells_it_for_all_that_began() -> None:
    starts = JournalledStarts(MemoryLog(), "executor-1")
    batch = job_of(record(1), record(2, 0), record(3))
    starts.watch(batch)
    begin(batch, 0, 1, 2)
    starts.forget(batch)
    assert starts.reported_with(batch, [2, 1, 0]) == ("executor-1", "batch-1")
    assert starts.reported_with(batch, [2, 1, 0]) is None
    starts.close()


async def test_about_once_a_second_it_tells_what_the_processors_do() -> None:
    log = MemoryLog()
    starts = JournalledStarts(log, "executor-1", ProcessorMeter(lambda: (3, 4)))
    first, second, third = (job_of(record(number)) for number in (1, 2, 3))
    for batch in (first, second, third):
        starts.watch(batch)
        begin(batch, 0)
        starts.forget(batch)
    ran = starts.reported_with(first, [0])
    assert ran is not None
    assert ran[:2] == ("executor-1", "batch-1")
    use = use_of(ran[2])  # type: ignore[misc]
    assert (use.batches, use.ran_ns, use.processors >= 1) == (3, 4, True)
    assert starts.reported_with(second, [0]) == ("executor-1", "batch-1")
    await starts.report(third)
    assert [fact.use for fact in await journal(log)] == [None]
    starts.close()


@pytest.mark.parametrize(("began", "ending"), [((0, 1, 2), (0, 1)), ((0,), (0, 2)), ((), (0, 2)), ((1,), (1,))])
async def test_an_end_of_others_than_those_that_began_does_not(began: tuple[int, ...], ending: tuple[int, ...]) -> None:
    log = MemoryLog()
    starts = JournalledStarts(log, "executor-1")
    batch = job_of(record(1), record(2, 0), record(3))
    starts.watch(batch)
    begin(batch, *began)
    assert starts.reported_with(batch, ending) is None
    await starts.report(batch)
    expected = [bytes([index + 1]) * 16 for index in began if index != 1]
    assert [list(fact.ids) for fact in await journal(log)] == ([expected] if expected else [])
    starts.close()


async def test_a_log_that_is_away_hears_nothing_later() -> None:
    class Away(MemoryLog):
        async def append(self, stream: bytes, fields: Fields) -> bytes:
            raise LogUnavailable("away")

    starts = JournalledStarts(Away(), "executor-1")
    batch = job_of(record(1))
    starts.watch(batch)
    begin(batch, 0)
    await starts.report(batch)
    assert not batch.start_unreported
    starts.close()
