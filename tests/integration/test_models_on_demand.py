"""One executor with room for few models: what is announced, loaded, evicted and refused, over a log in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_bench import ME, linear, running, x

import executors.deployment.memory_budget
from charonia import keys
from charonia.errors import StartupError
from charonia.facts.events import (
    FIELD_FACT,
    BatchFinished,
    BatchReturned,
    ExecutorDescribed,
    ModelExcluded,
    VersionAnnounced,
    VersionFailed,
    VersionHeld,
    VersionLoaded,
    VersionWanted,
    pack_fact,
)
from charonia.tensors import Tensor
from protos.model_config_pb2 import ModelConfig


async def want(bench: Any, *models: str) -> None:
    """As the owners of these models do when requests wait."""
    for model in models:
        await bench.log.append(keys.batches(ME), [FIELD_FACT, pack_fact(VersionWanted(model, 1))])


def held(bench: Any) -> list[tuple[str, bool]]:
    """Who came and went, in order."""
    return [(fact.model, fact.slots > 0) for fact in bench.control.facts() if isinstance(fact, VersionHeld)]


async def until_held(bench: Any, *expected: tuple[str, bool]) -> None:
    await bench.control.until(lambda: held(bench) == list(expected))


async def infer(bench: Any, model: str) -> str:
    _, record = await bench.accept(model, [Tensor.of("x", x(1))])
    return str(await bench.dispatch(model, [record]))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in "abc":
        linear(tmp_path / name / "1" / "model.onnx")
    return tmp_path


async def test_what_is_announced_is_complete_and_not_loaded(models: Path) -> None:
    async with running(models, max_loaded_models=2, labels={"zone": "z"}) as bench:
        facts = bench.control.facts()
        announced = {fact.model: fact for fact in facts if isinstance(fact, VersionAnnounced)}
        assert set(announced) == {"a", "b", "c"}
        config = ModelConfig.FromString(announced["a"].config)
        assert config.input[0].dims == [16]
        assert config.instance_group
        assert not any(isinstance(fact, VersionLoaded | VersionHeld) for fact in facts)
        described = [fact for fact in facts if isinstance(fact, ExecutorDescribed)]
        assert (described[-1].most_models, described[-1].loaded_models, described[-1].labels["zone"]) == (2, 0, "z")
        await want(bench, "a", "a")
        await until_held(bench, ("a", True))
        (fact,) = [fact for fact in bench.control.facts() if isinstance(fact, VersionHeld)]
        assert fact.load_ns > 0
        batch = await infer(bench, "a")
        await bench.finished("a", batch)
        await want(bench, "a", "nobody's")
        await bench.control.fact(ExecutorDescribed, loaded_models=1)
        assert held(bench) == [("a", True)]


async def test_the_least_recently_used_idle_one_makes_room(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # else the one that was loaded first may have to make room because the other one must still stay
    monkeypatch.setattr(executors.deployment.memory_budget, "MIN_STAY_NS", 0)
    async with running(models, max_loaded_models=2) as bench:
        await want(bench, "a")
        await until_held(bench, ("a", True))
        await want(bench, "b")
        await until_held(bench, ("a", True), ("b", True))
        await bench.finished("a", await infer(bench, "a"))
        await want(bench, "c")
        seen = [("a", True), ("b", True), ("b", False), ("c", True)]
        await until_held(bench, *seen)
        returned = await infer(bench, "b")  # its owner had not heard of it
        await bench.finished("b", returned, BatchReturned)


async def test_what_has_requests_in_the_log_stays(models: Path) -> None:
    async with running(models, max_loaded_models=1) as bench:
        await want(bench, "a")
        await until_held(bench, ("a", True))
        request_id, record = await bench.accept("a", [Tensor.of("x", x(1))])
        await want(bench, "b")
        await want(bench, "c")
        # three times as long as anybody must stay: it would be gone by now
        batches = [await infer(bench, "a") for _ in range(20)]
        for batch in batches:
            await bench.finished("a", batch)
        assert held(bench) == [("a", True)]
        await bench.finished("a", await bench.dispatch("a", [record]))
        await bench.control.until(lambda: ("b", True) in held(bench))
        assert held(bench)[:3] == [("a", True), ("a", False), ("b", True)]
        assert (await bench.log.unsettled("a", [request_id])) == [-1]


async def test_statistics_outlive_the_stay_in_memory(models: Path) -> None:
    async with running(models, max_loaded_models=1) as bench:
        await want(bench, "a")
        await until_held(bench, ("a", True))
        await bench.finished("a", await infer(bench, "a"))
        await want(bench, "b")
        await until_held(bench, ("a", True), ("a", False), ("b", True))
        await want(bench, "a")
        await until_held(bench, ("a", True), ("a", False), ("b", True), ("b", False), ("a", True))
        await bench.finished("a", await infer(bench, "a"))
        (announced,) = [f for f in bench.control.facts() if isinstance(f, VersionAnnounced) and f.model == "a"]
        counted = await bench.log.statistics(keys.statistics("a", 1, announced.content_hash))
        assert counted["inference_count"] == 2
        page = bench.service.metrics.render().decode()
        assert 'nv_inference_count{model="a",version="1"} 2.0' in page, "what makes room for others counts on"


async def test_a_model_that_is_larger_than_the_budget(models: Path) -> None:
    linear(models / "large" / "1" / "model.onnx", np.ones((16, 100_000), np.float32))
    async with running(models, model_memory_budget_bytes=5_000_000) as bench:
        await want(bench, "large")
        failed = await bench.control.fact(VersionFailed, model="large")
        assert failed.message.startswith("Resource exhausted: it needs 6")
        assert failed.message.endswith("the memory budget is 5000000 bytes")
        assert held(bench) == []


async def test_memory_is_measured_and_kept_within_the_budget(models: Path) -> None:
    for name in ("big", "bigger"):
        linear(models / name / "1" / "model.onnx", np.ones((16, 400_000), np.float32))  # 25.6 MB of weights
    budget = 90_000_000
    async with running(models, model_memory_budget_bytes=budget) as bench:
        await want(bench, "big")
        await until_held(bench, ("big", True))
        described = await bench.control.fact(ExecutorDescribed, loaded_models=1)
        assert described.budget_bytes == budget
        assert 25_600_000 <= described.used_bytes <= budget
        await want(bench, "bigger", "a")
        await bench.control.until(lambda: {("bigger", True), ("a", True)} <= set(held(bench)))
        for fact in bench.control.facts():
            assert not isinstance(fact, ExecutorDescribed) or fact.used_bytes <= budget


async def test_files_that_changed_since_are_no_version_of_the_model(models: Path) -> None:
    async with running(models, max_loaded_models=1) as bench:
        linear(models / "a" / "1" / "model.onnx", np.ones((16, 3), np.float32))
        await want(bench, "a")
        failed = await bench.control.fact(VersionFailed, model="a")
        assert failed.message == "Internal: its files have changed since it was announced"


async def test_what_is_not_placed_here_is_not_announced(models: Path) -> None:
    (models / "a" / "config.pbtxt").write_text(
        'parameters { key: "charonia.pool" value { string_value: "other" } } backend: "onnxruntime"'
    )
    async with running(models, max_loaded_models=1) as bench:
        excluded = await bench.control.fact(ModelExcluded, model="a")
        assert excluded.reason == "'charonia.pool' is 'other', and this executor is in the pool 'default'"
        assert not any(isinstance(f, VersionAnnounced) and f.model == "a" for f in bench.control.facts())
        await want(bench, "a", "b")
        await until_held(bench, ("b", True))


async def test_a_configuration_that_cannot_be_used_ends_the_start(models: Path) -> None:
    (models / "a" / "config.pbtxt").write_text(
        'parameters { key: "charonia.require" value { string_value: "a b" } } backend: "onnxruntime"'
    )
    with pytest.raises(StartupError, match=r"'charonia.require' must be terms"):
        async with running(models, max_loaded_models=1):
            pass


async def test_it_ends_while_a_model_waits_for_room(models: Path) -> None:
    async with running(models, max_loaded_models=1) as bench:
        await want(bench, "a")
        await until_held(bench, ("a", True))
        await bench.accept("a", [Tensor.of("x", x(1))])  # nobody runs it
        await want(bench, "b")
        batch = await infer(bench, "a")
        await bench.finished("a", batch, BatchFinished)
    assert held(bench) == [("a", True)]
