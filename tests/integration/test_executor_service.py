"""An executor over the log with real ONNX models: batches in, settled answers and facts out, against onnxruntime."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from executor_bench import ME, WEIGHTS, Follower, expected, linear, running, x

from charonia import keys
from charonia.errors import CharoniaError, ErrorCode, LogUnavailable, StartupError
from charonia.eventlog.memory import MemoryLog
from charonia.eventlog.port import Fields
from charonia.events import (
    BatchDied,
    BatchFinished,
    BatchReturned,
    ExecutorDraining,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    VersionFailed,
    VersionLoaded,
    VersionStateChanged,
    VersionUnloaded,
)
from charonia.models.interface import ModelInterface
from charonia.settings import ExecutorSettings
from charonia.tensors import Tensor
from charonia.wire import (
    BLOB,
    FIELD_HEADER,
    FIELD_RECORD,
    BatchHeader,
    Reference,
    ResponseRecord,
    unpack_response,
)
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


async def test_a_hosted_batcher_uses_the_local_stream(tmp_path: Path) -> None:
    linear(tmp_path / "linear" / "1" / "model.onnx")
    async with running(tmp_path, hosts_batcher=True) as bench:
        joined = await bench.control.fact(ProcessJoined)
        assert joined.hosts_batcher
        request_id, record = await bench.accept("linear", [Tensor.of("x", x(1))])
        stream = keys.LOCAL + keys.batches(ME)
        await bench.dispatch("linear", [record], stream=stream)
        assert request_id in await bench.replies("gw", 1)
        assert await bench.log.range(stream) == []


async def test_forged_entries_are_dropped_and_work_goes_on(tmp_path: Path) -> None:
    """H27."""
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
            "unable to read 'missing'",
        ),
        ('input { name: "q" data_type: TYPE_FP32 dims: 16 }', "unexpected inference input 'q'"),
        (
            "model_repository_agents { agents { name: 'redact' } }",
            "unable to find 'libtritonrepoagent_redact.so' for repo agent 'redact'",
        ),
        ('backend: "nobody"', "unable to find backend 'nobody'"),
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
    assert re.search(r"\| onnxruntime \| /.*executors/backends/onnxruntime.py +\| \{\}", told)


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


# -- explicit control --------------------------------------------------------------------------------------------------


async def test_explicit_loads_only_what_is_named_and_then_what_is_asked(tmp_path: Path) -> None:
    for name in ("a", "b"):
        linear(tmp_path / name / "1" / "model.onnx")
    async with running(tmp_path, model_control_mode="explicit", load_model=("a",)) as bench:
        assert {fact.model for fact in bench.control.facts() if isinstance(fact, VersionLoaded)} == {"a"}
        assert (await bench.request("load", "b")).error == ""
        await bench.control.fact(VersionLoaded, model="b")
        assert (await bench.request("unload", "a")).error == ""
        unloaded = await bench.control.fact(VersionUnloaded, model="a")
        assert unloaded.reason == "unloaded"
        assert (await bench.request("unload", "never-heard-of")).error == ""
        finished = await bench.request("load", "nothing")
        assert finished.error_code == ErrorCode.INTERNAL
        assert finished.error == "failed to load 'nothing', failed to poll from model repository"
        finished = await bench.request("load", "../a")
        assert finished.error == ("invalid model name '../a', model name must not contain path traversal characters")


async def test_the_wildcard_loads_everything(tmp_path: Path) -> None:
    for name in ("a", "b"):
        linear(tmp_path / name / "1" / "model.onnx")
    async with running(tmp_path, model_control_mode="explicit", load_model=("*",)) as bench:
        assert {fact.model for fact in bench.control.facts() if isinstance(fact, VersionLoaded)} == {"a", "b"}


async def test_other_modes_refuse_requests(tmp_path: Path) -> None:
    """R9."""
    linear(tmp_path / "a" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        for action in ("load", "unload"):
            finished = await bench.request(action, "a")
            assert finished.error_code == ErrorCode.UNAVAILABLE
            assert finished.error == "explicit model load / unload is not allowed if polling is enabled"


async def test_a_failed_load_names_every_version_and_the_old_one_still_serves(tmp_path: Path) -> None:
    """R21."""
    model = tmp_path / "m" / "1" / "model.onnx"
    linear(model)
    linear(tmp_path / "m" / "2" / "model.onnx")
    (tmp_path / "m" / "config.pbtxt").write_text("version_policy { all {} }")
    async with running(tmp_path, model_control_mode="explicit", load_model=("m",)) as bench:
        (tmp_path / "m" / "config.pbtxt").write_text(
            'version_policy { all {} } input { name: "q" data_type: TYPE_FP32 dims: 16 }'
        )
        finished = await bench.request("load", "m")
        reason = "Invalid argument: unexpected inference input 'q', allowed inputs are: x"
        assert finished.error_code == ErrorCode.INVALID_ARG
        assert finished.error == (
            f"load failed for model 'm': version 1 is at UNAVAILABLE state: {reason};\n"
            f"version 2 is at UNAVAILABLE state: {reason};\n"
        )
        (tmp_path / "m" / "config.pbtxt").write_text("not a config {")
        assert (await bench.request("load", "m")).error == "failed to load 'm', failed to poll from model repository"
        request_id, record = await bench.accept("m", [Tensor.of("x", x(1))])
        await bench.dispatch("m", [record])
        assert (await bench.replies("gw", 1))[request_id].error is None


async def test_a_reload_switches_to_the_new_files_and_one_without_change_does_nothing(tmp_path: Path) -> None:
    """R22."""
    model = tmp_path / "m" / "1" / "model.onnx"
    linear(model)
    async with running(tmp_path, model_control_mode="explicit", load_model=("m",)) as bench:
        first = await bench.control.fact(VersionLoaded)
        assert (await bench.request("load", "m")).error == ""
        assert sum(isinstance(fact, VersionLoaded) for fact in bench.control.facts()) == 1
        linear(model, WEIGHTS * 2)
        assert (await bench.request("load", "m")).error == ""
        second = [fact for fact in bench.control.facts() if isinstance(fact, VersionLoaded)][-1]
        assert second.content_hash != first.content_hash
        request_id, record = await bench.accept("m", [Tensor.of("x", x(1))])
        await bench.dispatch("m", [record], content_hash=first.content_hash)  # decided before the switch
        (output,) = (await bench.replies("gw", 1))[request_id].outputs
        np.testing.assert_allclose(output.array(), x(1) @ (WEIGHTS * 2), rtol=1e-4, atol=1e-5)
        assert not any(isinstance(fact, VersionUnloaded) for fact in bench.control.facts())


async def test_nothing_is_lost_while_models_are_reloaded_under_load(tmp_path: Path) -> None:
    model = tmp_path / "m" / "1" / "model.onnx"
    linear(model)
    async with running(tmp_path, model_control_mode="explicit", load_model=("m",)) as bench:
        accepted: list[bytes] = []

        async def load() -> None:
            for scale in (2, 3):
                linear(model, WEIGHTS * scale)
                assert (await bench.request("load", "m")).error == ""

        reloading = asyncio.create_task(load())
        while not reloading.done() or len(accepted) < 200:
            pairs = [await bench.accept("m", [Tensor.of("x", x(1, i))]) for i in range(4)]
            accepted += [request_id for request_id, _ in pairs]
            batch_id = await bench.dispatch("m", [record for _, record in pairs])
            await bench.finished("m", batch_id)
        await reloading
        found = await bench.replies("gw", len(accepted))
        assert sorted(found) == sorted(accepted)
        assert all(response.error is None for response in found.values())
        assert await bench.log.pending("m") == (0, 0)


async def test_a_configuration_override_lasts_until_unload(tmp_path: Path) -> None:
    """R24."""
    linear(tmp_path / "m" / "1" / "model.onnx")
    async with running(tmp_path, model_control_mode="explicit") as bench:
        config = '{"name": "m", "backend": "onnxruntime", "max_batch_size": "16"}'
        assert (await bench.request("load", "m", config_json=config)).error == ""

        def sizes() -> list[int]:
            facts = [fact for fact in bench.control.facts() if isinstance(fact, VersionLoaded)]
            return [ModelConfig.FromString(fact.config).max_batch_size for fact in facts]

        assert sizes() == [16]
        assert (await bench.request("load", "m")).error == ""
        assert sizes() == [16]
        assert "failed to poll" in (await bench.request("load", "m", config_json="{nonsense")).error
        await bench.request("unload", "m")
        assert (await bench.request("load", "m")).error == ""
        assert sizes() == [16, 4]


async def test_files_of_a_request_stand_in_for_the_repository(tmp_path: Path) -> None:
    """R25."""
    source = tmp_path / "files" / "model.onnx"
    linear(source, WEIGHTS * 5)
    (tmp_path / "repository").mkdir()
    async with running(tmp_path / "repository", model_control_mode="explicit") as bench:
        await bench.log.put_blob("blob-1", source.read_bytes(), 60)
        config = '{"name": "m", "backend": "onnxruntime"}'
        finished = await bench.request("load", "m", files={"7/model.onnx": "blob-1"})
        assert finished.error == "Load parameter 'config' must be specified for model file override"
        finished = await bench.request("load", "m", config_json=config, files={"../7/model.onnx": "blob-1"})
        assert "is outside the model directory" in finished.error
        finished = await bench.request("load", "m", config_json=config, files={"7/model.onnx": "lost"})
        assert "not in the log any more" in finished.error
        finished = await bench.request("load", "m", config_json=config, files={"7/model.onnx": "blob-1"})
        assert finished.error == ""
        loaded = await bench.control.fact(VersionLoaded)
        assert loaded.version == 7
        request_id, record = await bench.accept("m", [Tensor.of("x", x(1))])
        await bench.dispatch("m", [record], version=7)
        (output,) = (await bench.replies("gw", 1))[request_id].outputs
        np.testing.assert_allclose(output.array(), x(1) @ (WEIGHTS * 5), rtol=1e-4, atol=1e-5)
        await bench.request("unload", "m")
        await bench.control.fact(VersionUnloaded)
        assert "failed to poll" in (await bench.request("load", "m")).error


# -- polling -----------------------------------------------------------------------------------------------------------


async def test_polling_follows_the_repository(tmp_path: Path) -> None:
    """R10."""
    linear(tmp_path / "a" / "1" / "model.onnx")
    linear(tmp_path / "b" / "1" / "model.onnx")
    async with running(tmp_path, model_control_mode="poll", repository_poll_secs=3600) as bench:
        before = len(bench.control.facts())
        await bench.service.poll_once()
        assert len(bench.control.facts()) == before
        shutil.rmtree(tmp_path / "b")
        linear(tmp_path / "c" / "1" / "model.onnx")
        linear(tmp_path / "a" / "2" / "model.onnx", WEIGHTS * 3)
        await bench.service.poll_once()
        await bench.control.fact(VersionUnloaded, model="b")
        await bench.control.fact(VersionLoaded, model="c")
        await bench.control.fact(VersionLoaded, model="a", version=2)
        await bench.control.fact(VersionUnloaded, model="a", version=1)  # the policy is the latest one
        scans = [fact for fact in bench.control.facts() if isinstance(fact, RepositoryScanned)]
        assert scans[-1].models == ("a", "c")
        (tmp_path / "a" / "config.pbtxt").write_text("broken {")
        await bench.service.poll_once()
        failed = await bench.control.fact(VersionFailed, model="a")
        count = len(bench.control.facts())
        await bench.service.poll_once()  # a broken model is tried again only when its files change
        assert len(bench.control.facts()) == count
        assert failed.error_code == ErrorCode.INVALID_ARG


async def test_polling_follows_the_models_of_an_ensembles_repository(tmp_path: Path) -> None:
    """R2, R10: an ensemble goes over to the only other model of a name, and back when its own repository has one."""
    own, other = tmp_path / "own", tmp_path / "other"
    linear(own / "part" / "1" / "model.onnx")
    linear(other / "part" / "1" / "model.onnx", WEIGHTS * 3)
    (own / "whole" / "1").mkdir(parents=True)
    (own / "whole" / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 16 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 3 } ensemble_scheduling { step { model_name: "part" '
        'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }'
    )
    polling = {"model_control_mode": "poll", "repository_poll_secs": 3600, "model_namespacing": True}

    async def steps_of(loaded: VersionLoaded) -> list[str]:
        return [s.model_namespace for s in ModelConfig.FromString(loaded.config).ensemble_scheduling.step]

    async with running(own, model_repository=(os.fspath(own), os.fspath(other)), **polling) as bench:
        whole = f"{own}::whole"
        assert await steps_of(await bench.control.fact(VersionLoaded, model=whole)) == [os.fspath(own)]
        shutil.move(own / "part", tmp_path / "aside")
        await bench.service.poll_once()
        await bench.control.fact(VersionUnloaded, model=f"{own}::part")
        loaded = [f for f in bench.control.facts() if isinstance(f, VersionLoaded) and f.model == whole]
        assert await steps_of(loaded[-1]) == [os.fspath(other)]
        shutil.move(tmp_path / "aside", own / "part")
        await bench.service.poll_once()
        loaded = [f for f in bench.control.facts() if isinstance(f, VersionLoaded) and f.model == whole]
        assert await steps_of(loaded[-1]) == [os.fspath(own)]
        labels = f'{{model="part",namespace="{own}",version="1"}}'
        assert f"nv_inference_exec_count{labels}" in bench.service.metrics.render().decode()


# -- draining ----------------------------------------------------------------------------------------------------------


async def test_draining_finishes_what_runs_and_gives_back_the_rest(tmp_path: Path) -> None:
    linear(tmp_path / "m" / "1" / "model.onnx")
    async with running(tmp_path) as bench:
        batches = []
        for i in range(50):
            _, record = await bench.accept("m", [Tensor.of("x", x(1, i))])
            batches.append(await bench.dispatch("m", [record]))
        assert await bench.service.drain(10)
        facts = Follower(bench.log, keys.facts("m"))
        ends = await facts.until(
            lambda: (
                len(found := [f for f in facts.facts() if isinstance(f, (BatchFinished, BatchReturned))]) == 50
                and found
            )
        )
        assert sorted(fact.batch_id for fact in ends) == sorted(batches)
        returned = sum(isinstance(fact, BatchReturned) for fact in ends)
        assert (await bench.log.pending("m"))[0] == returned
        assert await bench.log.range(keys.batches(ME)) == []
        await bench.control.fact(ExecutorDraining)


async def test_what_comes_during_a_drain_goes_back_although_the_log_was_away_for_a_moment(tmp_path: Path) -> None:
    class Hiccup(MemoryLog):
        away = False

        async def append(self, stream: bytes, fields: Fields) -> bytes:
            if self.away and stream == keys.CONTROL:
                self.away = False
                raise LogUnavailable("a moment")
            return await super().append(stream, fields)

    python_model(tmp_path / "py", HELD)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    log = Hiccup()
    async with running(tmp_path, log=log) as bench:
        request_id, record = await bench.accept("py", [Tensor.of("x", np.array([[1, 2]], np.float32))])
        batch_id = await bench.dispatch("py", [record])
        opened = await asyncio.to_thread(gate.open, "wb")  # it runs now
        log.away = True
        draining = asyncio.ensure_future(bench.service.drain(30))
        await bench.control.fact(ExecutorDraining)
        _, record = await bench.accept("py", [Tensor.of("x", np.array([[1, 2]], np.float32))])
        returned = await bench.finished("py", await bench.dispatch("py", [record]), BatchReturned)
        assert returned.reason == "executor drains"
        opened.close()
        await bench.finished("py", batch_id)
        assert await draining
        assert (await bench.replies("gw", 1))[request_id].error is None


async def test_what_is_fetched_while_its_model_is_loaded_anew_is_given_back(tmp_path: Path) -> None:
    class Slow(MemoryLog):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.answer = asyncio.Event(), asyncio.Event()

        async def blob(self, blob_id: str) -> bytes | None:
            self.asked.set()
            await self.answer.wait()
            return await super().blob(blob_id)

    model = tmp_path / "m" / "1" / "model.onnx"
    linear(model)
    log = Slow()
    async with running(tmp_path, log=log, model_control_mode="explicit", load_model=("m",)) as bench:
        data = x(1).tobytes()
        await log.put_blob("far", data, 60)
        tensors = [Tensor.of("x", x(1))]
        _, record = await bench.accept("m", tensors, reference=Reference(BLOB, "far", len(data)))
        batch_id = await bench.dispatch("m", [record])
        await log.asked.wait()
        linear(model, WEIGHTS * 2)
        assert (await bench.request("load", "m")).error == ""
        await bench.service._deployment._retirement.idle()
        log.answer.set()
        assert "loaded anew" in (await bench.finished("m", batch_id, BatchReturned)).reason
        again = await bench.dispatch("m", [record])
        await bench.finished("m", again)


# -- instances that die ------------------------------------------------------------------------------------------------

DYING = """
import os
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if array[0, 0] == 666:
                for number in range(30):
                    print("line", number, file=sys.stderr)
                os._exit(3)
            if array[0, 0] < 0:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
                continue
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", array + 1)]))
        return answers
