"""TensorFlow's files as OpenVINO reads them: SavedModels and frozen graphs.

Names are TensorFlow's: those of the signature for a SavedModel, those of the nodes for a frozen graph (`image` for its
first output, `split:1` for its second).

OpenVINO serves the signature `serving_default` of one graph. For another (`TF_SIGNATURE_DEF`, `TF_GRAPH_TAG`) it gets a
copy of `saved_model.pb` which has that one alone, beside links to the other files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from charonia.backend import ModelSource
from charonia.errors import CharoniaError, InternalError, InvalidArgument, Unsupported

SAVED_MODEL = "saved_model.pb"
_SERVING = "serving_default"
_SERVING_TAG = "serve"
_INITIALISATION = ("__saved_model_init_op", "__saved_model_train_op")
"""Signatures that no client calls."""
Names = tuple[list[str], list[str]]
"""Of inputs and of outputs."""
_UNCONVERTED = re.compile(r"No conversion rule found for operations: ([^\n]+)")
_STRING, _MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_MESSAGES = {
    "SavedModel": {2: ("graphs", "MetaGraph")},
    "MetaGraph": {1: ("info", "MetaInfo"), 5: ("signatures", "Signature")},
    "MetaInfo": {4: ("tags", "")},
    "Signature": {1: ("key", ""), 2: ("tensors", "Tensors")},
    "Tensors": {1: ("inputs", "Tensor"), 2: ("outputs", "Tensor")},
    "Tensor": {1: ("key", "")},
}
"""What of TensorFlow's messages is looked at, all of it repeated: protobuf keeps fields that it does not know."""


@dataclass(frozen=True, slots=True)
class ChosenSignature:
    """A signature's names, and the file that has it as `serving_default`; None where that is the file as it is."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    file: bytes | None


def read_saved_model(core: Any, source: ModelSource, path: Path) -> tuple[Any, Names]:
    """The model of the configured signature, and its names. Raises `CharoniaError`; the library's own errors pass."""
    root = source.version_directory.resolve()
    if any(not file.resolve().is_relative_to(root) for file in path.rglob("*")):
        raise InvalidArgument(f"a file of the SavedModel of '{source.name}' is outside the version directory")
    tag, signature = source.parameter("TF_GRAPH_TAG"), source.parameter("TF_SIGNATURE_DEF")
    chosen = choose_signature(source.name, (path / SAVED_MODEL).read_bytes(), tag, signature)
    if chosen.file is None:
        model = core.read_model(os.fspath(path))
        return model, _names(model, chosen.inputs, chosen.outputs)
    with TemporaryDirectory(prefix="charonia-") as folder:
        for entry in path.iterdir():
            if entry.name != SAVED_MODEL:
                (Path(folder) / entry.name).symlink_to(entry.resolve())
        (Path(folder) / SAVED_MODEL).write_bytes(chosen.file)
        model = core.read_model(folder)
    return model, _names(model, chosen.inputs, chosen.outputs)


def choose_signature(name: str, content: bytes, tag: str | None, signature: str | None) -> ChosenSignature:
    """Choose among the signatures of a `saved_model.pb`.

    Without `tag` the graph is that for serving; without `signature` it is `serving_default`, else the first by name.
    Raises `InvalidArgument` where the file has no such graph or signature, `InternalError` for another file.
    """
    try:
        saved = _saved_model().FromString(content)
    except DecodeError as error:
        raise InternalError(f"the file '{SAVED_MODEL}' of '{name}' is no SavedModel: {error}") from None
    tag = tag or _SERVING_TAG
    tags = [[word for info in graph.info for word in info.tags] for graph in saved.graphs]
    fitting = [(words != [tag], at) for at, words in enumerate(tags) if tag in words]
    graph = saved.graphs[min(fitting)[1]] if fitting else None
    if graph is None:
        others = _listed(word for words in tags for word in words)
        raise InvalidArgument(
            f"unable to load model '{name}', expected '{tag}' tag; the graphs of the file have {others}"
        )
    found = sorted(key for item in graph.signatures for key in item.key if key not in _INITIALISATION)
    wanted = signature or (_SERVING if _SERVING in found or not found else found[0])
    if wanted not in found:
        raise InvalidArgument(
            f"unable to load model '{name}', expected '{wanted}' signature; the file has {_listed(found)}"
        )
    tensors = [one for item in graph.signatures if wanted in item.key for one in item.tensors]
    inputs = tuple(key for one in tensors for tensor in one.inputs for key in tensor.key)
    outputs = tuple(key for one in tensors for tensor in one.outputs for key in tensor.key)
    if wanted == _SERVING and len(saved.graphs) == 1:
        return ChosenSignature(inputs, outputs, None)
    kept = [item for item in graph.signatures if {wanted, *_INITIALISATION}.intersection(item.key)]
    for item in kept:
        item.key[:] = [_SERVING if key == wanted else key for key in item.key]
    kept_graph = type(graph)()
    kept_graph.CopyFrom(graph)
    del kept_graph.signatures[:]
    kept_graph.signatures.extend(kept)
    del saved.graphs[:]
    saved.graphs.append(kept_graph)
    return ChosenSignature(inputs, outputs, saved.SerializeToString())


def read_frozen_graph(frontend: Any, source: ModelSource, path: Path) -> tuple[Any, Names]:
    """The model between the tensors of the configuration, or the whole graph where it names none, or one too many."""
    graph = frontend.load(os.fspath(path))
    wanted: list[list[str]] = []
    for written, override in (
        (source.config.input, graph.override_all_inputs),
        (source.config.output, graph.override_all_outputs),
    ):
        wanted.append([_tensor_name(item.name) for item in written])
        places = [graph.get_place_by_tensor_name(name) for name in wanted[-1]]
        if places and all(place is not None for place in places):
            override(places)
    model = frontend.convert(graph)
    inputs, outputs = _names(model, *wanted)
    return model, ([name.removesuffix(":0") for name in inputs], [name.removesuffix(":0") for name in outputs])


def _names(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Names:
    """The names of inputs and outputs, in the order of the model.

    A tensor may have several: it may be an input and an output, or an output twice. Those that are wanted come first,
    then the one of its node.
    """
    found: list[list[str]] = []
    for nodes, wanted in ((model.inputs, inputs), (model.outputs, outputs)):
        left, names = list(wanted), []
        for node in nodes:
            own = node.node.get_friendly_name()
            known = sorted(node.names, key=lambda name: (name not in left, name != own, name))
            names.append(known[0] if known else own)
            if names[-1] in left:
                left.remove(names[-1])
        found.append(names)
    return found[0], found[1]


def conversion_error(source: ModelSource, error: Exception) -> CharoniaError | None:
    """The error for a graph with operations that OpenVINO lacks, or None where that is not the reason."""
    missing = _UNCONVERTED.search(str(error))
    if missing is None:
        return None
    return Unsupported(
        f"model '{source.name}' has operations that OpenVINO cannot convert: {missing[1].strip()}; {INSTALL}"
    )


INSTALL = (
    "install the plug-in charonia-tensorflow (plugins/tensorflow): with it, models of the backend 'tensorflow' run in "
    "TensorFlow itself"
)


def _tensor_name(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"'{word}'" for word in sorted(set(words))) or "none"


@cache
def _saved_model() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="saved_model_parts.proto", package="parts", syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for number, (name, kind) in fields.items():
            described.field.add(
                name=name,
                number=number,
                label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
                type=_MESSAGE if kind else _STRING,
                type_name=f".parts.{kind}" if kind else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("parts.SavedModel"))
