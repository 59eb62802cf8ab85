"""Models that die of a number, ask for one that does, and call it."""

from __future__ import annotations

from pathlib import Path

TWICE = """
platform: "ensemble"
max_batch_size: 0
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "held" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "between" }
  }
  step {
    model_name: "held" model_version: -1
    input_map { key: "IN" value: "between" } output_map { key: "OUT" value: "OUT" }
  }
}
"""

ASKS_FRAGILE = """
platform: "ensemble"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling {
  step {
    model_name: "fragile" model_version: -1
    input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
  }
}
"""

CALLS_FRAGILE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="fragile", requested_output_names=["Y"], inputs=request.inputs()
            )
            answers.append(call.exec())
        return answers
"""

CALLS_FRAGILE_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
"""

FRAGILE = """
import os
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        if any(13.0 in tensor for tensor in tensors):
            os._exit(7)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor)]) for tensor in tensors]
"""

FRAGILE_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { }
parameters { key: "charonia.target_p99_ms" value { string_value: "300" } }
response_cache { enable: true }
"""


def fragile_model(repository: Path, name: str) -> None:
    """X -> Y, whose process dies of 13.0; its batching adapts and its responses are cached."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.py").write_text(FRAGILE)
    (repository / name / "config.pbtxt").write_text(FRAGILE_CONFIG)
    for other in ("asks_fragile", "calls_fragile"):  # they find what it has answered in the cache
        (repository / other / "1").mkdir(parents=True)
    (repository / "asks_fragile" / "config.pbtxt").write_text(ASKS_FRAGILE)
    (repository / "calls_fragile" / "1" / "model.py").write_text(CALLS_FRAGILE)
    (repository / "calls_fragile" / "config.pbtxt").write_text(CALLS_FRAGILE_CONFIG)
