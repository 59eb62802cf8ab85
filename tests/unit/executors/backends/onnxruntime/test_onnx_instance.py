"""Errors of an execution. What graphs compute is in `executors/backends/test_onnxruntime.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from charonia.backend import DeviceLost, GraphSignature
from charonia.errors import InternalError
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from executors.backends.onnxruntime.onnx_instance import OnnxRuntimeInstance
from executors.backends.onnxruntime.onnx_session import Session
from executors.configuration.config import normalise


@pytest.mark.parametrize(("provider", "kind"), [("CUDA", DeviceLost), ("CPU", InternalError)])
def test_a_gpu_that_the_library_reports_lost(provider: str, kind: type[Exception]) -> None:
    """The library's own words for an address that a kernel may not read; a graph on the CPU may say what it likes."""

    def run(*_: object) -> None:
        raise RuntimeError(
            "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; "
            "hostname=h ; file=cuda_execution_provider.cc ; line=428 ; expr=cudaStreamSynchronize(stream_);"
        )

    session = SimpleNamespace(run=run, get_providers=lambda: [f"{provider}ExecutionProvider", "CPUExecutionProvider"])
    interface = ModelInterface.of(normalise(parse('name: "m" backend: "onnxruntime"')))
    opened = Session(session, GraphSignature((), ()), lambda: SimpleNamespace(terminate=False))
    with pytest.raises(kind, match="CUDA failure 700") as raised:
        OnnxRuntimeInstance(interface, opened).execute({}, ["y"])
    assert type(raised.value) is kind
