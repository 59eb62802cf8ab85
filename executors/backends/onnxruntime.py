"""Runs ONNX models with onnxruntime: makes sessions, with options from the configuration, and runs arrays.

The library is imported when a model first needs it. This module checks a configuration against the graph;
`executors.configuration` checks the rest.

Threads: by default, onnxruntime uses every physical core for each session, which oversubscribes a machine with several
instances and models. So a session gets cores / CPU instances of its model (at least 1), unless
`parameters { key: "intra_op_thread_count" }` is set (0: the library's default), and idle threads sleep instead of
spinning. CPU instances of one model version share a session: it is safe for concurrent runs, and saves a second copy of
the weights. Groups whose host policies name different cores have a session each.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from charonia.backend import Array, GraphSignature, InstanceSpec, Interrupted, ModelSource, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported
from charonia.models.interface import ModelInterface
from executors.configuration.autofill import check_against_graph
from executors.host.host_policy import thread_on

from .onnxruntime_options import (
    accelerator_providers,
    cuda_provider_options,
    intra_op_threads,
    run_entries,
    session_options,
)

DEFAULT_FILENAME = "model.onnx"

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
_ONNX_BFLOAT16 = 16
_PROBES_KEPT = 8
"""Sessions that are kept from `probe` for `create_instance`. A model that fails in between leaves one behind."""


@dataclass(slots=True)
class _Session:
    """A session and its signature."""

    session: Any
    signature: GraphSignature
    run_options: Callable[[], Any]
    """Makes the options of an instance's runs."""


@dataclass(slots=True)
class _Shared:
    """The CPU session of one load of a model version, and how many instances use it."""

    source: ModelSource
    users: int = 0
    opened: _Session | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class OnnxRuntimeBackend:
    """The backend `onnxruntime` (entry-point group `charonia.backends`); platform `onnxruntime_onnx`."""

    name: str = "onnxruntime"
    _probed: dict[tuple[object, ...], _Session] = field(default_factory=dict)
    _shared: dict[tuple[int, frozenset[int]], _Shared] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prefers_gpu(self) -> bool:
        """Whether instances of kind AUTO use a GPU: only when the installed library supports it (C8)."""
        try:
            import onnxruntime as ort
        except ImportError:
            return False
        return "CUDAExecutionProvider" in ort.get_available_providers()

    async def probe(self, source: ModelSource) -> GraphSignature:
        """Return names, types and dims of the graph (C71). Raises `CharoniaError` for a file that cannot be loaded."""
        return await asyncio.to_thread(self._probe, source)

    async def create_instance(self, spec: InstanceSpec) -> OnnxRuntimeInstance:
        """Make an instance with a session of its own, or with the CPU session of its model version.

        Raises `InvalidArgument` when the configuration does not fit the graph, `Unsupported` for a GPU without the
        library's CUDA provider.
        """
        return await asyncio.to_thread(self._create, spec)

    def _probe(self, source: ModelSource) -> GraphSignature:
        path = model_path(source)
        sharers = _configured_sharers(source)
        opened = _open(source, path, "CPU", -1, sharers)
        with self._lock:
            while len(self._probed) >= _PROBES_KEPT:
                self._probed.pop(next(iter(self._probed)))
            self._probed[_fingerprint(source, path, sharers)] = opened
        return opened.signature

    def _create(self, spec: InstanceSpec) -> OnnxRuntimeInstance:
        source, interface = spec.source, spec.interface
        path = model_path(source)
        if spec.kind != "CPU":
            with thread_on(spec.cores):
                opened = _open(source, path, spec.kind, spec.device_id, 1)
            check_against_graph(source.config, opened.signature)
            return OnnxRuntimeInstance(interface, opened, None)
        # one source object is one load of a version: a reload never gets the old session
        key = (id(source), spec.cores)
        with self._lock:
            shared = self._shared.setdefault(key, _Shared(source))
            shared.users += 1

        def release() -> None:
            with self._lock:
                shared.users -= 1
                if shared.users == 0:
                    self._shared.pop(key, None)

        try:
            with shared.lock:  # instances of a version are created concurrently, and the file is opened once
                if shared.opened is None:
                    sharers = sum(group.count for group in interface.instance_groups if group.kind == "KIND_CPU")
                    probed = None
                    if not spec.cores:  # the probed session's threads may run anywhere
                        with self._lock:
                            probed = self._probed.pop(_fingerprint(source, path, sharers), None)
                    with thread_on(spec.cores):  # the session's threads inherit the cores of this one
                        shared.opened = probed or _open(source, path, "CPU", -1, sharers)
                check_against_graph(source.config, shared.opened.signature)
                return OnnxRuntimeInstance(interface, shared.opened, release)
        except BaseException:
            release()
            raise


