"""SavedModels and frozen graphs in TensorFlow itself: what stands in for the shipped backend `tensorflow`.

A model of TensorFlow may read and write files, and the library is slow to import: so it runs in a sandbox.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from charonia.backend import Array, Backend, Format, GraphSignature, InstanceSpec, Model, ModelSource, TensorSignature
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported

_NOT_CALLED = ("__saved_model_init_op", "__saved_model_train_op")
"""Signatures that no client calls."""

Run = Callable[[Mapping[str, Array], Sequence[str]], Mapping[str, Array]]


class TensorFlowBackend(Backend):
    name, api, isolation = "tensorflow", (1, 0), "sandbox"
    formats = (
        Format("tensorflow_savedmodel", ("model.savedmodel",), cpu_instances=2),
        Format("tensorflow_graphdef", ("model.graphdef",), cpu_instances=2),
    )
    requires = (("tensorflow", "tensorflow-cpu"),)

    async def load(self, source: ModelSource) -> TensorFlowModel:
        return await asyncio.to_thread(TensorFlowModel, source)


class TensorFlowModel(Model):
    """What the file is, opened once for all instances: TensorFlow runs one graph from several threads."""

    def __init__(self, source: ModelSource) -> None:
        graph = source.config.platform == "tensorflow_graphdef"
        path = _path(source, "model.graphdef" if graph else "model.savedmodel")
        _set_threads(source)
        self._signature: GraphSignature | None = None
        try:
            if graph:
                self._run, names = _frozen_graph(source, path)
            else:
                self._run, self._signature = _saved_model(source, path)
                names = {tensor.name for tensor in (*self._signature.inputs, *self._signature.outputs)}
        except CharoniaError:
            raise
        except Exception as error:
            raise InternalError(f"TensorFlow cannot open model '{source.name}': {_reason(error)}") from None
        for item in (*source.config.input, *source.config.output):
            if item.name not in names:
                raise InvalidArgument(f"model '{source.name}' has no tensor '{item.name}', it has {sorted(names)}")

    async def signature(self) -> GraphSignature | None:
        return self._signature

    async def create_instance(self, spec: InstanceSpec) -> TensorFlowInstance:
        if spec.kind == "GPU":
            raise Unsupported(f"model '{spec.source.name}' asks for a GPU instance, but this plug-in runs on CPUs")
        return TensorFlowInstance(self._run)

    async def close(self) -> None:
        self._run = _closed


class TensorFlowInstance:
    stateless = False
    """A graph may have variables that it changes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        try:
            return self._run(inputs, outputs)
        except Exception as error:
            raise InternalError(f"TensorFlow: {_reason(error)}") from None

    def close(self) -> None:
        self._run = _closed


def _path(source: ModelSource, default: str) -> Path:
    root = source.version_directory.resolve()
    path = (root / (source.config.default_model_filename or default)).resolve()
    if not path.exists():
        raise NotFound(f"unable to find '{path}' for model '{source.name}'")
    if any(not file.resolve().is_relative_to(root) for file in (path, *path.rglob("*"))):
        raise InvalidArgument(f"a file of model '{source.name}' is outside the version directory")
    return path


def _set_threads(source: ModelSource) -> None:
    import tensorflow as tf

    for key, set_number in (
        ("TF_NUM_INTRA_THREADS", tf.config.threading.set_intra_op_parallelism_threads),
        ("TF_NUM_INTER_THREADS", tf.config.threading.set_inter_op_parallelism_threads),
    ):
        wanted = source.integer(key)
        if wanted is not None:
            try:
                set_number(wanted)
            except RuntimeError as error:  # another model of this process has begun
                raise InvalidArgument(f"'{key}' of '{source.name}' cannot be set: {error}") from None


