"""What a process that asks models finds in the response cache, and what is counted of it (K4, K5)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from memory_log.log import MemoryLog

from charonia import keys
from charonia.calls.cache.cached_calls import CachedCalls
from charonia.catalog.catalog import Catalog, ServedVersion
from charonia.datatypes import DataType
from charonia.errors import InternalError, Unavailable
from charonia.facts.events import ProcessJoined, VersionLoaded, VersionUnloaded
from charonia.inference import InferenceRequest
from charonia.metrics.cache_metrics import CacheMetrics
from charonia.models.config_forms import parse
from charonia.options.settings import MetricsSettings
from charonia.tensors import Tensor
from charonia.wire import ResponseRecord
from executors.configuration.config import normalise

TENSOR = '{ name: "X" data_type: TYPE_INT32 dims: 1 }'
CACHED = f'name: "m" backend: "python" input {TENSOR} output {TENSOR} response_cache {{ enable: true }}'


def tensor(value: int) -> Tensor:
    return Tensor("X", DataType.INT32, (1,), value.to_bytes(4, "little"))


def asked(value: int) -> InferenceRequest:
    return InferenceRequest("m", 1, [tensor(value)])


class World:
    def __init__(self) -> None:
        self.log = MemoryLog()
        self.catalog = Catalog()
        self.catalog.apply(ProcessJoined("executor", "e"))
        config = normalise(parse(CACHED))
        self.catalog.apply(VersionLoaded("e", "m", 1, "h", 1, config.SerializeToString()))
        self.observed: list[tuple[str, str]] = []
        self.calls = self.made()
        self.runs = 0

    def made(self) -> CachedCalls:
        return CachedCalls(
            self.log, None, 1_000_000, self.catalog, lambda served, what, _: self.observed.append((served.model, what))
        )

    @property
    def served(self) -> ServedVersion:
        return self.catalog.served("m")[1]

    async def ask(self, value: int, calls: CachedCalls | None = None, error: InternalError | None = None) -> int:
        async def run() -> ResponseRecord:
            self.runs += 1
            await asyncio.sleep(0)
            return ResponseRecord(bytes(16), "m", 1, [tensor(value + 1)], {}, error)

        calls = calls or self.calls
        rules = calls.rules(self.served)
        assert rules is not None
        record = await calls.answer(asked(value), self.served, rules, "", run)
        if record.error is not None:
            raise record.error
        return int.from_bytes(record.outputs[0].data, "little")

    async def statistics(self) -> dict[str, int]:
        return await self.log.statistics(keys.statistics("m", 1, "h"))


@pytest.fixture
async def world() -> World:
    return World()


async def stored(world: World, misses: int) -> None:
    """A miss is counted once the log has the answer."""
    async with asyncio.timeout(30):
        while world.calls.counts()[("m", 1)].misses < misses:
            await asyncio.sleep(0)


async def test_what_was_answered_once_is_answered_again(world: World) -> None:
    assert [await world.ask(1), await world.ask(1), await world.ask(2)] == [2, 2, 3]
    assert world.runs == 2
    await stored(world, 2)
    counts = world.calls.counts()[("m", 1)]
    assert (counts.hits, counts.misses) == (1, 2)
    assert sorted(world.observed) == [("m", "cache_hit"), ("m", "cache_miss"), ("m", "cache_miss"), ("m", "queue")]
    await world.calls.close()
    found = await world.statistics()
    assert (found["success_count"], found["queue_count"], found["cache_hit_count"]) == (1, 1, 1)
    assert found["cache_miss_count"] == 2


async def test_equal_ones_share_an_execution_and_its_failure(world: World) -> None:
    assert await asyncio.gather(*(world.ask(5) for _ in range(4))) == [6] * 4
    assert world.runs == 1
    failed = await asyncio.gather(*(world.ask(6, error=InternalError("no")) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [InternalError] * 3
    assert world.runs == 2
    await world.calls.close()


async def test_another_process_finds_it_too(world: World) -> None:
    assert await world.ask(1) == 2
    await stored(world, 1)
    other = world.made()
    assert await world.ask(1, other) == 2
    assert world.runs == 1
    world.calls.begin_anew()
    assert await world.ask(1) == 2
    assert world.runs == 1
    await other.close()
    await world.calls.close()


async def test_whose_answers_are_cached(world: World) -> None:
    served = world.served
    assert world.calls.rules(served) is world.calls.rules(served)
    decoupled = replace(served, content_hash="d", interface=replace(served.interface, decoupled=True))
    assert world.calls.rules(decoupled) is None
    plain = normalise(parse(CACHED.partition("response_cache")[0]))
    assert world.calls.rules(replace(served, content_hash="p", config=plain)) is None
    await world.calls.close()


async def test_the_page(world: World) -> None:
    await world.ask(1)
    await world.ask(1)
    await stored(world, 1)
    page = CacheMetrics(world.calls, MetricsSettings(), lambda model, version: {"team": f"{model}{version}"}).render()
    lines = page.decode().splitlines()
    labels = '{model="m",team="m1",version="1"}'
    for name in ("nv_inference_request_success", "nv_cache_num_hits_per_model", "nv_cache_num_misses_per_model"):
        assert f"{name}{labels} 1.0" in lines
    without = CacheMetrics(world.calls, MetricsSettings(counters=False), lambda *_: {}).render().decode()
    assert "nv_inference_request_success{" in without
    assert "nv_cache" not in without
    again = VersionLoaded("e", "m", 1, "other", 1, normalise(parse(CACHED)).SerializeToString())
    world.catalog.apply(again)
    assert world.calls.counts()
    world.catalog.apply(VersionUnloaded("e", "m", 1))
    world.catalog.apply(again)
    assert not world.calls.counts(), "it begins at 0, although nothing was read in between"
    await world.calls.close()


@pytest.mark.parametrize("alone", [True, False])
async def test_one_that_may_be_waited_for_joins_nobody(world: World, alone: bool) -> None:
    """The model asks itself the same: without `alone` it would wait for itself."""
    rules = world.calls.rules(world.served)
    assert rules is not None
    called: list[asyncio.Task[ResponseRecord]] = []

    async def inner() -> ResponseRecord:
        return ResponseRecord(bytes(16), "m", 1, [tensor(9)], {}, None)

    async def outer() -> ResponseRecord:
        called.append(asyncio.create_task(world.calls.answer(asked(1), world.served, rules, "", inner, alone=alone)))
        done, _ = await asyncio.wait(called, timeout=0.1 if not alone else 10)
        assert bool(done) is alone
        return ResponseRecord(bytes(16), "m", 1, [tensor(5)], {}, None)

    record = await world.calls.answer(asked(1), world.served, rules, "", outer)
    assert record.outputs[0].data == (5).to_bytes(4, "little")
    assert (await called[0]).outputs[0].data == (9 if alone else 5).to_bytes(4, "little")


async def test_nobody_waits_in_one_that_may_be_ended_for_its_callers(world: World) -> None:
    rules = world.calls.rules(world.served)
    assert rules is not None
    runs, ended = asyncio.Event(), asyncio.Event()

    async def stuck() -> ResponseRecord:
        runs.set()
        await ended.wait()
        raise Unavailable("deadlock: m -> m")

    first = asyncio.create_task(world.calls.answer(asked(1), world.served, rules, "", stuck, alone=True))
    await runs.wait()
    assert await world.ask(1) == 2
    ended.set()
    with pytest.raises(Unavailable, match="deadlock: m -> m"):
        await first
    await world.calls.close()
