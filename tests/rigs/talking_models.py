"""Models whose requests are of sequences and have several responses, and the configurations they are served with."""

from __future__ import annotations

from pathlib import Path

from e2e_models import put, python

TALKS = '''
import json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """X -> so many responses TOLD: [sum of the sequence so far, number of the response, START, END, requests, ready].

    With the state TOTAL where there is one, else in memory. Parameter `gates`: files the responses wait for. While
    `<model directory>/hold` is there it cannot be loaded.
    """

    def initialize(self, args):
        self.sums = {}
        while os.path.exists(os.path.join(args["model_repository"], "hold")):
            time.sleep(0.01)

    def execute(self, requests):
        ready = sum(self.control(request, "READY") for request in requests)
        for request in requests:
            sender = request.get_response_sender()
            if not self.control(request, "READY"):
                sender.send(flags=FINAL)
                continue
            threading.Thread(target=self.answer, args=(request, sender, [len(requests), ready]), daemon=True).start()

    def answer(self, request, sender, batch):
        count = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0])
        gates = json.loads(request.parameters() or "{}").get("gates", "")
        key, start = request.correlation_id(), self.control(request, "START")
        total = pb_utils.get_input_tensor_by_name(request, "TOTAL")
        sum = 0 if start else self.sums.get(key, 0) if total is None else int(total.as_numpy().ravel()[0])
        for number in range(count):
            give_up_at = time.monotonic() + 60
            while gates and not os.path.exists(f"{gates}.{number}") and time.monotonic() < give_up_at:
                time.sleep(0.002)
            sum += 1
            told = [sum, number, start, self.control(request, "END"), *batch]
            tensors = [pb_utils.Tensor("TOLD", np.array([told], np.int32))]
            if total is not None:
                tensors.append(pb_utils.Tensor("TOTAL_AFTER", np.array([[sum]], np.int32)))
            self.sums[key] = sum
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=FINAL)

    def control(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return 1 if tensor is None else int(tensor.as_numpy().ravel()[0])
'''

TALKS_IO = """
max_batch_size: 4
model_transaction_policy { decoupled: true }
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "TOLD" data_type: TYPE_INT32 dims: [ 6 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""

CONTROLS = """
control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] }
]
"""
READY = 'control_input [ { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ]'
LONG = "max_sequence_idle_microseconds: 60000000"
STATE = 'state [ { input_name: "TOTAL" output_name: "TOTAL_AFTER" data_type: TYPE_INT32 dims: [ 1 ] } ]'
REPEATABLE = 'parameters { key: "charonia.repeatable" value { string_value: "true" } }'

COUNTS_DOWN = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """X -> a response in each of so many turns: its number, and how many requests had this turn together."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            wanted = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0]
            turn = pb_utils.get_input_tensor_by_name(request, "TURN").as_numpy() + 1
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0]
            assert start == (turn.ravel()[0] == 1)
            told = np.array([[turn.ravel()[0], len(requests)]], np.int32)
            sender.send(pb_utils.InferenceResponse([
                pb_utils.Tensor("TOLD", told), pb_utils.Tensor("TURN_AFTER", turn)
            ]))
            if turn.ravel()[0] < wanted:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''

RECORDS = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Tells what every request of every execution so far was told: START, READY, END, correlation id, X."""

    def initialize(self, args):
        self.told = []

    def execute(self, requests):
        self.told.append([
            [int(pb_utils.get_input_tensor_by_name(r, name).as_numpy().ravel()[0])
             for name in ("START", "READY", "END", "CORRID", "X")]
            for r in requests
        ])
        text = str(self.told).encode()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([[text]], object))]) for _ in requests]
'''

MAKES = '''
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """X -> so many responses, and in the file of the parameter `sent` how many it could send so far."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            path = json.loads(request.parameters())["sent"]
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([[number]], np.int32))]))
                with open(path, "a") as file:
                    file.write(".")
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''

LOOKS = '''
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """NUMBER -> how far the producer is ahead of it."""

    def execute(self, requests):
        responses = []
        for request in requests:
            number = int(pb_utils.get_input_tensor_by_name(request, "NUMBER").as_numpy().ravel()[0])
            sent = os.path.getsize(json.loads(request.parameters())["sent"])
            told = np.array([[number, sent - number, 0, 0, 0, 0]], np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", told)]))
        return responses
'''


def build(repository: Path) -> None:
    python(repository, "talks", TALKS, TALKS_IO + f"sequence_batching {{ {LONG} direct {{ }} {CONTROLS} {READY} }}")
    oldest = f"sequence_batching {{ {LONG} oldest {{ max_candidate_sequences: 8 }} {CONTROLS} {STATE} }}"
    python(repository, "tells", TALKS, TALKS_IO + oldest)
    python(repository, "repeats", TALKS, TALKS_IO + oldest + REPEATABLE)
    python(
        repository,
        "counts",
        COUNTS_DOWN,
        'max_batch_size: 4 model_transaction_policy { decoupled: true } input [ { name: "X" data_type: TYPE_INT32 '
        'dims: 1 } ] output [ { name: "TOLD" data_type: TYPE_INT32 dims: 2 } ] sequence_batching { '
        "iterative_sequence: true oldest { max_candidate_sequences: 4 } control_input [ { "
        'name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] '
        'state [ { input_name: "TURN" output_name: "TURN_AFTER" data_type: TYPE_INT32 dims: 1 } ] }',
    )
    ordered = TALKS_IO.replace("count: 1", "count: 2")
    python(repository, "ordered", TALKS, ordered + "dynamic_batching { preserve_ordering: true }")
    number = "data_type: TYPE_INT32 dims: 1 }"
    making = f'max_batch_size: 4 input {{ name: "X" {number} output {{ name: "NUMBER" {number}'
    python(repository, "makes", MAKES, making + " model_transaction_policy { decoupled: true }")
    told = 'output { name: "TOLD" data_type: TYPE_INT32 dims: 6 }'
    python(repository, "looks", LOOKS, f'max_batch_size: 4 input {{ name: "NUMBER" {number} {told}')
    maps = 'input_map {{ key: "{0}" value: "{1}" }} output_map {{ key: "{2}" value: "{3}" }}'
    first = f'step {{ model_name: "makes" model_version: -1 {maps.format("X", "X", "NUMBER", "n")} }}'
    second = f'step {{ model_name: "looks" model_version: -1 {maps.format("NUMBER", "n", "TOLD", "TOLD")} }}'
    put(repository / "bounded" / "1" / "empty", "")
    put(
        repository / "bounded" / "config.pbtxt",
        f'platform: "ensemble" max_batch_size: 4 input {{ name: "X" {number} {told} '
        f"ensemble_scheduling {{ max_inflight_requests: 2 {first} {second} }}",
    )
    corrid = 'control_input [ { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } ] } ]'
    python(
        repository,
        "records",
        RECORDS,
        'max_batch_size: 3 input [ { name: "X" data_type: TYPE_INT32 dims: 1 } ] output [ { name: "TOLD" data_type: '
        f"TYPE_STRING dims: 1 }} ] sequence_batching {{ {LONG} direct {{ }} {CONTROLS} {READY} {corrid} }} "
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    )
