"""The stack test's own models, written as users write them: one that sleeps, and one for each way a model may work.

`sums` has sequences whose state the server keeps, `counts` answers more than once and may be run again, `calls` calls
`doubled` twice from its code, `pipeline` is an ensemble of both.
"""

from __future__ import annotations

from pathlib import Path

FEATURES = ("sums", "counts", "doubled", "calls", "pipeline")

_SLEEPER = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({sleep_s})
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
            for r in requests
        ]
"""
_SLEEPER_CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
"""

_SUMS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            total = x + pb_utils.get_input_tensor_by_name(request, "BEFORE").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(name, total) for name in ("SUM", "AFTER")]))
        return responses
"""
_SUMS_CONFIG = """
max_batch_size: 8
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "SUM" data_type: TYPE_FP32 dims: [1] }]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 64 }
  state [{ input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: [1] }]
}
"""

_COUNTS = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
                await asyncio.sleep(0.02)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_COUNTS_CONFIG = """
max_batch_size: 0
input [{ name: "N" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
model_transaction_policy { decoupled: true }
parameters { key: "charonia.repeatable" value { string_value: "true" } }
"""

_DOUBLED = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
            for r in requests
        ]
"""
_CALLS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()) for request in requests]

    def one(self, x):
        for _ in range(2):
            call = pb_utils.InferenceRequest(
                model_name="doubled", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", x)]
            )
            response = call.exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            x = pb_utils.get_output_tensor_by_name(response, "Y").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])
"""
_X_TO_Y = """
max_batch_size: 0
input [{ name: "X" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [-1] }]
"""
_PIPELINE_CONFIG = (
    'platform: "ensemble"'
    + _X_TO_Y
    + """
ensemble_scheduling {
  step {
    model_name: "doubled" model_version: -1
    input_map { key: "X" value: "X" } output_map { key: "Y" value: "between" }
  }
  step {
    model_name: "calls" model_version: -1
    input_map { key: "X" value: "between" } output_map { key: "Y" value: "Y" }
  }
}
"""
)
_ONE_EACH = 'backend: "python"\ninstance_group [{ count: 1 kind: KIND_CPU }]'


def _python(repository: Path, name: str, source: str, config: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    (version.parent / "config.pbtxt").write_text(_ONE_EACH + config)


def write_sleeper(repository: Path, sleep_s: float) -> None:
    """`sleeper`: IN -> OUT, one request at a time, `sleep_s` seconds each."""
    _python(repository, "sleeper", _SLEEPER.format(sleep_s=sleep_s), _SLEEPER_CONFIG)


def write_features(repository: Path) -> None:
    """The models of `FEATURES`. X -> Y is 2 x for `doubled`, 4 x for `calls`, 8 x for `pipeline`."""
    _python(repository, "sums", _SUMS, _SUMS_CONFIG)
    _python(repository, "counts", _COUNTS, _COUNTS_CONFIG)
    _python(repository, "doubled", _DOUBLED, _X_TO_Y)
    _python(repository, "calls", _CALLS, _X_TO_Y)
    (repository / "pipeline" / "1").mkdir(parents=True)
    (repository / "pipeline" / "config.pbtxt").write_text(_PIPELINE_CONFIG)


def numbers(name: str, shape: list[int], values: list[float], datatype: str = "FP32") -> dict[str, object]:
    """A request body with one input and the values as JSON."""
    return {"inputs": [{"name": name, "shape": shape, "datatype": datatype, "data": values}]}
