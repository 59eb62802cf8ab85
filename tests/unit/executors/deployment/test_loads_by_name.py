"""Loads and unloads by name, where several models may have it (R2, R20, R21)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from charonia.errors import CharoniaError, InternalError, InvalidArgument, Unavailable
from charonia.facts.events import ModelRequested
from executors.deployment.lifecycle import Lifecycle
from executors.deployment.loads_by_name import LoadsByName
from executors.loading.placement_rules import NotPlacedHere
from executors.repository.model_repository import ModelRepository


@dataclass
class Loads:
    errors: dict[str, CharoniaError] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    unloaded: list[tuple[str, bool]] = field(default_factory=list)

    async def load(self, model: str, request: ModelRequested | None) -> None:
        self.loaded.append(model)
        if model in self.errors:
            raise self.errors[model]

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        self.unloaded.append((model, dependents))


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a", tmp_path / "b"]
    for root in found:
        (root / "m" / "1").mkdir(parents=True)
    return found


def named(roots: list[Path], loads: Loads, *, namespacing: bool = True) -> LoadsByName:
    lifecycle = Lifecycle("e", "explicit")
    for root in roots:
        lifecycle.loading(f"{root}::m", 1)
    return LoadsByName(ModelRepository(roots, namespacing=namespacing), lifecycle, loads)


def request(**more: object) -> ModelRequested:
    return ModelRequested("load", "m", "r", **more)  # type: ignore[arg-type]


async def test_all_of_a_name_are_loaded_and_unloaded(roots: list[Path]) -> None:
    loads = Loads()
    subject = named(roots, loads)
    await subject.load("m", request())
    assert loads.loaded == [f"{root}::m" for root in roots]
    await subject.unload("m", dependents=True)
    assert loads.unloaded == [(f"{root}::m", True) for root in roots]
    await subject.unload("other", dependents=False)
    assert loads.unloaded[-1] == ("other", False)


async def test_without_namespaces_the_name_is_the_model(roots: list[Path]) -> None:
    loads = Loads()
    subject = named(roots, loads, namespacing=False)
    for name in ("m", "unknown"):  # whoever loads it says that it is not there
        await subject.load(name, request())
    assert loads.loaded == ["m", "unknown"]


async def test_one_that_nobody_has_cannot_be_polled(roots: list[Path]) -> None:
    with pytest.raises(InternalError) as raised:
        await named(roots, Loads()).load("n", request())
    assert raised.value.message == "failed to load 'n', failed to poll from model repository"


async def test_nor_is_one_of_a_repository_that_cannot_be_asked(
    roots: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: ModelRepository, name: str) -> list[str]:
        raise Unavailable("the bucket is away")

    monkeypatch.setattr(ModelRepository, "keys", fail)
    with pytest.raises(InternalError, match=r"^failed to load 'm', failed to poll from model repository$"):
        await named(roots, Loads()).load("m", request())
    assert "the bucket is away" in caplog.text


async def test_files_make_a_model_without_a_namespace(roots: list[Path]) -> None:
    loads = Loads()
    await named(roots, loads).load("m", request(config_json="{}", files={"1/model.onnx": "b"}))
    assert loads.loaded == ["m"]


async def test_every_failure_is_told(roots: list[Path]) -> None:
    keys = [f"{root}::m" for root in roots]
    loads = Loads({key: InvalidArgument(f"load failed for model '{key}': version 1 …;\n") for key in keys})
    with pytest.raises(InvalidArgument) as raised:
        await named(roots, loads).load("m", request())
    assert raised.value.message == "".join(f"load failed for model '{key}': version 1 …;\n" for key in keys)
    loads.errors[keys[1]] = InternalError("failed to poll")
    with pytest.raises(InternalError, match="failed to poll"):
        await named(roots, loads).load("m", request())


async def test_one_that_is_placed_elsewhere_is_no_failure(roots: list[Path]) -> None:
    loads = Loads({f"{roots[0]}::m": NotPlacedHere("elsewhere")})
    await named(roots, loads).load("m", request())
    loads.errors[f"{roots[1]}::m"] = NotPlacedHere("elsewhere too")
    with pytest.raises(NotPlacedHere, match="elsewhere"):
        await named(roots, loads).load("m", request())
