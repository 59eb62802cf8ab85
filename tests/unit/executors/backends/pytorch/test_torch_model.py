from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from executors.backends.pytorch.torch_model import PyTorchBackend
from executors.backends.registry import prefers_gpu


@pytest.mark.parametrize("available", [True, False])
def test_instances_of_kind_auto_go_to_a_gpu_that_pytorch_sees(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_available=lambda: available)  # type: ignore[attr-defined]
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")  # set by the import, and left again by this test
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.export", ModuleType("torch.export"))
    assert prefers_gpu(PyTorchBackend()) is available


def test_nor_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not prefers_gpu(PyTorchBackend())
