"""What is written of responses whose progress the log refuses: the batch ends, and so does each of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace

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
    FLAG_REPLY_BY_REFERENCE,
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


ORDERED = "dynamic_batching { preserve_ordering: true }"
PLAIN = CONFIG[: CONFIG.index("parameters")]


def record(number: int, endpoint: bytes = b"gw") -> RequestRecord:
    tensors = [Tensor.of("x", np.array([[number]], np.int32))]
    meta, data = request_meta(1, "", tensors, (), {}), [t.data for t in tensors]
    packed = pack_request(
        number.to_bytes(16, "big"), endpoint, b"", meta, data, rows=1, signature=0, level=0, accepted_ns=1
    )
    return unpack_request(packed)


def given(progress: bytes) -> ModelResponse:
    return ModelResponse([Tensor.of("y", np.ones((1, 1), np.int32))], progress=progress)


class Written:
    """A batch of two requests whose responses a writer writes, one of its own unless it is given."""

    def __init__(
        self, log: MemoryLog, model: str = "m", endpoint: bytes = b"gw", writer: ResponseWriter | None = None
    ) -> None:
        config = {"m": CONFIG, "ordered": PLAIN + ORDERED}.get(model, PLAIN)
        interface = ModelInterface.of(normalise(parse(config.replace('"m"', f'"{model}"'))))
        self.records = [record(number, endpoint) for number in range(2)]
        self.flow = FlowControl()
        self.settled: dict[bytes, str] = {}
        """By id, how each request ended."""
        self.sent: list[tuple[bytes, int]] = []
        """The responses that were sent, by id and index."""
        self.responses: list[ResponseRecord] = []
        self.counted: dict[int, dict[str, int]] = {}
        """By number of the request, what was counted of its responses."""
        self.sent_bytes: dict[int, int] = {}
        self.over = 0
        self.settles: Callable[[], Awaitable[object]] | None = None
        """What a settlement waits for."""
        self.writer = writer or ResponseWriter(
            log,
            "x",
            None,  # type: ignore[arg-type]
            self._cancel,
            OwnerReports(log, None),
        )
        header = BatchHeader("b", model, 1, "h", 1, (1, 1), keys.facts(model))
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
        if self.settles is not None:
            await self.settles()
        self.counted |= part.responses
        self.sent_bytes |= part.sent_bytes
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


# -- a part of the log is away -----------------------------------------------------------------------------------------


class PartlyAway(MemoryLog):
    """Does not answer for streams in `away`, until they come back. `appended` counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.away: dict[bytes, asyncio.Event] = {}
        self.asked: set[bytes] = set()
        self.appended = 0

    def lose(self, stream: bytes) -> None:
        self.away[stream] = asyncio.Event()

    def find(self, stream: bytes) -> None:
        self.away.pop(stream).set()

    async def answers(self, stream: bytes) -> None:
        self.asked.add(stream)
        if stream in self.away:
            await self.away[stream].wait()

    async def append(self, stream: bytes, fields: Sequence[Buffer]) -> bytes:
        await self.answers(stream)
        self.appended += 1
        return await super().append(stream, fields)

    async def append_progress(self, model: str, parts: Sequence[ProgressPart]) -> list[int]:
        await self.answers(keys.facts(model))
        return await super().append_progress(model, parts)

    async def seen(self, endpoint: str) -> list[tuple[int, int]]:
        """The responses that a gateway was sent, by number of the request and index."""
        entries = await self.range(keys.replies(endpoint))
        found = [unpack_response(bytes(one)) for entry in entries for one in records_of(entry.fields)]
        return [(int.from_bytes(one.id, "big"), one.place[1]) for one in found if one.place is not None]


@pytest.fixture
async def partly() -> PartlyAway:
    log = PartlyAway()
    for model in ("m", "a", "b"):
        await log.accept(model, 0, 0, [(record(n).id, 1) for n in range(2)], [b"r", b"x"], Limits())
    return log


async def begun(log: PartlyAway, *worlds: Written) -> None:
    """Each has given its first responses."""
    for world in worlds:
        for index in range(2):
            world.run.send(index, given(b"a"), final=False)
        await world.written()


