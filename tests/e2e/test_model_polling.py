"""Models that come, change and go in a repository that is polled, and servers that start with models that fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from controlled_models import factor
from e2e_asking import index, post, settle, statistics, until
from e2e_models import SCALING_IO, put, scaling
from e2e_server import serving, start
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def polled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("polled")
    models = directory / "models"
    scaling(models, "first", 2)
    with serving(models, directory / "state", "--model-control-mode=poll", "--repository-poll-secs=0.1") as server:
        yield SimpleNamespace(server=server, models=models)


# -- poll mode ---------------------------------------------------------------------------------------------------------


def test_polling_follows_models_as_they_come_change_and_go(polled: Any) -> None:
    server, models = polled.server, polled.models

    def serves(name: str, wanted: float) -> bool:
        try:
            return factor(server, name) == wanted
        except InferenceServerException:
            return False

    assert factor(server, "first") == 2
    scaling(models, "second", 3)
    until("a new model is served", lambda: serves("second", 3))
    scaling(models, "first", 4)
    until("a changed model is served", lambda: serves("first", 4))
    settle(server, "first")
    before = statistics(server, "first")["inference_count"]
    put(models / "first" / "1" / "model.onnx", b"no model at all")
    until("the broken file was tried", lambda: "failed to load first: " in server.log())
    assert factor(server, "first") == 4
    settle(server, "first")
    assert statistics(server, "first")["inference_count"] == before + 1
    scaling(models, "first", 5)
    until("it is mended", lambda: serves("first", 5))
    shutil.move(models / "second", models.parent / "aside")
    until("a removed model is gone", lambda: ("second", "") not in index(server) and not serves("second", 3))
    assert factor(server, "first") == 5
    shutil.move(models.parent / "aside", models / "second")
    until("it is back", lambda: serves("second", 3))
    status, answer = post(server, "/v2/repository/models/first/load")
    assert (status, answer) == (
        503,
        {"error": "explicit model load / unload is not allowed if polling is enabled"},
    )


def test_a_new_version_loads_alone(polled: Any) -> None:
    server, models = polled.server, polled.models
    scaling(models, "versions", 1, config="version_policy: { all { } }")

    def ready() -> set[str]:
        return {
            version for (name, version), row in index(server).items() if name == "versions" and row["state"] == "READY"
        }

    until("version 1", lambda: ("versions", "1") in index(server) and ready() == {"1"})
    assert factor(server, "versions") == 1
    scaling(models, "versions", 10, version=10)
    scaling(models, "versions", 2, version=2)
    until("all versions", lambda: ready() == {"1", "2", "10"})
    settle(server, "versions")
    assert statistics(server, "versions")["inference_count"] == 1, "version 1 was left alone (R10)"
    assert factor(server, "versions") == 10, "the numerically highest is the default (R3)"
    assert [factor(server, "versions", "grpc", v) for v in ("1", "2", "10")] == [1, 2, 10]
    assert json.loads(server.get("/v2/models/versions")[1])["versions"] == ["1", "2", "10"]
    assert json.loads(server.get("/v2/models/versions/versions/2")[1])["versions"] == ["2"]
    scaling(models, "versions", 0, config="version_policy: { latest { num_versions: 2 } }")
    until("the latest two", lambda: ready() == {"2", "10"})
    with pytest.raises(InferenceServerException, match="'versions' version 1 is not at ready state"):
        factor(server, "versions", version="1")
    scaling(models, "versions", 1, config="version_policy: { specific { versions: [ 1 ] } }")
    until("the chosen one", lambda: ready() == {"1"})
    assert factor(server, "versions") == 1
    scaling(models, "versions", 1, config="version_policy: { specific { versions: [ 7 ] } }")
    text = "at least one version must be available under the version policy of model 'versions'"
    until("the policy's error", lambda: text in server.log())
    assert factor(server, "versions") == 1
    assert server.get("/v2/health/ready")[0] == 200
    # versions that failed count as long as they are wanted
    scaling(models, "versions", 1, config="version_policy: { specific { versions: [ 1, 3 ] } }")
    put(models / "versions" / "3" / "model.onnx", b"no model at all")
    until("version 3 failed", lambda: index(server).get(("versions", "3"), {}).get("state") == "UNAVAILABLE")
    assert server.get("/v2/health/ready")[0] == 400
    assert factor(server, "versions") == 1
    scaling(models, "versions", 1, config="version_policy: { specific { versions: [ 1 ] } }")
    until("it is not wanted any more", lambda: server.get("/v2/health/ready")[0] == 200)


# -- starting ----------------------------------------------------------------------------------------------------------


def test_models_that_cannot_load_do_not_stop_the_others(serve: Any, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for repository in (one, other):
        scaling(repository, "twice", 1)
    scaling(one, "good", 2)
    scaling(other, "named", 3)
    chosen = f'backend: "onnxruntime"\nmax_batch_size: 3\n{SCALING_IO}'
    put(other / "named" / "configs" / "small.pbtxt", chosen)
    scaling(other, "bare", 4, config=None)
    scaling(other, "unlucky", 5)
    put(other / "unlucky" / "1" / "model.onnx", b"no model at all")
    server = serve(
        one,
        f"--model-repository={other}",
        "--exit-on-error=false",
        "--strict-readiness=false",
        "--model-config-name=small",
        "--disable-auto-complete-config",
    )
    assert factor(server, "good") == 2
    rows = index(server)
    twice = [row for (name, _), row in rows.items() if name == "twice"]
    assert [row["state"] for row in twice] == ["UNAVAILABLE"]
    assert "model appears in two or more repositories" in twice[0]["reason"]
    with pytest.raises(InferenceServerException, match="'twice'"):
        factor(server, "twice")
    assert json.loads(server.get("/v2/models/named/config")[1])["max_batch_size"] == 3
    assert json.loads(server.get("/v2/models/good/config")[1])["max_batch_size"] == 8
    assert rows["bare", "1"]["state"] == "UNAVAILABLE", "nothing is completed when auto-complete is off (C70)"
    assert rows["unlucky", "1"]["state"] == "UNAVAILABLE"
    assert server.get("/v2/health/ready")[0] == 200


WHOLE = """platform: "ensemble"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step { model_name: "nowhere" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""


def test_strict_readiness_counts_models_that_failed(tmp_path: Path) -> None:
    scaling(tmp_path / "models", "good", 2)
    scaling(tmp_path / "models", "bad", 2)
    put(tmp_path / "models" / "bad" / "1" / "model.onnx", b"no model at all")
    scaling(tmp_path / "models", "unreadable", 2)
    put(tmp_path / "models" / "unreadable" / "config.pbtxt", b"no_such_field: 3")
    put(tmp_path / "models" / "whole" / "config.pbtxt", WHOLE.encode())
    (tmp_path / "models" / "whole" / "1").mkdir()
    server = start(
        tmp_path / "models",
        tmp_path / "state",
        "--exit-on-error=false",
        "--model-control-mode=explicit",
        "--load-model=*",
    )
    try:

        def good_is_ready() -> bool:
            assert server.process.poll() is None, server.log()
            try:
                server.read_endpoints()
                return bool(server.get("/v2/models/good/ready")[0] == 200)
            except OSError:
                return False

        until("the good model is served", good_is_ready)
        until("the bad model has failed", lambda: index(server)["bad", "1"]["state"] == "UNAVAILABLE")
        assert server.get("/v2/health/live")[0] == 200
        assert server.get("/v2/health/ready")[0] == 400
        assert factor(server, "good") == 2
        # what is unloaded on purpose does not count
        assert post(server, "/v2/repository/models/bad/unload")[0] == 200
        until("the server is ready", lambda: server.get("/v2/health/ready")[0] == 200)
        assert index(server)["bad", "1"]["reason"] == "unloaded"
        # nor does an ensemble without its models, or a model whose configuration cannot be read
        assert "nowhere" in index(server)["whole", "1"]["reason"]
        assert post(server, "/v2/repository/models/whole/load")[0] == 400
        assert "no_such_field" in index(server)["unreadable", "1"]["reason"]
        assert post(server, "/v2/repository/models/unreadable/load")[0] == 500
        assert server.get("/v2/health/ready")[0] == 200
    finally:
        assert server.stop() == 0
