"""Triton's repository holds every model of the cases, with the files of Charonia's."""

from __future__ import annotations

from pathlib import Path

from loadtest.bench.cases import CASES, find
from loadtest.peers.triton import max_batch, write_triton_repository


def test_every_case_becomes_a_python_model(tmp_path: Path) -> None:
    write_triton_repository(tmp_path, find("mlp,ocr_rec,mixed"), Path("/onnx"))
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["identity", "identity_levels", "identity_py", "mlp", "ocr_rec"]
    config = (tmp_path / "mlp" / "config.pbtxt").read_text()
    assert 'backend: "python"' in config
    assert "dims: [784]" in config
    assert "dims: [10]" in config
    assert 'string_value: "/onnx/mlp/1/model.onnx"' in config
    assert "priority_levels: 2" in (tmp_path / "identity_levels" / "config.pbtxt").read_text()
    for name in written:
        compile((tmp_path / name / "1" / "model.py").read_text(), name, "exec")


def test_batches_are_limited_alike() -> None:
    assert [max_batch(CASES[name]) for name in ("identity", "resnet18", "ocr_rec")] == [64, 8, 8]
