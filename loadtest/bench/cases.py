"""The benched models: shapes, configurations, and the script that writes them into a model repository.

The ONNX files have random weights of a fixed seed: `mlp` is 784-256-10, `resnet18` has the topology of ResNet-18
(1.8 GMAC an image). Nothing is downloaded and nothing is committed; `ocr_rec` is copied from the example models.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.model import LoadTestError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One benched model: its tensors, the shape of one request, and the CPU seconds that one request takes.

    `path` is the ONNX file below a repository made by `write_repository`; None for a model that returns its input.
    `identity_levels` has two priority levels; `mixed` is no model but the trace of `mixed.py` over several of them.
    `cost_s` stretches the measured window, so that it holds several answers of every caller.
    """

    name: str
    shape: tuple[int, ...]
    input: str = "INPUT0"
    output: str = "OUTPUT0"
    path: str | None = None
    cost_s: float = 0.0


CASES = {
    case.name: case
    for case in (
        Case("identity", (1, 16)),
        Case("mlp", (1, 784), path="mlp/1/model.onnx"),
        Case("ocr_rec", (1, 3, 48, 96), "x", "fetch_name_0", "ocr_rec/1/model.onnx", 0.02),
        Case("identity_py", (1, 16)),
        Case("identity_big", (1, 3, 224, 224), cost_s=0.005),
        Case("resnet18", (1, 3, 224, 224), path="resnet18/1/model.onnx", cost_s=0.025),
        Case("identity_levels", (1, 16)),
        Case("mixed", (1, 16)),
    )
}

MIXED_MODELS = ("identity", "identity_levels", "mlp", "identity_py")

PYTHON_IDENTITY = '''"""Returns its input."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
'''


def find(names: str) -> list[Case]:
    """The cases of a comma-separated list; "all" is every case. Raises LoadTestError for an unknown name."""
    if names == "all":
        return [case for name, case in CASES.items() if name != "identity_levels"]
    unknown = set(names.split(",")) - CASES.keys()
    if unknown:
        raise LoadTestError(f"unknown model {', '.join(sorted(unknown))}; known are {', '.join(CASES)}")
    return [CASES[name] for name in names.split(",")]


def models_of(cases: list[Case]) -> list[Case]:
    """The cases that are models, with those that the mixed trace asks for."""
    names = [case.name for case in cases if case.name != "mixed"]
    if len(names) < len(cases):
        names += MIXED_MODELS
    return [CASES[name] for name in dict.fromkeys(names)]


def content(case: Case) -> Array:
    """The tensor that every request of a case carries: random, and the same in each run."""
    return np.random.default_rng(1).random(case.shape, dtype=np.float32)


@lru_cache(maxsize=16)
def expected(case: Case, repository: Path) -> Array:
    """The right answer to `content`: the input itself, or what a bare onnxruntime session makes of it."""
    if case.path is None:
        return content(case)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(repository / case.path), providers=["CPUExecutionProvider"])
    answer: Array = session.run(None, {case.input: content(case)})[0]
    return answer


LEVELS = "priority_levels: 2 default_priority_level: 2"


def config(
    name: str, backend: str, dims: tuple[list[int], list[int]], max_batch_size: int = 64, parameters: str = ""
) -> str:
    """The text of a config.pbtxt for one FP32 tensor in and one out, batched dynamically."""
    return (
        f'name: "{name}"\nbackend: "{backend}"\nmax_batch_size: {max_batch_size}\n'
        f'input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: {dims[0]} }} ]\n'
        f'output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: {dims[1]} }} ]\n'
        f"dynamic_batching {{ {LEVELS if name == 'identity_levels' else ''} }}\n{parameters}"
    )


