"""Native models in processes of their own: the same answers, and a crash or a hang that hurts nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import executor_bench as bench_
import numpy as np
import plugin_backends
import pytest
from onnx import TensorProto, helper, save

from charonia.backend import GraphSignature, InstanceDied, InstanceSpec, ModelSource
from charonia.errors import CharoniaError, InvalidArgument
from charonia.facts.events import BatchDiedInCompany, BatchFinished
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.backends.onnxruntime import OnnxRuntimeBackend
from executors.configuration.config import normalise
from executors.isolation.isolated_model import IsolatedModel
from executors.isolation.isolation_choice import isolation_of

ONE = "instance_group { count: 1 kind: KIND_CPU }"
ISOLATED = 'parameters { key: "charonia.isolation" value { string_value: "process" } }'


def source_of(directory: Path, text: str) -> ModelSource:
    return ModelSource("m", 1, directory, normalise(parse(f'name: "m" backend: "onnxruntime" {text}')))


async def stop(pid: int) -> None:
    """Stop a process, and wait until all its threads are."""
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while not is_stopped(pid):
            await asyncio.sleep(0.001)


def is_stopped(pid: int) -> bool:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found.append(" T " in (task / "stat").read_text())
    return all(found)


class Isolated:
    """A model in a process of its own, with some instances."""

    def __init__(self, directory: Path, text: str, *, ceiling_s: float = 0.0, sandboxed: bool = False) -> None:
        self.source = source_of(directory, text)
        self.model = IsolatedModel(
            replace(self.source, isolation="sandbox" if sandboxed else "process"), ceiling_s=ceiling_s
        )
        self.made: list[Any] = []

    async def instance(self, index: int = 0, device: int = -1) -> Any:
        interface = ModelInterface.of(self.source.config)
        spec = InstanceSpec(f"m_0_{index}", "CPU", device, self.source, interface)
        self.made.append(await self.model.create_instance(spec))
        return self.made[-1]

    async def __aenter__(self) -> Isolated:
        return self

    async def __aexit__(self, *_: object) -> None:
        for instance in self.made:
            await asyncio.to_thread(instance.close)
        await self.model.close()


async def run(instance: Any, *arguments: Any) -> Any:
    """Execute as an executor does, in a thread."""
    return await asyncio.to_thread(instance.execute, *arguments)


LINEAR = 'input { name: "x" data_type: TYPE_FP32 dims: 16 } output { name: "y" data_type: TYPE_FP32 dims: 3 } '
LINEAR += "max_batch_size: 8"


@pytest.mark.parametrize("sandboxed", [False, True])
async def test_numbers_and_strings_come_back_as_from_the_library(tmp_path: Path, sandboxed: bool) -> None:
    bench_.linear(tmp_path / "1" / "model.onnx")
    async with Isolated(tmp_path, LINEAR, sandboxed=sandboxed) as isolated:
        signature = await isolated.model.signature()
        assert isinstance(signature, GraphSignature)
        assert [tensor.name for tensor in (*signature.inputs, *signature.outputs)] == ["x", "y"]
        instance = await isolated.instance()
        given = bench_.x(3)
        assert np.allclose((await run(instance, {"x": given}, ["y"]))["y"], given @ bench_.WEIGHTS, atol=1e-5)
        with pytest.raises(CharoniaError):
            await run(instance, {"x": given}, ["nothing"])
        assert (await run(instance, {"x": given[:1]}, ["y"]))["y"].shape[0] == 1, "an error of one batch is no end"
        await asyncio.to_thread(instance.close)
        await asyncio.to_thread(instance.close)
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
    async with Isolated(tmp_path / "s", text, sandboxed=sandboxed) as isolated:
        words = await isolated.instance()
        for count in (1, 20_000):
            given = np.array([b"a", b"", "ü".encode()] * count, object)
            found = (await run(words, {"s": given}, ["t"]))["t"]
            assert [v if isinstance(v, bytes) else str(v).encode() for v in found] == given.tolist()


async def test_a_crash_and_a_hang_are_told_apart(tmp_path: Path) -> None:
    bench_.linear(tmp_path / "1" / "model.onnx")
    async with Isolated(tmp_path, LINEAR) as isolated:
        crashed = await isolated.instance()
        await stop(crashed.pid)
        running = asyncio.create_task(run(crashed, {"x": bench_.x(1)}, ["y"]))
        while not crashed._process.executing:
            await asyncio.sleep(0.001)
        os.kill(crashed.pid, signal.SIGKILL)  # any other signal would let it answer first
        with pytest.raises(InstanceDied, match=r"'m' is not healthy.*ended by signal 9 \(SIGKILL\)") as death:
            await running
        assert not death.value.blameless
        assert death.value.shared, "who sent that signal is unknown (ADR 0082)"
        with pytest.raises(InstanceDied) as death:
            await run(crashed, {"x": bench_.x(1)}, ["y"])
        assert death.value.blameless, "it was dead before"
        crashed.close()

    async with Isolated(tmp_path, LINEAR, ceiling_s=3) as isolated:
        hanging, beside = await isolated.instance(0), await isolated.instance(1)
        assert hanging.pid == beside.pid, "one process for the instances of a device"
        assert (await isolated.instance(2, device=0)).pid != hanging.pid
        await stop(hanging.pid)
        with pytest.raises(InstanceDied, match=r"was killed: it ran longer than 3 s") as death:
            await run(hanging, {"x": bench_.x(1)}, ["y"])
        assert not death.value.blameless
        again = await isolated.instance(0)
        assert again.pid != hanging.pid
        assert (await run(again, {"x": bench_.x(1)}, ["y"]))["y"].shape == (1, 3)


async def test_of_several_batches_in_a_process_that_ends_none_is_sure_to_be_the_cause(tmp_path: Path) -> None:
    bench_.linear(tmp_path / "1" / "model.onnx")
    async with Isolated(tmp_path, LINEAR) as isolated:
        instances = [await isolated.instance(index) for index in range(3)]
        await stop(instances[0].pid)
        running = [asyncio.create_task(run(one, {"x": bench_.x(1)}, ["y"])) for one in instances[:2]]
        while len(instances[0]._process.executing) < 2:
            await asyncio.sleep(0.001)
        os.kill(instances[0].pid, signal.SIGKILL)
        for one in running:
            with pytest.raises(InstanceDied) as death:
                await one
            assert death.value.shared
            assert not death.value.blameless
        with pytest.raises(InstanceDied) as death:
            await run(instances[2], {"x": bench_.x(1)}, ["y"])
        assert death.value.blameless


async def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"no model")
    async with Isolated(tmp_path, LINEAR) as isolated:
        with pytest.raises(CharoniaError, match=r"(?i)model"):
            await isolated.instance()
    source = source_of(tmp_path, ISOLATED.replace('"process"', '"thread"'))
    with pytest.raises(InvalidArgument, match='must be "none", "process" or "sandbox", got \'thread\''):
        isolation_of(source, OnnxRuntimeBackend(), require_sandbox=False)


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
        await stop(instance.pid)
        _, record = await bench.accept("apart", [Tensor.of("x", given)], endpoint="lost")
        batch_id = await bench.dispatch("apart", [record])
        async with asyncio.timeout(60):
            while not instance._process.executing:
                await asyncio.sleep(0.01)
        os.kill(instance.pid, signal.SIGKILL)  # any other signal would let it answer first
        died = await bench.finished("apart", batch_id, BatchDiedInCompany)
        assert "SIGKILL" in died.reason
        assert np.allclose(await answered("within", "two"), given @ bench_.WEIGHTS, atol=1e-5)
        async with asyncio.timeout(60):
            while pool._workers[0]._instance in (None, instance):
                await asyncio.sleep(0.01)
        assert np.allclose(await answered("apart", "three"), given @ bench_.WEIGHTS, atol=1e-5)


async def test_the_executor_neither_imports_nor_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = plugin_backends.install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.syspath_prepend(site)
    (tmp_path / "models" / "large" / "1").mkdir(parents=True)
    held_s = 3.0
    (tmp_path / "models" / "large" / "config.pbtxt").write_text(
        f'backend: "slow" {ONE} parameters {{ key: "seconds" value {{ string_value: "{held_s}" }} }}'
    )
    gaps_s: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            gaps_s.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    async with bench_.running(tmp_path / "models") as bench:
        interface = bench.service._deployment.find("large", 1).interface
    ticking.cancel()
    assert interface.inputs["x"].dims == (4,), "the process said so"
    assert interface.parameters["charonia.isolation"] == "process"
    # held here, there would be a gap as long as that
    assert max(gaps_s) < 0.95 * held_s, "the lock was held in the process, not here"
