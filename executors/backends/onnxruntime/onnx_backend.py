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
import contextlib
import ctypes
import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from charonia.backend import (
    Array,
    Backend,
    DeviceLost,
    Format,
    GraphSignature,
    InstanceSpec,
    Interrupted,
    MemoryUse,
    ModelSource,
    TensorSignature,
)
from charonia.cuda.lost_contexts import is_lost
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, Unsupported
from charonia.models.interface import ModelInterface
from charonia.tensors import object_array
from executors.backends.model_files import model_path
from executors.configuration.autofill import check_against_graph
from executors.host.host_policy import thread_on

from .bound_runs import GRAPH, BoundRuns
from .execution_providers import CPU, CUDA, OPENVINO, execution_providers
from .graph_weights import weight_bytes
from .library_setup import set_up
from .session_options import intra_op_threads, run_entries, session_options

_DEFAULT_FILENAME = "model.onnx"

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
_openvino_lock = threading.Lock()
"""The OpenVINO provider makes one session at a time."""


@dataclass(slots=True)
class _Session:
    """A session and its signature."""

    session: Any
    signature: GraphSignature
    run_options: Callable[[], Any]
    """Makes the options of an instance's runs."""
    bound: Callable[[], BoundRuns] | None = None
    """Makes the runs of an instance that has CUDA graphs."""


class OnnxRuntimeBackend(Backend):
    """The backend `onnxruntime`."""

    name = "onnxruntime"
    api = (1, 0)
    # runs release the interpreter's lock, so that a second instance is a gain
    formats = (Format("onnxruntime_onnx", (_DEFAULT_FILENAME,), cpu_instances=2),)
    supports = frozenset(("execution_accelerators", "op_libraries"))
    # the Python interface copies them one by one into the library's own, and back
    strings_apart = True
    requires = (("onnxruntime", "charonia[cpu], or charonia[gpu] for NVIDIA devices"),)

    def prefers_gpu(self) -> bool:
        """Whether instances of kind AUTO use a GPU: only when the installed library supports it (C8)."""
        import onnxruntime as ort

        return CUDA in ort.get_available_providers()

    async def open(self, settings: Mapping[str, str]) -> None:
        """Set up what all sessions share. Raises `InvalidArgument` for a setting with a bad value."""
        import onnxruntime as ort

        set_up(ort, settings, _cores())

    async def load(self, source: ModelSource) -> OnnxModel:
        """Return the model; its file is opened when something asks for it."""
        return OnnxModel(source)


