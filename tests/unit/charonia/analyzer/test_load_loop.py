"""The closed and the open loop on lanes that answer when the test says so."""

from __future__ import annotations

import asyncio
import time
from itertools import chain, count
from typing import Any

import pytest

from charonia.analyzer.encoded_requests import Turn
from charonia.analyzer.load_loop import Call, LoadLoop, SequencePlan, Sequences
from charonia.analyzer.window_figures import WindowFigures


class FakeLane:
    """Holds what was sent until the test answers."""

    def __init__(self, loop: LoadLoop) -> None:
        self._loop = loop
        self.is_open = False
        self.call: Any = Call()
        self.first_ns = 0
        self.sent: list[bytes] = []
        self.may_open = asyncio.Event()
        self.may_open.set()

    async def open(self) -> None:
        await self.may_open.wait()
        self.is_open = True

    def send(self, message: bytes) -> None:
        assert self.is_open
        self.sent.append(message)

    def close(self) -> None:
        self.is_open = False

    def answer(self, error: str | None = None) -> None:
        self._loop.ended(self, error)


class Named:
    """Requests whose bytes say what they are."""

    def message(self, stream: int, step: int, turn: Turn | None) -> bytes:
        said = f"{stream}.{step}"
        if turn is not None:
            said += f" {turn.correlation_id}{'s' if turn.start else ''}{'e' if turn.end else ''}"
        return said.encode()


class Rig:
    def __init__(self, steps: list[int], sequences: Sequences | None = None, max_lanes: int = 8) -> None:
        self.lanes: list[FakeLane] = []
        self.loop = LoadLoop(Named(), steps, self._make, sequences, max_lanes, 0)

    def _make(self, loop: LoadLoop) -> FakeLane:
        self.lanes.append(FakeLane(loop))
        return self.lanes[-1]

    def busy(self) -> list[FakeLane]:
        return [lane for lane in self.lanes if lane.call.busy]

    async def stop(self) -> None:
        """Answers what is in flight, so that the loop ends at once."""
        ending = asyncio.ensure_future(self.loop.stop())
        while not ending.done():
            await asyncio.sleep(0)
            for lane in self.busy():
                lane.answer()
        await ending

    async def end(self) -> None:
        await self.stop()
        self.loop.close()


def figures(loop: LoadLoop) -> WindowFigures:
    made = WindowFigures()
    made.add_worker(loop.cut())
    return made


async def test_a_closed_loop_keeps_each_lane_busy() -> None:
    rig = Rig([3])
    await rig.loop.start_closed(2, None)
    assert len(rig.busy()) == 2
    for _ in range(5):
        rig.lanes[0].answer()
    assert rig.lanes[0].sent == [b"0.0", b"0.2", b"0.0", b"0.1", b"0.2", b"0.0"]
    assert rig.lanes[1].sent == [b"0.1"]
    rig.lanes[1].answer("broken")
    seen = figures(rig.loop)
    assert (seen.completed, dict(seen.errors)) == (5, {"broken": 1})
    await asyncio.sleep(0)
    assert len(rig.busy()) == 2  # after an error the lane goes on, but not from within it
    await rig.end()
    assert not rig.busy()


async def test_a_number_of_requests_is_kept() -> None:
    rig = Rig([1])
    await rig.loop.start_closed(2, 3)
    while rig.busy():
        rig.busy()[0].answer()
    assert sum(len(lane.sent) for lane in rig.lanes) == 3
    assert rig.loop.ended_requests == 3
    await rig.end()


async def test_an_open_loop_counts_from_the_intended_time() -> None:
    rig = Rig([1], max_lanes=1)
    await rig.loop.start_open(1, count(0, 1_000_000), None)  # each millisecond, on one lane
    while len(rig.loop._due) < 5:  # nothing is answered: requests wait for the lane
        await asyncio.sleep(0.001)
    for _ in range(4):
        rig.lanes[0].answer()
    seen = figures(rig.loop)
    assert seen.completed == 4
    assert seen.due >= 5
    assert seen.latency.max_ns >= 5_000_000
    # the later requests waited for the lane and were answered at once when they had it
    assert seen.service.total_ns <= seen.latency.total_ns - 6_000_000
    assert seen.late >= 3
    await rig.end()


async def test_an_open_loop_takes_as_many_lanes_as_it_needs() -> None:
    rig = Rig([1], max_lanes=4)
    await rig.loop.start_open(1, count(0, 100_000), None)
    while len(rig.busy()) < 4:
        await asyncio.sleep(0.001)
    assert len(rig.lanes) == 4
    await rig.end()


async def test_sequences_have_one_request_in_flight_and_an_end() -> None:
    sequences = Sequences(SequencePlan(3, 0.0, 10, 2, 0), [2], 0)
    rig = Rig([2], sequences)
    await rig.loop.start_closed(1, None)
    for _ in range(3):
        rig.lanes[0].answer()
    assert rig.lanes[0].sent == [b"0.0 10s", b"0.1 10", b"0.0 10e", b"0.0 12s"]
    await rig.end()
    assert rig.lanes[0].sent[-1] == b"0.1 12e"  # a sequence under way is ended
    assert figures(rig.loop).completed == 4  # the request that ends it is not counted


