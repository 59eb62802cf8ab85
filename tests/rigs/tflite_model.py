"""A small TensorFlow Lite file: one dense layer."""

from __future__ import annotations

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as tflite

WEIGHTS = np.array([[1, 2, 3], [-4, 5, 6]], np.float32)
BIAS = np.array([0.5, -0.5], np.float32)


def model_bytes() -> bytes:
    """A dense layer of 3 inputs and 2 outputs: `y = relu(x @ WEIGHTS.T + BIAS)`."""
    model = tflite.ModelT()
    model.version = 3
    model.buffers = [tflite.BufferT() for _ in range(3)]
    for buffer, array in zip(model.buffers[1:], (WEIGHTS, BIAS), strict=True):
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
    graph = tflite.SubGraphT()
    graph.tensors = []
    tensors = (("x", (1, 3), 0), ("w", (2, 3), 1), ("b", (2,), 2), ("y", (1, 2), 0))
    for name, shape, buffer_number in tensors:
        tensor = tflite.TensorT()
        tensor.name, tensor.shape, tensor.buffer = name.encode(), list(shape), buffer_number
        tensor.type = tflite.TensorType.FLOAT32
        if name in "xy":
            tensor.shapeSignature = [-1, *shape[1:]]
        graph.tensors.append(tensor)
    graph.inputs, graph.outputs = [0], [3]
    layer = tflite.OperatorT()
    layer.inputs, layer.outputs = [0, 1, 2], [3]
    layer.builtinOptionsType = tflite.BuiltinOptions.FullyConnectedOptions
    layer.builtinOptions = tflite.FullyConnectedOptionsT()
    layer.builtinOptions.fusedActivationFunction = tflite.ActivationFunctionType.RELU
    graph.operators = [layer]
    code = tflite.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = tflite.BuiltinOperator.FULLY_CONNECTED
    signature = tflite.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = b"serving_default", 0
    signature.inputs, signature.outputs = [tflite.TensorMapT()], [tflite.TensorMapT()]
    signature.inputs[0].name, signature.inputs[0].tensorIndex = b"x", 0
    signature.outputs[0].name, signature.outputs[0].tensorIndex = b"y", 3
    model.operatorCodes, model.subgraphs, model.signatureDefs = [code], [graph], [signature]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def expected(x: np.ndarray) -> np.ndarray:
    """What it answers."""
    return np.maximum(x @ WEIGHTS.T + BIAS, 0)
