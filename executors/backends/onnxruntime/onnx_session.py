"""Opens ONNX files: a session, with providers and options from the configuration, and the signature of its graph.

`onnx_backend` decides which sessions there are, `onnx_instance` runs arrays in them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia.backend import GraphSignature, ModelSource, TensorSignature
from charonia.errors import InternalError, Unsupported

from .bound_runs import GRAPH, BoundRuns
from .execution_providers import CPU, CUDA, OPENVINO, execution_providers
from .session_options import run_entries, session_options

_ELEMENT_TYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
    "tensor(bfloat16)": "BF16",
}
_openvino_lock = threading.Lock()
"""The OpenVINO provider makes one session at a time."""


@dataclass(slots=True)
class Session:
    """A session and its signature."""

    session: Any
    signature: GraphSignature
    run_options: Callable[[], Any]
    """Makes the options of an instance's runs."""
    bound: Callable[[], BoundRuns] | None = None
    """Makes the runs of an instance that has CUDA graphs."""


def open_session(source: ModelSource, path: Path, kind: str, device_id: int, threads: int) -> Session:
    """Open a file with so many threads. Raises `InternalError` with the reason, `Unsupported` for a tensor's type."""
    import onnxruntime as ort

    providers = execution_providers(source, kind, device_id, ort.get_available_providers())
    options = session_options(ort, source, threads)
    if any(name == CUDA for name, _ in providers):
        find_cuda(ort)
    # by itself the library would fall back to the CPU where a provider cannot be used
    with _openvino_lock if providers[0][0] == OPENVINO else contextlib.nullcontext():
        try:
            session = ort.InferenceSession(os.fspath(path), options, providers, enable_fallback=0)
        except Exception as error:
            raise InternalError(f"onnx runtime error: {reason(error)}") from None
    missing = [name for name, _ in providers if name not in session.get_providers() and name != CPU]
    if missing and kind != "MODEL":
        where = f"GPU {device_id}" if kind == "GPU" else "the CPU"
        hint = " (without CUDA and cuDNN on the machine: install charonia[cuda])" if CUDA in missing else ""
        raise InternalError(
            f"model '{source.name}': onnxruntime could not use {', '.join(missing)} on {where}; why is among its own "
            f"lines in the log of this executor{hint}"
        )
    graphs = next((said.get("enable_cuda_graph") == "1" for name, said in providers if name == CUDA), False)
    entries = run_entries(source)

    def run_options(graph: str = "") -> Any:
        made = ort.RunOptions()
        for key, value in (*entries, *(((GRAPH, graph),) if graph else ())):
            made.add_run_config_entry(key, value)
        return made

    bound = functools.partial(BoundRuns, ort, session, "cuda", max(device_id, 0), run_options) if graphs else None
    return Session(session, _signature(source, session), run_options, bound)


def find_cuda(ort: Any) -> None:
    """Load CUDA and cuDNN from the wheels of `charonia[cuda]`, whose directories the dynamic linker does not search."""
    if importlib.util.find_spec("nvidia") is not None and hasattr(ort, "preload_dlls"):
        ort.preload_dlls(directory="")


def _signature(source: ModelSource, session: Any) -> GraphSignature:
    # initialisers that may be overridden are not listed as inputs: they are optional
    return GraphSignature(
        tuple(_tensor(source, node) for node in session.get_inputs()),
        tuple(_tensor(source, node) for node in session.get_outputs()),
    )


def _tensor(source: ModelSource, node: Any) -> TensorSignature:
    datatype = _ELEMENT_TYPES.get(node.type)
    if datatype is None:
        raise Unsupported(f"model '{source.name}': unsupported type '{node.type}' of tensor '{node.name}'")
    # names and None are symbolic sizes
    dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)
    return TensorSignature(node.name, datatype, dims)


def reason(error: Exception) -> str:
    return str(error).strip().removeprefix("[ONNXRuntimeError] : ")
