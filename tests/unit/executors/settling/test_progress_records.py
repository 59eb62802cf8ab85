"""The progress of responses on its way to the log: what is refused is not sent, what the log lost is appended again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from memory_log.log import MemoryLog

from charonia.backend import ModelRequest, ModelResponse
from charonia.errors import LogUnavailable
from charonia.eventlog.port import Limits, ProgressPart
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.wire import BatchHeader, RequestRecord, pack_request, request_meta, unpack_request, unpack_response
from executors.batches.assembly import Planner, groups
from executors.batches.execution import Batch
from executors.configuration.config import normalise
from executors.running.streamed_batch import FlowControl, Outgoing, StreamedBatch, StreamRun
from executors.running.submitted_batch import SubmittedBatch
from executors.settling.progress_records import append_progress, read_progress

CONFIG = """
name: "m" backend: "python" max_batch_size: 8 model_transaction_policy { decoupled: true }
input { name: "x" data_type: TYPE_INT32 dims: 1 } output { name: "y" data_type: TYPE_INT32 dims: 1 }
parameters { key: "charonia.resumable" value { string_value: "true" } }
"""


class Kept:
    """What a writer is given."""

    def __init__(self) -> None:
        self.all: list[Outgoing] = []

    def put(self, outgoing: Outgoing) -> None:
        self.all.append(outgoing)

    def freed(self, batch: StreamedBatch) -> None: ...


class Instance:
    """One that hears what is cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[ModelRequest] = []

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        self.cancelled += requests


def record(number: int) -> RequestRecord:
    tensors = [Tensor.of("x", np.array([[number]], np.int32))]
    meta, data = request_meta(1, "", tensors, (), {}), [t.data for t in tensors]
    packed = pack_request(
        number.to_bytes(16, "big"), b"gw", b"", meta, data, rows=1, signature=0, level=0, accepted_ns=1
    )
    return unpack_request(packed)


def given(progress: bytes) -> ModelResponse:
    return ModelResponse([Tensor.of("y", np.ones((1, 1), np.int32))], progress=progress)


class World:
    """A batch of two requests on an executor, at an attempt."""

    def __init__(self, log: MemoryLog, attempt: int = 1) -> None:
        self.log, self.writer, self.instance = log, Kept(), Instance()
        interface = ModelInterface.of(normalise(parse(CONFIG)))
        self.records = [record(number) for number in range(2)]
        header = BatchHeader("b", "m", 1, "h", 1, (attempt,) * 2, b"")
        self.submitted = SubmittedBatch(self.records, lambda *_: None, header)
        batch = Batch(Planner(interface), 1, self.records, set())
        self.streamed = StreamedBatch(batch, (attempt,) * 2, (), FlowControl(), self.writer)
        (self._planned,) = groups(interface, batch.planned)
        self.run: StreamRun
        self.requests: list[ModelRequest] = []

    async def begin(self) -> None:
        await read_progress(self.log, self.submitted)
        self.streamed.resume(self.submitted.progress)
        self.run = self.streamed.run_of(self._planned)
        self.requests = [ModelRequest("", 0, [], (), {}, progress=self.streamed.accepted(n)) for n in range(2)]
        self.run.begin([0, 1], self.requests, self.instance)

    async def flush(self) -> set[int]:
        outgoing, self.writer.all = self.writer.all, []
        batches, sent = {self.streamed: self.submitted}, {self.streamed: outgoing}
        fenced, otherwise, _ = await append_progress(self.log, batches, sent)
        assert not otherwise
        return fenced.get(self.streamed, set())


async def accepted() -> tuple[MemoryLog, int]:
    log = MemoryLog()
    await log.accept("m", 0, 0, [(record(n).id, 1) for n in range(2)], [b"r", b"x"], Limits())
    return log, await log.take_ownership("m", "me", "")