def _saved_model(source: ModelSource, path: Path) -> tuple[Run, GraphSignature]:
    """A session over the graph with its variables and tables, as Triton's backend has it.

    `tf.saved_model.load` would make the saved Python objects again, and fails for those of other releases of Keras.
    """
    import tensorflow as tf

    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph)
    with graph.as_default():
        saved = tf.compat.v1.saved_model.load(session, _tags(source, path), str(path))
    known = sorted(name for name in saved.signature_def if name not in _NOT_CALLED)
    wanted = source.parameter("TF_SIGNATURE_DEF") or ("serving_default" if "serving_default" in known else "")
    wanted = wanted or next(iter(known), "serving_default")
    if wanted not in known:
        raise InvalidArgument(f"unable to load model '{source.name}', expected '{wanted}' signature; it has {known}")
    signature = saved.signature_def[wanted]
    given, found = ({name: one.name for name, one in side.items()} for side in (signature.inputs, signature.outputs))
    return _runner(session, given, found), GraphSignature(_tensors(signature.inputs), _tensors(signature.outputs))


def _runner(session: Any, given: Mapping[str, str], found: Mapping[str, str]) -> Run:
    """Runs of a session. `given` and `found` map inputs and outputs to tensors of the graph; a name without an entry is
    that of its tensor.
    """

    def run(inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        fed = {given.get(name) or _tensor_name(name): array for name, array in inputs.items()}
        results = session.run([found.get(name) or _tensor_name(name) for name in outputs], fed)
        return dict(zip(outputs, results, strict=True))

    return run


def _tags(source: ModelSource, path: Path) -> list[str]:
    """All tags of the graph that has the wanted one: TensorFlow finds a graph only by the whole set."""
    from tensorflow.core.protobuf import saved_model_pb2

    asked = source.parameter("TF_GRAPH_TAG")
    wanted = asked or "serve"
    file = path / "saved_model.pb"
    if not file.exists():  # TensorFlow also reads a text, and a graph in several files
        return [wanted]
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    known = [list(graph.meta_info_def.tags) for graph in saved.meta_graphs]
    if [wanted] in known:
        return [wanted]
    for tags in known:
        if wanted in tags or (not asked and len(known) == 1):
            return tags
    listed = sorted({tag for tags in known for tag in tags})
    raise InvalidArgument(
        f"unable to load model '{source.name}', expected '{wanted}' tag; the graphs of the file have {listed}"
    )


def _frozen_graph(source: ModelSource, path: Path) -> tuple[Run, set[str]]:
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(path.read_bytes()), name="")
    session = tf.compat.v1.Session(graph=graph)
    for operation in _init_operations(source):
        session.run(graph.get_operation_by_name(operation))
    names = {tensor.name.removesuffix(":0") for node in graph.get_operations() for tensor in node.outputs}
    return _runner(session, {}, {}), names


def _init_operations(source: ModelSource) -> list[str]:
    """Those that `TF_INIT_OPS_FILE` names: a file of the version, else of the model."""
    name = source.parameter("TF_INIT_OPS_FILE")
    if name is None:
        return []
    root = source.directory.resolve()
    for path in ((source.version_directory / name).resolve(), (root / name).resolve()):
        if path.is_relative_to(root) and path.is_file():
            try:
                return [str(word) for word in json.loads(path.read_bytes())["init_ops"]]
            except (ValueError, KeyError, TypeError):
                raise InvalidArgument(f"'{name}' of '{source.name}' must be JSON with a list 'init_ops'") from None
    raise InvalidArgument(f"'TF_INIT_OPS_FILE' of '{source.name}': there is no file '{name}' in the model")


def _tensors(declared: Mapping[str, Any]) -> tuple[TensorSignature, ...]:
    """One side of a signature, of TensorInfo messages."""
    import tensorflow as tf

    found = []
    for name, info in declared.items():
        dtype, shape = tf.dtypes.as_dtype(info.dtype), info.tensor_shape
        datatype = "BYTES" if dtype == tf.string else DataType.of_numpy(np.dtype(dtype.as_numpy_dtype)).value
        found.append(TensorSignature(name, datatype, () if shape.unknown_rank else tuple(d.size for d in shape.dim)))
    return tuple(found)


def _tensor_name(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _closed(inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
    raise RuntimeError("the model is closed")


def _reason(error: Exception) -> str:
    return str(getattr(error, "message", None) or error).strip()
