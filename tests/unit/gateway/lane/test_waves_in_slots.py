"""Waves of small requests whose column is large: it lies in a slot of the gateway instead of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lane_bench import LaneBench, SentWave

from charonia.errors import LogUnavailable
from charonia.eventlog.payload_slots import SlotPool
from charonia.facts.events import ProcessJoined
from charonia.inference import InferenceResponse
from charonia.wire import unpack_request
from gateway.lane.door import MIN_COLUMN_BYTES

WIDTH = 6000
"""Elements of a request: 24,000 bytes, below the size of a request that lies in a slot itself."""
ROWS = 4
assert (ROWS - 1) * WIDTH * 4 > MIN_COLUMN_BYTES > WIDTH * 8


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LaneBench]:
    with LaneBench(shared=tmp_path, rows=ROWS) as bench:
        bench.run(bench.lease.grow(1 << 20))
        yield bench


def pool(bench: LaneBench) -> SlotPool:
    slots = bench.directories["g"].slots
    assert slots is not None
    return slots


def ask(bench: LaneBench, *values: int) -> list[asyncio.Task[InferenceResponse]]:
    """Ask in one tick: the first request leaves alone, and the others as one wave."""
    requests = [bench.request(value, width=WIDTH) for value in values]
    asked = bench.now(lambda: [asyncio.ensure_future(bench.service.infer(request)) for request in requests])
    bench.settle()
    return asked


def joined(bench: LaneBench) -> tuple[list[asyncio.Task[InferenceResponse]], SentWave]:
    """A wave of three requests."""
    asked = ask(bench, 1, 2, 3, 4)
    first, sent = bench.sent()
    bench.answer(first)
    return asked[1:], sent


def answer(bench: LaneBench, sent: SentWave) -> None:
    for request, value in zip(sent.wave.requests(), (20, 30, 40), strict=True):
        bench.answer_one(request.id, value)
    bench.run(bench.log.delete_entries(sent.stream, [sent.entry_id]))


def column(bench: LaneBench, sent: SentWave) -> list[int]:
    assert sent.wave.column_at is not None
    data = np.frombuffer(bench.directories["e"].read(sent.wave.column_at), np.int32)
    return [int(row[0]) for row in data.reshape(sent.wave.count, WIDTH)]


def test_a_large_column_lies_in_a_slot_until_its_wave_is_answered(bench: LaneBench) -> None:
    asked, sent = joined(bench)
    assert (sent.wave.count, sent.wave.columns, len(sent.wave.record) < 500) == (3, (), True)
    assert column(bench, sent) == [2, 3, 4]
    assert pool(bench).outstanding == 1
    answer(bench, sent)
    assert [int(task.result().outputs[0].array()[0, 0]) for task in asked] == [20, 30, 40]
    assert pool(bench).outstanding == 0
    assert bench.is_quiet()


def test_such_a_wave_can_be_taken_apart(bench: LaneBench) -> None:
    _, sent = joined(bench)
    for request, value in zip(sent.wave.requests(), (2, 3, 4), strict=True):
        reference = unpack_request(request.record).reference
        assert reference is not None
        data = np.frombuffer(bench.directories["e"].read(reference), np.int32)
        assert (len(data), set(data.tolist())) == (WIDTH, {value})


def test_small_columns_travel_in_the_log(bench: LaneBench) -> None:
    ask(bench, 1)
    (sent,) = bench.sent()
    assert (sent.wave.column_at, len(sent.wave.columns[0])) == (None, 4 * WIDTH)


def test_without_a_slot_the_column_travels_in_the_log(bench: LaneBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "lend", lambda *_, **__: None)
    _, sent = joined(bench)
    assert (sent.wave.column_at, len(sent.wave.columns[0])) == (None, 3 * 4 * WIDTH)


def test_a_wave_that_the_log_does_not_take_keeps_no_slot_and_no_bytes(bench: LaneBench) -> None:
    bench.gate.error = LogUnavailable("not now")
    asked = ask(bench, 1, 2, 3, 4)
    for task in asked:
        with pytest.raises(LogUnavailable):
            task.result()
    assert pool(bench).outstanding == 0
    assert bench.is_quiet()


def test_columns_travel_in_the_log_once_a_batcher_of_an_older_release_joins(bench: LaneBench) -> None:
    _, sent = joined(bench)
    assert sent.wave.column_at is not None
    answer(bench, sent)
    bench.run(bench.tell(ProcessJoined("batcher", "older", reads_waves=True)))
    _, sent = joined(bench)
    assert sent.wave.column_at is None


def test_columns_travel_in_the_log_to_an_executor_of_an_older_release(tmp_path: Path) -> None:
    with LaneBench(shared=tmp_path, rows=ROWS, reads_wave_slots=False) as bench:
        bench.run(bench.lease.grow(1 << 20))
        _, sent = joined(bench)
        assert (sent.wave.column_at, len(sent.wave.columns[0])) == (None, 3 * 4 * WIDTH)
