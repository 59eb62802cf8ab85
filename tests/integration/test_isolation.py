"""Native models in processes of their own: the same answers, and a crash or a hang that hurts nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import executor_bench as bench_
import numpy as np
import pytest
from onnx import TensorProto, helper, save

from charonia.backend import InstanceDied, InstanceSpec, ModelSource
from charonia.errors import CharoniaError, InvalidArgument
from charonia.facts.events import BatchDied, BatchFinished
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.configuration.config import normalise
from executors.isolation.isolated_instance import IsolatedInstance, wants_process
from executors.repository.pbtxt import parse

ONE = "instance_group { count: 1 kind: KIND_CPU }"
ISOLATED = 'parameters { key: "charonia.isolation" value { string_value: "process" } }'


def source_of(directory: Path, text: str) -> ModelSource:
    return ModelSource("m", 1, directory, normalise(parse(f'name: "m" backend: "onnxruntime" {text}')))


def instance_of(directory: Path, text: str, ceiling_s: float = 0.0) -> IsolatedInstance:
    source = source_of(directory, text)
    spec = InstanceSpec("m_0_0", "CPU", -1, source, ModelInterface.of(source.config))
    instance = IsolatedInstance(spec, ceiling_s)
    instance.load(spec)
    return instance


LINEAR = 'input { name: "x" data_type: TYPE_FP32 dims: 16 } output { name: "y" data_type: TYPE_FP32 dims: 3 } '
LINEAR += "max_batch_size: 8"


def test_numbers_and_strings_come_back_as_from_the_library(tmp_path: Path) -> None:
    bench_.linear(tmp_path / "1" / "model.onnx")
    instance = instance_of(tmp_path, LINEAR)
    given = bench_.x(3)
    assert np.allclose(instance.execute({"x": given}, ["y"])["y"], given @ bench_.WEIGHTS, atol=1e-5)
    with pytest.raises(CharoniaError):
        instance.execute({"x": given}, ["nothing"])
    assert instance.execute({"x": given[:1]}, ["y"])["y"].shape[0] == 1, "an error of one batch is no end"
    instance.close()
    instance.close()
    with pytest.raises(ProcessLookupError):
        os.kill(instance.pid, 0)

    strings = [helper.make_tensor_value_info(name, TensorProto.STRING, ["n"]) for name in ("s", "t")]
    graph = helper.make_graph([helper.make_node("Identity", ["s"], ["t"])], "g", strings[:1], strings[1:])
    (tmp_path / "s" / "1").mkdir(parents=True)
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
        tmp_path / "s/1/model.onnx",
    )
    text = 'input { name: "s" data_type: TYPE_STRING dims: -1 } output { name: "t" data_type: TYPE_STRING dims: -1 }'
    words = instance_of(tmp_path / "s", text)
    found = words.execute({"s": np.array([b"a", b"", "ü".encode()], object)}, ["t"])["t"]
    assert [v if isinstance(v, bytes) else str(v).encode() for v in found] == [b"a", b"", "ü".encode()]
    words.close()


def test_a_crash_and_a_hang_are_told_apart(tmp_path: Path) -> None:
    bench_.linear(tmp_path / "1" / "model.onnx")
    crashed = instance_of(tmp_path, LINEAR)
    os.kill(crashed.pid, signal.SIGSEGV)
    with pytest.raises(InstanceDied, match=r"'m_0_0' is not healthy.*ended by signal 11 \(SIGSEGV\)") as death:
        crashed.execute({"x": bench_.x(1)}, ["y"])
    assert not death.value.blameless
    assert "Segmentation fault" in death.value.stderr
    crashed.close()

    hanging = instance_of(tmp_path, LINEAR, ceiling_s=0.2)
    os.kill(hanging.pid, signal.SIGSTOP)
    with pytest.raises(InstanceDied, match=r"was killed: it ran longer than 0\.2 s"):
        hanging.execute({"x": bench_.x(1)}, ["y"])
    hanging.close()


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(CharoniaError, match=r"(?i)model"):
        instance_of(tmp_path, LINEAR)
    with pytest.raises(InvalidArgument, match='must be "process" or "none", got \'thread\''):
        wants_process(source_of(tmp_path, ISOLATED.replace('"process"', '"thread"')))


async def test_an_executor_outlives_its_models(tmp_path: Path) -> None:
    bench_.linear(tmp_path / "apart" / "1" / "model.onnx")
    (tmp_path / "apart" / "config.pbtxt").write_text(f'backend: "onnxruntime" {LINEAR} {ISOLATED} {ONE}')
    bench_.linear(tmp_path / "within" / "1" / "model.onnx")
    async with bench_.running(tmp_path) as bench:
        given = bench_.x(2)

        async def answered(model: str, endpoint: str) -> Any:
            request_id, record = await bench.accept(model, [Tensor.of("x", given)], endpoint=endpoint)
            batch_id = await bench.dispatch(model, [record])
            await bench.finished(model, batch_id, BatchFinished)
            return (await bench.replies(endpoint, 1))[request_id].outputs[0].array()

        assert np.allclose(await answered("apart", "one"), given @ bench_.WEIGHTS, atol=1e-5)
        pool = bench.service._deployment.find("apart", 1).pool
        instance = pool._workers[0]._instance
        os.kill(instance.pid, signal.SIGSEGV)
        _, record = await bench.accept("apart", [Tensor.of("x", given)], endpoint="lost")
        batch_id = await bench.dispatch("apart", [record])
        died = await bench.finished("apart", batch_id, BatchDied)
        assert "SIGSEGV" in died.reason
        assert np.allclose(await answered("within", "two"), given @ bench_.WEIGHTS, atol=1e-5)
        async with asyncio.timeout(60):
            while pool._workers[0]._instance in (None, instance):
                await asyncio.sleep(0.01)
        assert np.allclose(await answered("apart", "three"), given @ bench_.WEIGHTS, atol=1e-5)
