"""What is written of responses whose progress the log refuses: the batch ends, and so does each of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.backend import ModelRequest, ModelResponse
from charonia.eventlog import port
from charonia.eventlog.port import Limits, ProgressPart, Reply
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Buffer, Tensor
from charonia.wire import (
    BatchHeader,
    RequestRecord,
    ResponseRecord,
    pack_request,
    records_of,
    request_meta,
    unpack_request,
    unpack_response,
)
from executors.batches.assembly import Planner, groups
from executors.batches.batch_results import Executed
from executors.batches.execution import Batch
from executors.configuration.config import normalise
from executors.running.streamed_batch import FlowControl, StreamedBatch, StreamRun
from executors.running.submitted_batch import SubmittedBatch
from executors.settling.response_writer import ResponseWriter
from executors.settling.settler import OwnerReports

CONFIG = """
name: "m" backend: "python" max_batch_size: 8 model_transaction_policy { decoupled: true }
input { name: "x" data_type: TYPE_INT32 dims: 1 } output { name: "y" data_type: TYPE_INT32 dims: 1 }
parameters { key: "charonia.resumable" value { string_value: "true" } }
"""


def record(number: int) -> RequestRecord:
    tensors = [Tensor.of("x", np.array([[number]], np.int32))]
    meta, data = request_meta(1, "", tensors, (), {}), [t.data for t in tensors]
    packed = pack_request(
        number.to_bytes(16, "big"), b"gw", b"", meta, data, rows=1, signature=0, level=0, accepted_ns=1
    )
    return unpack_request(packed)


def given(progress: bytes) -> ModelResponse:
    return ModelResponse([Tensor.of("y", np.ones((1, 1), np.int32))], progress=progress)


class Written:
    """A batch of two requests whose responses a writer writes."""

    def __init__(self, log: MemoryLog) -> None:
        interface = ModelInterface.of(normalise(parse(CONFIG)))
        self.records = [record(number) for number in range(2)]
        self.flow = FlowControl()
        self.settled: dict[bytes, str] = {}
        """By id, how each request ended."""
        self.sent: list[tuple[bytes, int]] = []
        """The responses that were sent, by id and index."""
        self.responses: list[ResponseRecord] = []
        self.over = 0
        self.writer = ResponseWriter(log, "x", None, self._cancel, OwnerReports(log, None))  # type: ignore[arg-type]
        header = BatchHeader("b", "m", 1, "h", 1, (1, 1), b"f:{m}")
        self.submitted = SubmittedBatch(self.records, lambda *_: None, header)
        batch = Batch(Planner(interface), 1, self.records, set())
        self.streamed = StreamedBatch(batch, (1, 1), (), self.flow, self.writer)
        self.writer.open(self.streamed, self.submitted, self._settle)
        (planned,) = groups(interface, batch.planned)
        self.run: StreamRun = self.streamed.run_of(planned)
        self.run.begin([0, 1], [ModelRequest("", 0, [], (), {}) for _ in range(2)])

    def _cancel(self, batch: SubmittedBatch, ids: frozenset[bytes]) -> None:
        batch.unwanted |= ids
        self.streamed.cancel(ids, None)

    async def _settle(
        self, batch: SubmittedBatch, part: Executed, before: Sequence[tuple[str, bytes]], last: bool
    ) -> None:
        failed = {failure.index: str(failure.error) for failure in part.failures}
        for index, answer in enumerate(part.answers):
            if answer:
                self.settled[batch.records[index].id] = failed.get(index, "")
                assert str(unpack_response(answer).error or "") == failed.get(index, "")
        for _, response in before:
            found = unpack_response(response)
            assert found.place is not None
            self.sent.append((found.id, found.place[1]))
            self.responses.append(found)
        self.over += last

    async def written(self) -> None:
        await self.writer.written(self.streamed)
        assert self.flow._unwritten_bytes == 0


@pytest.fixture
async def log() -> MemoryLog:
    log = MemoryLog()
    await log.accept("m", 0, 0, [(record(n).id, 1) for n in range(2)], [b"r", b"x"], Limits())
    return log


async def test_a_batch_ends_with_a_request_that_ended_elsewhere(log: MemoryLog) -> None:
    """Its refused response and its end are one write."""
    world = Written(log)
    first, second = [one.id for one in world.records]
    assert await log.settle("m", [(second, 1)], None, []) == [True]
    for index in range(2):
        world.run.send(index, given(b"a"), final=False)
        world.run.send(index, None, final=True)
    await world.written()
    assert world.settled == {first: ""}
    assert world.sent == [(first, 0)]
    assert world.over == 1


@pytest.mark.parametrize("ends", [True, False])
async def test_a_request_with_other_progress_in_the_log_is_interrupted(log: MemoryLog, ends: bool) -> None:
    """No other run ends it; `ends`: its end was made by then."""
    world = Written(log)
    first, second = [one.id for one in world.records]
    await log.append_progress("m", [ProgressPart(second, 1, 0, [b"other"])])
    for index in range(2):
        world.run.send(index, given(b"a"), final=False)
    if ends:
        world.run.send(1, None, final=True)
    world.run.send(0, None, final=True)
    await world.written()
    if not ends:
        world.run.send(1, given(b"b"), final=False)
        world.run.send(1, None, final=True)
        await world.written()
    assert world.settled.pop(second).startswith("STREAM_INTERRUPTED: ")
    assert world.settled == {first: ""}
    assert world.sent == [(first, 0)]
    assert world.over == 1
    assert await log.progress("m", [second]) == [[b"other"]]


class CountingLog(MemoryLog):
    """Counts the calls that write progress alone, and those that may have replies with it."""

    alone = together = 0

    async def append_progress(self, model: str, parts: Sequence[ProgressPart]) -> list[int]:
        self.alone += 1
        return await super().append_progress(model, parts)

    async def append_progress_and_replies(
        self, model: str, parts: Sequence[ProgressPart], replies: Sequence[Reply]
    ) -> tuple[list[int], bool]:
        self.together += 1
        self.alone -= 1  # which it calls
        return await super().append_progress_and_replies(model, parts, replies)

    async def seen(self) -> list[tuple[bytes, int]]:
        """The responses that the gateway was sent, by id and index."""
        entries = await self.range(keys.replies("gw"))
        found = [unpack_response(bytes(one)) for entry in entries for one in records_of(entry.fields)]
        return [(one.id, one.place[1]) for one in found if one.place is not None]


@pytest.mark.parametrize("refused", [False, True])
async def test_responses_of_a_step_go_with_their_progress(refused: bool) -> None:
    """In one call, unless something of it is refused: what is left then leaves alone."""
    log = CountingLog()
    await log.accept("m", 0, 0, [(record(n).id, 1) for n in range(2)], [b"r", b"x"], Limits())
    world = Written(log)
    first, second = [one.id for one in world.records]
    for index in range(2):
        world.run.send(index, given(b"a"), final=False)
    await world.written()
    assert (log.alone, log.together) == (1, 0), "the owner hears of first responses before they are seen"
    if refused:
        assert await log.settle("m", [(second, 1)], None, []) == [True]
    for index in range(2):
        world.run.send(index, given(b"b"), final=False)
    await world.written()
    assert (log.alone, log.together) == (1, 1)
    assert await log.seen() == [(first, 0), (second, 0), (first, 1), *([] if refused else [(second, 1)])]
    assert (await log.progress("m", [first]))[0] == [b"a", b"b"]
    world.run.send(0, given(b"c"), final=False)
    world.run.send(1, None, final=True)
    await world.written()
    assert log.together == 1, "an end is written with its settlement"
    assert (await log.seen() + world.sent)[-1] == (first, 2)


class StuckLog(MemoryLog):
    """Takes no replies until `goes_on`; `asked` and `taken` count those of `append`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()
        self.taken = 0

    async def append(self, stream: bytes, fields: Sequence[Buffer]) -> bytes:
        self.asked.set()
        await self.goes_on.wait()
        self.taken += 1
        return await super().append(stream, fields)


