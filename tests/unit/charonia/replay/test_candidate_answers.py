"""Requests are asked again in order, within bounds, and each outcome is counted as what it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from charonia.errors import CharoniaError, InternalError, InvalidArgument, PermissionDenied, Unavailable
from charonia.releases.answer_differences import Answer
from charonia.replay.candidate_answers import INTERRUPTED, NO_ANSWERS, Pace, Replay
from charonia.replay.difference_report import DIFFERENT, NOT_RUN, SAME, DifferenceReport
from charonia.replay.replay_lines import EXPIRED, Recorded, lines_of
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord, pack_response
from charonia.wire.recorded_calls import RecordedCall, RecordedStep, pack_recorded_call


def output(value: float) -> Tensor:
    return Tensor.of("y", np.array([value], np.float32))


class World:
    """Recordings by number, whose answer is the number, and a candidate with the same answers but for `answers`."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.recorded: list[Recorded] = []
        self.answers: dict[int, float | CharoniaError] = {}
        self.jobs: dict[int, float] = {}
        self.asked: list[int] = []
        self.running = self.most = self.done = 0
        self.report = DifferenceReport("m", 3)

    def add(self, number: int, key: int = 0, flags: str = "") -> None:
        step = RecordedStep(key, "s" in flags, "e" in flags) if key else None
        call = RecordedCall(number, 2, [output(number)], (), client_id=str(number), sequence=step)
        pieces = pack_recorded_call(call, [pack_response(bytes(16), "m", 2, [output(number)], {})])
        self.records[number] = b"".join(bytes(piece) for piece in pieces)
        self.recorded.append(Recorded(number.to_bytes(16, "big"), number, 2, sequence=step))

    def add_job(self, number: int) -> None:
        """A recording of a request that was answered later."""
        call = RecordedCall(number, 2, [output(number)], (), ("y",), client_id=str(number), job=bytes([number] * 16))
        self.records[number] = b"".join(bytes(piece) for piece in pack_recorded_call(call, []))
        self.recorded.append(Recorded(number.to_bytes(16, "big"), number, 2))

    async def of_job(self, job_id: bytes) -> Sequence[ResponseRecord] | str:
        number = job_id[0]
        if number not in self.jobs:
            return "its job has not ended"
        return [ResponseRecord(b"", "m", 2, [output(self.jobs[number]), Tensor.of("z", np.zeros(1))], {}, None)]

    async def fetch(self, one: Recorded) -> bytes | None:
        return self.records.get(one.at_us)

    async def ask(self, call: RecordedCall) -> Sequence[Answer]:
        number = int(call.client_id)
        self.asked.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        found = self.answers.get(number, float(number))
        if isinstance(found, (Unavailable, PermissionDenied)):
            raise found
        return [Answer(error=found)] if isinstance(found, CharoniaError) else [Answer([output(found)])]

    async def replay(self, concurrency: int = 1, rate: float = 0.0) -> DifferenceReport:
        def done() -> None:
            self.done += 1

        lines = lines_of(self.recorded)
        replay = Replay(self.ask, self.fetch, self.report, {}, done, of_job=self.of_job)
        await replay.run(lines.lines, Pace(concurrency, rate))
        return self.report


async def test_equal_answers_are_the_same() -> None:
    world = World()
    for number in range(20):
        world.add(number)
    assert (await world.replay(4)).verdict == SAME
    assert (sorted(world.asked), world.most, world.done) == (list(range(20)), 4, 20)


async def test_answers_of_jobs_are_compared_and_what_has_none_is_not_asked() -> None:
    world = World()
    for number in (1, 2, 3):
        world.add_job(number)
    world.jobs = {1: 1.0, 2: 2.5}
    report = (await world.replay()).document()
    assert (report["compared"], report["same"], report["different"]) == (2, 1, 1)
    assert world.asked == [1, 2]
    assert "its job has not ended" in str(report["unreplayable"])