class OnnxRuntimeInstance:
    """An `InterruptibleInstance` over a session."""

    stateless = True
    """A graph keeps no state between executions."""

    def __init__(self, interface: ModelInterface, opened: _Session, release: Callable[[], None] | None) -> None:
        self.session: Any = opened.session
        self._run_options = opened.run_options()
        self._release = release
        graph = (*opened.signature.inputs, *opened.signature.outputs)
        self._strings = frozenset(t.name for t in opened.signature.inputs if t.datatype == "BYTES")
        self._typed = any(t.datatype == "BF16" for t in graph)
        self._name = interface.name

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run the graph for the wanted outputs.

        Raises `InvalidArgument` for strings that are not UTF-8, `Interrupted` after `interrupt`, `InternalError` with
        onnxruntime's message otherwise.
        """
        self._run_options.terminate = False
        if self._strings:
            inputs = {name: self._text(name, a) if name in self._strings else a for name, a in inputs.items()}
        try:
            if self._typed:
                return self._run_typed(inputs, outputs)
            results = self.session.run(outputs, inputs, self._run_options)
        except CharoniaError:
            raise
        except UnicodeDecodeError:
            raise InternalError(
                f"onnx runtime error: a string output of model '{self._name}' is not UTF-8 text"
            ) from None
        except Exception as error:
            if self._run_options.terminate:
                raise Interrupted(f"an execution of model '{self._name}' was interrupted", blameless=True) from None
            raise InternalError(_reason(error)) from None
        return dict(zip(outputs, results, strict=True))

    def interrupt(self) -> None:
        """End the running execution before its next node."""
        self._run_options.terminate = True

    def close(self) -> None:
        """Release the session. Its memory is freed when the last instance that shares it is closed."""
        self.session = None
        if self._release is not None:
            self._release()
            self._release = None

    def _text(self, name: str, array: Array) -> Array:
        """Convert bytes to text: onnxruntime's Python interface would use the repr of bytes objects."""
        text = np.empty(array.size, dtype=np.object_)
        try:
            text[:] = [element.decode() for element in array.ravel().tolist()]
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"string input '{name}' of model '{self._name}' must be UTF-8 text for the onnxruntime backend"
            ) from None
        return text.reshape(array.shape)

    def _run_typed(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run with BF16 tensors. NumPy has no BF16, so onnxruntime's values are made from, and read as, raw memory."""
        import onnxruntime as ort

        feeds = {}
        for name, array in inputs.items():
            if array.dtype == DataType.BF16.numpy:
                bits = np.ascontiguousarray(array).view(np.uint16)
                feeds[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
            else:
                feeds[name] = ort.OrtValue.ortvalue_from_numpy(array)
        values = self.session.run_with_ort_values(outputs, feeds, self._run_options)
        results: dict[str, Array] = {}
        for name, value in zip(outputs, values, strict=True):
            if value.data_type() == "tensor(bfloat16)":
                shape = tuple(value.shape())
                size_bytes = 2 * int(np.prod(shape))
                raw = ctypes.string_at(value.data_ptr(), size_bytes) if size_bytes else b""
                results[name] = np.frombuffer(raw, dtype=DataType.BF16.numpy).reshape(shape)
            else:
                results[name] = value.numpy()
        return results


def model_path(source: ModelSource) -> Path:
    """Return the model file: `default_model_filename` or model.onnx; if that is a directory, the model.onnx in it.

    Raises `InvalidArgument` for a name that leads out of the version directory, `NotFound` when there is no file (R5).
    """
    filename = source.config.default_model_filename or DEFAULT_FILENAME
    root = source.version_directory.resolve()
    path = (root / filename).resolve()
    if not path.is_relative_to(root) or path == root:
        raise InvalidArgument(
            f"default model filename '{filename}' of '{source.name}' is outside the version directory"
        )
    if path.is_dir():
        named = path / DEFAULT_FILENAME
        candidates = [named] if named.is_file() else sorted(path.glob("*.onnx"))
        if len(candidates) != 1:
            raise NotFound(f"unable to find '{named}' for model '{source.name}'")
        path = candidates[0].resolve()
        if not path.is_relative_to(root):
            raise InvalidArgument(f"model file of '{source.name}' is outside the version directory")
    if not path.is_file():
        raise NotFound(f"unable to find '{path}' for model '{source.name}'")
    return path


def _fingerprint(source: ModelSource, path: Path, threads_for: int) -> tuple[object, ...]:
    """Identifies what a probed session was made from, so that it is only used for the same."""
    stat = path.stat()
    parameters = tuple(sorted((key, value.string_value) for key, value in source.config.parameters.items()))
    optimization = source.config.optimization.graph.level
    threads = intra_op_threads(source, threads_for, _cores())
    libraries = tuple(source.config.model_operations.op_library_filename)
    return (source.name, str(path), stat.st_mtime_ns, stat.st_size, parameters, optimization, threads, libraries)


def _configured_sharers(source: ModelSource) -> int:
    """Estimate the CPU instances of the normalised configuration (C8). A wrong guess only opens the file again."""
    groups = source.config.instance_group
    return sum(max(1, group.count) for group in groups if group.count > 0) or 2


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _library(source: ModelSource) -> ModuleType:
    try:
        import onnxruntime
    except ImportError as error:
        raise Unsupported(
            f"model '{source.name}' needs the onnxruntime backend, whose library is not installed: install "
            f"charonia[cpu], or charonia[gpu] for NVIDIA devices ({error})"
        ) from None
    module: ModuleType = onnxruntime
    return module


def _open(source: ModelSource, path: Path, kind: str, device_id: int, sharers: int) -> _Session:
    ort = _library(source)
    options = session_options(ort, source, intra_op_threads(source, sharers, _cores()))
    providers: list[Any] = ["CPUExecutionProvider"]
    if kind in ("GPU", "MODEL") and "CUDAExecutionProvider" in ort.get_available_providers():
        _find_cuda(ort)
        providers.insert(0, ("CUDAExecutionProvider", cuda_provider_options(source, max(device_id, 0))))
    elif kind == "GPU":
        raise Unsupported(
            f"model '{source.name}' asks for a GPU instance, but the installed onnxruntime has no CUDA provider: "
            "install charonia[gpu] in place of charonia[cpu]"
        )
    providers = [*accelerator_providers(ort, source, kind), *providers]
    try:
        session = ort.InferenceSession(os.fspath(path), sess_options=options, providers=providers)
    except Exception as error:
        raise InternalError(f"onnx runtime error: {_reason(error)}") from None
    if kind == "GPU" and "CUDAExecutionProvider" not in session.get_providers():
        # the library would silently fall back to the CPU, but a GPU instance must use the GPU
        raise InternalError(
            f"model '{source.name}': onnxruntime could not use GPU {device_id}; why is among its own lines in the "
            "log of this executor (without CUDA and cuDNN on the machine: install charonia[cuda])"
        )
    entries = run_entries(source)

    def run_options() -> Any:
        made = ort.RunOptions()
        for key, value in entries:
            made.add_run_config_entry(key, value)
        return made

    return _Session(session, _signature(source, session), run_options)


def _find_cuda(ort: Any) -> None:
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


def _reason(error: Exception) -> str:
    return str(error).strip().removeprefix("[ONNXRuntimeError] : ")
