"""Small models of TensorFlow, written field by field: frozen graphs and SavedModels, without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
FLOAT, INT32, STRING, INT64 = 1, 3, 7, 9
_F = descriptor_pb2.FieldDescriptorProto
_S, _B, _I, _R, _O = _F.TYPE_STRING, _F.TYPE_BYTES, _F.TYPE_INT64, _F.TYPE_FLOAT, _F.TYPE_BOOL
# number: (name, type of a scalar or name of a message, repeated)
_MESSAGES: dict[str, dict[int, tuple[str, Any, bool]]] = {
    "SavedModel": {1: ("schema_version", _I, False), 2: ("meta_graphs", "MetaGraphDef", True)},
    "MetaGraphDef": {
        1: ("meta_info_def", "MetaInfoDef", False),
        2: ("graph_def", "GraphDef", False),
        5: ("signature_def", "SignatureEntry", True),
    },
    "MetaInfoDef": {4: ("tags", _S, True)},
    "SignatureEntry": {1: ("key", _S, False), 2: ("value", "SignatureDef", False)},
    "SignatureDef": {
        1: ("inputs", "TensorEntry", True),
        2: ("outputs", "TensorEntry", True),
        3: ("method_name", _S, False),
    },
    "TensorEntry": {1: ("key", _S, False), 2: ("value", "TensorInfo", False)},
    "TensorInfo": {1: ("name", _S, False), 2: ("dtype", _I, False), 3: ("tensor_shape", "Shape", False)},
    "GraphDef": {1: ("node", "NodeDef", True), 4: ("versions", "Versions", False)},
    "Versions": {1: ("producer", _I, False)},
    "NodeDef": {1: ("name", _S, False), 2: ("op", _S, False), 3: ("input", _S, True), 5: ("attr", "AttrEntry", True)},
    "AttrEntry": {1: ("key", _S, False), 2: ("value", "AttrValue", False)},
    "AttrValue": {
        2: ("s", _B, False),
        3: ("i", _I, False),
        4: ("f", _R, False),
        5: ("b", _O, False),
        6: ("type", _I, False),
        7: ("shape", "Shape", False),
        8: ("tensor", "Tensor", False),
    },
    "Shape": {2: ("dim", "Dim", True)},
    "Dim": {1: ("size", _I, False)},
    "Tensor": {1: ("dtype", _I, False), 2: ("tensor_shape", "Shape", False), 4: ("tensor_content", _B, False)},
}


@cache
def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"tf.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="written.proto", package="tf", syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for number, (name, kind, repeated) in fields.items():
            field = described.field.add(name=name, number=number, label=3 if repeated else 1)
            field.type = _F.TYPE_MESSAGE if isinstance(kind, str) else kind
            if isinstance(kind, str):
                field.type_name = f".tf.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _shape(dims: Sequence[int]) -> Any:
    return _class("Shape")(dim=[{"size": dim} for dim in dims])


def node(name: str, op: str, inputs: Sequence[str] = (), **attributes: Any) -> Any:
    """A node; an attribute is a dict of the field that it is in, as `{"type": FLOAT}`."""
    made = _class("NodeDef")(name=name, op=op, input=inputs)
    for key, value in attributes.items():
        made.attr.add(key=key, value=value)
    return made


def placeholder(name: str, dims: Sequence[int], dtype: int = FLOAT) -> Any:
    return node(name, "Placeholder", dtype={"type": dtype}, shape={"shape": _shape(dims)})


def constant(name: str, array: np.ndarray) -> Any:
    value = {"dtype": FLOAT, "tensor_shape": _shape(array.shape), "tensor_content": array.tobytes()}
    return node(name, "Const", dtype={"type": FLOAT}, value={"tensor": value})


def scoring() -> list[Any]:
    """`scores = softmax(image @ WEIGHTS)`, and beside it `sum = (x + y) @ WEIGHTS` with `x` handed on as `echo`."""
    of = {"T": {"type": FLOAT}}
    return [
        placeholder("image", (-1, 4)),
        placeholder("x", (-1, 4)),
        placeholder("y", (-1, 4)),
        constant("weights", WEIGHTS),
        node("logits", "MatMul", ["image", "weights"], **of),
        node("scores", "Softmax", ["logits"], **of),
        node("both", "AddV2", ["x", "y"], **of),
        node("sum", "MatMul", ["both", "weights"], **of),
    ]


def scores_alone() -> list[Any]:
    """`scores = softmax(image @ WEIGHTS)`, and nothing else."""
    return [made for made in scoring() if made.name in ("image", "weights", "logits", "scores")]


def frozen_graph(nodes: Sequence[Any]) -> bytes:
    """The bytes of a frozen graph."""
    written: bytes = _graph(nodes).SerializeToString()
    return written


def _graph(nodes: Sequence[Any]) -> Any:
    return _class("GraphDef")(node=nodes, versions={"producer": 1395})


Signature = tuple[Mapping[str, str], Mapping[str, str]]
"""Inputs and outputs: the node of each name."""

SERVING: Signature = ({"picture": "image"}, {"scores": "scores", "raw": "logits"})
ADDING: Signature = ({"left": "x", "right": "y"}, {"sum": "sum", "echo": "x"})


def saved_model(
    directory: Path,
    signatures: Mapping[str, Signature],
    tags: Sequence[Sequence[str]] = (("serve",),),
    nodes: Sequence[Any] | None = None,
    dtype: int = FLOAT,
) -> None:
    """Write a SavedModel with such a graph for each list of tags."""
    saved = _class("SavedModel")(schema_version=1)
    for words in tags:
        graph = saved.meta_graphs.add(graph_def=_graph(scoring() if nodes is None else nodes))
        graph.meta_info_def.tags.extend(words)
        for key, (inputs, outputs) in signatures.items():
            signature = graph.signature_def.add(key=key).value
            signature.method_name = "tensorflow/serving/predict"
            for entries, named in ((signature.inputs, inputs), (signature.outputs, outputs)):
                for name, of in named.items():
                    width = 4 if of in ("image", "x", "y") else 3
                    entries.add(
                        key=name, value={"name": f"{of}:0", "dtype": dtype, "tensor_shape": _shape((-1, width))}
                    )
    (directory / "variables").mkdir(parents=True)
    (directory / "saved_model.pb").write_bytes(saved.SerializeToString())


def scores(image: np.ndarray) -> np.ndarray:
    """What `scores` answers."""
    powers = np.exp(image @ WEIGHTS - (image @ WEIGHTS).max(-1, keepdims=True))
    result: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return result
