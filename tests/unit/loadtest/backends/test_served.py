"""Requests and answers are what tritonclient makes of them; counters and roles are found among their neighbours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from tritonclient.grpc import service_pb2

from loadtest.backends.served import executed, request_bytes, roles_of, values_of
from loadtest.backends.subjects import SUBJECTS
from loadtest.bench.servers import Endpoints

METRICS = """nv_inference_count{model="fil_1_none",version="1"} 640
nv_inference_count{model="fil_1_process",version="1"} 7
nv_inference_exec_count{model="fil_1_none",version="1"} 10
nv_inference_exec_count{model="fil_1_process",version="1"} 7
nv_inference_count_of_others{model="fil_1_none"} 9
"""


def test_rows_and_executions_of_one_model() -> None:
    assert executed(METRICS, "fil_1_none") == (640.0, 10.0)
    assert executed(METRICS, "fil_1") == (0.0, 0.0)


def test_requests_carry_the_tensor() -> None:
    subject = SUBJECTS["fil_32"]
    tensor = subject.contents()[0]
    message = service_pb2.ModelInferRequest.FromString(request_bytes(subject, "m", tensor))
    assert (message.model_name, message.inputs[0].name) == ("m", "input__0")
    assert list(message.inputs[0].shape) == [32, 32]
    assert message.raw_input_contents[0] == tensor.tobytes()


def test_values_of_an_answer() -> None:
    values = np.arange(5, dtype=np.float32)
    answer = service_pb2.ModelInferResponse(raw_output_contents=[values.tobytes()])
    assert np.array_equal(values_of(answer.SerializeToString()), values)


def test_heartbeats_are_no_models(tmp_path: Path) -> None:
    own, parent = os.getpid(), os.getppid()
    file = tmp_path / "processes.json"
    for name, role in (("beats", "heartbeats"), ("instance:m_0_0", "model")):
        file.write_text(json.dumps([{"role": "executor", "pid": parent}, {"role": name, "pid": own, "parent": parent}]))
        assert roles_of(Endpoints(processes_file=file))[own] == role
