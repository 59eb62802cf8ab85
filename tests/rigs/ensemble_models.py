"""Models that make the ensembles of the end-to-end tests, the ensembles, and what is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from e2e_asking import infer, statistics
from e2e_models import SCALING_IO, WIDTH, gated, put, python, scaling
from e2e_server import Server

ADDER = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            asked = json.loads(request.parameters())
            if "fail" in asked:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(asked["fail"])))
                continue
            terms = [pb_utils.get_input_tensor_by_name(request, name) for name in ("A", "B", "C")]
            total = sum(term.as_numpy() for term in terms if term is not None)
            made = [] if "silent" in asked else [pb_utils.Tensor("SUM", total)]
            told = {"sequence_id": asked["sequence"], "sequence_start": True} if "sequence" in asked else {}
            responses.append(pb_utils.InferenceResponse(made, parameters=told))
        return responses
"""

SHAPED = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(request, "A").as_numpy() for request in requests]
        assert all(one.shape[1:] == (2, 2) for one in found)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", one)]) for one in found]
"""

REPEATER = """
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0, 0])
            ends_itself = "flag the last" in request.parameters()
            for number in range(count):
                flags = FINAL if ends_itself and number == count - 1 else 0
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value + number)]), flags=flags)
            if "end bare" in request.parameters():
                sender.send(pb_utils.InferenceResponse([]), flags=FINAL)
            elif not ends_itself:
                sender.send(flags=FINAL)
"""

REPEATER_CONFIG = f"""
max_batch_size: 8
input [
  {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }},
  {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }}
]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""

TOTAL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            get = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            total = get("BEFORE") + get("TERM")
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total), pb_utils.Tensor("AFTER", total)])
            )
        return responses
