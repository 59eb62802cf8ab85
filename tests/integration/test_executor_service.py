"""An executor over the log with real ONNX models: batches in, settled answers and facts out, against onnxruntime."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import numpy as np
import pytest
from executor_bench import ME, expected, linear, running, x
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import ErrorCode, StartupError
from charonia.facts.events import (
    BatchReturned,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    VersionFailed,
    VersionLoaded,
    VersionStateChanged,
)
from charonia.models.interface import ModelInterface
from charonia.options.settings import ExecutorSettings
from charonia.tensors import Tensor
from charonia.wire import FIELD_HEADER, FIELD_RECORD, BatchHeader, unpack_response
from executors.app import create
from protos.model_config_pb2 import ModelConfig


async def test_start_up_tells_everything_the_others_need(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    linear(tmp_path / "linear" / "3" / "model.onnx")
    (tmp_path / "linear" / "labels.txt").write_text("a\nb\nc\n")
    (tmp_path / "linear" / "config.pbtxt").write_text(
        'version_policy { all {} } output { name: "y" data_type: TYPE_FP32 dims: 3 label_filename: "labels.txt" }'
    )
    async with running(tmp_path) as bench:
        facts = bench.control.facts()
        kinds = [type(fact) for fact in facts]
        assert kinds.index(ProcessJoined) < kinds.index(RepositoryScanned) < kinds.index(VersionStateChanged)
        scans = [fact for fact in facts if isinstance(fact, RepositoryScanned)]
        assert [scan.ready for scan in scans] == [False, True]
        assert scans[0].models == ("linear",)
        assert kinds[-1] is RepositoryScanned
        loaded = {fact.version: fact for fact in facts if isinstance(fact, VersionLoaded)}
        assert sorted(loaded) == [1, 3]
        interface = ModelInterface.of(ModelConfig.FromString(loaded[1].config))
        assert interface.max_batch_size == 4  # auto-completed (C71)
        assert interface.inputs["x"].dims == (16,)
        assert loaded[1].slots == 2  # C8: two CPU instances
        assert list(loaded[1].labels["y"]) == ["a", "b", "c"]
        assert loaded[1].content_hash
        assert await bench.log.alive("executor", [ME]) == [True]
    left = await bench.control.fact(ProcessLeft)
    assert left.reason == "drained"
    assert await bench.log.alive("executor", [ME]) == [False]


async def test_a_batch_is_answered_settled_counted_and_gone(tmp_path: Path) -> None:
    model = tmp_path / "linear" / "1" / "model.onnx"
    linear(model)
    async with running(tmp_path) as bench:
        parts = [x(1, 1), x(2, 2), x(1, 3)]
        accepted = [
            await bench.accept("linear", [Tensor.of("x", part)], endpoint="one" if i < 2 else "two")
            for i, part in enumerate(parts)
        ]
        batch_id = await bench.dispatch("linear", [record for _, record in accepted])
        await bench.finished("linear", batch_id)
        found = await bench.replies("one", 2) | await bench.replies("two", 1)
        for (request_id, _), part in zip(accepted, parts, strict=True):
            (output,) = found[request_id].outputs
            assert output.name == "y"
            assert output.shape == (len(part), 3)
            np.testing.assert_allclose(output.array(), expected(model, part), rtol=1e-5, atol=1e-5)
        assert len(await bench.log.range(keys.replies("one"))) == 1  # one entry per endpoint
        assert await bench.log.pending("linear") == (0, 0)
        loaded = await bench.control.fact(VersionLoaded)
        stats = await bench.log.statistics(keys.statistics("linear", 1, loaded.content_hash))
        assert stats["success_count"] == stats["queue_count"] == stats["compute_infer_count"] == 3
        assert stats["inference_count"] == 4
        assert stats["execution_count"] == stats["b4_count"] == 1
        assert stats["compute_infer_ns"] == 3 * stats["b4_infer_ns"] > 0
        assert stats["success_ns"] >= stats["queue_ns"] + stats["compute_infer_ns"]
        assert "fail_count" not in stats
        await bench.service.drain(10)
        assert await bench.log.range(keys.batches(ME)) == []
        metrics = bench.service.metrics.render().decode()
        assert 'charonia_executor_executions_total{model="linear",version="1"} 1.0' in metrics
        assert 'nv_model_load_duration_secs{model="linear",version="1"}' in metrics


async def test_a_request_that_does_not_fit_fails_alone(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        good, good_record = await bench.accept("linear", [Tensor.of("x", x(1))])
        bad, bad_record = await bench.accept("linear", [Tensor.of("x", x(1).astype(np.float64))])
        await bench.dispatch("linear", [good_record, bad_record])
        found = await bench.replies("gw", 2)
        assert found[good].error is None
        assert found[bad].error is not None
        assert found[bad].error.code is ErrorCode.INVALID_ARG
        assert "data-type is 'FP64', but model 'linear' expects 'FP32'" in found[bad].error.message
        loaded = await bench.control.fact(VersionLoaded)
        stats = await bench.log.statistics(keys.statistics("linear", 1, loaded.content_hash))
        assert (stats["success_count"], stats["fail_count"], stats["fail_OTHER"]) == (1, 1, 1)


async def test_what_somebody_else_settled_first_is_not_counted(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        cancelled, cancelled_record = await bench.accept("linear", [Tensor.of("x", x(1))])
        _, record = await bench.accept("linear", [Tensor.of("x", x(1))])
        assert await bench.log.settle("linear", [(cancelled, 0)], None, []) == [True]
        batch_id = await bench.dispatch("linear", [cancelled_record, record])
        await bench.finished("linear", batch_id)
        await bench.service.drain(10)
        loaded = await bench.control.fact(VersionLoaded)
        stats = await bench.log.statistics(keys.statistics("linear", 1, loaded.content_hash))
        assert stats["success_count"] == 1
        assert stats["execution_count"] == stats["b2_count"] == 1


async def test_answers_go_through_the_owner_when_order_matters(tmp_path: Path) -> None:
    """S6."""
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        accepted = [await bench.accept("linear", [Tensor.of("x", x(1, i))], endpoint=f"e{i}") for i in range(2)]
        batch_id = await bench.dispatch("linear", [record for _, record in accepted], via_owner=True)
        fact = await bench.finished("linear", batch_id)
        assert [endpoint for endpoint, _ in fact.replies] == ["e0", "e1"]
        assert [unpack_response(record).id for _, record in fact.replies] == [request_id for request_id, _ in accepted]
        assert await bench.log.range(keys.replies("e0")) == []


async def test_a_hosted_batcher_uses_the_local_link(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path, hosts_batcher=True) as bench:
        joined = await bench.control.fact(ProcessJoined)
        assert joined.hosts_batcher
        request_id, record = await bench.accept("linear", [Tensor.of("x", x(1))])
        await bench.dispatch("linear", [record])
        assert request_id in await bench.replies("gw", 1)
        assert await bench.log.range(keys.batches(ME)) == []


async def test_forged_entries_are_dropped_and_work_goes_on(tmp_path: Path) -> None:
    """Somebody with access to the log wrote them."""
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        _, record = await bench.accept("linear", [Tensor.of("x", x(1))])
        header = BatchHeader("f", "linear", 1, "", 1, (0,), keys.facts("linear"))
        for fields in (
            [b"q", b"z"],
            [FIELD_HEADER, b"\xff\xff"],
            [FIELD_HEADER, header.pack()],
            [FIELD_HEADER, header.pack(), FIELD_RECORD, b"\x09" + record[1:]],
            [FIELD_HEADER, header.pack(), FIELD_RECORD, record[:40]],
            [FIELD_HEADER, header.pack(), FIELD_RECORD, record[:-3]],
        ):
            await bench.log.append(keys.batches(ME), fields)
        request_id, record = await bench.accept("linear", [Tensor.of("x", x(1))])
        await bench.dispatch("linear", [record])
        assert request_id in await bench.replies("gw", 1)
        await bench.service.drain(10)
        assert await bench.log.range(keys.batches(ME)) == []
        assert b"charonia_executor_invalid_entries_total 6.0" in bench.service.metrics.render()


async def test_a_version_that_is_not_served_is_given_back(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        _, record = await bench.accept("linear", [Tensor.of("x", x(1))])
        batch_id = await bench.dispatch("linear", [record], version=9)
        returned = await bench.finished("linear", batch_id, BatchReturned)
        assert returned.executor == ME
        assert await bench.log.pending("linear") == (1, len(record))


async def test_without_batching_the_shape_is_exact(tmp_path: Path) -> None:
    model = tmp_path / "one" / "1" / "model.onnx"
    linear(model, batch=1)
    async with running(tmp_path) as bench:
        loaded = await bench.control.fact(VersionLoaded)
        assert ModelConfig.FromString(loaded.config).max_batch_size == 0
        request_id, record = await bench.accept("one", [Tensor.of("x", x(1))])
        await bench.dispatch("one", [record])
        (output,) = (await bench.replies("gw", 1))[request_id].outputs
        np.testing.assert_allclose(output.array(), expected(model, x(1)), rtol=1e-5)


async def test_warm_up_runs_on_every_instance_and_is_counted(tmp_path: Path) -> None:
    """C17, I12."""
    linear(tmp_path / "linear" / "1" / "model.onnx")
    (tmp_path / "linear" / "warmup").mkdir()
    (tmp_path / "linear" / "warmup" / "data").write_bytes(x(1).tobytes())
    entry = (
        'model_warmup {{ name: "{0}" batch_size: 2 count: 3 '
        'inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: 16 {1} }} }} }}\n'
    )
    (tmp_path / "linear" / "config.pbtxt").write_text(
        entry.format("z", "zero_data: true")
        + entry.format("r", "random_data: true")
        + entry.format("f", 'input_data_file: "data"')
    )
    async with running(tmp_path) as bench:
        loaded = await bench.control.fact(VersionLoaded)
        stats = await bench.log.statistics(keys.statistics("linear", 1, loaded.content_hash))
        assert stats["execution_count"] == 2 * 3 * 3
        assert stats["success_count"] == stats["inference_count"] == 2 * stats["execution_count"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 16 '
            'input_data_file: "missing" } } }',
            "failed to open text file for read ",
        ),
        ('input { name: "q" data_type: TYPE_FP32 dims: 16 }', "unexpected inference input 'q'"),
        (
            "model_repository_agents { agents { name: 'redact' } }",
            "unable to find 'libtritonrepoagent_redact.so' for repo agent 'redact'",
        ),
        ('backend: "nobody"', "unable to find backend library for backend 'nobody', try specifying"),
        ("instance_group { kind: KIND_GPU count: 1 gpus: 0 }", "GPU"),
        ("version_policy { specific { versions: 7 } }", "at least one version must be available"),
        ("max_batch_size: -3", "'max_batch_size' must be non-negative"),
    ],
)
async def test_a_start_up_that_fails_says_why_and_leaves_nothing(tmp_path: Path, config: str, reason: str) -> None:
    """R29."""
    linear(tmp_path / "linear" / "1" / "model.onnx")
    (tmp_path / "linear" / "config.pbtxt").write_text(config)
    log = MemoryLog()
    service = create(ExecutorSettings(ME, (os.fspath(tmp_path),)), log)
    with pytest.raises(StartupError, match=r"^failed to load all models: linear: ") as caught:
        await service.start()
    assert reason in str(caught.value)
    assert await log.alive("executor", [ME]) == [False]
    assert not any(task is not asyncio.current_task() for task in asyncio.all_tasks())


async def test_the_start_is_told_in_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R30: also of what failed."""
    linear(tmp_path / "good" / "1" / "model.onnx")
    linear(tmp_path / "bad" / "2" / "model.onnx")
    (tmp_path / "bad" / "config.pbtxt").write_text("max_batch_size: -3")
    caplog.set_level("INFO", "executors.service")
    with pytest.raises(StartupError):
        await create(ExecutorSettings(ME, (os.fspath(tmp_path),)), MemoryLog()).start()
    (told,) = [record.getMessage() for record in caplog.records if "| Model" in record.getMessage()]
    assert re.search(r"\| good +\| 1 +\| READY +\|", told)
    assert re.search(r"\| bad +\| 2 +\| UNAVAILABLE: .*'max_batch_size' must be non-negative", told)
    assert re.search(r"\| onnxruntime \| /.*executors/backends/onnxruntime/onnx_backend.py +\| \{\}", told)


async def test_with_exit_on_error_off_the_others_are_served(tmp_path: Path) -> None:
    linear(tmp_path / "good" / "1" / "model.onnx")
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "1" / "model.onnx").write_bytes(b"nonsense")
    async with running(tmp_path, exit_on_error=False) as bench:
        failed = await bench.control.fact(VersionFailed)
        assert (failed.model, failed.version) == ("bad", 1)
        assert failed.message.startswith("Internal: onnx runtime error")
        await bench.control.fact(VersionLoaded, model="good")


def test_a_repository_that_is_not_there_is_a_start_up_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        create(ExecutorSettings(ME, (os.fspath(tmp_path / "none"),)), MemoryLog())
