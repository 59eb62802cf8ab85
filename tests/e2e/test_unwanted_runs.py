"""A running python model is told when nobody wants its answer any more, whoever took it back."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_asking import until
from e2e_models import put, python
from e2e_server import Server, serving
from wave_load import is_riding

from charonia.clock import wall_ns

SOURCE = """
import json, os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            mark = json.loads(request.parameters())["mark"]
            if not mark:
                continue
            open(mark + ".entered", "w").close()
            give_up_at = time.monotonic() + 60
            while not request.is_cancelled() and time.monotonic() < give_up_at:
                time.sleep(0.002)
            open(mark + (".cancelled" if request.is_cancelled() else ".gave_up"), "w").close()
        return [pb_utils.InferenceResponse() for _ in requests]
"""
CONFIG = """
max_batch_size: 0
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
IO = (
    'max_batch_size: 0 input {{ name: "{0}" data_type: TYPE_INT32 dims: [ 1 ] }} '
    'output {{ name: "{1}" data_type: TYPE_INT32 dims: [ 1 ] }} instance_group {{ kind: KIND_CPU count: 1 }} '
)
MAKES = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            mark, sender = json.loads(request.parameters())["mark"], request.get_response_sender()
            while not request.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([1], np.int32))]))
            open(mark + ".cancelled", "w").close()
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WAITS = """
import json, os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            mark = json.loads(request.parameters())["mark"]
            open(mark + ".waits", "w").close()
            while not os.path.exists(mark + ".cancelled"):
                time.sleep(0.002)
        return [pb_utils.InferenceResponse() for _ in requests]
"""
FLOW = """
platform: "ensemble" max_batch_size: 0
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "z" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
ensemble_scheduling {
  max_inflight_requests: 1
  step { model_name: "makes" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }
  step { model_name: "waits" model_version: -1 input_map { key: "y" value: "y" } output_map { key: "z" value: "z" } }
}
"""


@pytest.fixture(scope="module", params=["inside", "separate"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the batcher inside the executor's process, where cancels never touch the log, and apart from it."""
    models = tmp_path_factory.mktemp("models")
    python(models, "patient", SOURCE, CONFIG)
    flags = [] if request.param == "inside" else ["--batcher=separate"]
    with serving(models, tmp_path_factory.mktemp("state"), *flags) as running:
        yield running


def send(
    server: Server, mark: Path, parameters: dict[str, object], headers: dict[str, str]
) -> http.client.HTTPConnection:
    """Ask and wait until the model has the request, but not for the answer."""
    connection = sent(server, mark, parameters, headers)
    until("the model has it", mark.with_suffix(".entered").exists)
    return connection


def sent(
    server: Server, mark: Path, parameters: dict[str, object], headers: dict[str, str]
) -> http.client.HTTPConnection:
    body = {
        "inputs": [{"name": "x", "shape": [1], "datatype": "INT32", "data": [1]}],
        "parameters": {"mark": str(mark), **parameters},
    }
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", "/v2/models/patient/infer", json.dumps(body), headers)
    return connection


def ride(server: Server) -> None:
    """Let the model be seen to be quick, so that its requests travel in waves from now on."""
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT32", "data": [1]}], "parameters": {"mark": ""}}

    def rides() -> bool:
        connection = http.client.HTTPConnection(server.http, timeout=60)
        connection.request("POST", "/v2/models/patient/infer", json.dumps(body))
        assert connection.getresponse().status == 200
        connection.close()
        with server.log_client() as log:
            return is_riding(log, "patient")

    until("its requests ride", rides)


def seen(mark: Path) -> bool:
    assert not mark.with_suffix(".gave_up").exists()
    return mark.with_suffix(".cancelled").exists()


@pytest.mark.parametrize("in_wave", [False, True], ids=["alone", "in a wave"])
def test_a_caller_that_hangs_up(server: Server, tmp_path: Path, in_wave: bool) -> None:
    if in_wave:
        ride(server)
    mark = tmp_path / "call"
    send(server, mark, {}, {}).close()
    until("the model sees it", lambda: seen(mark))


def test_a_job_that_is_deleted(server: Server, tmp_path: Path) -> None:
    mark = tmp_path / "job"
    connection = send(server, mark, {}, {"Prefer": "respond-async"})
    answer = connection.getresponse()
    assert answer.status == 202
    location = answer.getheader("Location")
    answer.read()
    connection.close()
    assert location is not None
    assert server.request("DELETE", location)[0] == 200
    until("the model sees it", lambda: seen(mark))
    assert json.loads(server.get(location)[1])["state"] == "cancelled"


@pytest.mark.parametrize("in_wave", [False, True], ids=["alone", "in a wave"])
def test_a_deadline_that_passes(server: Server, tmp_path: Path, in_wave: bool) -> None:
    if in_wave:
        ride(server)
    for seconds in (2, 8, 30):  # more where a busy machine does not let the model have it by then
        mark = tmp_path / f"late{seconds}"
        connection = sent(server, mark, {"charonia_deadline_us": wall_ns() // 1000 + seconds * 1_000_000}, {})
        assert connection.getresponse().status == 504
        connection.close()
        if mark.with_suffix(".entered").exists():
            break
    until("the model sees it", lambda: seen(mark))


@pytest.mark.long
def test_a_job_of_an_ensemble_that_is_deleted_while_it_has_no_owner(tmp_path: Path) -> None:
    """Its step is a stream with a response window, which sends nothing more until the next step takes responses."""
    models, mark = tmp_path / "models", tmp_path / "stream"
    python(models, "makes", MAKES, IO.format("x", "y") + "model_transaction_policy { decoupled: true }")
    python(models, "waits", WAITS, IO.format("y", "z"))
    put(models / "flow" / "1" / "empty", "")
    put(models / "flow" / "config.pbtxt", FLOW)
    with serving(models, tmp_path / "state", "--batcher=separate") as server:
        tensor = {"name": "x", "shape": [1], "datatype": "INT32", "data": [1]}
        body = json.dumps({"inputs": [tensor], "parameters": {"mark": str(mark)}}).encode()
        status, told = server.request("POST", "/v2/models/flow/infer", body, {"Prefer": "respond-async"})
        assert status == 202, told
        until("the next step has a response", mark.with_suffix(".waits").exists)
        (pid,) = server.pids("batcher")
        os.kill(pid, signal.SIGSTOP)  # it decides nothing more
        location = json.loads(told)["location"]
        status, ended = server.request("DELETE", location)
        assert (status, json.loads(ended)["state"]) == (200, "cancelled")
        os.kill(pid, signal.SIGKILL)
        until("the model sees it", mark.with_suffix(".cancelled").exists)
