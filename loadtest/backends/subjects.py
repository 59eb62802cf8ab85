"""What is measured: models of each backend, the rows of their requests, and their configurations.

The model files are written by `model_files`, the libraries are called by `bare`, the server is loaded by `served`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadtest.model import LoadTestError

Array = np.ndarray[Any, Any]

TREES, DEPTH, FEATURES = 500, 8, 32
IMAGE = (3, 224, 224)
"""600 KB in FP32."""
DENSE, CLASSES = 1024, 1000
ISOLATIONS = ("none", "process", "sandbox")

_BATCHED = "dynamic_batching { }"


@dataclass(frozen=True)
class Subject:
    """One model as its library runs it alone, and as a model of the server.

    `shape` is that of a request, rows first. `threads` is the parameter that bounds the model's threads to one, as
    the library has alone. `bodies` different requests are sent in turns: of the same rows a processor learns the
    branches of trees. A model with a `batch` joins requests up to so many rows, the others run each alone; the library
    alone runs the rows of a request at once, or `bare_rows`.
    """

    name: str
    backend: str
    file: str
    library: str
    shape: tuple[int, ...]
    outputs: int
    tensors: tuple[str, str] = ("INPUT0", "OUTPUT0")
    threads: tuple[str, str] | None = None
    more: str = ""
    in_flight: int = 4
    bodies: int = 8
    batch: int = 0
    bare_rows: int = 0
    isolations: tuple[str, ...] = ISOLATIONS

    @property
    def rows(self) -> int:
        """Rows of a request."""
        return self.shape[0]

    def contents(self, rows: int = 0) -> list[Array]:
        """The tensors of requests, or of so many rows: random, and the same in each run."""
        source = np.random.default_rng(1)
        shape = (rows or self.rows, *self.shape[1:])
        return [source.standard_normal(shape, dtype=np.float32) for _ in range(self.bodies)]

    def model(self, isolation: str) -> str:
        """The name of the model of a repository that is isolated so."""
        return f"{self.name}_{isolation}"

    def config(self, isolation: str) -> str:
        """The text of its config.pbtxt."""
        given = dict([self.threads] if self.threads else []) | {"charonia.isolation": isolation}
        lines = [
            f'name: "{self.model(isolation)}"',
            f'backend: "{self.backend}"',
            f'default_model_filename: "{self.file}"',
            f"max_batch_size: {self.batch or self.rows}",
            f'input {{ name: "{self.tensors[0]}" data_type: TYPE_FP32 dims: {list(self.shape[1:])} }}',
            f'output {{ name: "{self.tensors[1]}" data_type: TYPE_FP32 dims: [ {self.outputs} ] }}',
            "instance_group { count: 1 kind: KIND_CPU }",
            _BATCHED if self.batch else "",
            self.more,
            *(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in given.items()),
        ]
        return "\n".join(filter(None, lines)) + "\n"


_ONNX = Subject(
    *("onnx_resnet18", "onnxruntime", "resnet18.onnx", "onnxruntime", (1, *IMAGE), CLASSES),
    threads=("intra_op_thread_count", "1"),
)
_TORCH = Subject(
    *("torchscript", "pytorch", "resnet18.pt", "torchscript", (1, *IMAGE), CLASSES),
    tensors=("INPUT__0", "OUTPUT__0"),
    threads=("INTRA_OP_THREAD_COUNT", "1"),
    more='platform: "pytorch_libtorch"',
    isolations=("process", "sandbox"),
)
_TREES = Subject(
    *("fil_256", "fil", "xgboost.ubj", "trees", (256, FEATURES), 1),
    tensors=("input__0", "output__0"),
    threads=("cpu_nthread", "1"),
    in_flight=16,
    bodies=32,
    batch=2048,
    isolations=("none", "process"),
)

SUBJECTS = {
    subject.name: subject
    for subject in (
        _ONNX,
        replace(_ONNX, name="onnx_batched", in_flight=16, batch=8, bare_rows=8),
        replace(_ONNX, name="onnx_quick", file="quick.onnx"),
        replace(
            _ONNX,
            name="openvino_resnet18",
            backend="openvino",
            library="openvino",
            threads=("INFERENCE_NUM_THREADS", "1"),
        ),
        _TORCH,
        replace(_TORCH, name="torch_batched", in_flight=16, batch=8, bare_rows=8),
        replace(_TORCH, name="torch_pt2", file="resnet18.pt2", library="pt2"),
        _TREES,
        replace(_TREES, name="fil_32", shape=(32, FEATURES), in_flight=32, bodies=64),
        replace(_TREES, name="fil_1", shape=(1, FEATURES), in_flight=64, bodies=256),
        Subject(
            *("litert_dense", "litert", "dense.tflite", "litert", (8, DENSE), DENSE),
            tensors=("x", "y"),
            isolations=("none", "process"),
        ),
    )
}


def find(names: str) -> list[Subject]:
    """The subjects of a comma-separated list; "all" is every subject. Raises LoadTestError for an unknown name."""
    if names == "all":
        return list(SUBJECTS.values())
    unknown = set(names.split(",")) - SUBJECTS.keys()
    if unknown:
        raise LoadTestError(f"unknown subject {', '.join(sorted(unknown))}; known are {', '.join(SUBJECTS)}")
    return [SUBJECTS[name] for name in names.split(",")]
