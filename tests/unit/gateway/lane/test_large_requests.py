"""Large requests in waves: their tensors lie in slots of the gateway, their answers in a slot of the executor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lane_bench import GATEWAY, MODEL, LaneBench, SentWave

from charonia import keys
from charonia.datatypes import DataType
from charonia.errors import DeadlineExceeded, LogUnavailable, ResourceExhausted
from charonia.eventlog.payload_slots import SlotPool
from charonia.eventlog.port import EndedWave, Reply
from charonia.facts.events import ProcessJoined
from charonia.inference import InferenceResponse
from charonia.wire import FIELD_WAVE, pack_wave_reply, records_of, reply_meta, unpack_request
from gateway.lane.door import MIN_COLUMN_BYTES
from gateway.lane.pending_waves import _Replies

WIDTH = 10_000
"""Elements: 40,000 bytes."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LaneBench]:
    with LaneBench(shared=tmp_path) as bench:
        reserve(bench)
        yield bench


def reserve(bench: LaneBench) -> None:
    bench.run(bench.lease.grow(1 << 20))


def pool(bench: LaneBench, name: str = GATEWAY) -> SlotPool:
    slots = bench.directories[name].slots
    assert slots is not None
    return slots


def ask(bench: LaneBench, *values: int, width: int = WIDTH) -> list[asyncio.Task[InferenceResponse]]:
    """Ask in one tick, one after the other."""
    asked = [bench.begin(bench.service.infer(bench.request(value, width=width))) for value in values]
    bench.settle()
    return asked


def execute(bench: LaneBench, sent: SentWave) -> None:
    """Read the tensors of a wave as an executor does, and answer with them, in a slot."""
    wave, directory = sent.wave, bench.directories["e"]
    data = [directory.read(reference) for reference in wave.references]
    place = wave.meta.inputs[0]
    reference = directory.give(data, wave.endpoint)
    assert reference is not None
    meta = reply_meta(MODEL, 1, (("y", DataType.INT32, place.shape, place.size_bytes),))
    reply = pack_wave_reply(wave.prefix, wave.count, meta, [], 1000, reference)

    async def end() -> None:
        replies = [Reply(keys.replies(GATEWAY), [FIELD_WAVE, reply])]
        counted = (keys.statistics(MODEL, 1, "hash"), {})
        assert bench.log.waves.end([EndedWave(sent.stream, sent.entry_id)], counted, replies, lambda _: None)

    bench.run(end())
    bench.settle()


def value_of(task: asyncio.Task[InferenceResponse]) -> int:
    """Which request an answer is to."""
    array = task.result().outputs[0].array()
    assert (array.shape, len(np.unique(array))) == ((1, WIDTH), 1)
    return int(array[0, 0])


def test_large_requests_share_a_wave_and_each_gets_its_own_answer(bench: LaneBench) -> None:
    asked = ask(bench, 1)  # while one is under way, others gather
    (first,) = bench.sent()
    execute(bench, first)
    more = ask(bench, 2, 3, 4)
    waves = bench.sent()
    assert sum(sent.wave.count for sent in waves) == 3
    assert all(not sent.wave.columns and sent.wave.reply_by_reference for sent in waves)
    assert all(len(sent.wave.record) < 1000 for sent in waves)
    for sent in waves:
        execute(bench, sent)
    assert [value_of(task) for task in asked + more] == [1, 2, 3, 4]


def test_slots_are_free_again_once_waves_are_answered_and_answers_let_go(bench: LaneBench) -> None:
    for value in range(12):
        (asked,) = ask(bench, value)
        for sent in bench.sent():
            execute(bench, sent)
        assert value_of(asked) == value
        del asked
    assert bench.is_quiet()
    assert pool(bench).outstanding == 0
    assert pool(bench).size_bytes <= 3 * 65_536, "used again and again"
    assert pool(bench, "e").size_bytes <= 3 * 65_536