async def test_sequences_of_request_rates_keep_their_order() -> None:
    sequences = Sequences(SequencePlan(0, 0.0, 1, 1, 0), [4], 0)
    rig = Rig([4], sequences)
    await rig.loop.start_open(2, count(0, 100_000), None)
    while sum(len(lane.call.due) for lane in rig.lanes) < 6:
        await asyncio.sleep(0.001)
    assert [lane.sent for lane in rig.lanes] == [[b"0.0 1s"], [b"0.0 2s"]]
    rig.lanes[0].answer()
    assert rig.lanes[0].sent[-1] == b"0.1 1"
    await rig.end()


def test_correlation_ids_stay_in_their_range_and_are_not_used_twice_at_once() -> None:
    sequences = Sequences(SequencePlan(5, 20.0, 10, 1, 13), [1], 3)
    first, second = sequences.begin(), sequences.begin()
    assert (first.correlation_id, second.correlation_id) == (10, 11)
    sequences.end(first)
    assert [sequences.begin().correlation_id for _ in range(2)] == [12, 10]


def test_lengths_vary_by_the_percentage() -> None:
    sequences = Sequences(SequencePlan(10, 20.0, 1, 1, 0), [1], 3)
    assert {sequences.begin().length for _ in range(200)} == {8, 9, 10, 11, 12}


@pytest.mark.parametrize("error", [None, "broken"])
async def test_a_lane_that_was_closed_is_opened_again(error: str | None) -> None:
    rig = Rig([1])
    await rig.loop.start_closed(1, None)
    rig.lanes[0].is_open = False
    rig.lanes[0].answer(error)
    while not rig.busy():
        await asyncio.sleep(0)
    assert len(rig.lanes[0].sent) == 2
    await rig.end()


async def test_the_next_level_uses_the_lanes_of_the_one_before() -> None:
    rig = Rig([1], max_lanes=4)
    for _ in range(2):
        await rig.loop.start_open(1, count(0, 100_000), None)
        while len(rig.busy()) < 4:
            await asyncio.sleep(0.001)
        await rig.stop()
        rig.lanes[2].close()  # the server does not keep it for the next level
    assert len(rig.lanes) == 5
    rig.loop.close()


async def test_lanes_that_were_closed_while_idle_are_opened_again() -> None:
    rig = Rig([1])
    await rig.loop.start_open(2, chain([0], count(20_000_000, 1_000_000)), None)
    for lane in rig.lanes:
        if not lane.call.busy:
            lane.close()
    while not all(lane.sent for lane in rig.lanes[:2]):
        await asyncio.sleep(0.001)
    await rig.end()
    assert not figures(rig.loop).errors


async def test_sequences_go_on_when_their_lane_was_closed_while_idle() -> None:
    rig = Rig([4], Sequences(SequencePlan(0, 0.0, 1, 1, 0), [4], 0))
    await rig.loop.start_open(1, count(0, 1_000_000), None)
    rig.lanes[0].answer()
    rig.lanes[0].close()
    while len(rig.lanes[0].sent) < 2:
        await asyncio.sleep(0.001)
    await rig.end()


async def test_a_lane_that_closes_behind_an_error_is_opened_again() -> None:
    rig = Rig([1])
    await rig.loop.start_closed(1, None)
    rig.lanes[0].answer("broken")
    rig.lanes[0].close()
    while not rig.busy():
        await asyncio.sleep(0)
    await rig.end()


async def test_what_opens_a_lane_ends_with_its_level() -> None:
    rig = Rig([1])
    await rig.loop.start_closed(2, None)
    lane = rig.lanes[1]
    lane.may_open.clear()
    lane.close()
    lane.answer("broken")
    await asyncio.sleep(0)
    await rig.stop()
    await rig.loop.start_closed(1, None)
    lane.may_open.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (lane.is_open, len(lane.sent)) == (False, 1)
    await rig.end()


async def test_a_window_of_a_number_of_requests_ends_with_the_last() -> None:
    rig = Rig([1])
    began_ns = time.perf_counter_ns()
    await rig.loop.start_closed(2, 2)
    rig.lanes[0].answer()
    rig.lanes[1].answer()
    spent_ns = time.perf_counter_ns() - began_ns
    await asyncio.sleep(0.001)
    assert figures(rig.loop).duration_ns <= spent_ns
    await rig.stop()
    await rig.loop.start_closed(0, 0)  # a worker without a share
    assert figures(rig.loop).duration_ns == 0
    await rig.end()


async def test_an_open_loop_of_a_number_of_requests_takes_no_more_lanes_than_them() -> None:
    rig = Rig([1])
    times = count(0, 1_000)
    await rig.loop.start_open(1, times, 1)
    assert len(rig.lanes[0].sent) == 1
    await asyncio.sleep(0.002)  # more would be due
    rig.loop._wake()
    assert next(times) == 2_000
    await rig.end()
    assert len(rig.lanes) == 1
