"""The python models that Triton and Charonia both serve to be compared. `compared_calls` has what they are asked."""

from __future__ import annotations

from pathlib import Path

ECHO = '''import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns each input as the output of its name with O_ before it."""

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("O_" + t.name(), t.as_numpy()) for t in request.inputs()])
            for request in requests
        ]
'''

SCRIPTED = '''import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def text(name, words):
    return pb_utils.Tensor(name, np.array([word.encode() for word in words], dtype=object))


class TritonPythonModel:
    """Does what the elements of CMD say, one after the other: each but `sleep` and `raise` is one response."""

    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def respond(self, command, request):
        word, _, rest = command.partition(":")
        if word == "out":
            return pb_utils.InferenceResponse([text("OUT", rest.split(","))])
        if word == "none":
            return pb_utils.InferenceResponse([])
        if word == "error":
            code, _, message = rest.partition(":")
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))
        if word == "request":
            facts = {
                "id": request.request_id(), "correlation": request.correlation_id(), "flags": request.flags(),
                "timeout": request.timeout(), "wanted": sorted(request.requested_output_names()),
                "parameters": json.loads(request.parameters() or "{}"),
            }
            return pb_utils.InferenceResponse([text("OUT", [json.dumps(facts, sort_keys=True)])])
        if word == "call":
            asked = json.loads(rest)
            inputs = [text(name, words) for name, words in asked["inputs"].items()]
            call = pb_utils.InferenceRequest(
                model_name=asked["model"], requested_output_names=asked["outputs"], inputs=inputs
            )
            response = call.exec()
            if response.has_error():
                return pb_utils.InferenceResponse([text("OUT", ["failed", response.error().message()])])
            found = [t.as_numpy().reshape(-1).tolist() for t in response.output_tensors()]
            return pb_utils.InferenceResponse([text("OUT", [str(found)])])
        raise ValueError("no command: " + command)

    def execute(self, requests):
        responses = []
        for request in requests:
            sender = request.get_response_sender() if self.decoupled else None
            commands = pb_utils.get_input_tensor_by_name(request, "CMD").as_numpy().reshape(-1)
            for command in (element.decode() for element in commands):
                if command.startswith("sleep:"):
                    time.sleep(float(command[6:]))
                elif command.startswith("raise:"):
                    raise ValueError(command[6:])
                elif sender is not None:
                    sender.send(self.respond(command, request))
                else:
                    responses.append(self.respond(command, request))
            if sender is not None:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None if self.decoupled else responses
'''

CONTROLS = '''import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns its inputs, those of the sequence batcher too, as JSON."""

    def execute(self, requests):
        responses = []
        for request in requests:
            told = {t.name(): [t.as_numpy().reshape(-1).tolist(), list(t.shape())] for t in request.inputs()}
            words = np.array([json.dumps(told, sort_keys=True).encode()], dtype=object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", words)]))
        return responses
'''

_TENSORS = {
    "TEXT": "TYPE_STRING dims: [1]", "N": "TYPE_INT32 dims: [1] optional: true",
    "F": "TYPE_FP32 dims: [-1] optional: true", "M": "TYPE_INT64 dims: [2, -1] optional: true",
    "B": "TYPE_BOOL dims: [1] optional: true", "H": "TYPE_FP16 dims: [1] optional: true",
}  # fmt: skip
_CPU = "instance_group [ { kind: KIND_CPU count: 1 } ]"
_SCRIPT_IO = """input [ { name: "CMD" data_type: TYPE_STRING dims: [-1] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [-1] } ]"""
_CONTROL_INPUTS = """
control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } ] } ]
control_input [ { name: "END" control [ { kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] } ] } ]
control_input [ { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } ] } ]
control_input [ { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ]"""


def _echo(tensors: dict[str, str], max_batch_size: int) -> str:
    inputs = [f'input [ {{ name: "{name}" data_type: {kind} }} ]' for name, kind in tensors.items()]
    outputs = [
        f'output [ {{ name: "O_{name}" data_type: {kind.replace(" optional: true", "")} }} ]'
        for name, kind in tensors.items()
    ]
    return "\n".join([f'backend: "python" max_batch_size: {max_batch_size}', _CPU, *inputs, *outputs])


def _ensemble(first: str, second: str) -> str:
    return f"""platform: "ensemble"
input [ {{ name: "IN" data_type: TYPE_STRING dims: [-1] }} ]
output [ {{ name: "OUT" data_type: TYPE_STRING dims: [-1] }} ]
ensemble_scheduling {{
  step [ {{ model_name: "{first}" model_version: -1 input_map {{ key: "CMD" value: "IN" }}
    output_map {{ key: "OUT" value: "mid" }} }} ]
  step [ {{ model_name: "{second}" model_version: -1 input_map {{ key: "X" value: "mid" }}
    output_map {{ key: "O_X" value: "OUT" }} }} ]
}}"""


def _sequence(batcher: str) -> str:
    return f"""backend: "python" {_CPU}
input [ {{ name: "V" data_type: TYPE_INT32 dims: [1] }} ]
output [ {{ name: "OUT" data_type: TYPE_STRING dims: [1] }} ]
sequence_batching {{ max_sequence_idle_microseconds: 2000000 {batcher} {_CONTROL_INPUTS} }}"""


_DECOUPLED = "model_transaction_policy { decoupled: true }"
MODELS: dict[str, tuple[str, str]] = {
    "mixed": (_echo(_TENSORS, 4), ECHO),
    "plain": (_echo(_TENSORS, 0), ECHO),
    "matrix": (_echo({"X": "TYPE_FP32 dims: [2, 3]"}, 0), ECHO),
    "rows": (_echo({"X": "TYPE_INT32 dims: [2, -1]"}, 0), ECHO),
    "word": (_echo({"X": "TYPE_STRING dims: [1]"}, 0), ECHO),
    "words": (_echo({"X": "TYPE_STRING dims: [-1]"}, 0), ECHO),
    "scripted": (f'backend: "python"\n{_CPU}\n{_SCRIPT_IO}', SCRIPTED),
    "caller": (f'backend: "python"\n{_CPU}\n{_SCRIPT_IO}', SCRIPTED),
    "decoupled": (f'backend: "python"\n{_CPU}\n{_DECOUPLED}\n{_SCRIPT_IO}', SCRIPTED),
    "chain": (_ensemble("scripted", "words"), ""),
    "stream_chain": (_ensemble("decoupled", "words"), ""),
    "direct": (_sequence("direct { }"), CONTROLS),
    "oldest": (_sequence("oldest { max_candidate_sequences: 4 }"), CONTROLS),
}
"""Configuration and code by name; an ensemble has no code."""


def write_compared_repository(target: Path) -> None:
    """Writes all models into a directory of their own."""
    for name, (config, code) in MODELS.items():
        version = target / name / "1"
        version.mkdir(parents=True)
        (target / name / "config.pbtxt").write_text(config + "\n")
        if code:
            (version / "model.py").write_text(code)
