from __future__ import annotations

from pathlib import Path

import pytest

from charonia.errors import AlreadyExists, CharoniaError, InternalError, InvalidArgument
from charonia.facts.events import ModelRequested
from executors.deployment.registered_repositories import RegisteredRepositories, find_model
from executors.repository.model_repository import ModelRepository

CONFIG = 'name: "another" backend: "onnxruntime" max_batch_size: 8\n'


class Loads:
    """Records what is loaded and unloaded; `failure` is raised by loads."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failure: CharoniaError | None = None

    async def load(self, name: str, request: ModelRequested) -> None:
        self.done.append(f"load {name}")
        if self.failure is not None:
            raise self.failure

    async def unload(self, name: str, *, dependents: bool) -> None:
        self.done.append(f"unload {name}{' and its parts' if dependents else ''}")

    async def ended(self, name: str) -> None:
        self.done.append(f"{name} has ended")

    async def changed(self) -> None:
        self.done.append("changed")


def make(path: Path, *, namespacing: bool) -> tuple[RegisteredRepositories, ModelRepository, Loads]:
    (path / "first").mkdir()
    repository, loads = ModelRepository([path / "first"], namespacing=namespacing), Loads()
    registered = RegisteredRepositories(repository, loads, loads)
    registered.changed = loads.changed
    return registered, repository, loads


def put(directory: Path, config: str = CONFIG) -> Path:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.onnx").touch()
    (directory / "config.pbtxt").write_text(config)
    return directory


def request(alias: str, model: str, directory: Path) -> ModelRequested:
    return ModelRequested("load", model, "id", alias=alias, directory=str(directory))


@pytest.mark.parametrize("namespacing", [False, True])
async def test_life(tmp_path: Path, namespacing: bool) -> None:
    registered, repository, loads = make(tmp_path, namespacing=namespacing)
    put(tmp_path / "second" / "sub")
    put(tmp_path / "second" / ".hidden")
    await registered.load("m", request("a", "m", tmp_path / "second"))
    assert registered.keys() == {"a": f"{tmp_path / 'second'}::m"}
    (key,) = repository.keys("m")
    assert repository.names() == (key,)
    found = repository.find(key)
    assert found is not None
    # it has the name that was asked for, whatever its directory and configuration say
    assert (found.name, found.path, found.required_config().name) == ("m", tmp_path / "second" / "sub", "m")
    assert repository.find(key.replace("::m", "::sub") if namespacing else "sub") is None
    for again in (request("a", "n", tmp_path / "second"), request("b", "m", tmp_path / "second")):
        with pytest.raises(AlreadyExists):
            await registered.load(again.model, again)
    put(tmp_path / "third" / "sub")
    with pytest.raises(AlreadyExists, match="failed to register 'm', there is a conflicting mapping for 'm'"):
        await registered.load("m", request("b", "m", tmp_path / "third"))
    await registered.unload("m", "a")
    assert loads.done == ["load m", "changed", "unload m and its parts", "m has ended", "changed"]
    assert (registered.keys(), repository.names()) == ({}, ())
    await registered.load("m", request("b", "m", tmp_path / "third"))
    assert registered.keys() == {"b": f"{tmp_path / 'third'}::m"}


async def test_nothing_is_left_of_a_load_that_failed(tmp_path: Path) -> None:
    registered, repository, loads = make(tmp_path, namespacing=True)
    put(tmp_path / "second" / "sub")
    loads.failure = InternalError("no")
    for _ in range(2):
        with pytest.raises(InternalError):
            await registered.load("m", request("a", "m", tmp_path / "second"))
    assert (registered.keys(), repository.keys("m"), loads.done) == ({}, [], ["load m"] * 2)
    with pytest.raises(InvalidArgument, match="path traversal"):
        await registered.load("x/y", request("a", "x/y", tmp_path / "second"))


async def test_a_path_that_cannot_be_a_namespace(tmp_path: Path) -> None:
    registered, repository, _ = make(tmp_path, namespacing=True)
    put(tmp_path / "a::b" / "sub")
    with pytest.raises(InvalidArgument, match="it must have another name with --model-namespacing"):
        await registered.load("m", request("a", "m", tmp_path / "a::b"))
    assert repository.names() == ()


def test_the_model_of_a_directory(tmp_path: Path) -> None:
    assert find_model(put(tmp_path / "one")) == (tmp_path, "one")
    put(tmp_path / "of-one" / "m")
    assert find_model(tmp_path / "of-one") == (tmp_path / "of-one", "m")
    put(tmp_path / "of-two" / "m")
    put(tmp_path / "of-two" / "n")
    with pytest.raises(InvalidArgument, match="one is an ensemble, got m, n"):
        find_model(tmp_path / "of-two")
    step = 'step [ { model_name: "m" model_version: -1 } ]'
    put(tmp_path / "of-two" / "e", f'name: "e" platform: "ensemble" ensemble_scheduling {{ {step} }}')
    assert find_model(tmp_path / "of-two") == (tmp_path / "of-two", "e")
    with pytest.raises(InvalidArgument, match="repository not found"):
        find_model(tmp_path / "none")
