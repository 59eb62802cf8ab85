"""What becomes of a model that was opened for auto-complete: it is loaded, or closed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

import pytest

from charonia.backend import GraphSignature, InstanceSpec, MemoryUse, ModelSource, TensorSignature
from charonia.errors import CharoniaError, InternalError
from charonia.models.interface import ModelInterface
from executors.backends.registry import BackendRegistry
from executors.loading.loader import Loader
from executors.repository.model_directory import ModelDirectory, read

CONFIG = 'backend: "told" max_batch_size: 4 instance_group { count: 2 kind: KIND_CPU }'


class Told:
    """A model that tells what is done with it."""

    def __init__(self, backend: ToldBackend) -> None:
        self.backend = backend
        self.signatures = self.instances = self.closes = 0

    async def signature(self) -> GraphSignature:
        self.signatures += 1
        if self.backend.reason is not None:
            raise self.backend.reason
        tensors = [TensorSignature(name, "FP32", (-1, 2)) for name in "ab"]
        return GraphSignature((tensors[0],), (tensors[1],))

    async def create_instance(self, spec: InstanceSpec) -> Any:
        self.instances += 1
        if self.backend.is_broken:
            raise InternalError("no instance")
        return Instance()

    async def close(self) -> None:
        self.closes += 1
        if self.backend.unclosable is not None:
            raise self.backend.unclosable


class Instance:
    stateless = True

    def execute(self, inputs: Any, outputs: Any) -> Never:
        raise NotImplementedError

    def close(self) -> None: ...


class ToldBackend:
    name = "told"

    def __init__(self) -> None:
        self.models: list[Told] = []
        self.reason: Exception | None = None
        self.is_broken = False
        self.unloadable: Exception | None = None
        self.unclosable: Exception | None = None

    async def load(self, source: ModelSource) -> Told:
        if self.unloadable is not None:
            raise self.unloadable
        self.models.append(Told(self))
        return self.models[-1]


def setup(root: Path, count: int = 1) -> tuple[ToldBackend, Loader, list[ModelDirectory]]:
    backend = ToldBackend()
    registry = BackendRegistry({"told": backend})
    for number in range(count):
        (root / f"m{number}" / "1").mkdir(parents=True)
        (root / f"m{number}" / "config.pbtxt").write_text(CONFIG)
    directories = [read(root / f"m{number}") for number in range(count)]
    return backend, Loader(registry, gpus=0, auto_complete=True, backend_config={}), directories


def nothing_known(_model: str) -> dict[int, ModelInterface]:
    return {}


async def test_the_model_that_was_asked_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    config = await of.complete(directory, [1], nothing_known)
    version = await of.load(directory, 1, config)
    (model,) = backend.models
    assert (model.signatures, model.instances, model.closes) == (1, 2, 0)
    await version.pool.close()
    assert model.closes == 1
    again = await of.load(directory, 1, config)
    assert len(backend.models) == 2
    await again.pool.close()


async def test_a_model_that_does_not_say_what_it_is_is_closed(tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    for backend.reason, text in ((InternalError("no file"), "no file"), (ValueError("odd"), "ValueError: odd")):
        with pytest.raises(CharoniaError, match=text):
            await of.complete(directory, [1], nothing_known)
        assert backend.models[-1].closes == 1


async def test_a_model_without_instances_is_closed(tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    config = await of.complete(directory, [1], nothing_known)
    backend.is_broken = True
    with pytest.raises(InternalError, match="no instance"):
        await of.load(directory, 1, config)
    assert backend.models[0].closes == 1


async def test_a_model_that_no_load_took_is_closed(tmp_path: Path) -> None:
    backend, of, (directory, other) = setup(tmp_path, 2)
    for each in (directory, other):
        await of.complete(each, [1], nothing_known)
    await of.release(directory.key)
    assert [model.closes for model in backend.models] == [1, 0]
    await of.release(directory.key)
    assert backend.models[0].closes == 1


async def test_a_model_is_not_loaded_twice_for_one_that_was_asked_before(tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    for _ in range(2):
        await of.complete(directory, [1], nothing_known)
    assert [model.closes for model in backend.models] == [1, 0]


async def test_what_a_backend_raises_is_the_reason_of_the_load(tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    config = await of.complete(directory, [1], nothing_known)
    await of.release(directory.key)
    backend.unloadable = ValueError("odd")
    with pytest.raises(InternalError, match="ValueError: odd"):
        await of.complete(directory, [1], nothing_known)
    with pytest.raises(InternalError, match="ValueError: odd"):
        await of.load(directory, 1, config)


async def test_a_model_that_cannot_be_closed_keeps_nothing_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend, of, (directory,) = setup(tmp_path)
    config = await of.complete(directory, [1], nothing_known)
    backend.unclosable = OSError("stuck")
    version = await of.load(directory, 1, config)
    await version.pool.close()
    assert backend.models[0].closes == 1
    assert "stuck" in caplog.text


async def test_a_parameter_that_nothing_reads_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, of, (directory,) = setup(tmp_path)
    directory.required_config().parameters["charonia.colour"].string_value = "red"
    await of.complete(directory, [1], nothing_known)
    assert f"model '{directory.name}': parameter 'charonia.colour' is not known and has no effect" in caplog.text


class OneByOne(ToldBackend):
    """Tells how many calls were under way at once, and what it was opened with."""

    parallel_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.under_way = self.most = 0
        self.calls: list[object] = []

    async def open(self, settings: Mapping[str, str]) -> None:
        self.calls.append(dict(settings))
        if "fails" in settings:
            raise OSError("no device")

    async def close(self) -> None:
        self.calls.append("closed")

    async def load(self, source: ModelSource) -> Told:
        self.calls.append("loaded")
        model = await super().load(source)
        create = model.create_instance

        async def counted(spec: InstanceSpec) -> Any:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0)
            self.under_way -= 1
            return await create(spec)

        model.create_instance = counted  # type: ignore[method-assign]
        return model


async def test_a_backend_is_opened_before_its_first_model_and_closed_after_its_last(tmp_path: Path) -> None:
    _, _, directories = setup(tmp_path, 2)
    backend = OneByOne()
    settings = {"": {"a": "1", "b": "1"}, "told": {"b": "2"}, "other": {"c": "3"}}
    of = Loader(BackendRegistry({"told": backend}), gpus=0, auto_complete=True, backend_config=settings)
    for directory in directories:
        await of.complete(directory, [1], nothing_known)
    await of.close()
    assert backend.calls == [{"a": "1", "b": "2"}, "loaded", "loaded", "closed"]
    assert [model.closes for model in backend.models] == [1, 1]


async def test_a_backend_that_cannot_be_opened_fails_its_models(tmp_path: Path) -> None:
    _, _, (directory,) = setup(tmp_path)
    backend = OneByOne()
    settings = {"told": {"fails": ""}}
    of = Loader(BackendRegistry({"told": backend}), gpus=0, auto_complete=True, backend_config=settings)
    for _ in range(2):
        with pytest.raises(InternalError, match="backend 'told' cannot be opened: OSError: no device"):
            await of.complete(directory, [1], nothing_known)
    await of.close()
    assert backend.calls == [settings["told"], settings["told"]]


@pytest.mark.parametrize("parallel", [False, True])
async def test_instances_are_made_one_by_one_where_the_backend_wants_it(parallel: bool, tmp_path: Path) -> None:
    _, _, directories = setup(tmp_path, 2)
    backend = OneByOne()
    backend.parallel_loading = parallel
    of = Loader(BackendRegistry({"told": backend}), gpus=0, auto_complete=True, backend_config={})
    configs = [await of.complete(directory, [1], nothing_known) for directory in directories]
    loads = (of.load(directory, 1, config) for directory, config in zip(directories, configs, strict=True))
    versions = await asyncio.gather(*loads)
    assert backend.most > 1 if parallel else backend.most == 1
    for version in versions:
        await version.pool.close()
    await of.close()


@pytest.mark.parametrize(
    ("uses", "memory"),
    [
        ([MemoryUse("GPU", 0, 3), MemoryUse("CPU", 0, 5), MemoryUse("GPU", 0, 4)], {"GPU 0": 7, "CPU 0": 5}),
        ([MemoryUse("GPU", 0, 0)], {}),
        ([MemoryUse("GPU", -1, 3)], {}),
        ([MemoryUse("disk", 0, 3)], {}),  # type: ignore[arg-type]
        (None, {}),
    ],
)
async def test_a_model_may_say_how_much_memory_it_holds(
    uses: list[MemoryUse] | None, memory: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X7. What is no memory is a line in the log."""
    _, of, (directory,) = setup(tmp_path)
    config = await of.complete(directory, [1], nothing_known)
    monkeypatch.setattr(Told, "memory", lambda _model: uses, raising=False)
    version = await of.load(directory, 1, config)
    assert version.memory == memory
    await version.pool.close()
