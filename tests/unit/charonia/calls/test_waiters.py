"""One call as its reader sees it: order, repetitions, ends."""

from __future__ import annotations

import asyncio

import pytest

from charonia.calls.waiters import Held, StreamWaiter, Visible
from charonia.errors import Cancelled, DeadlineExceeded, ErrorCode, StreamInterrupted
from charonia.wire import ResponseRecord

ID = bytes(16)


def response(index: int | None = None, *, attempt: int = 1, final: bool = False) -> ResponseRecord:
    place = None if index is None else (attempt, index)
    return ResponseRecord(ID, "m", 1, [], {"index": -1 if index is None else index}, None, final, place)


def waiter(*, repeatable: bool = False) -> tuple[StreamWaiter, Held]:
    held = Held(10_000, 10_000)
    return StreamWaiter("m", ID, Visible(repeatable=repeatable), held), held


async def test_one_answer_is_the_last() -> None:
    call, held = waiter()
    reading = asyncio.ensure_future(call.next())
    await asyncio.sleep(0)
    assert call.answered(response(final=True))
    assert held.size_bytes > 0
    found = await reading
    assert found is not None
    assert found.final
    assert (await call.next(), call.ended_by_reply, held.size_bytes) == (None, True, 0)
    assert not call.answered(response(final=True))


async def test_several_answers_come_in_order_and_once() -> None:
    call, _ = waiter(repeatable=True)
    assert call.answered(response(0))
    assert call.answered(response(1))
    # another attempt of a repeatable model starts from the beginning: responses that were shown are not shown again
    assert not call.answered(response(0, attempt=2))
    assert not call.answered(response(1, attempt=2))
    assert call.answered(response(2, attempt=2, final=True))
    found = [await call.next() for _ in range(3)]
    assert [answer.parameters["index"] for answer in found if answer] == [0, 1, 2]
    assert await call.next() is None


async def test_two_runs_are_never_mixed() -> None:
    call, _ = waiter()
    call.answered(response(0))
    call.answered(response(0, attempt=2))
    assert [answer.parameters["index"] for answer in [await call.next()] if answer] == [0]
    with pytest.raises(StreamInterrupted):
        await call.next()
    assert not call.ended_by_reply, "its run is still to be cancelled"


async def test_a_failure_comes_after_what_was_answered_before() -> None:
    call, held = waiter()
    call.answered(response(0))
    call.failed(DeadlineExceeded("late"))
    call.failed(Cancelled("later"))
    first = await call.next()
    assert first is not None
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="late"):
            await call.next()
    assert (call.ended_by_reply, held.size_bytes) == (False, 0)


async def test_who_gives_up_reads_no_more_and_holds_nothing() -> None:
    call, held = waiter()
    call.answered(response(0))
    call.cancel()
    with pytest.raises(Cancelled):
        await call.next()
    assert (call.ended_by_reply, held.size_bytes) == (False, 0)
    # nor does giving up what has been answered whole bother anybody
    done, held = waiter()
    done.answered(response(final=True))
    done.cancel()
    assert (done.ended_by_reply, held.size_bytes) == (True, 0)


def test_another_run_cannot_go_on_for_the_first() -> None:
    visible = Visible(repeatable=False)
    assert visible.admits((1, 0), final=False)
    with pytest.raises(StreamInterrupted, match=r"^STREAM_INTERRUPTED: .*charonia.repeatable") as caught:
        visible.admits((2, 0), final=False)
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_another_run_may_begin_while_nothing_is_visible() -> None:
    visible = Visible(repeatable=False, attempt=1)
    assert visible.admits((2, 0), final=True)
    assert (visible.attempt, visible.count) == (2, 1)


def test_a_straggler_of_a_lost_run_is_dropped() -> None:
    visible = Visible(repeatable=True)
    assert visible.admits((1, 0), final=False)
    assert not visible.admits((2, 0), final=False)
    assert not visible.admits((1, 1), final=False)
    assert visible.admits((2, 1), final=False)