async def test_differences_are_counted() -> None:
    world = World()
    for number in range(4):
        world.add(number)
    world.answers = {1: 1.5, 2: InternalError("broken")}
    report = await world.replay()
    assert (report.verdict, report.same, report.different) == (DIFFERENT, 2, 2)


async def test_sequences_are_asked_in_order_beside_others() -> None:
    world = World()
    for number in range(12):
        world.add(number, key=1 + number % 3, flags="s" if number < 3 else "e" if number > 8 else "")
    await world.replay(3)
    for key in range(3):
        assert [number for number in world.asked if number % 3 == key] == list(range(key, 12, 3))
    assert world.most == 3


@pytest.mark.parametrize("reason", ["unavailable", "expired", "unreadable"])
async def test_behind_a_gap_a_sequence_goes_on_where_it_begins_again(reason: str) -> None:
    world = World()
    for number, flags in enumerate(["s", "", "", "s", "e"]):
        world.add(number, 7, flags)
    if reason == "unavailable":
        world.answers[1] = Unavailable("gone")
    elif reason == "expired":
        del world.records[1]
    else:
        world.records[1] = b"\x01"
    document = (await world.replay()).document()
    assert (document["verdict"], document["same"]) == ("not run", 3)
    assert sum(found["count"] for found in document["unanswered"]) == (2 if reason == "unavailable" else 1)
    assert sum(found["count"] for found in document["unreplayable"]) == (0 if reason == "unavailable" else 1)
    if reason == "expired":
        assert document["unreplayable"][0]["reason"] == EXPIRED
    assert world.done == 5


async def test_without_a_candidate_it_gives_up() -> None:
    world = World()
    for number in range(100):
        world.add(number)
        world.answers[number] = Unavailable("no server")
    report = await world.replay()
    document = report.document()
    assert (report.verdict, len(world.asked), world.done) == (NOT_RUN, 10, 100)
    assert {found["reason"]: found["count"] for found in document["unanswered"]} == {"no server": 10, NO_ANSWERS: 90}


async def test_one_that_is_not_let_in_says_so() -> None:
    world = World()
    for number in range(9):
        world.add(number)
        world.answers[number] = PermissionDenied("no")
    with pytest.raises(PermissionDenied):
        await world.replay(3)


async def test_a_rate_is_kept() -> None:
    world = World()
    for number in range(6):
        world.add(number)
    began_s = asyncio.get_running_loop().time()
    await world.replay(6, rate=100)
    assert asyncio.get_running_loop().time() - began_s >= 0.049


async def test_errors_that_both_have_are_the_same() -> None:
    world = World()
    world.add(1)
    world.answers[1] = InvalidArgument("not so")
    assert (await world.replay()).different == 1, "recorded was an answer"


@pytest.mark.parametrize(("answer", "verdict"), [(1.0, NOT_RUN), (9.0, DIFFERENT)])
async def test_an_interrupted_replay_reports_what_it_has_compared(answer: float, verdict: int) -> None:
    world = World()
    for number in range(1, 9):
        world.add(number)
    world.answers[1] = answer
    asked_all, lines = asyncio.Event(), lines_of(world.recorded).lines

    async def ask(call: RecordedCall) -> Sequence[Answer]:
        if int(call.client_id) < 4:
            return await world.ask(call)
        asked_all.set()
        await asyncio.Event().wait()  # never answered
        raise AssertionError

    replay = Replay(ask, world.fetch, world.report, {}, of_job=world.of_job)
    running = asyncio.create_task(replay.run(lines, Pace(1, 0.0)))
    await asyncio.wait_for(asked_all.wait(), 30)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    replay.interrupted(lines)
    document = world.report.document()
    assert (document["compared"], world.report.verdict) == (3, verdict)
    (unanswered,) = document["unanswered"]
    assert (unanswered["reason"], unanswered["count"]) == (INTERRUPTED, 5)
