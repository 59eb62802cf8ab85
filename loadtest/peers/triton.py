"""Writes Triton's model repository for the benched cases: python models, the only backend in the wheel.

ONNX files run through onnxruntime inside the python model, with the threads that Charonia is given for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.bench.cases import LEVELS, PYTHON_IDENTITY, Case, models_of

ONNX_MODEL = '''"""Runs an ONNX file; requests of one batch run as one."""

import json

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = 1, 1
        path = parameters["path"]["string_value"]
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.input = parameters["input"]["string_value"]
        self.output = parameters["output"]["string_value"]

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, self.input).as_numpy() for request in requests]
        joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        result = self.session.run(None, {self.input: joined})[0]
        answers, start = [], 0
        for tensor in tensors:
            part = result[start : start + len(tensor)]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor(self.output, part)]))
            start += len(tensor)
        return answers
'''

_MAX_BATCH = {"resnet18": 8, "ocr_rec": 8}
_INSTANCES = {"resnet18": 2}
_DELAY_US = {"ocr_rec": 2000}
_OUTPUTS = {"mlp": [10], "resnet18": [1000], "ocr_rec": [-1, 18710]}
_INPUTS = {"ocr_rec": [3, 48, -1]}


def max_batch(case: Case) -> int:
    """The largest batch that every server may form of a case."""
    return _MAX_BATCH.get(case.name, 64)


def write_triton_repository(target: Path, cases: Sequence[Case], repository: Path) -> None:
    """Writes one python model per case; `repository` holds the ONNX files."""
    for case in models_of(list(cases)):
        home = target / case.name
        (home / "1").mkdir(parents=True)
        (home / "1" / "model.py").write_text(PYTHON_IDENTITY if case.path is None else ONNX_MODEL)
        dims = _INPUTS.get(case.name, list(case.shape[1:]))
        outputs = _OUTPUTS.get(case.name, dims)
        levels = LEVELS if case.name == "identity_levels" else ""
        text = (
            f'name: "{case.name}"\nbackend: "python"\nmax_batch_size: {max_batch(case)}\n'
            f'input [ {{ name: "{case.input}" data_type: TYPE_FP32 dims: {dims} }} ]\n'
            f'output [ {{ name: "{case.output}" data_type: TYPE_FP32 dims: {outputs} }} ]\n'
            f"dynamic_batching {{ max_queue_delay_microseconds: {_DELAY_US.get(case.name, 0)} {levels} }}\n"
            f"instance_group [ {{ kind: KIND_CPU count: {_INSTANCES.get(case.name, 1)} }} ]\n"
        )
        if case.path is not None:
            values = {"path": str(repository / case.path), "input": case.input, "output": case.output}
            for name, value in values.items():
                text += f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'
        (home / "config.pbtxt").write_text(text)
