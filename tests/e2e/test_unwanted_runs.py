"""A running python model is told when nobody wants its answer any more, whoever took it back."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_asking import until
from e2e_models import python
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