class Graph:
    """Collects the nodes and weights of an ONNX graph with one input, INPUT0."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []

    def weight(self, *shape: int, scale: float) -> str:
        """A new random weight, normally distributed."""
        from onnx import numpy_helper

        name = f"w{len(self._weights)}"
        values = (self._random.standard_normal(shape) * scale).astype(np.float32)
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A new node of one output; the name of that output."""
        from onnx import helper

        name = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def convolution(self, x: str, channels: tuple[int, int], kernel: int, stride: int) -> str:
        """A convolution with bias that keeps the size, divided by the stride."""
        inward, outward = channels
        weight = self.weight(outward, inward, kernel, kernel, scale=(2.0 / (inward * kernel * kernel)) ** 0.5)
        return self.node(
            "Conv", x, weight, self.weight(outward, scale=0.01),
            kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4,
        )  # fmt: skip

    def linear(self, x: str, size: tuple[int, int]) -> str:
        """A matrix product with bias."""
        return self.node("Gemm", x, self.weight(*size, scale=0.05), self.weight(size[1], scale=0.0))

    def save(self, path: Path, shapes: tuple[list[int], list[int]]) -> None:
        """Writes the model; the last node's output is OUTPUT0. The shapes leave the batch dimension out."""
        import onnx
        from onnx import TensorProto, helper

        self._nodes[-1].output[0] = "OUTPUT0"
        tensors = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape])
            for name, shape in zip(("INPUT0", "OUTPUT0"), shapes, strict=True)
        ]
        graph = helper.make_graph(self._nodes, "g", tensors[:1], tensors[1:], self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 8
        onnx.checker.check_model(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, str(path))


def _write_mlp(path: Path) -> None:
    graph = Graph()
    graph.linear(graph.node("Relu", graph.linear("INPUT0", (784, 256))), (256, 10))
    graph.save(path, ([784], [10]))


def write_resnet18(path: Path) -> None:
    graph = Graph()
    x = graph.node("Relu", graph.convolution("INPUT0", (3, 64), 7, 2))
    x = graph.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    inward = 64
    for outward in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and outward != 64 else 1
            y = graph.node("Relu", graph.convolution(x, (inward, outward), 3, stride))
            y = graph.convolution(y, (outward, outward), 3, 1)
            short = x if inward == outward else graph.convolution(x, (inward, outward), 1, stride)
            x = graph.node("Relu", graph.node("Add", y, short))
            inward = outward
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x), axis=1)
    graph.linear(x, (512, 1000))
    graph.save(path, ([3, 224, 224], [1000]))


def write_repository(repository: Path, cases: list[Case], examples: Path) -> None:
    """Writes the cases that the repository lacks. Raises LoadTestError when `ocr_rec` is not among the examples."""
    image, threads = [3, 224, 224], 'parameters { key: "intra_op_thread_count" value: { string_value: "1" } }\n'
    two = "instance_group [ { kind: KIND_CPU count: 2 } ]\n"
    configs = {
        "identity": config("identity", "onnxruntime", ([16], [16])),
        "identity_levels": config("identity_levels", "onnxruntime", ([16], [16])),
        "identity_big": config("identity_big", "onnxruntime", (image, image)),
        "identity_py": config("identity_py", "python", ([16], [16])),
        "mlp": config("mlp", "onnxruntime", ([784], [10]), parameters=threads),
        "resnet18": config("resnet18", "onnxruntime", (image, [1000]), 8, two + threads),
    }
    for case in models_of(cases):
        home = repository / case.name
        if (home / "config.pbtxt").exists():
            continue
        if case.name == "ocr_rec":
            if not (examples / "ocr_rec").is_dir():
                raise LoadTestError(f"no ocr_rec in {examples}: run `make models`, or leave it out of --models")
            shutil.copytree(examples / "ocr_rec", home)
            continue
        (home / "1").mkdir(parents=True, exist_ok=True)
        if case.name == "identity_py":
            (home / "1" / "model.py").write_text(PYTHON_IDENTITY)
        elif case.name == "mlp":
            _write_mlp(home / "1" / "model.onnx")
        elif case.name == "resnet18":
            write_resnet18(home / "1" / "model.onnx")
        else:
            shape = list(case.shape[1:])
            graph = Graph()
            graph.node("Identity", "INPUT0")
            graph.save(home / "1" / "model.onnx", (shape, shape))
        (home / "config.pbtxt").write_text(configs[case.name])  # last: it marks the model as complete
