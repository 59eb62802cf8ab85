"""When a model is loaded or left because of what other executors serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from virtual_time import MemoryLoop

from charonia.errors import InternalError, Unavailable
from charonia.facts.events import Fact, ModelExcluded, ModelRequested, ProcessJoined, ProcessLeft, VersionLoaded
from executors.deployment.agreement import Agreement
from executors.deployment.lifecycle import Lifecycle
from executors.loading.placement_rules import NotPlacedHere

FILES = VersionLoaded("other", "m", 1, "brought", 1, b"", override_id="early")
LATER = VersionLoaded("other", "m", 1, "brought later", 1, b"", override_id="later")
LOST = ProcessLeft("executor", "other", "lost")
FULL = Unavailable("the disk is full")


class Executor:
    """The parts of an executor that `Agreement` calls. `results` are those of its loads, None for a success."""

    def __init__(self, *results: Exception | None) -> None:
        self.results = list(results)
        self.happened: list[str] = []
        self._lock = asyncio.Lock()
        parts = cast(Any, self)
        self.agreement = Agreement(
            *(parts, "me"),
            serving={},
            lifecycle=Lifecycle("me", "explicit"),
            announcer=parts,
            composition=parts,
            loads=self,
            lost_within_s=0,
        )

    async def hear(self, *facts: Fact) -> None:
        for fact in facts:
            for model in self.agreement.hear(fact):
                await self.agreement.agree(model)

    async def leaves(self) -> None:
        """Another executor serves files that this one does not have: a load at the start is refused."""
        await self.hear(ProcessJoined("executor", "other"), FILES)
        with pytest.raises(NotPlacedHere):
            await self.agreement.override("m", None)

    async def alive(self, _role: str, incarnations: list[str]) -> list[bool]:
        return [True for _ in incarnations]

    async def announce(self, fact: Fact) -> None:
        assert isinstance(fact, ModelExcluded)
        self.happened.append(f"excluded {fact.model}")

    async def loaded(self, model: str) -> None:
        self.happened.append(f"ensembles with {model} are tried")

    async def load(self, model: str, request: None, *, to_agree: bool) -> None:
        assert to_agree
        async with self._lock:
            self.happened.append(f"load {model}")
            if (error := self.results.pop(0)) is not None:
                raise error
            self.agreement.loaded(model, ends_files=False)

    async def drop(self, model: str) -> None:
        self.happened.append(f"drop {model}")

    def lock(self, model: str) -> asyncio.Lock:
        return self._lock


async def test_a_model_is_left_to_others_until_none_has_its_files() -> None:
    executor = Executor(None)
    await executor.leaves()
    assert executor.happened == ["drop m", "excluded m"]
    assert not executor.agreement.differs("m")
    await executor.hear(LOST)
    assert executor.happened[2:] == ["load m"]
    assert not executor.agreement.differs("m")


@pytest.mark.parametrize("end", [Agreement.unloaded, lambda agreement, model: agreement.loaded(model, ends_files=True)])
async def test_a_model_is_no_longer_left_once_it_is_loaded_or_unloaded(end: Callable[[Agreement, str], None]) -> None:
    executor = Executor()
    await executor.leaves()
    end(executor.agreement, "m")
    await executor.hear(LOST)
    assert executor.happened == ["drop m", "excluded m"]


async def test_a_load_that_a_client_requests_is_not_left() -> None:
    executor = Executor()
    await executor.hear(ProcessJoined("executor", "other"), FILES)
    assert await executor.agreement.override("m", ModelRequested("load", "m", "late")) is None
    assert executor.happened == []


async def test_a_model_stays_left_to_those_that_serve_a_later_load_which_failed_here() -> None:
    executor = Executor(None)
    await executor.leaves()
    executor.agreement.requested(ModelRequested("load", "m", "later", "{}"))
    await executor.hear(LATER)
    assert executor.happened[2:] == [], "the repository's files would be other ones"
    await executor.hear(LOST)
    assert executor.happened[2:] == ["load m"]


async def test_ensembles_are_tried_where_a_model_is_placed_elsewhere() -> None:
    executor = Executor(NotPlacedHere("another pool"))
    await executor.leaves()
    await executor.hear(LOST)
    assert executor.happened[2:] == ["load m", "ensembles with m are tried"]


def attempts(executor: Executor) -> int:
    return executor.happened.count("load m")


@pytest.fixture
def loop() -> Iterator[MemoryLoop]:
    made = MemoryLoop()
    yield made
    made.close()


def lost_by_others(loop: MemoryLoop, *results: Exception | None) -> Executor:
    """An executor that takes `m` over, with the results of its loads."""
    executor = Executor(*results)
    loop.run_until_complete(executor.leaves())
    loop.run_until_complete(executor.hear(LOST))
    assert attempts(executor) == 1
    return executor


def test_a_load_that_fails_is_tried_again_at_growing_intervals(
    loop: MemoryLoop, caplog: pytest.LogCaptureFixture
) -> None:
    executor = lost_by_others(loop, InternalError("no memory"), RuntimeError("can't start new thread"), FULL, None)
    for number, delay_s in enumerate((5, 10, 20), start=1):
        assert f"failed to load m, trying again in {delay_s} s: " in caplog.text
        loop.advance(delay_s - 0.5)
        assert attempts(executor) == number
        loop.advance(0.5)
        assert attempts(executor) == number + 1
    loop.advance(10_000)
    assert attempts(executor) == 4, "it is served"


def test_what_is_unloaded_is_not_tried_again(loop: MemoryLoop) -> None:
    executor = lost_by_others(loop, FULL, FULL, None)
    executor.agreement.unloaded("m")
    loop.advance(10_000)
    assert attempts(executor) == 1
    loop.run_until_complete(executor.leaves())
    loop.run_until_complete(executor.hear(LOST))
    loop.advance(5)
    assert attempts(executor) == 3, "the delays begin again"


def test_what_another_executor_serves_again_is_not_tried_again(loop: MemoryLoop) -> None:
    executor = lost_by_others(loop, FULL)
    loop.run_until_complete(executor.hear(ProcessJoined("executor", "other"), FILES))
    loop.advance(10_000)
    assert attempts(executor) == 1


def test_what_another_executor_serves_by_a_later_load_is_not_tried_again(loop: MemoryLoop) -> None:
    executor = lost_by_others(loop, FULL)
    executor.agreement.requested(ModelRequested("load", "m", "later", "{}"))
    loop.run_until_complete(executor.hear(ProcessJoined("executor", "other"), LATER))
    loop.advance(10_000)
    assert attempts(executor) == 1


def test_the_delay_does_not_grow_with_the_versions_that_change_at_once(
    loop: MemoryLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """Each change is a load of its own."""
    executor = lost_by_others(loop, FULL, FULL, FULL, FULL, None)

    async def change() -> None:
        changes = asyncio.gather(*(executor.agreement.agree("m") for _ in range(3)))
        async with executor.lock("m"):  # a load is under way
            await asyncio.sleep(0)
        await changes

    loop.run_until_complete(change())
    assert attempts(executor) == 4
    assert "in 10 s" in caplog.text
    assert "in 20 s" not in caplog.text
    loop.advance(10)
    assert attempts(executor) == 5


def test_a_change_is_not_kept_waiting_by_the_next_try(loop: MemoryLoop) -> None:
    executor = lost_by_others(loop, FULL, None)
    loop.run_until_complete(executor.agreement.agree("m"))
    loop.advance(10_000)
    assert attempts(executor) == 2


def test_what_is_placed_elsewhere_is_not_tried_again(loop: MemoryLoop) -> None:
    executor = lost_by_others(loop, FULL, NotPlacedHere("another pool"))
    loop.advance(10_000)
    assert attempts(executor) == 2


def test_an_executor_that_stops_tries_nothing_again(loop: MemoryLoop) -> None:
    executor = lost_by_others(loop, FULL, FULL)
    loop.run_until_complete(executor.agreement.close())
    loop.run_until_complete(executor.agreement.agree("m"))  # a change came last
    loop.advance(10_000)
    assert attempts(executor) == 2
