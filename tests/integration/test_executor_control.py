"""An executor that loads, reloads and unloads models as it is told, or as the repository changes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from executor_bench import ME, WEIGHTS, Bench, linear, running, x
from memory_log.log import MemoryLog

from charonia import keys
from charonia.errors import ErrorCode
from charonia.facts.events import (
    FIELD_FACT,
    Fact,
    ProcessJoined,
    RepositoryScanned,
    VersionFailed,
    VersionLoaded,
    VersionUnloaded,
    pack_fact,
)
from charonia.models.config_forms import parse
from charonia.tensors import Tensor
from protos.model_config_pb2 import ModelConfig

CONFIG = (
    'name: "m" backend: "onnxruntime" max_batch_size: 8 '
    'input { name: "x" data_type: TYPE_FP32 dims: 16 } output { name: "y" data_type: TYPE_FP32 dims: 3 }'
)

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
            f"load failed for model 'm': version 1 is at UNAVAILABLE state: {reason};"
            f"version 2 is at UNAVAILABLE state: {reason};\n"
        )
        (tmp_path / "m" / "config.pbtxt").write_text("not a config {")
        assert (await bench.request("load", "m")).error == "failed to load 'm', failed to poll from model repository"
        request_id, record = await bench.accept("m", [Tensor.of("x", x(1))])
        await bench.dispatch("m", [record])
        assert (await bench.replies("gw", 1))[request_id].error is None


async def test_all_versions_of_a_load_are_served_or_none(tmp_path: Path) -> None:
    """R21."""
    for version in (1, 2, 3):
        linear(tmp_path / "m" / str(version) / "model.onnx")
    (tmp_path / "m" / "2" / "model.onnx").write_bytes(b"none")
    (tmp_path / "m" / "config.pbtxt").write_text(
        'version_policy { all {} } input { name: "x" data_type: TYPE_FP32 dims: 16 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 3 } max_batch_size: 8'
    )
    async with running(tmp_path, model_control_mode="explicit") as bench:
        refused = await bench.request("load", "m")
        assert refused.error.startswith("load failed for model 'm': version 2 is at UNAVAILABLE state: ")
        assert "version 1" not in refused.error
        assert not any(isinstance(fact, VersionLoaded) for fact in bench.control.facts())
        given_up = {fact.version for fact in bench.control.facts() if isinstance(fact, VersionUnloaded)}
        assert given_up == {1, 3}
        linear(tmp_path / "m" / "2" / "model.onnx")
        assert (await bench.request("load", "m")).error == ""
        assert {f.version for f in bench.control.facts() if isinstance(f, VersionLoaded)} == {1, 2, 3}


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


async def say(log: MemoryLog, *facts: Fact) -> None:
    """Write control facts of another process."""
    await log.append(keys.CONTROL, [part for fact in facts for part in (FIELD_FACT, pack_fact(fact))])


def counted(bench: Bench) -> float | None:
    page = bench.service.metrics.render().decode()
    found = re.search(r'^nv_inference_count\{model="m",version="1"\} (\S+)', page, re.M)
    return float(found[1]) if found else None


@pytest.mark.parametrize("mode", ["explicit", "poll"])
async def test_counters_begin_at_0_when_no_executor_has_the_version_any_more(mode: str, tmp_path: Path) -> None:
    """Those of gateways and batchers follow the same facts, so that all begin again together."""
    log, model = MemoryLog(), tmp_path / "m"
    linear(model / "1" / "model.onnx")
    (model / "config.pbtxt").write_text(CONFIG)
    config = parse(CONFIG).SerializeToString()

    await say(log, ProcessJoined("executor", "earlier"), VersionLoaded("earlier", "m", 1, "h", 1, config))
    named = {"load_model": ("m",)} if mode == "explicit" else {"repository_poll_secs": 3600}
    async with running(tmp_path, log=log, model_control_mode=mode, **named) as bench:

        def count() -> float | None:
            return counted(bench)

        async def until_counted(wanted: float | None) -> None:
            async with asyncio.timeout(30):
                while count() != wanted:
                    await asyncio.sleep(0.001)

        async def change(*, to_load: bool) -> None:
            kind: type = VersionLoaded if to_load else VersionUnloaded
            before = sum(isinstance(fact, kind) for fact in bench.control.facts())
            if mode == "explicit":
                assert (await bench.request("load" if to_load else "unload", "m")).error == ""
            else:
                await asyncio.to_thread(os.rename, *((aside, model) if to_load else (model, aside)))
                await bench.service.poll_once()
            await bench.control.until(lambda: sum(isinstance(f, kind) for f in bench.control.facts()) > before)

        aside = tmp_path.parent / f"{tmp_path.name} aside"
        _, record = await bench.accept("m", [Tensor.of("x", x(1))])
        await bench.finished("m", await bench.dispatch("m", [record]))
        await until_counted(1)
        await change(to_load=False)
        assert count() == 1, "the other executor has it still"
        await change(to_load=True)
        assert count() == 1
        await say(log, VersionUnloaded("earlier", "m", 1))
        await change(to_load=False)
        await until_counted(None)
        await change(to_load=True)
        await until_counted(0)


async def test_counters_go_on_in_a_new_log_that_another_executor_has_joined_first(tmp_path: Path) -> None:
    """What an executor reads of others in the new log, before its own heartbeat shows that it is one, counts there."""
    log, model = MemoryLog(), tmp_path / "m"
    linear(model / "1" / "model.onnx")
    (model / "config.pbtxt").write_text(CONFIG)
    config = parse(CONFIG).SerializeToString()
    other = ProcessJoined("executor", "other"), VersionLoaded("other", "m", 1, "h", 1, config)
    async with running(tmp_path, log=log, model_control_mode="explicit", load_model=("m",)) as bench:

        def said() -> list[Fact]:
            return [fact for fact in bench.control.facts() if getattr(fact, "executor", "") in (ME, "other")]

        _, record = await bench.accept("m", [Tensor.of("x", x(1))])
        await bench.finished("m", await bench.dispatch("m", [record]))
        async with asyncio.timeout(30):
            while counted(bench) != 1:
                await asyncio.sleep(0.001)
        await log.delete_stream(keys.CONTROL)
        await say(log, *other)
        await bench.control.until(lambda: other[1] in said())
        before = len(said())
        log._epoch = "another"
        # the last fact that is written again
        await bench.control.until(lambda: any(isinstance(fact, RepositoryScanned) for fact in said()[before:]))
        assert (await bench.request("unload", "m")).error == ""
        unloaded = VersionUnloaded(ME, "m", 1)
        await bench.control.until(lambda: unloaded in said())
        assert counted(bench) == 1, "the other executor has it still"
        await say(log, VersionUnloaded("other", "m", 1))
        async with asyncio.timeout(30):
            while counted(bench) is not None:
                await asyncio.sleep(0.001)


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


async def test_requests_for_a_model_are_carried_out_in_their_order(tmp_path: Path) -> None:
    """The last request in the log decides, on every executor."""
    linear(tmp_path / "m" / "1" / "model.onnx")
    async with running(tmp_path, model_control_mode="explicit") as bench:
        await bench.log.put_blob("blob-1", (tmp_path / "m" / "1" / "model.onnx").read_bytes(), 60)
        brings = {"config_json": '{"name": "m", "backend": "onnxruntime"}', "files": {"7/model.onnx": "blob-1"}}

        async def served() -> list[int]:
            await bench.service._deployment._retirement.idle()
            return [loaded.version for loaded in bench.service._deployment.loaded_versions()]

        answers = await asyncio.gather(bench.request("load", "m"), bench.request("load", "m", **brings))
        assert [answer.error for answer in answers] == ["", ""]
        assert await served() == [7]
        await asyncio.gather(bench.request("load", "m"), bench.request("unload", "m"))
        assert await served() == []


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
