"""What requests are told that they have used: ensembles step by step, failed requests, and those that ran twice.

The same amounts are in `charonia usage` and in the metrics.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from e2e_asking import client, inputs, on_the_page, until
from e2e_models import WIDTH, gated, put, python, scaling
from e2e_server import Server, serving
from tritonclient.grpc import service_pb2, service_pb2_grpc

BUSY_S = 0.05
FRAIL = f"""
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({BUSY_S})
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if values.min() < -100:
                raise ValueError("the whole batch failed")
            if values.min() < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("below 0")))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
        return responses
"""
FRAIL_CONFIG = f"""
max_batch_size: 8
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""
BREAKING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.ones((2,), np.float32))]))
            sender.send(
                pb_utils.InferenceResponse(error=pb_utils.TritonError("broken off")),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
"""
BREAKING_CONFIG = """
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


def ensemble(repository: Path, name: str, *steps: str) -> None:
    """The steps one after another, each of a model with INPUT0 and OUTPUT0."""
    said = [
        f'step {{ model_name: "{model}" model_version: -1 '
        f'input_map {{ key: "INPUT0" value: "{"INPUT0" if at == 0 else f"between{at}"}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{"OUTPUT0" if at + 1 == len(steps) else f"between{at + 1}"}" }} }}'
        for at, model in enumerate(steps)
    ]
    about = f"""platform: "ensemble"
max_batch_size: 8
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
ensemble_scheduling {{ {" ".join(said)} }}
"""
    (repository / name / "1").mkdir(parents=True)
    put(repository / name / "config.pbtxt", about)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    scaling(models, "double", 2.0, config="instance_group [ { count: 1 kind: KIND_CPU } ]")
    python(models, "frail", FRAIL, FRAIL_CONFIG)
    python(models, "step", FRAIL, FRAIL_CONFIG)
    python(models, "counted", FRAIL, FRAIL_CONFIG)
    python(models, "breaking", BREAKING, BREAKING_CONFIG)
    gated(models, "gated", "max_batch_size: 8\ninstance_group [ { count: 1 kind: KIND_CPU } ]")
    ensemble(models, "chain", "double", "frail")
    ensemble(models, "outer", "double", "chain")
    ensemble(models, "steps", "double", "step")
    with serving(models, tmp_path_factory.mktemp("state"), "--batcher=separate") as running:
        yield running


def body(value: float, rows: int = 1, *, wanted: bool = True) -> dict[str, Any]:
    data = [[value] * WIDTH] * rows
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [rows, WIDTH], "data": data}
    return {"inputs": [tensor]} | ({"parameters": {"charonia_receipt": True}} if wanted else {})


def asked(server: Server, path: str, content: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """Status, headers and body of a POST."""
    request = urllib.request.Request(
        f"http://{server.http}{path}", json.dumps(content).encode(), headers or {}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def infer(server: Server, model: str, value: float, rows: int = 1, **more: Any) -> tuple[int, Any, Any]:
    status, headers, content = asked(server, f"/v2/models/{model}/infer", body(value, rows, **more))
    return status, headers, json.loads(content)


def usage(server: Server, model: str, enough: Any) -> dict[str, Any]:
    """The row of `charonia usage` of a model, once it is `enough`: it is written about once a second."""

    def look() -> dict[str, Any] | None:
        command = [str(Path(sys.executable).parent / "charonia"), "usage", "--model", model, "--json"]
        done = subprocess.run(
            [*command, "--log-url", server.log_url], capture_output=True, text=True, timeout=120, check=True
        )
        rows = json.loads(done.stdout)["usage"]
        return rows[0] if rows and enough(rows[0]) else None

    return until(f"the usage of {model}", look) or {}


# -- ensembles ---------------------------------------------------------------------------------------------------------


def test_an_ensemble_tells_what_its_steps_have_used(server: Server) -> None:
    status, _, answer = infer(server, "chain", 1.0, rows=2)
    assert (status, answer["outputs"][0]["data"]) == (200, [2.0] * 2 * WIDTH)
    told = json.loads(answer["parameters"]["charonia_receipt"])
    assert [(step["model"], step["version"], step["rows"]) for step in told["steps"]] == [
        ("double", 1, 2),
        ("frail", 1, 2),
    ]
    assert all(step["executor"] and step["batch"] and step["attempt"] == 1 for step in told["steps"])
    for name in ("instance_s", "queue_s", "input_bytes", "output_bytes", "tokens"):
        assert told[name] == pytest.approx(sum(step[name] for step in told["steps"]))
    assert told["instance_s"] > BUSY_S
    assert (told["rows"], told["input_bytes"], "failed" in told) == (2, 2 * 2 * WIDTH * 4, False)


def test_an_ensemble_in_an_ensemble_over_grpc(server: Server) -> None:
    with client("grpc", server) as asking:
        values = inputs("grpc", INPUT0=np.ones((1, WIDTH), np.float32))
        answer = asking.infer("outer", values, parameters={"charonia_receipt": True})
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), np.full((1, WIDTH), 4, np.float32))
    told = json.loads(answer.get_response().parameters["charonia_receipt"].string_param)
    assert [step["model"] for step in told["steps"]] == ["double", "chain"]
    inner = told["steps"][1]
    assert [step["model"] for step in inner["steps"]] == ["double", "frail"]
    assert told["instance_s"] >= inner["instance_s"] >= inner["steps"][1]["instance_s"] > BUSY_S


def test_the_steps_of_ensembles_are_in_the_usage_of_their_models(server: Server) -> None:
    sums = 0.0
    for _ in range(5):
        told = json.loads(infer(server, "steps", 3.0)[2]["parameters"]["charonia_receipt"])
        sums += told["steps"][1]["instance_s"]
    row = usage(server, "step", lambda row: row["requests"] >= 5)
    assert row["requests"] == 5
    assert row["instance_s"] == pytest.approx(sums, abs=1e-6)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "reason"), [(-1.0, "below 0"), (-101.0, "the whole batch failed")])