class OnnxModel:
    """One load of an ONNX model's version: its CPU sessions, one for each set of cores. A GPU instance has its own."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._sessions: dict[frozenset[int], tuple[object, _Session]] = {}
        """With what each was made from."""
        self._places: list[tuple[Literal["CPU", "GPU"], int]] = []
        """Where each of the other sessions has its weights."""
        self._lock = threading.Lock()

    async def signature(self) -> GraphSignature:
        """Return names, types and dims of the graph (C71). Raises `CharoniaError` for a file that cannot be loaded."""
        sharers = _configured_sharers(self._source)
        return (await asyncio.to_thread(self._session, self._source, sharers)).signature

    async def create_instance(self, spec: InstanceSpec) -> OnnxRuntimeInstance:
        """Make an instance with a session of its own, or with the CPU session of its model version.

        Raises `InvalidArgument` when the configuration does not fit the graph, `Unsupported` for a GPU without the
        library's CUDA provider.
        """
        return await asyncio.to_thread(self._create, spec)

    def memory(self) -> list[MemoryUse]:
        """The weights of the file, once for each session; not what executions take, which the library does not say."""
        size_bytes = weight_bytes(model_path(self._source, _DEFAULT_FILENAME))
        if size_bytes is None:
            return []
        with self._lock:
            places = [*(("CPU", 0) for _ in self._sessions), *self._places]
        return [MemoryUse(kind, device, size_bytes) for kind, device in places]

    async def close(self) -> None:
        """Release the sessions. Their memory is freed when the last instance that uses one is closed."""
        with self._lock:
            self._sessions.clear()

    def _create(self, spec: InstanceSpec) -> OnnxRuntimeInstance:
        source, interface = spec.source, spec.interface
        if spec.kind == "CPU":
            sharers = sum(group.count for group in interface.instance_groups if group.kind == "KIND_CPU")
            opened = self._session(source, sharers, spec.cores)
        else:
            with thread_on(spec.cores):
                opened = _open(source, model_path(source, _DEFAULT_FILENAME), spec.kind, spec.device_id, 1)
            on_gpu = spec.kind == "GPU" or CUDA in opened.session.get_providers()
            with self._lock:
                self._places.append(("GPU", max(spec.device_id, 0)) if on_gpu else ("CPU", 0))
        check_against_graph(source.config, opened.signature)
        return (OnnxRuntimeInstance if opened.bound is None else GraphInstance)(interface, opened)

    def _session(self, source: ModelSource, sharers: int, cores: frozenset[int] = frozenset()) -> _Session:
        """The CPU session with threads for so many instances; the threads run on `cores`, without any anywhere."""
        path = model_path(source, _DEFAULT_FILENAME)
        made_from = _fingerprint(source, path, sharers)
        with self._lock:  # instances are created concurrently, and the file is opened once
            known, opened = self._sessions.get(cores, (None, None))
            if opened is None or known != made_from:
                with thread_on(cores):  # the session's threads inherit the cores of this one
                    opened = _open(source, path, "CPU", -1, sharers)
                self._sessions[cores] = made_from, opened
            return opened


class OnnxRuntimeInstance:
    """An `InterruptibleInstance` over a session."""

    stateless = True
    """A graph keeps no state between executions."""

    def __init__(self, interface: ModelInterface, opened: _Session) -> None:
        self.session: Any = opened.session
        self._run_options = opened.run_options()
        graph = (*opened.signature.inputs, *opened.signature.outputs)
        self._strings = frozenset(t.name for t in opened.signature.inputs if t.datatype == "BYTES")
        self._typed = any(t.datatype == "BF16" for t in graph)
        self._on_gpu = CUDA in self.session.get_providers()
        self._name = interface.name

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run the graph for the wanted outputs.

        Raises `InvalidArgument` for strings that are not UTF-8, `Interrupted` after `interrupt`, `DeviceLost` for
        what says that this process has lost its GPU, `InternalError` with onnxruntime's message otherwise.
        """
        self._run_options.terminate = False
        if self._strings:
            inputs = {name: self._text(name, a) if name in self._strings else a for name, a in inputs.items()}
        try:
            return self._run(inputs, outputs)
        except CharoniaError:
            raise
        except UnicodeDecodeError:
            raise InternalError(
                f"onnx runtime error: a string output of model '{self._name}' is not UTF-8 text"
            ) from None
        except Exception as error:
            if self._on_gpu and is_lost(error):
                raise DeviceLost(f"model '{self._name}' has lost its GPU: {_reason(error)}") from None
            if self._run_options.terminate:
                raise Interrupted(f"an execution of model '{self._name}' was interrupted", blameless=True) from None
            raise InternalError(_reason(error)) from None

    def interrupt(self) -> None:
        """End the running execution before its next node."""
        self._run_options.terminate = True

    def close(self) -> None:
        """Release the session. Its memory is freed when nothing else uses it."""
        self.session = None

    def _text(self, name: str, array: Array) -> Array:
        """Convert bytes to text: onnxruntime's Python interface would use the repr of bytes objects."""
        try:
            text = object_array(map(bytes.decode, array.flat), array.size)
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"string input '{name}' of model '{self._name}' must be UTF-8 text for the onnxruntime backend"
            ) from None
        return text.reshape(array.shape)

    def _run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if self._typed:
            return self._run_typed(inputs, outputs)
        return dict(zip(outputs, self.session.run(outputs, inputs, self._run_options), strict=True))

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


class GraphInstance(OnnxRuntimeInstance):
    """One with CUDA graphs: its batches run over memory that stays at its place, all in one thread."""

    def __init__(self, interface: ModelInterface, opened: _Session) -> None:
        super().__init__(interface, opened)
        assert opened.bound is not None
        self._runs = opened.bound()
        self._fits = not self._strings and not self._typed

    def started(self) -> None:
        """Keep all runs in the thread that calls this: the graphs are this thread's."""

    def _run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        if not self._fits:
            return super()._run(inputs, outputs)
        try:
            return self._runs.run(inputs, outputs)
        finally:
            self._run_options.terminate = self._runs.options.terminate

    def interrupt(self) -> None:
        """End the running execution before its next node; a graph runs to its end."""
        super().interrupt()
        self._runs.options.terminate = True


def _fingerprint(source: ModelSource, path: Path, threads_for: int) -> tuple[object, ...]:
    """Identifies what a session is made from, so that it is only used for the same."""
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


def _open(source: ModelSource, path: Path, kind: str, device_id: int, sharers: int) -> _Session:
    import onnxruntime as ort

    providers = execution_providers(source, kind, device_id, ort.get_available_providers())
    options = session_options(ort, source, intra_op_threads(source, sharers, _cores()))
    if any(name == CUDA for name, _ in providers):
        _find_cuda(ort)
    # by itself the library would fall back to the CPU where a provider cannot be used
    with _openvino_lock if providers[0][0] == OPENVINO else contextlib.nullcontext():
        try:
            session = ort.InferenceSession(os.fspath(path), options, providers, enable_fallback=0)
        except Exception as error:
            raise InternalError(f"onnx runtime error: {_reason(error)}") from None
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
    return _Session(session, _signature(source, session), run_options, bound)


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