async def test_nothing_is_written_after_what_was_abandoned() -> None:
    """Of an executor that leaves while a stream runs: its reader would see a gap where the next run gives them all."""
    log = StuckLog()
    await log.accept("m", 0, 0, [(record(n).id, 1) for n in range(2)], [b"r", b"x"], Limits())
    world = Written(log)
    world.run.send(0, given(b"a"), final=False)
    await log.asked.wait()
    await world.writer.closed()
    log.goes_on.set()
    world.run.send(0, given(b"b"), final=False)
    for _ in range(20):  # a write, if there were one, would be over by then
        await asyncio.sleep(0)
    assert log.taken == 0
    assert await log.progress("m", [world.records[0].id]) == [[b"a"]]


async def test_progress_that_the_log_would_not_take_is_an_error_of_its_response(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 100)
    world = Written(log)
    first, second = [one.id for one in world.records]
    for progress in (b"a", bytes(101), b"b"):
        world.run.send(0, given(progress), final=False)
    for index in range(2):
        world.run.send(index, given(b""), final=True)
    await world.written()
    assert world.settled == {first: "", second: ""}
    assert sorted(world.sent) == [(first, 0), (first, 1), (first, 2)]
    failed = [one for one in world.responses if one.error is not None]
    assert [(one.place, str(one.error)) for one in failed] == [
        ((1, 1), "the progress of a response of model 'm' is more than the log takes")
    ]
