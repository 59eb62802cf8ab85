"""One call as its reader sees it: order, repetitions, ends."""

from __future__ import annotations

import asyncio

import pytest

from charonia.calls.call import Call, HeldBytes
from charonia.errors import Cancelled, DeadlineExceeded, StreamInterrupted
from charonia.wire import ResponseRecord

ID = bytes(16)


def response(index: int | None = None, *, attempt: int = 1, final: bool = False) -> ResponseRecord:
    place = None if index is None else (attempt, index)
    return ResponseRecord(ID, "m", 1, [], {"index": -1 if index is None else index}, None, final, place)


class Watched:
    def __init__(self, *, repeatable: bool = False) -> None:
        self.held = HeldBytes()
        self.ends = 0
        self.call = Call("m", ID, 100, self.held, self._ended, repeatable=repeatable)

    def _ended(self, call: Call) -> None:
        assert call is self.call
        self.ends += 1


async def test_one_answer_is_the_last() -> None:
    watched = Watched()
    assert watched.held.count == 100
    reading = asyncio.ensure_future(watched.call.next())
    await asyncio.sleep(0)
    assert watched.call.answered(response(final=True), 7)
    assert watched.held.count == 7
    found = await reading
    assert found is not None
    assert found.final
    assert (await watched.call.next(), watched.ends, watched.held.count) == (None, 1, 0)
    assert not watched.call.answered(response(final=True), 7)


async def test_several_answers_come_in_order_and_once() -> None:
    call = Watched(repeatable=True).call
    assert call.answered(response(0), 1)
    assert call.answered(response(1), 1)
    # another attempt of a repeatable model begins anew: what was seen is not shown again
    assert not call.answered(response(0, attempt=2), 1)
    assert not call.answered(response(1, attempt=2), 1)
    assert call.answered(response(2, attempt=2, final=True), 1)
    assert [answer.parameters["index"] async for answer in call] == [0, 1, 2]


async def test_two_runs_are_never_mixed() -> None:
    watched = Watched()
    watched.call.answered(response(0), 1)
    watched.call.answered(response(0, attempt=2), 1)
    assert [answer.parameters["index"] for answer in [await watched.call.next()] if answer] == [0]
    with pytest.raises(StreamInterrupted):
        await watched.call.next()
    assert watched.call.unwanted


async def test_a_failure_comes_after_what_was_answered_before() -> None:
    watched = Watched()
    watched.call.answered(response(0), 5)
    watched.call.fail(DeadlineExceeded("late"), unwanted=True)
    watched.call.fail(Cancelled("later"))
    first = await watched.call.next()
    assert first is not None
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="late"):
            await watched.call.next()
    assert (watched.call.unwanted, watched.ends, watched.held.count) == (True, 1, 0)


async def test_who_gives_up_reads_no_more_and_holds_nothing() -> None:
    watched = Watched()
    watched.call.answered(response(0), 5)
    watched.call.cancel()
    with pytest.raises(Cancelled):
        await watched.call.next()
    assert (watched.call.unwanted, watched.ends, watched.held.count) == (True, 1, 0)
    # nor does giving up what has been answered whole bother anybody
    done = Watched()
    done.call.answered(response(final=True), 5)
    done.call.cancel()
    assert (done.call.unwanted, done.ends, done.held.count) == (False, 1, 0)