async def test_a_batch_whose_part_of_the_log_is_away_alone_waits_for_it(partly: PartlyAway) -> None:
    """The others are in the same write."""
    lost = Written(partly, "a", b"gw-a")
    other = Written(partly, "b", b"gw-b", lost.writer)
    await begun(partly, lost, other)
    lost.settles = lambda: partly.answers(keys.facts("a"))
    partly.lose(keys.facts("a"))
    for world in (lost, other):
        world.run.send(0, given(b""), final=False)
        world.run.send(0, None, final=True)
        world.run.send(1, given(b""), final=False)
    async with asyncio.timeout(30):
        await other.written()
        for index in range(2, 40):
            other.run.send(1, given(b""), final=False)
            lost.run.send(1, given(b""), final=False)
            await other.written()
            assert (1, index) in await partly.seen("gw-b")
        other.run.send(1, None, final=True)
        await other.written()
        assert other.over == 1
        assert (lost.settled, lost.over) == ({}, 0)
        assert lost.flow._unwritten_bytes > 0, "its instance is held back once there is too much"

        lost.run.send(1, None, final=True)
        partly.find(keys.facts("a"))
        await lost.written()
    assert lost.over == 1
    received = [int.from_bytes(i, "big") for i, _ in lost.sent]
    assert received.count(1) + len([n for n, _ in await partly.seen("gw-a") if n == 1]) == 40
    in_order = [place for n, place in await partly.seen("gw-a") if n == 1]
    assert in_order == sorted(in_order)
    assert lost.writer._apart == {}


async def test_streams_to_one_gateway_do_not_wait_for_another_whose_replies_cannot_be_written(
    partly: PartlyAway,
) -> None:
    """Also those of one model."""
    lost = Written(partly, "a", b"gw-a")
    same, other = Written(partly, "a", b"gw-b", lost.writer), Written(partly, "b", b"gw-b", lost.writer)
    await begun(partly, lost, same, other)
    partly.lose(keys.replies("gw-a"))
    for world in (lost, same, other):
        world.run.send(0, given(b""), final=False)
    async with asyncio.timeout(30):
        await same.written()
        await other.written()
        lost.run.send(0, given(b""), final=False)
        for world in (same, other):
            world.run.send(0, given(b""), final=False)
            await world.written()
        assert await partly.seen("gw-a") == [(0, 0), (1, 0)]
        partly.find(keys.replies("gw-a"))
        await lost.written()
    assert await partly.seen("gw-a") == [(0, 0), (1, 0), (0, 1), (0, 2)]