def test_a_wave_by_reference_can_be_taken_apart(bench: LaneBench) -> None:
    (asked,) = ask(bench, 7)
    (sent,) = bench.sent()
    (request,) = sent.wave.requests()
    assert unpack_request(request.record).reference == sent.wave.references[0]
    data = np.frombuffer(bench.directories["e"].read(sent.wave.references[0]), np.int32)
    assert set(data.tolist()) == {7}
    bench.answer_one(request.id, 70)
    assert asked.result().outputs[0].array()[0, 0] == 70
    assert pool(bench).outstanding == 0


def test_without_a_slot_a_large_request_goes_the_full_way(bench: LaneBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "lend", lambda *_, **__: None)
    ask(bench, 1)
    assert bench.sent() == []
    (entry,) = bench.run(bench.log.range(bench.stream))
    (record,) = records_of(entry.fields)
    assert unpack_request(record).reference is not None, "a file"
    assert pool(bench).outstanding == 0


def test_without_room_a_large_request_goes_the_full_way_and_keeps_no_slot(bench: LaneBench) -> None:
    bench.lease.held_bytes = 0
    ask(bench, 1)
    assert bench.sent() == []
    assert pool(bench).outstanding == 1, "that of the request on the full way"


def test_a_wave_that_the_log_does_not_take_keeps_no_slot(bench: LaneBench) -> None:
    bench.gate.error = LogUnavailable("not now")
    (asked,) = ask(bench, 1)
    with pytest.raises(LogUnavailable):
        asked.result()
    assert pool(bench).outstanding == 0
    assert bench.is_quiet()


def test_a_late_request_is_ended_and_its_slot_with_it(bench: LaneBench) -> None:
    deadline_ns = 1  # long past
    with pytest.raises(DeadlineExceeded):
        bench.run(bench.service.infer(bench.request(1, width=WIDTH, deadline_ns=deadline_ns)))
    assert pool(bench).outstanding == 0


def test_a_duplicate_answer_frees_the_slot_of_the_executor(bench: LaneBench) -> None:
    (asked,) = ask(bench, 5)
    (sent,) = bench.sent()
    again = SentWave(sent.entry_id, sent.stream, sent.wave)
    directory = bench.directories["e"]
    data = [directory.read(reference) for reference in sent.wave.references]
    execute(bench, sent)
    assert value_of(asked) == 5
    reference = directory.give(data, GATEWAY)
    assert reference is not None
    place = again.wave.meta.inputs[0]
    meta = reply_meta(MODEL, 1, (("y", DataType.INT32, place.shape, place.size_bytes),))
    before = bench.waves.duplicates
    bench.now(lambda: bench.waves.on_reply(pack_wave_reply(again.wave.prefix, 1, meta, [], 1, reference)))
    assert bench.waves.duplicates == before + 1
    del asked, data
    pool(bench, "e").tidy()
    assert pool(bench, "e").outstanding == 0


def test_requests_between_the_bounds_travel_in_their_waves(bench: LaneBench) -> None:
    (asked,) = ask(bench, 3, width=6000)
    (sent,) = bench.sent()
    assert (sent.wave.references, len(sent.wave.columns[0])) == ((), 24_000)
    bench.answer()
    assert asked.result().outputs[0].array()[0, 0] == 3


def test_without_a_shared_directory_large_requests_go_the_full_way() -> None:
    with LaneBench() as bench:
        reserve(bench)
        ask(bench, 1)
        assert bench.sent() == []


def test_a_model_without_batches_gets_large_requests_one_by_one(tmp_path: Path) -> None:
    with LaneBench(rows=0, shared=tmp_path) as bench:
        reserve(bench)
        asked = ask(bench, 1, 2, 3)
        answered = 0
        while waves := bench.sent():
            assert [sent.wave.count for sent in waves] == [1] * len(waves)
            for sent in waves:
                execute(bench, sent)
                answered += 1
        assert answered == 3
        assert [int(task.result().outputs[0].array()[0]) for task in asked] == [1, 2, 3]