"""


HELD = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.gate = os.path.join(args["model_repository"], "..", "gate")

    def execute(self, requests):
        with open(self.gate, "rb") as gate:
            gate.read()
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor)]) for tensor in tensors]
"""


def python_model(directory: Path, code: str = DYING) -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text(code)
    (directory / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 2 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 2 } instance_group { kind: KIND_CPU count: 1 }'
    )


async def test_a_python_instance_that_dies_is_told_of_and_made_again(tmp_path: Path) -> None:
    """P19, I13."""
    python_model(tmp_path / "py")
    async with running(tmp_path) as bench:

        async def infer(*values: float) -> list[ResponseRecord]:
            pairs = [
                await bench.accept("py", [Tensor.of("x", np.full((1, 2), value, np.float32))], endpoint=str(values))
                for value in values
            ]
            await bench.dispatch("py", [record for _, record in pairs])
            found = await bench.replies(str(values), len(pairs))
            return [found[request_id] for request_id, _ in pairs]

        first, second = await infer(1, -1)
        assert first.outputs[0].array().tolist() == [[2.0, 2.0]]
        assert isinstance(second.error, CharoniaError)
        assert second.error.message == "negative"
        deadly = [await bench.accept("py", [Tensor.of("x", np.full((1, 2), value, np.float32))]) for value in (1, 666)]
        batch_id = await bench.dispatch("py", [record for _, record in deadly])
        died = await bench.finished("py", batch_id, BatchDied)
        assert re.fullmatch(
            r"Stub process 'py_0_0' is not healthy\. The process \(pid \d+\) exited with code 3\.", died.reason
        )
        assert died.stderr == "\n".join(f"line {number}" for number in range(10, 30))
        assert (died.executor, died.instance, died.blameless) == (ME, "py_0_0", False)
        assert died.ids == b"".join(request_id for request_id, _ in deadly)
        assert await bench.log.unsettled("py", [request_id for request_id, _ in deadly]) == [0, 0]
        assert await bench.log.range(keys.replies("gw")) == []
        (alive,) = await infer(3)
        assert alive.outputs[0].array().tolist() == [[4.0, 4.0]]
        loaded = await bench.control.fact(VersionLoaded)
        stats = await bench.log.statistics(keys.statistics("py", 1, loaded.content_hash))
        assert (stats["success_count"], stats["fail_count"], stats["fail_BACKEND"]) == (2, 1, 1)
        await bench.service.drain(10)
        assert await bench.log.range(keys.batches(ME)) == []
        page = bench.service.metrics.render().decode()
        assert 'charonia_executor_batches_died_total{model="py",version="1"} 1.0' in page
        assert 'charonia_fenced_total{model="py",version="1"} 0.0' in page
