"""What comes with an ensemble and what goes with it, over loads that happen in memory (R26, C52)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from google.protobuf import text_format

from charonia.catalog.catalog import Catalog
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.facts.events import ProcessJoined, VersionLoaded
from charonia.models.interface import ModelInterface
from executors.loading.composing_models import Composition, completed_ensemble
from executors.loading.placement_rules import NotPlacedHere
from executors.repository.model_directory import Fingerprint, ModelDirectory
from protos.model_config_pb2 import ModelConfig

IO = 'input { name: "i" data_type: TYPE_FP32 dims: 1 } output { name: "o" data_type: TYPE_FP32 dims: 1 }'


def plain(name: str, more: str = "") -> ModelConfig:
    return text_format.Parse(f'name: "{name}" backend: "python" {IO} {more}', ModelConfig())


def ensemble(name: str, *parts: str, version: int = -1) -> ModelConfig:
    tensors = ["i", *(f"t{number}" for number in range(1, len(parts))), "o"]
    steps = " ".join(
        f'step {{ model_name: "{part}" model_version: {version} input_map {{ key: "i" value: "{takes}" }} '
        f'output_map {{ key: "o" value: "{gives}" }} }}'
        for part, takes, gives in zip(parts, tensors, tensors[1:], strict=False)
    )
    text = f'name: "{name}" platform: "ensemble" {IO} ensemble_scheduling {{ {steps} }}'
    return text_format.Parse(text, ModelConfig())


class Loads:
    """A repository of configurations; `broken` models cannot be loaded, with the reason."""

    def __init__(self, *configs: ModelConfig, broken: Mapping[str, CharoniaError] | None = None) -> None:
        self.repository = {config.name: config for config in configs}
        self.broken = dict(broken or {})
        self.loading: set[str] = set()
        self.failures: dict[str, CharoniaError] = {}
        self.served: dict[str, ModelConfig] = {}
        self.calls: list[str] = []
        self.everywhere = Catalog()
        self.composition = Composition(self)

    def configs(self) -> Mapping[str, ModelConfig]:
        return self.served

    def interfaces(self, model: str) -> Mapping[int, ModelInterface]:
        return {1: ModelInterface.of(self.served[model])} if model in self.served else {}

    def find_directory(self, model: str) -> ModelDirectory | None:
        config = self.repository.get(model)
        return ModelDirectory(model, Path("/"), (1,), Fingerprint("", ""), config) if config is not None else None

    def failure(self, model: str) -> CharoniaError | None:
        return self.failures.get(model)

    async def catalog(self) -> Catalog:
        return self.everywhere

    def is_loading(self, model: str) -> bool:
        return model in self.loading

    async def load_ended(self, model: str) -> None:
        while model in self.loading:
            await asyncio.sleep(0)

    def is_underway(self, model: str) -> bool:
        return False

    async def load_underway(self, model: str) -> bool:
        return False

    async def load(self, model: str, request: None = None) -> None:
        self.calls.append(f"load {model}")
        try:
            if model in self.broken:
                raise self.broken[model]
            directory = self.find_directory(model)
            assert directory is not None
            find = await self.composition.prepare(directory)
            config = self.repository[model]
            if config.HasField("ensemble_scheduling"):
                config = completed_ensemble(config, model, find)
            self.served[model] = config
        except CharoniaError as error:
            self.failures[model] = error
            self.composition.failed(model)
            raise
        self.failures.pop(model, None)
        self.composition.forget(model)
        await self.composition.loaded(model)

    async def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")
        del self.served[model]

    async def reload(self, model: str) -> None:
        await self.load(model)


async def test_what_it_is_composed_of_comes_with_it() -> None:
    loads = Loads(plain("a"), plain("b"), ensemble("inner", "a", "b"), ensemble("outer", "inner", "a"))
    await loads.load("outer")
    assert set(loads.served) == {"a", "b", "inner", "outer"}
    assert len(loads.calls) == len(set(loads.calls))
    assert loads.composition.dependents("a") == ["inner", "outer"]
    assert loads.composition.parts("inner") == ["b"]
    assert loads.composition.parts("a") == []


async def test_what_was_asked_for_by_name_is_no_mere_part() -> None:
    loads = Loads(plain("a"), plain("b"), ensemble("e", "a", "b"))
    loads.composition.chosen("a")
    await loads.load("e")
    assert loads.composition.parts("e") == ["b"]
    loads.composition.unloaded("a")
    assert loads.composition.parts("e") == ["a", "b"]


async def test_what_is_missing_is_told() -> None:
    loads = Loads(
        plain("a"),
        ensemble("lacks", "a", "nobody"),
        ensemble("old", "a", version=3),
        ensemble("unlucky", "bad"),
        plain("bad"),
        ensemble("x", "y"),
        ensemble("y", "x"),
        broken={"bad": InvalidArgument("load failed for model 'bad': it broke;\n")},
    )
    expected = {
        "lacks": "ensemble lacks contains models that are not available or ambiguous: nobody",
        "old": "ensemble 'old' depends on 'a' whose required version 3 is not loaded.",
        "unlucky": "ensemble 'unlucky' depends on 'bad' which has no loaded version. Model 'bad' loading failed with "
        "error: it broke;",
        "x": "circular dependency between ensembles: x -> ... -> y -> x",
    }
    for name, text in expected.items():
        with pytest.raises(InvalidArgument) as refused:
            await loads.load(name)
        assert refused.value.message == text


async def test_an_ensemble_that_failed_comes_when_what_it_lacked_does() -> None:
    loads = Loads(plain("a"), ensemble("e", "a"), broken={"a": InternalError("not yet")})
    with pytest.raises(InvalidArgument):
        await loads.load("e")
    loads.broken.clear()
    await loads.load("a")
    assert set(loads.served) == {"a", "e"}


async def test_a_model_that_is_loaded_anew_takes_along_who_does_not_fit_any_more() -> None:
    loads = Loads(plain("a"), ensemble("e", "a"))
    await loads.load("e")
    await loads.reload("a")
    assert "e" in loads.served
    loads.repository["a"] = text_format.Parse(
        'name: "a" backend: "python" input { name: "other" data_type: TYPE_FP32 dims: 1 }', ModelConfig()
    )
    await loads.reload("a")
    assert loads.calls[-1] == "unload e"
    assert set(loads.served) == {"a"}
    loads.repository["a"] = plain("a")
    await loads.reload("a")
    assert set(loads.served) == {"a", "e"}


async def test_an_ensemble_is_decoupled_when_a_part_is() -> None:
    loads = Loads(plain("a", "model_transaction_policy { decoupled: true }"), ensemble("e", "a"))
    await loads.load("e")
    assert loads.served["e"].model_transaction_policy.decoupled


async def test_a_part_may_be_served_elsewhere() -> None:
    loads = Loads(plain("a"), ensemble("e", "a"), broken={"a": NotPlacedHere("in another pool")})
    with pytest.raises(NotPlacedHere, match="ensemble 'e' waits for 'a', which is loaded elsewhere"):
        await loads.load("e")
    loads.everywhere.apply(ProcessJoined("executor", "other"))
    loaded = VersionLoaded("other", "a", 1, "hash", 1, loads.repository["a"].SerializeToString())
    loads.everywhere.apply(loaded)
    while "e" not in loads.served:
        assert loads.composition._tasks, loads.calls
        await next(iter(loads.composition._tasks))
    await loads.composition.close()
    assert loads.everywhere.listeners == []


async def test_an_ensemble_is_not_tried_again_while_one_of_its_parts_is_loaded() -> None:
    """Two loads would wait for each other."""
    loads = Loads(plain("a"), ensemble("inner", "a"), ensemble("outer", "a", "inner"))
    await loads.load("outer")
    for name in ("outer", "inner", "a"):
        await loads.unload(name)
    loads.composition.failed("outer")
    loads.loading.add("inner")  # which loads "a" now
    await loads.load("a")
    assert "outer" not in loads.served
    loads.loading.clear()
    while loads.composition._tasks:
        await next(iter(loads.composition._tasks))
    assert "outer" in loads.served


async def test_an_ensemble_is_reloaded_after_its_own_load_that_may_wait_for_the_part() -> None:
    """Polling may find an ensemble and a part of it changed at once; their loads would wait for each other."""
    loads = Loads(plain("a"), ensemble("e", "a"))
    await loads.load("e")
    loads.loading.add("e")
    loads.calls.clear()
    await loads.composition.loaded("a")
    assert loads.calls == []
    (task,) = loads.composition._tasks
    await task
    assert loads.calls == ["load e"]


async def test_an_ensemble_that_drains_is_not_reloaded() -> None:
    loads = Loads(plain("a"), ensemble("e", "a"))
    await loads.load("e")
    loads.interfaces = lambda model: {}  # type: ignore[assignment,method-assign]
    loads.calls.clear()
    await loads.composition.loaded("a")
    assert loads.calls == []
