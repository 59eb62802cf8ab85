"""Batches with many strings in a process of their model's own, beside small ones in the executor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import executor_bench as bench_
import numpy as np
import pytest
from onnx import TensorProto, helper, save

from charonia.backend import InstanceSpec, ModelSource
from charonia.errors import InternalError
from charonia.facts.events import BatchDiedInCompany, BatchFinished
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.batches.encoded_strings import MANY_STRINGS
from executors.configuration.config import normalise
from executors.isolation.isolated_batch import IsolatedBatches
from executors.isolation.isolated_model import IsolatedModel
from executors.isolation.strings_apart import StringsApart

CONFIG = """
backend: "onnxruntime" max_batch_size: 4 instance_group { count: 1 kind: KIND_CPU }
input { name: "s" data_type: TYPE_STRING dims: -1 } output { name: "t" data_type: TYPE_STRING dims: -1 }
"""


def write_model(directory: Path) -> None:
    """t = s, [n, m]."""
    ends = [helper.make_tensor_value_info(name, TensorProto.STRING, ["n", "m"]) for name in ("s", "t")]
    graph = helper.make_graph([helper.make_node("Identity", ["s"], ["t"])], "g", ends[:1], ends[1:])
    (directory / "1").mkdir(parents=True)
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
        directory / "1" / "model.onnx",
    )
    (directory / "config.pbtxt").write_text(CONFIG)


def strings(rows: int, count: int, prefix: str = "w") -> np.ndarray:
    words = [f"{prefix}{number}".encode() for number in range(rows * count)]
    return np.array(words, np.object_).reshape(rows, count)


async def patient(wait: Callable[[], Awaitable[Any]]) -> Any:
    """What this waits for. A process that works in bulk may take minutes to start on a busy machine."""
    for _ in range(5):
        with contextlib.suppress(TimeoutError):
            return await wait()
    return await wait()


async def test_a_batch_with_many_strings_runs_elsewhere_and_a_small_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    take = StringsApart.take

    def noted(apart: StringsApart, spec: InstanceSpec) -> IsolatedBatches | None:
        found = take(apart, spec)
        pids.append(found.pid if found is not None else 0)
        return found

    monkeypatch.setattr(StringsApart, "take", noted)
    write_model(tmp_path / "m")
    async with bench_.running(tmp_path) as bench:

        async def answered(endpoint: str, *tensors: Tensor) -> list[Any]:
            accepted = [await bench.accept("m", [tensor], endpoint=endpoint) for tensor in tensors]
            batch_id = await bench.dispatch("m", [record for _, record in accepted])
            await patient(lambda: bench.finished("m", batch_id, BatchFinished))
            replies = await bench.replies(endpoint, len(tensors))
            return [replies[request_id] for request_id, _ in accepted]

        small = strings(1, 4)
        (reply,) = await answered("small", Tensor.of("s", small))
        assert reply.outputs[0].array().tolist() == small.tolist()
        assert pids == []

        parts = [strings(rows, MANY_STRINGS // 2 + 1, prefix) for rows, prefix in ((2, "a"), (1, "ü"))]
        replies = await answered("many", *(Tensor.of("s", part) for part in parts))
        assert [reply.outputs[0].array().tolist() for reply in replies] == [part.tolist() for part in parts]
        assert len(pids) == 1
        assert pids[0] not in (0, os.getpid())

        good, bad = Tensor.of("s", parts[0]), Tensor.of("s", parts[1])
        bad.data = bytes(bad.data[:-1]) + b"\xff"
        replies = await answered("mixed", good, bad)
        assert replies[0].error is None
        assert "must be UTF-8 text" in replies[1].error.message
        cut_short = Tensor("s", good.datatype, good.shape, bytes(good.data[:-1]))
        (reply,) = await answered("short", cut_short)
        assert reply.error is not None
        assert "incomplete string" in reply.error.message
        assert set(pids) == {pids[0]}, "errors are no reason to end the process"

        os.kill(pids[0], signal.SIGSTOP)
        _, record = await bench.accept("m", [Tensor.of("s", parts[0])], endpoint="dying")
        batch_id = await bench.dispatch("m", [record])
        os.kill(pids[0], signal.SIGKILL)  # also before it has the batch: then another process runs that
        await patient(lambda: bench.finished("m", batch_id, (BatchDiedInCompany, BatchFinished)))
        (reply,) = await answered("again", good)
        assert reply.outputs[0].array().tolist() == parts[0].tolist()
        assert pids[-1] != pids[0]
        (loaded,) = bench.service._deployment.loaded_versions()
        assert [worker.generation for worker in loaded.pool._workers] == [1], "that was no death of the instance here"


async def test_the_process_ends_some_time_after_its_last_batch(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = normalise(parse(f'name: "m" {CONFIG}'))
    source = ModelSource("m", 1, tmp_path, config)
    spec = InstanceSpec("m_0", "CPU", -1, source, ModelInterface.of(config))
    apart = StringsApart(source, 60, idle_s=0)
    try:
        first = await asyncio.to_thread(apart.take, spec)
        second = await asyncio.to_thread(apart.take, spec)
        assert first is not None
        assert second is not None
        assert first.pid == second.pid, "one process for the instances of a model"
        apart.give_back(first)
        assert await asyncio.to_thread(apart.take, spec) is first, "as long as one is in use"
        apart.give_back(first)
        apart.give_back(second)
        async with asyncio.timeout(60):
            while not first.is_dead:
                await asyncio.sleep(0.001)
        later = await asyncio.to_thread(apart.take, spec)
        assert later is not None
        assert later.pid != first.pid
        apart.give_back(later)
    finally:
        await apart.close()
    assert later.is_dead


async def test_without_a_process_batches_run_in_the_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    async def failing(*_: Any) -> None:
        tries.append(1)
        raise InternalError("no memory")

    monkeypatch.setattr(IsolatedModel, "create_instance", failing)
    write_model(tmp_path / "m")
    async with bench_.running(tmp_path) as bench:
        given = strings(1, MANY_STRINGS + 1)
        for endpoint in ("first", "second"):
            request_id, record = await bench.accept("m", [Tensor.of("s", given)], endpoint=endpoint)
            await bench.finished("m", await bench.dispatch("m", [record]), BatchFinished)
            reply = (await bench.replies(endpoint, 1))[request_id]
            assert reply.outputs[0].array().tolist() == given.tolist()
    assert len(tries) == 1, "the second one waits for no process that fails again"


async def test_a_model_whose_answers_had_many_strings_runs_elsewhere_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = StringsApart.take

    def noted(apart: StringsApart, spec: InstanceSpec) -> IsolatedBatches | None:
        found = take(apart, spec)
        taken.append(found.pid if found is not None else 0)
        return found

    monkeypatch.setattr(StringsApart, "take", noted)
    number = helper.make_tensor_value_info("n", TensorProto.INT64, ["n", "m"])
    text = helper.make_tensor_value_info("t", TensorProto.STRING, ["n", "m"])
    node = helper.make_node("Cast", ["n"], ["t"], to=TensorProto.STRING)
    made = helper.make_model(
        helper.make_graph([node], "g", [number], [text]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    (tmp_path / "m" / "1").mkdir(parents=True)
    save(made, tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "config.pbtxt").write_text(
        CONFIG.replace('name: "s" data_type: TYPE_STRING', 'name: "n" data_type: TYPE_INT64')
    )
    async with bench_.running(tmp_path) as bench:

        async def answered(*counts: int) -> None:
            given = [np.arange(count, dtype=np.int64).reshape(1, count) for count in counts]
            accepted = [await bench.accept("m", [Tensor.of("n", one)], endpoint=str(counts)) for one in given]
            batch_id = await bench.dispatch("m", [record for _, record in accepted])
            await patient(lambda: bench.finished("m", batch_id, BatchFinished))
            replies = await bench.replies(str(counts), len(counts))
            for (request_id, _), one in zip(accepted, given, strict=True):
                texts = [str(number).encode() for number in one[0]]
                assert replies[request_id].outputs[0].array().tolist() == [texts]

        await answered(MANY_STRINGS + 1)
        assert taken == [], "nobody knew"
        await answered(MANY_STRINGS + 2)
        assert len(taken) == 1
        assert taken[0] not in (0, os.getpid())
        await answered(3, 3)
        assert len(taken) == 1, "so few bytes make no strings by the million"
