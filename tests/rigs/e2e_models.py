"""Model repositories of a test's own: small ONNX graphs and python models, written the way users write them."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import numpy as np

WIDTH = 4

GATED = '''
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """VALUE -> EXECUTION (which execution of this instance), REQUESTS (how many shared it).

    Parameter `entered`: a file to make when the request begins. `gate`: a file to wait for before going on.
    """

    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        self.count += 1
        for request in requests:
            parameters = json.loads(request.parameters())
            if "entered" in parameters:
                open(parameters["entered"], "w").close()
        for request in requests:
            gate = json.loads(request.parameters()).get("gate", "")
            give_up_at = time.monotonic() + 240  # several commands are started meanwhile
            while gate and not os.path.exists(gate) and time.monotonic() < give_up_at:
                time.sleep(0.002)
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
            fill = lambda number: np.full(value.shape, number, np.int32)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("EXECUTION", fill(self.count)),
                pb_utils.Tensor("REQUESTS", fill(len(requests))),
                pb_utils.Tensor("ECHO", value),
            ]))
        return responses
'''

GATED_IO = """
input [ { name: "VALUE" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [
  { name: "EXECUTION" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "REQUESTS" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "ECHO" data_type: TYPE_INT32 dims: [ -1 ] }
]
"""

SCALING_IO = f"""
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
"""


@functools.cache
def scaling_graph(factor: float) -> bytes:
    """An ONNX model: FP32 [batch, WIDTH] INPUT0 times `factor` -> OUTPUT0."""
    import onnx
    from onnx import TensorProto, helper

    def tensor(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH])

    by = helper.make_tensor("by", TensorProto.FLOAT, [1], np.array([factor], np.float32))
    node = helper.make_node("Mul", ["INPUT0", "by"], ["OUTPUT0"])
    graph = helper.make_graph([node], "scaling", [tensor("INPUT0")], [tensor("OUTPUT0")], [by])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())


def put(path: Path, content: bytes | str) -> None:
    """Write a file in one step, so that nobody sees half of it; the temporary one lies outside the model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    # a repository ignores hidden directories
    staging = path.parents[2] if len(path.parents) > 2 and path.parents[2].is_dir() else path.parent
    with tempfile.NamedTemporaryFile(dir=staging, prefix=".staged", delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def scaling(repository: Path, name: str, factor: float, *, version: int = 1, config: str | None = "") -> Path:
    """An ONNX model that multiplies. `config` is what config.pbtxt says beyond names and types; None writes no file."""
    model = repository / name
    put(model / str(version) / "model.onnx", scaling_graph(factor))
    if config is not None and not (config == "" and (model / "config.pbtxt").exists()):
        put(model / "config.pbtxt", f'backend: "onnxruntime"\nmax_batch_size: 8\n{SCALING_IO}\n{config}\n')
    return model


def echoing(repository: Path, name: str) -> Path:
    """An ONNX model that gives back FP32 rows of any length: INPUT0 as OUTPUT0."""
    return _giving_back(repository, name, "FLOAT", "TYPE_FP32")


def strings(repository: Path, name: str) -> Path:
    """As `echoing`, of strings."""
    return _giving_back(repository, name, "STRING", "TYPE_STRING")


def _giving_back(repository: Path, name: str, graph_type: str, type_name: str) -> Path:
    import onnx
    from onnx import TensorProto, helper

    element = getattr(TensorProto, graph_type)
    ends = [helper.make_tensor_value_info(end, element, ["batch", "n"]) for end in ("INPUT0", "OUTPUT0")]
    graph = helper.make_graph([helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])], "echo", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    assert isinstance(model, onnx.ModelProto)
    put(repository / name / "1" / "model.onnx", model.SerializeToString())
    io = "".join(f'{way} [ {{ name: "{end}" data_type: {type_name} dims: [ -1 ] }} ]\n' for way, end in _ECHO_IO)
    put(repository / name / "config.pbtxt", f'backend: "onnxruntime"\nmax_batch_size: 8\n{io}')
    return repository / name


_ECHO_IO = (("input", "INPUT0"), ("output", "OUTPUT0"))


def python(repository: Path, name: str, source: str, config: str | None, *, version: int = 1) -> Path:
    """A python model; `config` is the whole of config.pbtxt beyond the backend, None writes no file."""
    model = repository / name
    put(model / str(version) / "model.py", source)
    if config is not None:
        put(model / "config.pbtxt", f'backend: "python"\n{config}\n')
    return model


def gated(repository: Path, name: str, config: str) -> Path:
    """The model that waits for files; see GATED."""
    return python(repository, name, GATED, GATED_IO + config)