async def test_a_resumable_model_whose_progress_cannot_be_written_does_not_hold_up_others(partly: PartlyAway) -> None:
    lost = Written(partly, "m", b"gw-m")
    other = Written(partly, "b", b"gw-b", lost.writer)
    await begun(partly, lost, other)
    partly.lose(keys.facts("m"))
    for world in (lost, other):
        world.run.send(0, given(b"b"), final=False)
    async with asyncio.timeout(30):
        await other.written()
        for _ in range(3):
            for world in (lost, other):
                world.run.send(0, given(b"b"), final=False)
            await other.written()
        assert len(await partly.seen("gw-b")) == 6
        assert len(await partly.seen("gw-m")) == 2
        partly.find(keys.facts("m"))
        await lost.written()
    assert await partly.seen("gw-m") == [(0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (0, 4)]
    assert [len(one) for one in await partly.progress("m", [lost.records[0].id])] == [5]


async def test_several_parts_of_the_log_come_back_one_by_one(partly: PartlyAway) -> None:
    first = Written(partly, "a", b"gw-a")
    second, third = Written(partly, "b", b"gw-b", first.writer), Written(partly, "b", b"gw-c", first.writer)
    worlds = (first, second, third)
    await begun(partly, *worlds)
    for name in ("gw-a", "gw-b"):
        partly.lose(keys.replies(name))
    for world in worlds:
        world.run.send(0, given(b""), final=False)
    async with asyncio.timeout(30):
        await third.written()
        partly.find(keys.replies("gw-b"))
        await second.written()
        second.run.send(0, given(b""), final=False)
        await second.written()
        assert len(await partly.seen("gw-b")) == 4
        assert first.writer._apart.keys() == {first.streamed}
        partly.find(keys.replies("gw-a"))
        await first.written()


async def test_a_batch_that_waits_no_longer_takes_all_of_its_responses_along(partly: PartlyAway) -> None:
    """In an ordered batch they are written in several parts, if a request has ended between them."""
    lost = Written(partly, "a", b"gw")
    ordered, other = Written(partly, "ordered", b"gw", lost.writer), Written(partly, "b", b"gw-b", lost.writer)
    worlds = (lost, ordered, other)
    await begun(partly, *worlds)
    sent = len(await partly.seen("gw"))
    lost.settles = lambda: partly.answers(keys.facts("a"))
    partly.lose(keys.replies("gw"))
    partly.lose(keys.facts("a"))
    for world in worlds:
        world.run.send(0, given(b""), final=False)
    async with asyncio.timeout(30):
        await other.written()
        assert lost.writer._apart.keys() == {lost.streamed, ordered.streamed}
        lost.run.send(0, None, final=True)
        ordered.run.send(0, None, final=True)
        partly.find(keys.replies("gw"))
        while ordered.streamed in lost.writer._apart:
            await asyncio.sleep(0)
        ordered.run.send(1, given(b""), final=False)
        await ordered.written()
        assert (await partly.seen("gw"))[sent:] == [(0, 1), (0, 1), (1, 0), (1, 1)]
        assert lost.settled == {}
        partly.find(keys.facts("a"))
        await lost.written()
    assert lost.writer._apart == {}


async def test_a_writer_that_is_closed_while_a_part_of_the_log_is_away_writes_nothing_more(partly: PartlyAway) -> None:
    lost = Written(partly, "a", b"gw-a")
    other = Written(partly, "b", b"gw-b", lost.writer)
    await begun(partly, lost, other)
    partly.lose(keys.replies("gw-a"))
    for world in (lost, other):
        world.run.send(0, given(b""), final=False)
    async with asyncio.timeout(30):
        await other.written()
        lost.run.send(0, given(b""), final=False)
        await lost.writer.closed()
    partly.find(keys.replies("gw-a"))
    await asyncio.sleep(0)
    assert await partly.seen("gw-a") == [(0, 0), (1, 0)]


async def test_responses_of_several_models_that_are_made_during_a_write_are_one_entry_for_each_gateway(
    partly: PartlyAway,
) -> None:
    first = Written(partly, "a")
    second = Written(partly, "b", writer=first.writer)
    await begun(partly, first, second)
    before = partly.appended
    for _ in range(3):
        for world in (first, second):
            for index in range(2):
                world.run.send(index, given(b""), final=False)
    await first.written()
    await second.written()
    assert partly.appended == before + 1


# -- what is counted of responses that cannot be sent ------------------------------------------------------------------


def kinds(counts: dict[str, int]) -> list[str]:
    """What was counted of responses, in order of their indices."""
    names = [name.removesuffix("_count") for name, value in counts.items() if name.endswith("_count") and value]
    return sorted(name for name in names if not name.endswith(("_infer", "_output")))


async def test_a_response_that_the_log_would_not_take_is_counted_as_a_failure(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could have been sent out of band, where there was no room for it."""
    monkeypatch.setattr("executors.settling.response_writer.BY_REFERENCE_BYTES", 1)
    world = Written(log, "a")
    world.streamed.reports = True
    world.submitted.flags |= FLAG_REPLY_BY_REFERENCE
    world.writer._payloads = SimpleNamespace(refer=lambda _record, answer: answer)  # type: ignore[assignment]
    for one in world.records:
        one.flags |= FLAG_REPLY_BY_REFERENCE
    world.run.send(0, given(b""), final=False)
    await world.written()
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 10)
    world.run.send(0, given(b""), final=False)
    await world.written()
    monkeypatch.undo()
    world.run.send(0, given(b""), final=False)
    world.run.send(0, None, final=True)
    await world.written()
    assert kinds(world.counted[0]) == ["r0_success", "r1_fail", "r2_success"]
    assert {name: value > 0 for name, value in world.counted[0].items() if name.startswith("r1_fail")} == {
        "r1_fail_count": True,
        "r1_fail_ns": True,
    }
    assert world.sent_bytes == {0: 8}, "two of four bytes each"
    assert world.settled == {world.records[0].id: ""}, "the request itself has not failed"


async def test_responses_that_find_no_room_behind_those_of_requests_before_are_counted_as_failures(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Written(log, "ordered")
    world.streamed.reports = True
    for _ in range(2):
        world.run.send(1, given(b""), final=False)
    monkeypatch.setattr("executors.running.streamed_batch.MAX_HELD_BYTES", 1)
    world.run.send(1, given(b""), final=False)
    world.run.send(0, given(b""), final=False)
    world.run.send(0, None, final=True)
    await world.written()
    assert world.settled[world.records[1].id].startswith("more than 1 bytes of responses wait")
    assert kinds(world.counted[1]) == ["r0_fail", "r1_fail", "r2_fail"]
    assert kinds(world.counted[0]) == ["r0_success"]
    assert world.sent_bytes == {0: 4, 1: 0}
