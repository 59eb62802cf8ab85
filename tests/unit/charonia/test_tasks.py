"""Background tasks are kept, waited for, cancelled and reported; steps are repeated until they succeed."""

from __future__ import annotations

import asyncio
import gc
from itertools import pairwise
from typing import Any

import pytest
from virtual_time import MemoryLoop, VirtualLoop

from charonia.errors import InvalidArgument, LogUnavailable
from charonia.tasks import Tasks, ends_caller, insist, periodic


async def test_tasks_are_kept_until_they_end() -> None:
    tasks, done = Tasks(), asyncio.Event()

    async def finishes() -> None:
        await done.wait()

    tasks.spawn(finishes(), "finishes")
    gc.collect()
    assert len(tasks) == 1
    done.set()
    await tasks.settled()
    assert len(tasks) == 0


async def test_tasks_started_by_tasks_are_waited_for() -> None:
    tasks, seen = Tasks(), []

    async def second() -> None:
        await asyncio.sleep(0)
        seen.append(2)

    async def first() -> None:
        seen.append(1)
        tasks.spawn(second())

    tasks.spawn(first())
    await tasks.settled()
    assert seen == [1, 2]


async def test_close_cancels_and_waits_for_what_tidies_up() -> None:
    tasks, tidied = Tasks(), []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.close()
    assert (tidied, len(tasks)) == ([True], 0)


async def test_an_error_is_reported_and_a_cancellation_is_not() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)
    fault = ValueError("no")

    async def fails() -> None:
        raise fault

    tasks.spawn(fails())
    tasks.spawn(asyncio.sleep(60)).cancel()
    await tasks.settled()
    await asyncio.sleep(0)
    assert errors == [fault]


async def test_without_a_reader_an_error_goes_to_the_loop_with_the_name_of_its_task() -> None:
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))

    async def fails() -> None:
        raise ValueError("no")

    tasks = Tasks()
    tasks.spawn(fails(), "the sweep")
    await tasks.settled()
    await asyncio.sleep(0)
    assert [context["message"] for context in said] == ["the sweep failed"]


def test_a_step_is_repeated_with_pauses_that_double_until_it_succeeds() -> None:
    loop, times = VirtualLoop(), []

    async def step() -> None:
        times.append(round(loop.time(), 3))
        if len(times) < 5:
            raise LogUnavailable("away")

    repeated = loop.create_task(insist(step, "it cannot be written", first_s=1, last_s=3))
    for _ in range(40):
        loop.advance(0.5)
        loop.tick()
    assert repeated.result()
    assert [later - earlier for earlier, later in pairwise(times)] == [1, 2, 3, 3]
    loop.close()


async def test_what_is_no_error_of_ours_ends_the_repetition() -> None:
    async def step() -> None:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await insist(step, "it cannot be written")


async def test_it_ends_when_it_is_given_up() -> None:
    tries = 0

    async def step() -> None:
        nonlocal tries
        tries += 1
        raise InvalidArgument("never")

    assert not await insist(step, "it cannot be written", first_s=0, given_up=lambda: tries >= 3)
    assert tries == 3


async def test_the_tasks_of_this_moment_can_be_waited_for() -> None:
    tasks, done = Tasks(), asyncio.Event()

    async def first() -> None:
        tasks.spawn(done.wait())

    tasks.spawn(first())
    await asyncio.wait([*tasks])
    assert len(tasks) == 1
    done.set()
    await tasks.settled()


def _pass(loop: MemoryLoop, seconds: float) -> None:
    loop.tick()
    for _ in range(int(seconds / 0.5)):
        loop.advance(0.5)
        loop.tick()


def _end(loop: MemoryLoop, task: asyncio.Task[None]) -> None:
    task.cancel()
    loop.tick()
    loop.close()


def test_a_periodic_step_goes_on_after_errors(caplog: pytest.LogCaptureFixture) -> None:
    loop, times_s, refused = MemoryLoop(), [], []
    outcomes = iter([None, LogUnavailable("away"), ValueError("wrong")])

    async def step() -> None:
        times_s.append(loop.time())
        if error := next(outcomes, None):
            raise error

    repeated = loop.create_task(periodic(step, 2.0, "no step", on_refusal=lambda error: refused.append(error.message)))
    _pass(loop, 8.0)
    assert times_s == [2.0, 4.0, 6.0, 8.0]
    assert refused == ["away"]
    assert [(record.message, record.exc_info is not None) for record in caplog.records] == [("no step", True)]
    _end(loop, repeated)


def test_a_periodic_step_begins_at_once_if_asked_to() -> None:
    loop, times_s = MemoryLoop(), []
    pauses_s = iter([0.5, 1.5])

    async def step() -> None:
        times_s.append(loop.time())

    repeated = loop.create_task(periodic(step, lambda: next(pauses_s, 9.0), "no step", at_once=True))
    _pass(loop, 5.0)
    assert times_s == [0.0, 0.5, 2.0]
    _end(loop, repeated)


async def test_a_cancellation_of_another_task_does_not_end_the_one_that_waits() -> None:
    other = asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)
    other.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await other
    assert not ends_caller(caught.value)
    assert not ends_caller(SystemExit(1))
    assert ends_caller(GeneratorExit())

    async def waits() -> bool:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            return ends_caller(error)
        return False

    own = asyncio.create_task(waits())
    await asyncio.sleep(0)
    own.cancel()
    assert await own
