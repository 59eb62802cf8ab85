"""Libraries that a session needs. Options and signatures are in `executors/backends/test_onnxruntime.py`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from executors.backends.onnxruntime.onnx_session import find_cuda


def test_cuda_is_looked_for_in_its_wheels_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    library = SimpleNamespace(preload_dlls=lambda *, directory: asked.append(directory))
    find_cuda(library)
    assert asked == []
    (tmp_path / "nvidia" / "cu13").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    find_cuda(SimpleNamespace())  # before 1.21
    find_cuda(library)
    assert asked == [""]
