"""Backends by their word."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from charonia.backend import ENTRY_POINT_GROUP, ModelSource
from charonia.errors import InvalidArgument, Unsupported
from executors.backends import registry
from executors.backends.python.process_settings import code_file
from executors.backends.registry import BackendRegistry, prefers_gpu
from executors.configuration import declarations
from protos.model_config_pb2 import ModelConfig


def test_shipped_backends_are_the_declared_entry_points() -> None:
    root = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
    declared = tomllib.loads((root / "pyproject.toml").read_text())
    assert declared["project"]["entry-points"][ENTRY_POINT_GROUP] == declarations.SHIPPED


def test_a_backend_is_made_once() -> None:
    backends = BackendRegistry()
    made = backends.get("onnxruntime")
    assert made.name == "onnxruntime"
    assert backends.get("onnxruntime") is made


def test_an_installed_package_may_bring_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str, name: str) -> list[metadata.EntryPoint]:
        assert group == ENTRY_POINT_GROUP
        found = {"other": "executors.backends.onnxruntime:OnnxRuntimeBackend", "broken": "no_such_module:Backend"}
        return [metadata.EntryPoint(name, found[name], group)] if name in found else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    backends = BackendRegistry()
    assert backends.get("other") is backends.get("other")
    with pytest.raises(Unsupported, match="backend 'broken' cannot be imported"):
        backends.get("broken")
    with pytest.raises(InvalidArgument, match="unable to find backend library for backend 'none'"):
        backends.get("none")


def test_only_the_known_distribution_stands_in_for_a_shipped_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for word, module in (("charonia-tensorflow", "stand_in"), ("somebody-else", "other")):
        info = tmp_path / f"{word.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {word}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[{ENTRY_POINT_GROUP}]\ntensorflow = {module}:Backend\nopenvino = {module}:Backend\n"
        )
        (tmp_path / f"{module}.py").write_text(
            "class Backend:\n    api = (1, 0)\n    async def load(self, source): ...\n"
        )
    backends = BackendRegistry()
    declarations._stand_in.cache_clear()
    assert type(backends.get("tensorflow")).__module__ == "stand_in"
    assert backends.has("tensorflow")
    assert type(backends.get("openvino")).__module__.startswith("executors.")
    declarations._stand_in.cache_clear()


class OfAnotherRelease:
    name = "other"
    api = (1, 7)

    async def load(self, source: ModelSource) -> None: ...


class OfAnAge(OfAnotherRelease):
    api = (2, 0)


class Older:
    name = "other"

    async def probe(self, source: ModelSource) -> None: ...


class Failing:
    def __init__(self) -> None:
        raise OSError("no such library")


class WithoutVersion(OfAnotherRelease):
    api = 1  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("made", "reason"), [(Failing, "OSError: no such library"), (WithoutVersion, "TypeError: 'int' object")]
)
def test_a_backend_that_fails_is_refused_in_words(made: type, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other exception would end the start of the executor."""

    def entry_points(*, group: str, name: str) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint(name, f"{__name__}:{made.__name__}", group)]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda _entry: made)
    with pytest.raises(Unsupported, match=f"backend 'other' cannot be created: {reason}"):
        BackendRegistry().get("other")


@pytest.mark.parametrize(
    ("made", "version"),
    [(OfAnotherRelease, "version 1.7"), (OfAnAge, "version 2.0"), (Older, "a version before 1.0")],
)
def test_a_backend_for_another_contract_is_refused(made: type, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str, name: str) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint(name, f"{__name__}:{made.__name__}", group)]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda _entry: made)
    sentence = f"backend 'other' was written for {version} of the contract of backends .*, this is version 1.0"
    with pytest.raises(Unsupported, match=sentence):
        BackendRegistry().get("other")


def test_onnxruntime_prefers_a_gpu_only_if_its_library_can_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    backends = BackendRegistry()
    can = "CUDAExecutionProvider" in ort.get_available_providers()
    assert prefers_gpu(backends.get("onnxruntime")) is can
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert not prefers_gpu(backends.get("onnxruntime"))
    assert not prefers_gpu(backends.get("python"))