def test_large_requests_that_wait_are_counted_and_too_many_refused(tmp_path: Path) -> None:
    bound = 10 * 4 * WIDTH
    with LaneBench(shared=tmp_path, max_pending_per_gateway_bytes=bound) as bench:
        reserve(bench)
        asked = ask(bench, *range(40))
        requester = bench.service._dataplane.requester
        assert requester._size_bytes <= bound
        refused = [task for task in asked if task.done()]
        assert len(refused) >= 30
        for task in refused:
            with pytest.raises(ResourceExhausted):
                task.result()
        while waves := bench.sent():
            for sent in waves:
                execute(bench, sent)
        assert requester._size_bytes == 0
        assert sorted(value_of(task) for task in asked if task not in refused) == list(range(40 - len(refused)))


def test_a_reply_in_many_parts_is_put_together() -> None:
    got: list[bytes] = []

    class Waves:
        def on_reply(self, record: bytes) -> None:
            got.append(record)

    replies = [bytes([number]) * size for number, size in enumerate((0, 1, 3, 4, 5, 70_000, 2))]
    stream = b"".join(len(reply).to_bytes(4, "little") + reply for reply in replies)
    for step in (1, 3, 7, 4096, len(stream)):
        got.clear()
        connection = _Replies(Waves(), set())  # type: ignore[arg-type]
        for at in range(0, len(stream), step):
            connection.data_received(stream[at : at + step])
        assert got == replies


def test_what_takes_long_to_copy_into_a_slot_goes_the_full_way(bench: LaneBench) -> None:
    """Which copies in a thread; the lane would copy in the loop."""
    width = (4 << 20) // 4
    (asked,) = ask(bench, 1, width=width)
    assert bench.sent() == []
    while not (entries := bench.run(bench.log.range(bench.stream))):
        bench.settle()
    (record,) = records_of(entries[0].fields)
    assert unpack_request(record).reference is not None
    asked.cancel()
    (_,) = ask(bench, 2, width=width - 1)
    assert len(bench.sent()) == 1


# -- waves of small requests whose column is large: it lies in a slot of the gateway -----------------------------------

COLUMN_WIDTH = 6000
"""Elements of a request: 24,000 bytes, below the size of a request that lies in a slot itself."""
ROWS = 4
assert (ROWS - 1) * COLUMN_WIDTH * 4 > MIN_COLUMN_BYTES > COLUMN_WIDTH * 8


@pytest.fixture
def columns(tmp_path: Path) -> Iterator[LaneBench]:
    with LaneBench(shared=tmp_path, rows=ROWS) as bench:
        bench.run(bench.lease.grow(1 << 20))
        yield bench


def ask_together(bench: LaneBench, *values: int) -> list[asyncio.Task[InferenceResponse]]:
    """Ask in one tick: the first request leaves alone, and the others as one wave."""
    requests = [bench.request(value, width=COLUMN_WIDTH) for value in values]
    asked = bench.now(lambda: [asyncio.ensure_future(bench.service.infer(request)) for request in requests])
    bench.settle()
    return asked


def joined(bench: LaneBench) -> tuple[list[asyncio.Task[InferenceResponse]], SentWave]:
    """A wave of three requests."""
    asked = ask_together(bench, 1, 2, 3, 4)
    first, sent = bench.sent()
    bench.answer(first)
    return asked[1:], sent


def answer_each(bench: LaneBench, sent: SentWave) -> None:
    for request, value in zip(sent.wave.requests(), (20, 30, 40), strict=True):
        bench.answer_one(request.id, value)
    bench.run(bench.log.delete_entries(sent.stream, [sent.entry_id]))


def first_of_each(bench: LaneBench, sent: SentWave) -> list[int]:
    assert sent.wave.column_at is not None
    data = np.frombuffer(bench.directories["e"].read(sent.wave.column_at), np.int32)
    return [int(row[0]) for row in data.reshape(sent.wave.count, COLUMN_WIDTH)]


def test_a_large_column_lies_in_a_slot_until_its_wave_is_answered(columns: LaneBench) -> None:
    asked, sent = joined(columns)
    assert (sent.wave.count, sent.wave.columns, len(sent.wave.record) < 500) == (3, (), True)
    assert first_of_each(columns, sent) == [2, 3, 4]
    assert pool(columns).outstanding == 1
    answer_each(columns, sent)
    assert [int(task.result().outputs[0].array()[0, 0]) for task in asked] == [20, 30, 40]
    assert pool(columns).outstanding == 0
    assert columns.is_quiet()


