"""When the requests of a queue leave: lone ones at once, those of several callers together, none never."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_bench import QUICK_NS, Front, LaneBench

from charonia.clock import monotonic_ns
from gateway.lane.door import Call
from gateway.lane.gathering import SLOW_NS, Gathering, Round

HOLD_S = 0.002
PARALLEL_NS = 600_000
"""A model that takes so long uses all its instances."""


@pytest.fixture
def bench() -> Iterator[LaneBench]:
    """Its model was seen to be quick."""
    with LaneBench() as bench:
        bench.prove()
        yield bench


def of(*waves: int) -> list[list[int]]:
    """Waves of so many requests, whose values count on."""
    found, first = [], 0
    for count in waves:
        found.append(list(range(first, first + count)))
        first += count
    return found


def share(bench: LaneBench, front: Front, count: int) -> None:
    """Let so many requests leave in one wave, and answer it."""
    front.send(*range(count))
    bench.settle()
    (_,) = bench.sent()
    bench.answer()


# -- alone -------------------------------------------------------------------------------------------------------------


def test_a_lone_request_leaves_at_once() -> None:
    with LaneBench() as bench:
        front = bench.front()
        for value in range(12):
            front.send(value)
            assert bench.values() == [[value]], "in the tick in which it was read"
            bench.answer()
        assert front.answers == list(range(12))


def test_nothing_waits_for_the_answers_of_a_model_that_may_be_slow() -> None:
    with LaneBench() as bench:
        front = bench.front()
        for value in range(5):
            front.send(value)
            bench.settle()
        assert bench.values() == of(1, 1, 1, 1, 1)


def test_nothing_waits_here_where_the_queue_is_bounded() -> None:
    """S7: what waits has to be counted in the log."""
    with LaneBench("dynamic_batching { default_queue_policy { max_queue_size: 9 } }") as bench:
        bench.prove()
        front = bench.front()
        for value in range(5):
            front.send(value)
            bench.settle()
        assert bench.values() == of(1, 1, 1, 1, 1)


# -- together ----------------------------------------------------------------------------------------------------------


def test_requests_gather_while_a_wave_is_under_way(bench: LaneBench) -> None:
    front = bench.front()
    for value in range(6):
        front.send(value)
        bench.settle()
    assert bench.values() == of(1)
    assert bench.pending_metric() == 6
    bench.answer()
    assert bench.values() == [[1, 2, 3, 4, 5]]
    assert bench.pending_metric() == 5
    bench.answer()
    assert bench.pending_metric() == 0


def test_requests_of_all_forms_leave_together(bench: LaneBench) -> None:
    front, other = bench.front(), bench.front(timeout_us=5)
    front.send(0)
    for value in (1, 2):
        front.send(value)
        other.send(10 * value)
    bench.answer()
    assert bench.values() == [[1, 2], [10, 20]]


def test_what_comes_in_later_ticks_joins_as_long_as_more_comes(bench: LaneBench) -> None:
    front = bench.front()
    for _ in range(3):
        share(bench, front, 5)  # those of several callers, from now on
    for count in (6, 3):
        bench.loop.advance(HOLD_S)
        for value in range(count):
            front.send(value)
            assert bench.values() == []
        bench.settle()
        assert bench.values() == of(count)
        bench.answer()


def test_a_full_wave_waits_for_nothing(bench: LaneBench) -> None:
    front = bench.front()
    front.send(0)
    front.send(*range(1, 8))
    bench.settle()
    assert bench.values() == of(1)
    front.send(8)
    assert bench.values() == of(1, 8)
    front.send(*range(9, 9 + 17))
    assert bench.values() == of(1, 8, 8, 8)
    bench.answer(bench.sent()[0])
    assert bench.values() == of(1, 8, 8, 8)[1:], "others are under way"


def test_full_waves_wait_too_where_many_are_under_way(bench: LaneBench) -> None:
    front = bench.front()
    front.send(0)
    for first in range(1, 10 * 8, 8):
        front.send(*range(first, first + 8))
    assert bench.values() == of(1, *[8] * 7)
    bench.answer()
    bench.loop.advance(HOLD_S)
    assert [value for wave in bench.values() for value in wave] == list(range(57, 81))


@pytest.mark.parametrize(("count", "leave"), [(8192, False), (8193, True)])
def test_where_very_many_wait_they_go_the_full_way_which_bounds_them(bench: LaneBench, count: int, leave: bool) -> None:
    while bench.lease.held_requests <= count:
        assert bench.run(bench.lease.grow())
    front = bench.front()
    front.send(0)
    calls = front.send(*range(count))
    left = [call for call, what in front.told if what == "left"]
    assert left == (calls if leave else [])


# -- waiting for those who were answered -------------------------------------------------------------------------------


def test_the_next_wave_waits_for_those_who_were_just_answered(bench: LaneBench) -> None:
    front = bench.front()
    share(bench, front, 5)  # and four of five are expected again
    for value in range(3):
        front.send(value)
        bench.settle()
    assert bench.values() == []
    front.send(3)
    assert bench.values() == of(4), "at once"


def test_it_waits_for_two_milliseconds_at_most(bench: LaneBench) -> None:
    front = bench.front()
    share(bench, front, 5)
    front.send(0)
    bench.loop.advance(0.9 * HOLD_S)
    assert bench.values() == []
    bench.loop.advance(0.1 * HOLD_S)
    assert bench.values() == of(1)


def test_once_all_have_come_nothing_is_left_of_the_waiting(bench: LaneBench) -> None:
    front = bench.front()
    share(bench, front, 5)
    bench.loop.advance(0.5 * HOLD_S)
    front.send(0, 1, 2, 3)
    assert bench.values() == of(4)
    front.send(4, 5)
    bench.loop.advance(HOLD_S)
    assert bench.values() == of(4), "these wait for the wave that is under way"


def test_nobody_waits_behind_a_lone_answer(bench: LaneBench) -> None:
    front = bench.front()
    share(bench, front, 1)
    front.send(0)
    bench.settle()
    assert bench.values() == of(1)


def was_held(bench: LaneBench, front: Front) -> bool:
    """Whether the next wave waits in vain for five who were answered. Takes three waves."""
    share(bench, front, 5)
    front.send(0)
    bench.settle()
    held = not bench.sent()
    bench.loop.advance(HOLD_S)
    bench.answer()
    share(bench, front, 1)
    return held


def test_waiting_ends_where_it_is_in_vain_and_is_tried_again_now_and_then(bench: LaneBench) -> None:
    front = bench.front()
    held = [was_held(bench, front) for _ in range(6 + 32)]
    assert held[:6] == [True] * 6
    assert sum(held[6:]) == 1, "one wave of 32 waits to see whether it is worth it"


def test_waiting_is_taken_up_again_where_it_is_worth_it(bench: LaneBench) -> None:
    front = bench.front()
    assert [was_held(bench, front) for _ in range(8)] == [True] * 6 + [False] * 2
    for _ in range(33):
        share(bench, front, 5)
    assert was_held(bench, front)


# -- what the model takes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "infer_ns", "at_once"),
    [(1, QUICK_NS, 1), (3, QUICK_NS, 1), (3, PARALLEL_NS, 3), (1, PARALLEL_NS, 1), (20, PARALLEL_NS, 8)],
)
def test_a_model_that_takes_its_time_uses_all_its_instances(slots: int, infer_ns: int, at_once: int) -> None:
    with LaneBench(slots=slots) as bench:
        front = bench.front()
        for value in range(4):
            front.send(value)
            bench.answer(infer_ns=infer_ns)
        for value in range(at_once + 3):
            front.send(value)
            bench.settle()
        assert bench.values() == of(*[1] * at_once)


SLOW = SLOW_NS + 1


@pytest.mark.parametrize(
    ("infer_ns", "verdicts"),
    [
        ([SLOW] * 4, [True, True, True, False]),
        ([SLOW, SLOW, SLOW, SLOW_NS], [True] * 4),
        ([SLOW_NS, SLOW, SLOW, SLOW] + [SLOW] * 4, [True] * 7 + [False]),
        ([SLOW] * 8, [True, True, True, False] * 2),
    ],
)
def test_the_least_of_four_times_says_whether_a_model_is_too_slow(infer_ns: list[int], verdicts: list[bool]) -> None:
    with LaneBench() as bench:
        gathering = bench.front().door.gathering
        before_ns = monotonic_ns()
        assert [gathering.measured(one) for one in infer_ns] == verdicts
        closed_s = (gathering.closed_until_ns - before_ns) / 1e9
        closed = verdicts.count(False)  # for a second, then for two, and so on
        assert closed <= closed_s < closed + 1 if closed else closed_s < 0


def test_behind_a_model_that_became_slow_nothing_waits_here(bench: LaneBench) -> None:
    front = bench.front()
    for _ in range(4):
        front.door.gathering.measured(SLOW)
    for value in range(3):
        front.send(value)
        bench.settle()
    assert bench.values() == of(1, 1, 1)


def test_behind_a_wave_that_stalls_requests_wait_in_the_log(bench: LaneBench) -> None:
    front = bench.front()
    front.send(0)
    front.send(1)
    bench.settle()
    bench.loop.advance(0.005)
    bench.settle()
    assert bench.values() == of(1)
    front.send(2)
    bench.loop.advance(0.006)
    bench.settle()
    assert bench.values() == [[0], [1, 2]]
    front.send(3)
    bench.settle()
    assert bench.values() == [[0], [1, 2], [3]], "as behind a model that may be slow"


# -- everything together -----------------------------------------------------------------------------------------------

_steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, 1), st.sampled_from([1, 1, 1, 2, 3, 7, 8, 9, 30])),
        st.tuples(st.just("answer"), st.integers(0, 9), st.sampled_from([QUICK_NS, PARALLEL_NS])),
        st.tuples(st.just("tick")),
        st.tuples(st.just("wait"), st.sampled_from([0.0001, 0.001, HOLD_S, 0.01])),
    ),
    max_size=40,
)


@settings(max_examples=examples(100))
@given(_steps, st.integers(1, 3), st.booleans())
def test_every_request_is_answered_once_and_none_waits_while_nothing_is_under_way(
    steps: list[tuple[object, ...]], slots: int, may_gather: bool
) -> None:
    block = "" if may_gather else "default_queue_policy { max_queue_size: 9 }"
    with LaneBench(f"dynamic_batching {{ {block} }}", slots=slots) as bench:
        fronts = [bench.front(), bench.front(timeout_us=5)]
        asked: list[list[Call]] = [[], []]
        for what, *more in steps:
            if what == "read":
                which, count = more
                first = len(asked[which])  # type: ignore[index, call-overload]
                asked[which] += fronts[which].send(*range(first, first + count))  # type: ignore
            elif what == "answer" and (sent := bench.sent()):
                bench.answer(sent[more[0] % len(sent)], infer_ns=more[1])  # type: ignore
            elif what == "tick":
                bench.loop.tick()
            elif what == "wait":
                bench.loop.advance(*more)  # type: ignore
            sent = bench.sent()
            assert all(1 <= len(one.values) <= 8 for one in sent)
            assert all(one.values == sorted(one.values) for one in sent)
        for _ in range(200):
            bench.settle()
            bench.loop.advance(HOLD_S)
            waiting = [call for front in fronts for call in front.door.waiting]
            if not bench.sent():
                break
            bench.answer(bench.sent()[0])
        assert waiting == []
        for front, calls in zip(fronts, asked, strict=True):
            assert sorted((calls.index(call), value) for call, value in front.told) == [  # type: ignore
                (index, index) for index in range(len(calls))
            ]
        assert bench.service.lane.waves._under_way == {}
        assert all(lease.is_idle for lease in bench.service.lane.waves.leases._held.values())


# -- several queues ----------------------------------------------------------------------------------------------------


class CountedWaves:
    """Counts the writes to the log."""

    def __init__(self) -> None:
        self.flushes = 0

    def flush(self) -> None:
        self.flushes += 1


class QueueDoor:
    """A door whose requests make one wave."""

    most = 64

    def __init__(self, gathering: Gathering) -> None:
        self.gathering = gathering
        self.waiting: list[int] = []
        self.sent: list[int] = []

    def come(self, count: int) -> None:
        self.waiting += [0] * count
        self.gathering.came(self)  # type: ignore[arg-type]

    def send(self, *, full_only: bool = False) -> int:
        if not self.waiting or full_only:
            return 0
        self.sent.append(len(self.waiting))
        self.waiting.clear()
        return 1

    def leave_all(self) -> None:
        raise AssertionError("too many wait")


class Queues:
    """Two queues of one gateway, both of quick models."""

    def __init__(self) -> None:
        self.waves: Any = CountedWaves()
        shared = Round(self.waves, is_shared=True)
        self.a, self.b = (QueueDoor(Gathering(self.waves, name, 1, shared, may_gather=True)) for name in (b"a", b"b"))

    def prove(self) -> None:
        for door in (self.a, self.b):
            for _ in range(4):
                assert door.gathering.measured(QUICK_NS)


@pytest.fixture
async def queues() -> Queues:
    return Queues()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_lone_request_of_a_quick_model_leaves_at_once(queues: Queues) -> None:
    queues.a.come(1)
    assert queues.a.sent == [1]
    queues.a.gathering.ended(1)
    queues.prove()
    queues.a.come(1)
    assert queues.a.sent == [1, 1]


async def test_requests_of_several_queues_leave_in_one_write(queues: Queues) -> None:
    queues.prove()
    queues.a.come(5)
    await until(lambda: queues.a.sent == [5])
    queues.a.come(4)
    queues.b.come(3)
    writes = queues.waves.flushes
    queues.a.gathering.ended(5)
    await until(lambda: bool(queues.b.sent))
    assert (queues.a.sent, queues.b.sent) == ([5, 4], [3])
    assert queues.waves.flushes == writes + 1


async def test_the_next_waves_wait_for_all_who_were_answered_together(queues: Queues) -> None:
    queues.prove()
    queues.a.come(10)
    queues.b.come(10)
    await until(lambda: bool(queues.a.sent and queues.b.sent))
    queues.a.gathering.ended(10)
    assert queues.a.sent == queues.b.sent == [10], "the other queue's callers are about to be answered"
    queues.b.gathering.ended(10)
    queues.a.come(17)
    assert len(queues.a.sent) == 1
    queues.b.come(1)
    assert (queues.a.sent, queues.b.sent) == ([10, 17], [10, 1]), "nine tenths of them are here"


async def test_a_queue_without_answers_holds_no_other_up(queues: Queues) -> None:
    queues.prove()
    queues.a.come(2)
    await until(lambda: bool(queues.a.sent))  # and is never answered
    for number in range(20):
        queues.b.come(2)
        await until(lambda wanted=number: len(queues.b.sent) > wanted)  # type: ignore[misc]
        queues.b.gathering.ended(2)
    queues.b.come(2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await until(lambda: len(queues.b.sent) == 21)
    assert queues.a.sent == [2]


async def test_a_slow_model_is_tried_again_sooner_than_one_that_stays_slow(queues: Queues) -> None:
    queue = queues.a.gathering
    waits_s = []
    for _ in range(7):
        assert [queue.measured(SLOW_NS + 1) for _ in range(4)] == [True, True, True, False]
        waits_s.append(round((queue.closed_until_ns - monotonic_ns()) / 1e9))
    assert waits_s == [1, 2, 4, 8, 16, 30, 30]
    queues.prove()
    assert [queue.measured(SLOW_NS + 1) for _ in range(4)] == [True, True, True, False]
    assert queue.closed_until_ns - monotonic_ns() < 2e9
