"""Who is asked for a version that nobody has in memory, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

from batcher.owner.demand import Demand, most_room
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.facts.events import ExecutorDescribed, ProcessJoined
from charonia.models.interface import ModelInterface
from protos.model_config_pb2 import ModelConfig

CONFIG = ModelConfig(name="m", backend="python")


def served(slots: dict[str, int]) -> ServedVersion:
    on_demand = frozenset(executor for executor, count in slots.items() if not count)
    return ServedVersion("m", 1, "h", CONFIG, ModelInterface.of(CONFIG), {}, slots, on_demand=on_demand)


class Dispatcher:
    """Notes who is told, and takes it or not."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.takes = True

    async def ask_to_load(self, executor: str, version: int) -> bool:
        self.told.append((executor, version))
        return self.takes


def first(_model: str, executors: Collection[str]) -> str:
    return min(executors)


async def settle() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def demand() -> tuple[Demand, Dispatcher]:
    dispatcher = Dispatcher()
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.add(asyncio.get_running_loop().create_task(work))

    return Demand("m", dispatcher.ask_to_load, first, spawn), dispatcher


async def test_one_executor_is_asked_once_when_something_waits() -> None:
    asks, dispatcher = demand()
    asks.on_served({1: served({"a": 0, "b": 0})})
    assert asks.unloaded
    asks.look({})
    asks.look({2: 1})
    asks.look({1: 3})
    asks.look({1: 4})
    await settle()
    assert dispatcher.told == [("a", 1)]


async def test_what_somebody_holds_is_not_asked_for() -> None:
    asks, dispatcher = demand()
    asks.on_served({1: served({"a": 0, "b": 2})})
    assert not asks.unloaded
    asks.look({1: 1})
    await settle()
    assert dispatcher.told == []


async def test_it_is_asked_for_again_when_it_was_there_meanwhile() -> None:
    asks, dispatcher = demand()
    for slots in ({"a": 0}, {"a": 1}, {"a": 0}):
        asks.on_served({1: served(slots)})
        asks.look({1: 1})
    await settle()
    assert dispatcher.told == [("a", 1), ("a", 1)]


async def test_another_one_is_asked_when_the_first_leaves_or_cannot() -> None:
    asks, dispatcher = demand()
    asks.on_served({1: served({"a": 0, "b": 0})})
    asks.look({1: 1})
    asks.on_served({1: served({"b": 0})})
    asks.look({1: 1})
    await settle()
    assert dispatcher.told == [("a", 1), ("b", 1)]


async def test_what_the_log_does_not_take_is_said_again() -> None:
    asks, dispatcher = demand()
    dispatcher.takes = False
    asks.on_served({1: served({"a": 0})})
    asks.look({1: 1})
    await settle()
    asks.look({1: 1})
    await settle()
    assert dispatcher.told == [("a", 1), ("a", 1)]


async def test_what_does_not_come_is_asked_for_again() -> None:
    asks, dispatcher = demand()
    asks.on_served({1: served({"a": 0, "b": 0})})
    asks.look({1: 1})
    for _ in range(11):
        asks.tend({1: 1}, lambda _: False)
    await settle()
    assert dispatcher.told == [("a", 1)] * 3
    for _ in range(11):
        asks.tend({}, lambda _: True)
    await settle()
    assert len(dispatcher.told) == 3, "nobody waits any more"


async def test_a_backlog_is_shared_with_one_that_has_room() -> None:
    asks, dispatcher = demand()
    asks.on_served({1: served({"a": 2, "b": 0, "c": 0})})
    assert asks.has_on_demand_versions
    for waiting in (100, 100, 8, 100, 100):
        asks.tend({1: waiting}, lambda _: True)
    await settle()
    assert dispatcher.told == [], "it was gone meanwhile"
    asks.tend({1: 100}, lambda _: False)
    await settle()
    assert dispatcher.told == [], "nobody has room"
    asks.tend({1: 100}, lambda executor: executor == "c")
    await settle()
    assert dispatcher.told == [("c", 1)]
    asks.on_served({1: served({"a": 2, "b": 3, "c": 2})})
    assert not asks.has_on_demand_versions


def catalog(**described: tuple[int, int, int, int]) -> Catalog:
    found = Catalog()
    for executor, numbers in described.items():
        found.apply(ProcessJoined("executor", executor))
        found.apply(ExecutorDescribed(executor, {}, *numbers))
    return found


def test_the_emptiest_is_asked() -> None:
    assert most_room(catalog(a=(50, 100, 0, 0), b=(40, 100, 0, 0)), "m", {"a", "b"}) == "b"
    assert most_room(catalog(a=(1, 100, 3, 4), b=(50, 100, 1, 4)), "m", {"a", "b"}) == "b"
    assert most_room(catalog(a=(0, 0, 0, 9), b=(0, 0, 1, 9)), "m", {"a", "b"}) == "a"


def test_full_ones_share_the_models_and_each_keeps_its_own() -> None:
    full = catalog(a=(100, 100, 0, 0), b=(95, 100, 0, 0), c=(0, 0, 0, 0))
    chosen = {f"m{number}": most_room(full, f"m{number}", {"a", "b"}) for number in range(60)}
    assert {most_room(full, model, {"b", "a"}) == executor for model, executor in chosen.items()} == {True}
    assert 15 < list(chosen.values()).count("a") < 45
    assert most_room(full, "m", {"unheard"}) == "unheard"
