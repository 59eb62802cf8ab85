"""The real module `tensorrt_rtx` without a GPU: it builds plans, and the backend asks it only what it has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import fake_tensorrt
import onnx
import pytest
import tensorrt_rtx
from backend_calls import signature_of
from fake_tensorrt import FakeDriver, driver, driver_file
from onnx import TensorProto, helper

from charonia.backend import ModelSource
from charonia.errors import InternalError, Unsupported
from charonia.models.config_forms import parse
from executors.backends.tensorrt import TensorRtBackend

__all__ = ["driver", "driver_file"]

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "tensorrt.md"
KINDS = ("ILogger", "IOutputAllocator", "Runtime", "IPluginRegistry", "ICudaEngine", "IExecutionContext")
OURS = {"plan", "logger", "tensors", "strategy", "profile", "shapes", "addresses", "allocators", "engine", "loaded"}
"""What the fake's objects have for themselves; a method that the base class leaves to us is no name of the real one."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_fake_has_names_of_the_real_module_alone(kind: str) -> None:
    fake, real = getattr(fake_tensorrt, kind), getattr(tensorrt_rtx, kind)
    callbacks = {"reallocate_output_async", "notify_shape"} if kind == "IOutputAllocator" else set()
    said = inspect.getsource(fake)
    names = {name for name in vars(fake) if not name.startswith("_")} | set(re.findall(r"self\.([a-z]\w*) = ", said))
    assert names
    assert not [name for name in names - OURS - callbacks if not hasattr(real, name)]
    assert callbacks <= set(re.findall(r"def (\w+)\(", real.__doc__ or ""))


@pytest.mark.parametrize(
    "kind", ["DataType", "TensorFormat", "TensorIOMode", "TensorLocation", "ExecutionContextAllocationStrategy"]
)
def test_the_fakes_words_are_the_real_modules(kind: str) -> None:
    assert not [one.name for one in getattr(fake_tensorrt, kind) if not hasattr(getattr(tensorrt_rtx, kind), one.name)]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What the page's program builds from a graph that adds a and b."""
    tensors: list[Any] = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", 4)) for name in "abc"]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"])], "g", tensors[:2], tensors[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    monkeypatch.chdir(tmp_path)
    onnx.save(model, "model.onnx")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    return Path("model.plan").read_bytes()


def source(directory: Path, plan: bytes) -> ModelSource:
    (directory / "1").mkdir()
    (directory / "1" / "model.plan").write_bytes(plan)
    return ModelSource("m", 1, directory, parse("name: 'm' platform: 'tensorrt_plan'"), {"library": "tensorrt_rtx"})


async def test_a_plan_is_built_here_and_needs_a_driver(
    plan: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(plan) > 10_000
    monkeypatch.setattr("charonia.cuda.cuda_library.LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(Unsupported, match="runs on NVIDIA GPUs, and this machine has none"):
        await signature_of(TensorRtBackend(), source(tmp_path, plan))


async def test_the_module_says_why_it_reads_no_plan(plan: bytes, tmp_path: Path, driver: FakeDriver) -> None:
    """The driver of the test is not one that the module can use."""
    with pytest.raises(
        InternalError, match=r"unable to create TensorRT engine for model 'm': .*Cuda Runtime.*cudaError"
    ):
        await signature_of(TensorRtBackend(), source(tmp_path, plan))