"""

TOTAL_CONFIG = f"""
max_batch_size: 8
input [ {{ name: "TERM" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
output [ {{ name: "TOTAL" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
sequence_batching {{
  oldest {{ max_candidate_sequences: 8 }}
  state [ {{ input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
}}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""

ADDER_CONFIG = f"""
max_batch_size: 8
input [
  {{ name: "A" data_type: TYPE_FP32 dims: [ {WIDTH} ] }},
  {{ name: "B" data_type: TYPE_FP32 dims: [ {WIDTH} ] optional: true }},
  {{ name: "C" data_type: TYPE_FP32 dims: [ {WIDTH} ] optional: true }}
]
output [ {{ name: "SUM" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""

BIG = np.arange(30_000, dtype=np.float32).reshape(1, -1)
"""Over 32 KB: beside the log."""


def step(model: str, takes: dict[str, str], gives: dict[str, str]) -> str:
    taken = " ".join(f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in takes.items())
    given = " ".join(f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in gives.items())
    return f'step {{ model_name: "{model}" model_version: -1 {taken} {given} }}'


def ensemble(models: Path, name: str, *steps: str, io: str = SCALING_IO, more: str = "", batch: int = 8) -> None:
    (models / name / "1").mkdir(parents=True)
    scheduling = "ensemble_scheduling {\n" + "\n".join(steps) + "\n}"
    put(models / name / "config.pbtxt", f'platform: "ensemble"\nmax_batch_size: {batch}\n{io}\n{scheduling}\n{more}\n')


def tensor(name: str, type_: str = "TYPE_FP32", dims: object = WIDTH, more: str = "") -> str:
    return f'{{ name: "{name}" data_type: {type_} dims: [ {dims} ] {more} }}'


def copying_graph() -> bytes:
    """An ONNX model: FP32 [batch, any] IN -> OUT."""
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "any"]) for name in ("IN", "OUT")]
    node = helper.make_node("Identity", ["IN"], ["OUT"])
    model = helper.make_model(
        helper.make_graph([node], "copying", tensors[:1], tensors[1:]),
        opset_imports=[helper.make_opsetid("", 13)],
        ir_version=8,
    )
    return bytes(model.SerializeToString())


SCALE = {"INPUT0": "INPUT0"}


def build(models: Path) -> None:
    """The models, the graphs of them, and graphs that cannot be loaded."""
    put(models / "copying" / "1" / "model.onnx", copying_graph())
    wide = f"input [ {tensor('IN', dims=-1)} ] output [ {tensor('OUT', dims=-1)} ]"
    put(models / "copying" / "config.pbtxt", f'backend: "onnxruntime"\nmax_batch_size: 8\n{wide}\n')
    scaling(models, "double", 2.0)
    scaling(models, "triple", 3.0)
    scaling(models, "batched", 7.0, config="dynamic_batching { max_queue_delay_microseconds: 200000 }")
    waits = "max_queue_delay_microseconds: 500000 default_queue_policy { default_timeout_microseconds: 1000 }"
    scaling(models, "impatient", 1.0, config=f"dynamic_batching {{ {waits} }}")
    ensemble(models, "rushed", step("impatient", SCALE, {"OUTPUT0": "OUTPUT0"}))
    python(models, "adder", ADDER, ADDER_CONFIG)
    python(models, "flat_adder", ADDER, ADDER_CONFIG.replace("max_batch_size: 8", "max_batch_size: 0"))
    gated(models, "gated", "max_batch_size: 8\ninstance_group { kind: KIND_CPU count: 1 }\n")
    python(models, "repeater", REPEATER, REPEATER_CONFIG)
    scaling(models, "kept", 5.0, config="response_cache { enable: true }")
    python(models, "total", TOTAL, TOTAL_CONFIG)
    build_shapes(models)
    build_behaviours(models)
    ensemble(models, "round", step("about", SCALE, {"OUTPUT0": "OUTPUT0"}))
    ensemble(models, "about", step("round", SCALE, {"OUTPUT0": "OUTPUT0"}))
    ensemble(models, "lacking", step("nobody", SCALE, {"OUTPUT0": "OUTPUT0"}))
    unfit = f"input [ {tensor('INPUT0', dims=WIDTH + 1)} ] output [ {tensor('OUTPUT0')} ]"
    ensemble(models, "unfit", step("double", SCALE, {"OUTPUT0": "OUTPUT0"}), io=unfit)


def build_shapes(models: Path) -> None:
    """A chain, branches that meet again, one in another, one with a condition, one whose tensors are large."""
    ensemble(
        models,
        "chain",
        step("double", SCALE, {"OUTPUT0": "a"}),
        step("triple", {"INPUT0": "a"}, {"OUTPUT0": "b"}),
        step("batched", {"INPUT0": "b"}, {"OUTPUT0": "OUTPUT0"}),
    )
    branches = (
        step("double", SCALE, {"OUTPUT0": "a"}),
        step("triple", SCALE, {"OUTPUT0": "b"}),
        step("adder", {"A": "a", "B": "b", "C": "EXTRA"}, {"SUM": "SUM"}),
    )
    ensemble(
        models,
        "branches",
        *branches,
        io=f"input [ {tensor('INPUT0')}, {tensor('EXTRA', more='optional: true')} ]"
        f"output [ {tensor('SUM')}, {tensor('a')} ]",
    )
    ensemble(
        models,
        "nested",
        step("branches", {"INPUT0": "INPUT0"}, {"SUM": "five"}),
        step("triple", {"INPUT0": "five"}, {"OUTPUT0": "OUTPUT0"}),
    )
    ensemble(
        models,
        "conditional",
        step("double", SCALE, {"OUTPUT0": "doubled"}),
        step("adder", {"A": "INPUT0", "B": "doubled"}, {"SUM": "SUM"}),
        io=f"input [ {tensor('INPUT0')}, {tensor('RUN', 'TYPE_BOOL', 1)} ]"
        f"output [ {tensor('SUM')}, {tensor('doubled')} ]",
        more='parameters { key: "charonia.step_condition.double" value { string_value: "RUN" } }',
    )
    # of a model that batches and one that does not
    ends = f"input [ {tensor('INPUT0')} ] output [ {tensor('a')}, {tensor('SUM')} ]"
    mixed = (step("double", SCALE, {"OUTPUT0": "a"}), step("flat_adder", {"A": "a", "B": "INPUT0"}, {"SUM": "SUM"}))
    ensemble(models, "mixed", *mixed, io=ends, batch=0)
    ensemble(models, "mixed_batching", *mixed, io=ends)
    shape = f"reshape {{ shape: [ {WIDTH // 2}, 2 ] }}"
    shaped = " ".join([f"input [ {tensor('A', more=shape)} ]", f"output [ {tensor('SUM', more=shape)} ]"])
    python(models, "shaped", SHAPED, f"max_batch_size: 8 {shaped}")
    flat = f"reshape {{ shape: [ {WIDTH} ] }}"
    ensemble(
        models,
        "reshaped",
        step("shaped", {"A": "INPUT0"}, {"SUM": "a"}),
        step("double", {"INPUT0": "a"}, {"OUTPUT0": "OUTPUT0"}),
        io=f"input [ {tensor('INPUT0', dims=f'2, {WIDTH // 2}', more=flat)} ]"
        f"output [ {tensor('OUTPUT0', dims=f'1, {WIDTH}', more=flat)}, {tensor('a')} ]",
    )
    ensemble(
        models,
        "waiting",
        step("triple", SCALE, {"OUTPUT0": "a"}),
        step("copying", {"IN": "BIG"}, {"OUT": "first"}),
        step("gated", {"VALUE": "VALUE"}, {"ECHO": "echo"}),
        step("adder", {"A": "a"}, {"SUM": "SUM"}),
        step("copying", {"IN": "first"}, {"OUT": "second"}),
        io=f"input [ {tensor('INPUT0')}, {tensor('BIG', dims=-1)}, {tensor('VALUE', 'TYPE_INT32', -1)} ]"
        f"output [ {tensor('SUM')}, {tensor('echo', 'TYPE_INT32', -1)}, {tensor('second', dims=-1)} ]",
    )


def build_behaviours(models: Path) -> None:
    """Graphs with a decoupled step, remembered answers, and sequences."""
    ensemble(
        models,
        "spread",
        step("repeater", {"INPUT0": "INPUT0", "COUNT": "COUNT"}, {"OUTPUT0": "a"}),
        step("triple", {"INPUT0": "a"}, {"OUTPUT0": "OUTPUT0"}),
        io=f"input [ {tensor('INPUT0')}, {tensor('COUNT', 'TYPE_INT32', 1)} ] output [ {tensor('OUTPUT0')} ]",
    )
    ensemble(
        models,
        "repeated",
        step("repeater", {"INPUT0": "INPUT0", "COUNT": "COUNT"}, {"OUTPUT0": "OUTPUT0"}),
        io=f"input [ {tensor('INPUT0')}, {tensor('COUNT', 'TYPE_INT32', 1)} ] output [ {tensor('OUTPUT0')} ]",
    )
    ensemble(
        models,
        "remembered",
        step("double", SCALE, {"OUTPUT0": "a"}),
        step("triple", {"INPUT0": "a"}, {"OUTPUT0": "OUTPUT0"}),
        more="response_cache { enable: true }",
    )
    ensemble(
        models,
        "recalling",
        step("kept", SCALE, {"OUTPUT0": "a"}),
        step("kept", {"INPUT0": "a"}, {"OUTPUT0": "OUTPUT0"}),
    )
    ensemble(
        models,
        "running",
        step("double", SCALE, {"OUTPUT0": "a"}),
        step("total", {"TERM": "a"}, {"TOTAL": "OUTPUT0"}),
    )
    ensemble(
        models,
        "rerouting",
        step("adder", {"A": "INPUT0"}, {"SUM": "a"}),
        step("total", {"TERM": "a"}, {"TOTAL": "OUTPUT0"}),
    )


def rows(count: int = 1) -> np.ndarray:
    return np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH) + 1


def ask(server: Server, model: str, kind: str = "grpc", **tensors: np.ndarray) -> Any:
    return infer(server, model, kind, **(tensors or {"INPUT0": rows()}))


def counted(server: Server, model: str) -> dict[str, int]:
    """Executions, rows, successes and failures of a model."""
    stats = statistics(server, model)
    return {
        "executions": int(stats.get("execution_count", 0)),
        "rows": int(stats.get("inference_count", 0)),
        "success": int(stats["inference_stats"]["success"].get("count", 0)),
        "fail": int(stats["inference_stats"]["fail"].get("count", 0)),
    }


def succeeded(server: Server, model: str) -> float:
    name = f'nv_inference_request_success{{model="{model}",version="1"}} '
    return sum(float(line.removeprefix(name)) for line in server.scrape().splitlines() if line.startswith(name))