def source(directory: Path, word: str, runtime: str = "", **settings: str) -> ModelSource:
    given = {key.replace("_", "-"): value for key, value in settings.items()}
    return ModelSource("m", 1, directory / "m", ModelConfig(name="m", backend=word, runtime=runtime), given)


def test_a_python_based_backend_is_found_in_the_backend_directory_alone(tmp_path: Path) -> None:
    backends = BackendRegistry()
    directory = str(tmp_path / "backends")
    wanted = source(tmp_path, "echo", backend_directory=directory)
    for place in (tmp_path / "m", tmp_path / "m/1"):
        place.mkdir(parents=True)
        (place / "model.py").write_text("")
    with pytest.raises(InvalidArgument) as caught:
        backends.of(wanted)
    text = "unable to find backend library for backend 'echo', try specifying runtime on the model configuration."
    assert caught.value.message == text
    with pytest.raises(InvalidArgument, match=r"'tensorrtllm'.* docs/howto/tensorrt-llm.md says how its tensors"):
        backends.of(source(tmp_path, "tensorrtllm", backend_directory=directory))
    (tmp_path / "backends/echo").mkdir(parents=True)
    (tmp_path / "backends/echo/model.py").write_text("")
    assert backends.of(wanted) is backends.get("python")
    assert code_file(wanted) == tmp_path / "backends/echo/model.py"
    assert backends.of(source(tmp_path / "none", "onnxruntime", backend_directory=directory)).name == "onnxruntime"


def test_a_runtime_of_python_goes_before_a_native_backend(tmp_path: Path) -> None:
    backends = BackendRegistry()
    directory = str(tmp_path / "backends")
    with pytest.raises(InvalidArgument) as caught:
        backends.of(source(tmp_path, "onnxruntime", "model.py", backend_directory=directory))
    assert caught.value.message == (
        "unable to find Python backend based backend library 'model.py' for model 'm', "
        f"searched: '{directory}/onnxruntime/model.py'"
    )
    (tmp_path / "backends/onnxruntime").mkdir(parents=True)
    (tmp_path / "backends/onnxruntime/model.py").write_text("")
    assert backends.of(source(tmp_path, "onnxruntime", "model.py", backend_directory=directory)).name == "python"
    assert backends.of(source(tmp_path, "onnxruntime", backend_directory=directory)).name == "onnxruntime"


def test_a_backend_word_does_not_lead_out_of_the_backend_directory(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    (tmp_path / "backends").mkdir()
    with pytest.raises(InvalidArgument, match="unable to find backend"):
        BackendRegistry().of(source(tmp_path, "..", backend_directory=str(tmp_path / "backends")))


def test_given_backends_go_first(tmp_path: Path) -> None:
    mine = BackendRegistry().get("python")
    backends = BackendRegistry({"onnxruntime": mine})
    assert backends.of(source(tmp_path, "onnxruntime")) is mine
    assert backends.created() == [mine]


def test_a_library_may_be_in_the_models_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_importable", lambda module: module != "vllm")
    of = source(tmp_path, "vllm")
    with pytest.raises(Unsupported, match=r"install charonia\[vllm\]"):
        BackendRegistry().of(of)
    of.config.parameters["EXECUTION_ENV_PATH"].string_value = "/opt/vllm"
    assert BackendRegistry().of(of).name == "vllm"
    in_the_executor = source(tmp_path, "openvino")
    in_the_executor.config.parameters["EXECUTION_ENV_PATH"].string_value = "/opt/vllm"
    monkeypatch.setattr(registry, "_importable", lambda module: module != "openvino")
    with pytest.raises(Unsupported, match=r"install charonia\[openvino\]"):
        BackendRegistry().of(in_the_executor)


def test_tritons_own_backend_takes_the_place_of_one_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_importable", lambda module: module != "vllm")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "model.py").write_text("")
    assert BackendRegistry().of(source(tmp_path, "vllm", backend_directory=str(tmp_path))).name == "python"
    monkeypatch.setattr(registry, "_importable", lambda module: True)
    assert BackendRegistry().of(source(tmp_path, "vllm", backend_directory=str(tmp_path))).name == "vllm"
