"""What becomes of a model that was opened for auto-complete: it is loaded, or closed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

import pytest

from charonia.backend import GraphSignature, InstanceSpec, MemoryUse, ModelSource, TensorSignature
from charonia.errors import CharoniaError, InternalError, InvalidArgument
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
        if self.backend.given is not None:
            return self.backend.given
        tensors = [TensorSignature(name, "FP32", (-1, 2)) for name in "ab"]
        return GraphSignature((tensors[0],), (tensors[1],))

    async def create_instance(self, spec: InstanceSpec) -> Any:
        self.instances += 1
        if self.backend.is_broken:
            raise InternalError("no instance")
        if self.backend.instance_error is not None:
            raise self.backend.instance_error
        return self.backend.made

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
        self.reason: BaseException | None = None
        self.instance_error: BaseException | None = None
        self.is_broken = False
        self.unloadable: BaseException | None = None
        self.unclosable: BaseException | None = None
        self.loads_nothing = False
        self.given: Any = None
        """What its models give in place of a signature."""
        self.made: Any = Instance()
        """What its models make as an instance."""

    async def load(self, source: ModelSource) -> Told:
        if self.unloadable is not None:
            raise self.unloadable
        if self.loads_nothing:
            return None  # type: ignore[return-value]
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
    # names of files may be any bytes, and the reason is written to the log
    for error in (ValueError("no 'a\udcff'"), InvalidArgument("no 'a\udcff'")):
        backend.unloadable = error
        with pytest.raises(CharoniaError) as failed:
            await of.load(directory, 1, config)
        assert failed.value.message.endswith("no 'a\\udcff'")
        assert type(failed.value) is (InvalidArgument if isinstance(error, InvalidArgument) else InternalError)


SHAPES_OF_NOTHING = [TensorSignature("a", "FP32", None)]  # type: ignore[arg-type]
WORDS_OF_NUMPY = [TensorSignature("a", "float32", (-1, 2))]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"inputs": []}, "backend 'told' gave a dict as signature"),
        (GraphSignature((), tuple(SHAPES_OF_NOTHING)), "TypeError"),
        (GraphSignature(tuple(WORDS_OF_NUMPY), ()), "float32"),
    ],
)
async def test_a_signature_that_is_none_fails_its_model_alone(given: Any, text: str, tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    backend.given = given
    with pytest.raises(CharoniaError, match=text):
        await of.complete(directory, [1], nothing_known)
    assert backend.models[0].closes == 1


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (None, "made a NoneType, which is no instance"),
        (object(), "made a object, which is no instance: it needs execute"),
    ],
)
async def test_an_instance_that_is_none_fails_its_model_alone(made: object, text: str, tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    backend.made = made
    config = await of.complete(directory, [1], nothing_known)
    with pytest.raises(InternalError, match=text):
        await of.load(directory, 1, config)
    assert backend.models[0].closes == 1


async def test_a_backend_that_loads_nothing_says_so(tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    config = await of.complete(directory, [1], nothing_known)
    await of.release(directory.key)
    backend.loads_nothing = True
    with pytest.raises(InternalError, match="backend 'told' loaded a NoneType, which is no model"):
        await of.complete(directory, [1], nothing_known)
    with pytest.raises(InternalError, match="backend 'told' loaded a NoneType, which is no model"):
        await of.load(directory, 1, config)


async def test_what_a_backend_raises_where_nothing_is_expected_fails_its_model_alone(tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    config = await of.complete(directory, [1], nothing_known)
    await of.release(directory.key)

    def isolation_of(source: ModelSource) -> Never:
        raise KeyError("odd")

    backend.isolation_of = isolation_of  # type: ignore[attr-defined]
    with pytest.raises(InternalError, match="KeyError: 'odd'"):
        await of.complete(directory, [1], nothing_known)
    with pytest.raises(InternalError, match="KeyError: 'odd'"):
        await of.load(directory, 1, config)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_an_exit_of_a_backend_fails_its_model_alone(error: BaseException, tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    text = type(error).__name__
    async with asyncio.timeout(30):
        config = await of.complete(directory, [1], nothing_known)
        backend.instance_error = error
        with pytest.raises(InternalError, match=text):
            await of.load(directory, 1, config)
        backend.reason = error
        with pytest.raises(InternalError, match=text):
            await of.complete(directory, [1], nothing_known)
        backend.unloadable = error
        with pytest.raises(InternalError, match=text):
            await of.load(directory, 1, config)


class Starting(Instance):
    def started(self) -> Never:
        raise SystemExit(3)


class StartingDeep(Starting):
    depth = 2

    def submit(self, inputs: Any, outputs: Any) -> Never:
        raise NotImplementedError


@pytest.mark.parametrize("made", [Starting(), StartingDeep()], ids=lambda made: type(made).__name__)
async def test_an_exit_in_the_thread_of_an_instance_fails_its_model_alone(made: Instance, tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    backend.made = made
    config = await of.complete(directory, [1], nothing_known)
    async with asyncio.timeout(30):
        with pytest.raises(InternalError, match="SystemExit: 3"):
            await of.load(directory, 1, config)


async def test_a_load_can_be_cancelled(tmp_path: Path) -> None:
    backend, of, (directory,) = setup(tmp_path)
    asked = asyncio.Event()

    async def waits(source: ModelSource) -> Never:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    backend.load = waits  # type: ignore[method-assign]
    load = asyncio.create_task(of.complete(directory, [1], nothing_known))
    await asked.wait()
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load


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


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("upstream")])
async def test_an_exit_in_a_close_is_logged(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Staying(Instance):
        def close(self) -> None:
            raise error

    async def close() -> Never:
        raise error

    backend, of, (directory,) = setup(tmp_path)
    backend.unclosable, backend.made = error, Staying()
    backend.close = close  # type: ignore[attr-defined]
    config = await of.complete(directory, [1], nothing_known)
    version = await of.load(directory, 1, config)
    await asyncio.create_task(version.pool.close())
    await asyncio.create_task(of.close())
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("failed to close model" in text for text in logged)
    assert any(text.startswith("instance ") and text.endswith(" failed to close") for text in logged)
    assert "backend told failed to close" in logged
