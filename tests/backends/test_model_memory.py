"""What models say that they hold: the size of their weights, by where they lie, once for each copy."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import xgboost
from e2e_server import serving
from onnx import TensorProto, helper, numpy_helper
from torch_models import (
    as_class,
    as_package,
    as_program,
    as_script,
    dense,
    exported,
    nested_tensors,
    package,
    source,
    spec,
)
from tritonclient import http as client

from charonia.backend import InstanceSpec, MemoryUse, ModelSource
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.backends.fil import FilBackend
from executors.backends.onnxruntime import OnnxRuntimeBackend
from executors.backends.openvino import OpenVinoBackend
from executors.backends.pytorch import PyTorchBackend
from executors.backends.pytorch.torch_programs import memory_of
from executors.configuration.config import normalise
from executors.isolation.isolated_model import IsolatedModel

__all__ = ["package"]

TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: 16 } output { name: "y" data_type: TYPE_FP32 dims: 3 } max_batch_size: 8
instance_group { count: 2 kind: KIND_CPU }
"""
TREES = """
name: "m" backend: "fil" max_batch_size: 8
input { name: "input__0" data_type: TYPE_FP32 dims: 4 } output { name: "output__0" data_type: TYPE_FP32 dims: 1 }
parameters { key: "model_type" value { string_value: "xgboost_json" } }
"""
WEIGHT_BYTES = 16 * 3 * 4


def linear(directory: Path, backend: str) -> ModelSource:
    weights = numpy_helper.from_array(np.ones((16, 3), np.float32), "w")
    given, made = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", k]) for n, k in (("x", 16), ("y", 3)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [given], [made], [weights])
    (directory / "1").mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
        directory / "1" / "model.onnx",
    )
    said = f'name: "m" backend: "{backend}" default_model_filename: "model.onnx" {TENSORS}'
    return ModelSource("m", 1, directory, normalise(parse(said)))


async def memory_with_instances(model: Any, specs: list[InstanceSpec]) -> list[MemoryUse]:
    instances = [await model.create_instance(spec) for spec in specs]
    found: list[MemoryUse] = list(model.memory())
    for instance in instances:
        instance.close()
    await model.close()
    return found


def spec_of(of: ModelSource, cores: frozenset[int] = frozenset()) -> InstanceSpec:
    return InstanceSpec("m_0", "CPU", -1, of, ModelInterface.of(of.config), cores)


@pytest.mark.parametrize("backend", [OnnxRuntimeBackend, OpenVinoBackend])
async def test_instances_that_share_a_graph_count_once(backend: Any, tmp_path: Path) -> None:
    of = linear(tmp_path, backend.name)
    assert (await backend().load(of)).memory() == [], "nothing was opened"
    shared = await memory_with_instances(await backend().load(of), [spec_of(of), spec_of(of)])
    assert shared == [MemoryUse("CPU", 0, WEIGHT_BYTES)]
    apart = await memory_with_instances(await backend().load(of), [spec_of(of), spec_of(of, frozenset((0,)))])
    assert apart == [MemoryUse("CPU", 0, WEIGHT_BYTES)] * 2


@pytest.mark.parametrize("made", [as_script, as_program, as_class], ids=lambda made: made.__name__[3:])
async def test_weights_of_torch(made: Any, tmp_path: Path) -> None:
    of = made(tmp_path)
    (found,) = await memory_with_instances(await PyTorchBackend().load(of), [spec(of)])
    assert found == MemoryUse("CPU", 0, sum(tensor.nbytes for tensor in dense().parameters()))


async def test_a_compiled_package_says_nothing(tmp_path: Path, package: bytes) -> None:
    of = source(as_package(tmp_path, package), f"max_batch_size: 8 {nested_tensors()}", leave=True)
    assert await memory_with_instances(await PyTorchBackend().load(of), [spec(of)]) == []


def test_views_of_one_storage_count_once() -> None:
    whole = torch.zeros(100)
    assert memory_of([whole, whole[:10], whole.view(10, 10)]) == [MemoryUse("CPU", 0, 400)]


async def test_trees(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((50, 4), np.float32)
    (tmp_path / "1").mkdir()
    booster = xgboost.train({"max_depth": 3}, xgboost.DMatrix(rows, rows[:, 0]), 5)
    booster.save_model(tmp_path / "1" / "xgboost.json")
    config = normalise(parse(TREES))
    of = ModelSource("m", 1, tmp_path, config)
    model: Any = await FilBackend().load(of)
    (found,) = await memory_with_instances(model, [spec_of(of), spec_of(of)])
    assert (found.kind, found.device_id) == ("CPU", 0)
    assert found.size_bytes > 500


async def test_a_model_in_another_process_says_it_too(tmp_path: Path) -> None:
    of = as_program(tmp_path)
    model = IsolatedModel(replace(of, isolation="sandbox"), ceiling_s=60)
    instance: Any = await model.create_instance(spec(of))
    found = await asyncio.to_thread(model.memory)
    await asyncio.to_thread(instance.close)
    await model.close()
    assert found == [MemoryUse("CPU", 0, sum(tensor.nbytes for tensor in dense().parameters()))]


def test_clients_read_it_in_the_statistics(tmp_path: Path) -> None:
    """X7: of a model in the executor, and of one in a sandbox."""
    (tmp_path / "models" / "linear").mkdir(parents=True)
    linear(tmp_path / "models" / "linear", "onnxruntime")
    (tmp_path / "models" / "linear" / "config.pbtxt").write_text(f'backend: "onnxruntime" {TENSORS}')
    (tmp_path / "models" / "dense" / "1").mkdir(parents=True)
    exported(dense(), tmp_path / "models" / "dense" / "1" / "model.pt2")
    (tmp_path / "models" / "dense" / "config.pbtxt").write_text('backend: "pytorch"')
    expected = {"linear": WEIGHT_BYTES, "dense": sum(tensor.nbytes for tensor in dense().parameters())}
    with serving(tmp_path / "models", tmp_path / "state") as server, client.InferenceServerClient(server.http) as asked:
        for model, size_bytes in expected.items():
            ((row,),) = asked.get_inference_statistics(model).values()
            assert row["memory_usage"] == [{"type": "CPU", "id": 0, "byte_size": size_bytes}]
