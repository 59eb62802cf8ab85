"""An executor over a remote repository that fails, and what is fetched of models that it need not load (R7)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from executor_bench import WEIGHTS, linear, running
from memory_store import MemoryStore

from charonia.errors import StartupError
from charonia.facts.events import ModelExcluded, VersionFailed, VersionHeld, VersionLoaded, VersionUnloaded
from executors.repository.remote.opening import RemoteRepositories
from protos.model_config_pb2 import ModelConfig

URL = "s3://bucket/models"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MemoryStore:
    """The store behind `URL`."""
    made = MemoryStore()
    monkeypatch.setattr(RemoteRepositories, "_store", lambda self, address: made)
    monkeypatch.setenv("TRITON_AWS_MOUNT_DIRECTORY", os.fspath(tmp_path / "copies"))
    return made


def onnx(directory: Path, scale: float = 1.0) -> bytes:
    file = directory / "made.onnx"
    linear(file, WEIGHTS * scale)
    return file.read_bytes()


def over_url(tmp_path: Path, **settings: Any) -> Any:
    return running(tmp_path, model_repository=(URL,), repository_poll_secs=3600.0, **settings)


def copies(directory: Path) -> set[str]:
    return {path.name for path in (directory / "copies").glob("*/*/*")}


def loaded(bench: Any) -> list[str]:
    return [fact.model for fact in bench.control.facts() if isinstance(fact, VersionLoaded)]


async def test_what_could_not_be_fetched_is_tried_again_at_the_next_look(store: MemoryStore, tmp_path: Path) -> None:
    for name in ("good", "bad"):
        store.put(f"{name}/1/model.onnx", onnx(tmp_path))
    store.breaks = {"bad/1/model.onnx": 3}
    async with over_url(tmp_path, model_control_mode="poll", exit_on_error=False) as bench:
        failed = await bench.control.fact(VersionFailed)
        assert (failed.model, failed.message) == ("bad", "Unavailable: the connection broke")
        assert loaded(bench) == ["good"]
        store.breaks = {"bad/1/model.onnx": 3}
        await bench.service.poll_once()
        assert loaded(bench) == ["good"]
        await bench.service.poll_once()
        assert loaded(bench) == ["good", "bad"]
        # one that serves goes on serving until its successor could be fetched
        store.put("bad/1/model.onnx", onnx(tmp_path, 2))
        store.breaks = {"bad/1/model.onnx": 3}
        await bench.service.poll_once()
        assert bench.service._deployment.find("bad", 1) is not None
        assert len(loaded(bench)) == 2
        await bench.service.poll_once()
        assert loaded(bench) == ["good", "bad", "bad"]


async def test_one_that_could_never_be_fetched_can_go(store: MemoryStore, tmp_path: Path) -> None:
    store.put("bad/1/model.onnx", onnx(tmp_path))
    store.breaks = {"bad/1/model.onnx": 10**6}
    async with over_url(tmp_path, model_control_mode="poll", exit_on_error=False) as bench:
        store.delete("bad/1/model.onnx")
        await bench.service.poll_once()
        gone = await bench.control.fact(VersionUnloaded, model="bad")
        assert gone.reason == "unloaded"


async def test_a_start_that_cannot_fetch_says_why(store: MemoryStore, tmp_path: Path) -> None:
    store.put("m/1/model.onnx", onnx(tmp_path))
    store.breaks = {"m/1/model.onnx": 3}
    with pytest.raises(StartupError, match=r"^failed to load all models: m: load failed for model 'm': .*broke"):
        async with over_url(tmp_path):
            pass


async def test_a_model_of_another_pool_is_not_fetched(store: MemoryStore, tmp_path: Path) -> None:
    store.put("m/1/model.onnx", onnx(tmp_path))
    store.put("m/config.pbtxt", 'parameters { key: "charonia.pool" value { string_value: "large" } }')
    store.put("python/1/model.py", "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n")
    tensors = "".join(f'{kind} {{ name: "{kind}" data_type: TYPE_INT8 dims: 1 }} ' for kind in ("input", "output"))
    # the version that the policy leaves out is not here to look at
    store.put("python/2/model.py", "")
    policy = "version_policy { specific { versions: 1 } }"
    store.put("python/config.pbtxt", f'backend: "python" {tensors} {policy}')
    async with over_url(tmp_path, pool="small") as bench:
        excluded = {f.model for f in bench.control.facts() if isinstance(f, ModelExcluded)}
        assert excluded == {"m"}, "the other one is of no pool"
        assert loaded(bench) == ["python"]
        assert "m/1/model.onnx" not in store.copied()
        assert copies(tmp_path) == {"python"}


async def test_an_override_needs_no_more_than_its_versions(store: MemoryStore, tmp_path: Path) -> None:
    """R24."""
    for version in (1, 2, 3):
        store.put(f"m/{version}/model.onnx", onnx(tmp_path))
    async with over_url(tmp_path, model_control_mode="explicit") as bench:
        config = '{"name": "m", "backend": "onnxruntime", "version_policy": {"specific": {"versions": [2]}}}'
        assert (await bench.request("load", "m", config_json=config)).error == ""
        (fact,) = [fact for fact in bench.control.facts() if isinstance(fact, VersionLoaded)]
        assert fact.version == 2
        assert ModelConfig.FromString(fact.config).version_policy.specific.versions == [2]
        assert store.copied() == ["m/2/model.onnx"]
        await bench.request("unload", "m")
        await bench.control.fact(VersionUnloaded, model="m")
        await bench.service._deployment.idle()
        assert copies(tmp_path) == set()


async def test_models_on_demand_keep_their_copies(store: MemoryStore, tmp_path: Path) -> None:
    for name in "ab":
        store.put(f"{name}/1/model.onnx", onnx(tmp_path))
    async with over_url(tmp_path, max_loaded_models=1) as bench:
        assert copies(tmp_path) == {"a", "b"}
        for round_, name in enumerate("aba"):
            bench.service._on_demand.wanted(name, 1)
            await bench.control.until(
                lambda name=name, round_=round_: (
                    [fact.model for fact in bench.control.facts() if isinstance(fact, VersionHeld) and fact.slots]
                    == list("aba")[: round_ + 1]
                )
            )
        assert copies(tmp_path) == {"a", "b"}
        assert sorted(store.copied()) == ["a/1/model.onnx", "b/1/model.onnx"]
    assert copies(tmp_path) == {"a", "b"}, "a mount directory's copies stay"
    store.put("a/1/model.onnx", onnx(tmp_path, 2))
    async with over_url(tmp_path, max_loaded_models=1) as bench:
        await bench.service._deployment.idle()
        assert len(list((tmp_path / "copies").glob("*/*/a"))) == 1, "the successor removes what has changed since"
        assert len(list((tmp_path / "copies").glob("*/*/b"))) == 1
