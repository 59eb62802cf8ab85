"""`python -m loadtest.backends.model_files FILE`: writes one model file, in a process that may import its library.

All have random weights of a fixed seed: ResNet-18's topology (1.8 GMAC an image) as ONNX, TorchScript and exported
program; its first block alone (0.35 GMAC); trees that XGBoost grew; three dense layers for TensorFlow Lite. The trees
are written a second time as ONNX, from XGBoost's JSON and apart from the backend's own exporter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.bench.cases import Graph, write_resnet18

from .subjects import CLASSES, DENSE, DEPTH, FEATURES, IMAGE, TREES

_LAYERS = 3
_ROWS = 20_000
"""Of the set that the trees grow on: enough that they are nearly full."""


def _onnx_quick(path: Path) -> None:
    graph = Graph()
    x = graph.node("Relu", graph.convolution("INPUT0", (3, 64), 7, 2))
    x = graph.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    y = graph.convolution(graph.node("Relu", graph.convolution(x, (64, 64), 3, 1)), (64, 64), 3, 1)
    x = graph.node("Relu", graph.node("Add", x, y))
    graph.linear(graph.node("Flatten", graph.node("GlobalAveragePool", x), axis=1), (64, CLASSES))
    graph.save(path, (list(IMAGE), [CLASSES]))


def _resnet() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inward: int, outward: int) -> None:
            super().__init__()
            stride = 1 if inward == outward else 2
            self.first = nn.Conv2d(inward, outward, 3, stride, 1)
            self.second = nn.Conv2d(outward, outward, 3, 1, 1)
            self.short = nn.Identity() if inward == outward else nn.Conv2d(inward, outward, 1, stride)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.short(x) + self.second(torch.relu(self.first(x))))

    torch.manual_seed(0)
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(Block(*pair) for pair in pairwise(widths)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)),
    ).eval()


def _torchscript(path: Path) -> None:
    import torch

    with torch.inference_mode():
        torch.jit.save(torch.jit.trace(_resnet(), torch.zeros(1, *IMAGE)), str(path))


def _pt2(path: Path) -> None:
    import torch

    shapes = ({0: torch.export.Dim("rows", min=1, max=64)},)
    program = torch.export.export(_resnet(), (torch.zeros(2, *IMAGE),), dynamic_shapes=shapes)
    torch.export.save(program, str(path))


def _trees(path: Path) -> None:
    import xgboost

    source = np.random.default_rng(0)
    rows = source.standard_normal((_ROWS, FEATURES), dtype=np.float32)
    labels = source.standard_normal(_ROWS) + rows[:, 0] * rows[:, 1]
    settings = {"objective": "reg:squarederror", "max_depth": DEPTH, "eta": 0.05, "seed": 0}
    booster = xgboost.train(settings, xgboost.DMatrix(rows, labels), TREES)
    booster.save_model(str(path))
    document = json.loads(booster.save_raw("json"))
    _tree_graph(document, path.with_suffix(".onnx"))


def _tree_graph(document: dict[str, Any], path: Path) -> None:
    """The trees of XGBoost's JSON as one TreeEnsembleRegressor."""
    import onnx
    from onnx import TensorProto, helper

    learner = document["learner"]
    nodes: dict[str, list[Any]] = {
        name: []
        for name in ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids",
                     "missing_value_tracks_true")
    }  # fmt: skip
    leaves: list[tuple[int, int, float]] = []
    for number, tree in enumerate(learner["gradient_booster"]["model"]["trees"]):
        columns = (tree[key] for key in ("left_children", "right_children", "split_indices", "split_conditions",
                                         "default_left"))  # fmt: skip
        for index, (left, right, feature, value, tracks) in enumerate(zip(*columns, strict=True)):
            is_leaf = left < 0
            if is_leaf:
                leaves.append((number, index, value))
            row = (number, index, 0 if is_leaf else feature, 0.0 if is_leaf else value,
                   "LEAF" if is_leaf else "BRANCH_LT", max(left, 0), max(right, 0), int(tracks))  # fmt: skip
            for column, one in zip(nodes.values(), row, strict=True):
                column.append(one)
    base = float(str(learner["learner_model_param"]["base_score"]).strip("[]"))
    treeids, nodeids, weights = zip(*leaves, strict=True)
    node = helper.make_node(
        "TreeEnsembleRegressor", ["INPUT0"], ["OUTPUT0"], domain="ai.onnx.ml", n_targets=1, base_values=[base],
        target_treeids=treeids, target_nodeids=nodeids, target_ids=[0] * len(leaves), target_weights=weights,
        **{f"nodes_{name}": column for name, column in nodes.items()},
    )  # fmt: skip
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width])
        for name, width in (("INPUT0", FEATURES), ("OUTPUT0", 1))
    ]
    graph = helper.make_graph([node], "g", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, str(path))


def _dense(path: Path) -> None:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as tflite

    source = np.random.default_rng(0)
    model, graph = tflite.ModelT(), tflite.SubGraphT()
    model.version, model.buffers, graph.tensors, graph.operators = 3, [tflite.BufferT()], [], []

    def tensor(name: str, shape: tuple[int, ...], values: Any = None) -> int:
        one = tflite.TensorT()
        one.name, one.shape, one.type, one.buffer = name.encode(), list(shape), tflite.TensorType.FLOAT32, 0
        if values is None:
            one.shapeSignature = [-1, *shape[1:]]
        else:
            data = tflite.BufferT()
            data.data = np.frombuffer(values.astype(np.float32).tobytes(), np.uint8)
            one.buffer = len(model.buffers)
            model.buffers.append(data)
        graph.tensors.append(one)
        return len(graph.tensors) - 1

    at = tensor("x", (1, DENSE))
    for number in range(_LAYERS):
        weights = source.standard_normal((DENSE, DENSE)) * DENSE**-0.5
        layer = tflite.OperatorT()
        name = "y" if number == _LAYERS - 1 else f"h{number}"
        layer.inputs = [at, tensor(f"w{number}", (DENSE, DENSE), weights), tensor(f"b{number}", (DENSE,), weights[0])]
        at = tensor(name, (1, DENSE))
        layer.outputs = [at]
        layer.builtinOptionsType = tflite.BuiltinOptions.FullyConnectedOptions
        layer.builtinOptions = tflite.FullyConnectedOptionsT()
        layer.builtinOptions.fusedActivationFunction = tflite.ActivationFunctionType.RELU
        graph.operators.append(layer)
    code, signature = tflite.OperatorCodeT(), tflite.SignatureDefT()
    code.builtinCode = code.deprecatedBuiltinCode = tflite.BuiltinOperator.FULLY_CONNECTED
    graph.inputs, graph.outputs = [0], [at]
    signature.signatureKey, signature.subgraphIndex = b"serving_default", 0
    signature.inputs, signature.outputs = [tflite.TensorMapT()], [tflite.TensorMapT()]
    signature.inputs[0].name, signature.inputs[0].tensorIndex = b"x", 0
    signature.outputs[0].name, signature.outputs[0].tensorIndex = b"y", at
    model.subgraphs, model.operatorCodes, model.signatureDefs = [graph], [code], [signature]
    builder = flatbuffers.Builder(1 << 24)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(builder.Output())


WRITERS: dict[str, Callable[[Path], None]] = {
    "resnet18.onnx": write_resnet18,
    "quick.onnx": _onnx_quick,
    "resnet18.pt": _torchscript,
    "resnet18.pt2": _pt2,
    "xgboost.ubj": _trees,
    "dense.tflite": _dense,
}

if __name__ == "__main__":
    file = Path(sys.argv[1])
    WRITERS[file.name](file)
