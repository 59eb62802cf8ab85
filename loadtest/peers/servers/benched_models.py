"""What every Python peer shares: the benched models as functions, and the JSON bodies; runs in a peer's environment.

LOADTEST_CASES is a JSON document: by name input, output, shape of one request, ONNX file or null, largest batch.
"""

import base64
import json
import os

import numpy as np
import onnxruntime

CASES = json.loads(os.environ["LOADTEST_CASES"])
LARGE_ELEMENTS = 100_000


def runner(name):
    """A function from [N,...] FP32 to [N,...] FP32."""
    case = CASES[name]
    if case["path"] is None:
        return lambda tensor: tensor
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2 if name == "resnet18" else 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(case["path"], options, providers=["CPUExecutionProvider"])
    return lambda tensor: session.run(None, {case["input"]: tensor})[0]


def decode(name, document):
    """The tensor of a JSON body: KServe v2 JSON, or base64 for large ones."""
    if "b64" in document:
        return np.frombuffer(base64.b64decode(document["b64"]), np.float32).reshape(CASES[name]["shape"])
    tensor = document["inputs"][0]
    return np.asarray(tensor["data"], np.float32).reshape(tensor["shape"])


def encode(name, tensor):
    """The JSON document of an answer."""
    if tensor.size > LARGE_ELEMENTS:
        return {"b64": base64.b64encode(tensor.tobytes()).decode()}
    output = {"name": CASES[name]["output"], "datatype": "FP32", "shape": list(tensor.shape)}
    return {"model_name": name, "outputs": [{**output, "data": tensor.ravel().tolist()}]}