def test_a_failed_request_tells_in_a_header_what_it_has_used(server: Server, value: float, reason: str) -> None:
    status, headers, answer = infer(server, "frail", value, rows=3)
    assert status == 500
    assert reason in answer["error"]
    assert set(answer) == {"error"}
    told = json.loads(headers["charonia-receipt"])
    assert (told["failed"], told["rows"], told["attempt"], told["batch_rows"]) == (True, 3, 1, 3)
    assert BUSY_S < told["instance_s"] < 30
    assert 0 < told["queue_s"] < 30
    assert told["input_bytes"] == 3 * WIDTH * 4
    _, plain, _ = infer(server, "frail", value, rows=3, wanted=False)
    assert "charonia-receipt" not in plain


def test_instance_time_of_failed_requests_is_counted_apart(server: Server) -> None:
    _, headers, _ = infer(server, "counted", -101.0, rows=3)
    told = json.loads(headers["charonia-receipt"])
    infer(server, "counted", -101.0, rows=3, wanted=False)
    row = usage(server, "counted", lambda row: row["failures"] >= 2)
    assert (row["requests"], row["instance_s"], row["failures"]) == (0, 0, 2)
    assert row["failed_instance_s"] > told["instance_s"] + BUSY_S
    page = on_the_page(server, 'charonia_usage_failed_instance_seconds_total{model="counted"')
    (counted,) = re.findall(r'^charonia_usage_failed_instance_seconds_total{model="counted",[^}]*} (\S+)', page, re.M)
    assert float(counted) >= row["failed_instance_s"] - 1e-6


def test_a_failed_request_over_grpc(server: Server) -> None:
    request = service_pb2.ModelInferRequest(model_name="frail")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, WIDTH]).contents.fp32_contents.extend([-1.0] * WIDTH)
    request.parameters["charonia_receipt"].bool_param = True
    with grpc.insecure_channel(server.grpc) as channel:
        calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            calls.ModelInfer(request, timeout=60)
        (answer,) = calls.ModelStreamInfer(iter([request]), timeout=60)
    trailers = dict(failed.value.trailing_metadata())
    in_stream = answer.infer_response.parameters["charonia_receipt"].string_param
    for text in (trailers["charonia-receipt"], in_stream):
        told = json.loads(text)
        assert (told["failed"], told["rows"]) == (True, 1)
        assert told["instance_s"] > BUSY_S
    assert "below 0" in answer.error_message


def test_a_failed_ensemble_counts_the_steps_that_ran(server: Server) -> None:
    status, headers, answer = infer(server, "chain", -1.0)
    assert (status, "in ensemble 'chain', below 0" in answer["error"]) == (500, True)
    told = json.loads(headers["charonia-receipt"])
    assert [(step["model"], step.get("failed", False)) for step in told["steps"]] == [
        ("double", False),
        ("frail", True),
    ]
    assert told["failed"]
    assert told["instance_s"] > BUSY_S
    status, headers, _ = infer(server, "outer", -1.0)
    told = json.loads(headers["charonia-receipt"])
    assert [step["model"] for step in told["steps"]] == ["double", "chain"]
    assert told["instance_s"] > BUSY_S


def test_a_stream_that_fails_after_a_response(server: Server) -> None:
    content = {"INPUT0": 1.0, "charonia_receipt": True}
    status, _, events = asked(server, "/v2/models/breaking/generate_stream", content)
    told = [json.loads(line.removeprefix(b"data: ")) for line in events.split(b"\n\n") if line]
    assert (status, told[0]["OUTPUT0"], told[1]["error"]) == (200, [1.0, 1.0], "broken off")
    receipt = json.loads(told[1]["charonia_receipt"])
    assert (receipt["failed"], receipt["output_bytes"]) == (True, 8)
    assert receipt["instance_s"] > 0


def test_a_failed_job_keeps_its_receipt(server: Server) -> None:
    status, _, content = asked(server, "/v2/models/frail/infer", body(-1.0), {"prefer": "respond-async"})
    assert status == 202
    job = json.loads(content)["id"]
    request = urllib.request.Request(f"http://{server.http}/v2/jobs/{job}/result?wait=30")
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(request, timeout=60)
    with failed.value as error:
        assert json.loads(error.headers["charonia-receipt"])["instance_s"] > BUSY_S


# -- runs that were lost -----------------------------------------------------------------------------------------------


def test_a_request_that_ran_twice_is_charged_for_the_run_that_gave_its_answer(server: Server, tmp_path: Path) -> None:
    entered, gate = tmp_path / "entered", tmp_path / "gate"
    (executor,) = server.pids("executor")
    tensor = {"name": "VALUE", "datatype": "INT32", "shape": [1, 1], "data": [7]}
    parameters = {"charonia_receipt": True, "entered": str(entered), "gate": str(gate)}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(asked, server, "/v2/models/gated/infer", {"inputs": [tensor], "parameters": parameters})
        until("it runs", entered.exists)
        entered.unlink()
        os.kill(executor, signal.SIGKILL)
        gate.touch()  # of the next run
        status, _, content = asking.result(120)
    assert status == 200
    told = json.loads(json.loads(content)["parameters"]["charonia_receipt"])
    assert told["attempt"] == 2
    counted = usage(server, "gated", lambda row: row["requests"] >= 1)
    assert (counted["requests"], counted["failures"]) == (1, 0)
    assert counted["instance_s"] == pytest.approx(told["instance_s"], abs=1e-6)
