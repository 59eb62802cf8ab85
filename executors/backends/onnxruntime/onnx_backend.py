"""The backend, and one load of an ONNX model: which sessions there are, and which instances share one.

The library is imported when a model first needs it. This module checks a configuration against the graph;
`executors.configuration` checks the rest. `onnx_session` opens files, `onnx_instance` runs arrays.

Threads: by default, onnxruntime uses every physical core for each session, which oversubscribes a machine with several
instances and models. So a session gets cores / CPU instances of its model (at least 1), unless
`parameters { key: "intra_op_thread_count" }` is set (0: the library's default), and idle threads sleep instead of
spinning. CPU instances of one model version share a session: it is safe for concurrent runs, and saves a second copy of
the weights. Groups whose host policies name different cores have a session each.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from charonia.backend import Backend, Format, GraphSignature, InstanceSpec, MemoryUse, ModelSource
from executors.backends.model_files import model_path
from executors.configuration.autofill import check_against_graph
from executors.host.host_policy import thread_on

from .execution_providers import CUDA
from .graph_weights import weight_bytes
from .library_setup import set_up
from .onnx_instance import GraphInstance, OnnxRuntimeInstance
from .onnx_session import Session, open_session
from .session_options import intra_op_threads

_DEFAULT_FILENAME = "model.onnx"


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
        self._sessions: dict[frozenset[int], tuple[object, Session]] = {}
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
                threads = intra_op_threads(source, 1, _cores())
                path = model_path(source, _DEFAULT_FILENAME)
                opened = open_session(source, path, spec.kind, spec.device_id, threads)
            on_gpu = spec.kind == "GPU" or CUDA in opened.session.get_providers()
            with self._lock:
                self._places.append(("GPU", max(spec.device_id, 0)) if on_gpu else ("CPU", 0))
        check_against_graph(source.config, opened.signature)
        return (OnnxRuntimeInstance if opened.bound is None else GraphInstance)(interface, opened)

    def _session(self, source: ModelSource, sharers: int, cores: frozenset[int] = frozenset()) -> Session:
        """The CPU session with threads for so many instances; the threads run on `cores`, without any anywhere."""
        path = model_path(source, _DEFAULT_FILENAME)
        made_from = _fingerprint(source, path, sharers)
        with self._lock:  # instances are created concurrently, and the file is opened once
            known, opened = self._sessions.get(cores, (None, None))
            if opened is None or known != made_from:
                with thread_on(cores):  # the session's threads inherit the cores of this one
                    opened = open_session(source, path, "CPU", -1, intra_op_threads(source, sharers, _cores()))
                self._sessions[cores] = made_from, opened
            return opened


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
