"""Backends by their word."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from charonia.backend import ENTRY_POINT_GROUP
from charonia.errors import InvalidArgument, Unsupported
from executors import registry
from executors.registry import BackendRegistry, prefers_gpu


def test_shipped_backends_are_the_declared_entry_points() -> None:
    declared = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert declared["project"]["entry-points"][ENTRY_POINT_GROUP] == registry._SHIPPED


def test_a_backend_is_made_once() -> None:
    backends = BackendRegistry()
    made = backends.get("onnxruntime")
    assert made.name == "onnxruntime"
    assert backends.get("onnxruntime") is made


def test_an_installed_package_may_bring_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str, name: str) -> list[metadata.EntryPoint]:
        assert group == ENTRY_POINT_GROUP
        found = {"other": "executors.backends.onnxruntime:OnnxRuntimeBackend", "broken": "no_such_module:Backend"}
        return [metadata.EntryPoint(name, found[name], group)] if name in found else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    backends = BackendRegistry()
    assert backends.get("other") is backends.get("other")
    with pytest.raises(Unsupported, match="backend 'broken' cannot be imported"):
        backends.get("broken")
    with pytest.raises(InvalidArgument, match="unable to find backend 'none'"):
        backends.get("none")


def test_onnxruntime_prefers_a_gpu_only_if_its_library_can_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    backends = BackendRegistry()
    can = "CUDAExecutionProvider" in ort.get_available_providers()
    assert prefers_gpu(backends.get("onnxruntime")) is can
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert not prefers_gpu(backends.get("onnxruntime"))
    assert not prefers_gpu(backends.get("python"))