async def test_a_flush_is_one_call_for_all_requests() -> None:
    log, _ = await accepted()
    calls: list[Sequence[ProgressPart]] = []
    append = log.append_progress

    async def counted(model: str, parts: Sequence[ProgressPart]) -> list[int]:
        calls.append(parts)
        if len(calls) == 1:
            await append(model, parts)
            raise LogUnavailable("no answer")
        return await append(model, parts)

    log.append_progress = counted  # type: ignore[method-assign]
    world = World(log)
    await world.begin()
    world.run.send(0, given(b"a"), final=False)
    world.run.send(1, given(b""), final=False)
    world.run.send(0, given(b"b"), final=False)
    world.run.send(1, given(b"ignored"), final=True)
    assert [one.begins for one in world.writer.all] == [True, True, False, False]
    assert await world.flush() == set()
    assert len(calls) == 2, "repeated, as the log did not answer"
    assert (
        calls[0]
        == calls[1]
        == [
            ProgressPart(world.records[0].id, 1, 0, [b"a", b"b"]),
            ProgressPart(world.records[1].id, 1, 0, [b""]),
        ]
    )
    assert await log.progress("m", [one.id for one in world.records]) == [[b"a", b"b"], [b""]]


async def test_a_later_attempt_repeats_goes_on_and_fences_the_earlier() -> None:
    log, token = await accepted()
    first = World(log)
    await first.begin()
    for progress in (b"a", b"b"):
        first.run.send(0, given(progress), final=False)
    assert await first.flush() == set()

    assert await log.begin_attempt("m", token, [first.records[0].id], 2) == [True]
    second = World(log, attempt=2)
    await second.begin()
    assert [list(one.progress) for one in second.requests] == [[b"a", b"b"], []]
    for progress in (b"a", b"b", b"c"):
        second.run.send(0, given(progress), final=False)
    sent = [(one.progress, one.begins, unpack_response(one.record).place) for one in second.writer.all]
    assert sent == [(None, False, (2, 0)), (None, False, (2, 1)), (b"c", True, (2, 2))]
    assert second.streamed.begun_ids() == [second.records[0].id]
    assert await second.flush() == set()

    first.run.send(0, given(b"late"), final=False)
    first.run.send(1, given(b"z"), final=False)
    assert await first.flush() == {0}, "its other request runs nowhere else"
    assert await log.progress("m", [one.id for one in first.records]) == [[b"a", b"b", b"c"], [b"z"]]


async def test_a_replay_that_disagrees_ends_its_request_alone() -> None:
    log, token = await accepted()
    first = World(log)
    await first.begin()
    for number in (0, 1):
        first.run.send(number, given(b"a"), final=False)
    await first.flush()
    await log.begin_attempt("m", token, [one.id for one in first.records], 2)
    second = World(log, attempt=2)
    await second.begin()
    second.run.send(0, given(b"other"), final=False)
    second.run.send(0, given(b"more"), final=False)
    second.run.send(1, None, final=True)
    for one in second.writer.all:
        assert one.final
        assert str(unpack_response(one.record).error).startswith("STREAM_INTERRUPTED: its executor was lost")
    assert [one.index for one in second.writer.all] == [0, 1], "also one that ends too early"
    assert second.instance.cancelled == second.requests
    assert [failure.index for failure in second.streamed.batch.executed.failures] == [0, 1]


async def test_an_error_of_the_model_during_its_replay_is_its_end() -> None:
    log, token = await accepted()
    first = World(log)
    await first.begin()
    first.run.send(0, given(b"a"), final=False)
    await first.flush()
    await log.begin_attempt("m", token, [first.records[0].id], 2)
    second = World(log, attempt=2)
    await second.begin()
    second.run.send(0, ModelResponse(error=LogUnavailable("no memory")), final=True)
    assert str(unpack_response(second.writer.all[0].record).error) == "no memory"


async def test_what_the_log_lost_is_appended_again() -> None:
    log, _ = await accepted()
    world = World(log)
    await world.begin()
    for progress in (b"a", b"b", b"c"):
        world.run.send(0, given(progress), final=False)
    await world.flush()
    del log._of("m").requests[world.records[0].id].progress[1:]  # the last moments before a server's death
    world.run.send(0, given(b"d"), final=False)
    assert await world.flush() == set()
    assert await log.progress("m", [world.records[0].id]) == [[b"a", b"b", b"c", b"d"]]


async def test_nothing_is_appended_of_what_is_settled() -> None:
    log, _ = await accepted()
    world = World(log)
    await world.begin()
    world.run.send(0, given(b"a"), final=False)
    assert await log.settle("m", [(world.records[0].id, 1)], None, []) == [True]
    assert await world.flush() == {0}
    world.streamed.cancel({world.records[0].id}, None)
    world.run.send(0, given(b"b"), final=False)
    assert world.writer.all == []
    assert await log.progress_ids("m") == []