def test_such_a_wave_can_be_taken_apart(columns: LaneBench) -> None:
    _, sent = joined(columns)
    for request, value in zip(sent.wave.requests(), (2, 3, 4), strict=True):
        reference = unpack_request(request.record).reference
        assert reference is not None
        data = np.frombuffer(columns.directories["e"].read(reference), np.int32)
        assert (len(data), set(data.tolist())) == (COLUMN_WIDTH, {value})


def test_small_columns_travel_in_the_log(columns: LaneBench) -> None:
    ask_together(columns, 1)
    (sent,) = columns.sent()
    assert (sent.wave.column_at, len(sent.wave.columns[0])) == (None, 4 * COLUMN_WIDTH)


def test_without_a_slot_the_column_travels_in_the_log(columns: LaneBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "lend", lambda *_, **__: None)
    _, sent = joined(columns)
    assert (sent.wave.column_at, len(sent.wave.columns[0])) == (None, 3 * 4 * COLUMN_WIDTH)


def test_a_wave_that_cannot_be_packed_keeps_no_slot_and_no_bytes(
    columns: LaneBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> bytes:
        assert pool(columns).outstanding <= 1
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("gateway.lane.door.wave_head", broken)
        asked = ask_together(columns, 1, 2, 3, 4)
        entries = columns.run(columns.log.range(columns.stream))
    found = [unpack_request(record) for entry in entries for record in records_of(entry.fields)]
    assert (len(asked), len(found)) == (4, 4), "each went the full way"
    assert columns.waves._under_way == {}
    assert pool(columns).outstanding == 0
    assert columns.lease.is_idle


def test_a_wave_that_the_log_does_not_take_keeps_no_slot_and_no_bytes(columns: LaneBench) -> None:
    columns.gate.error = LogUnavailable("not now")
    asked = ask_together(columns, 1, 2, 3, 4)
    for task in asked:
        with pytest.raises(LogUnavailable):
            task.result()
    assert pool(columns).outstanding == 0
    assert columns.is_quiet()


def test_columns_travel_in_the_log_once_a_batcher_of_an_older_release_joins(columns: LaneBench) -> None:
    _, sent = joined(columns)
    assert sent.wave.column_at is not None
    answer_each(columns, sent)
    columns.run(columns.tell(ProcessJoined("batcher", "older", reads_waves=True)))
    _, sent = joined(columns)
    assert sent.wave.column_at is None


def test_requests_that_wait_as_their_door_closes_travel_in_the_log(columns: LaneBench) -> None:
    _, sent = joined(columns)
    answer_each(columns, sent)
    requests = [columns.request(value, width=COLUMN_WIDTH) for value in (1, 2, 3, 4)]
    asked = columns.now(lambda: [asyncio.ensure_future(columns.service.infer(request)) for request in requests])
    columns.loop.tick()
    (door,) = columns.service.lane._doors()
    assert len(door.waiting) == 3
    columns.now(lambda: columns.waves.close_door(door))
    columns.settle()
    assert len(asked) == 4
    last = columns.sent()[-1].wave
    assert (last.count, last.column_at) == (3, None)


def test_half_of_the_slots_are_kept_for_large_requests(columns: LaneBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.calls.payload_transfer.MAX_SLOTS", 2)
    _, sent = joined(columns)
    assert sent.wave.column_at is not None
    more = ask_together(columns, 5, 6, 7)
    latest = columns.sent()[-1]
    assert (len(more), latest.wave.count, latest.wave.column_at) == (3, 3, None)


def test_columns_travel_in_the_log_to_an_executor_of_an_older_release(tmp_path: Path) -> None:
    with LaneBench(shared=tmp_path, rows=ROWS, reads_wave_slots=False) as bench:
        bench.run(bench.lease.grow(1 << 20))
        _, sent = joined(bench)
        assert (sent.wave.column_at, len(sent.wave.columns[0])) == (None, 3 * 4 * COLUMN_WIDTH)
