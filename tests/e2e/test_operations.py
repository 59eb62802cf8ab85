"""The operators' commands against a running server: see, hold back, cancel, understand what died, audit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import infer, until
from e2e_models import gated, python
from e2e_server import serving
from tritonclient.utils import InferenceServerException

DEADLY = """
import os, sys
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        if any(array[0, 0] == 13 for array in arrays) and not os.path.exists(CURED):
            print("thirteen, of all numbers", file=sys.stderr, flush=True)
            os._exit(7)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in arrays]
"""

DEADLY_CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


@pytest.fixture(scope="module")
def cured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cure") / "cured"


@pytest.fixture(scope="module")
def server(cured: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    gated(models, "gated", "max_batch_size: 1 instance_group [ { count: 1 kind: KIND_CPU } ]")
    levels = "max_batch_size: 1 dynamic_batching { priority_levels: 2 default_priority_level: 2 }"
    gated(models, "levels", levels + " instance_group [ { count: 1 kind: KIND_CPU } ]")
    python(models, "deadly", DEADLY.replace("CURED", repr(str(cured))), DEADLY_CONFIG)
    with serving(models, tmp_path_factory.mktemp("state"), "--journal=all") as running:
        yield running


def charonia(server: Any, *words: str) -> tuple[int, Any]:
    """Exit code and document of a command that finds the server by its state directory."""
    command = [str(Path(sys.executable).parent / "charonia"), *words, "--json", f"--state-dir={server.state_dir}"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=180)
    assert done.stdout, done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def value_of(number: int, **parameters: str) -> dict[str, Any]:
    tensor = {"name": "VALUE", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    return {"inputs": [tensor], "parameters": parameters}


def submit(server: Any, model: str, body: dict[str, Any]) -> str:
    """The id of a job."""
    headers = {"Prefer": "respond-async"}
    status, answer = server.request("POST", f"/v2/models/{model}/infer", json.dumps(body).encode(), headers)
    assert status == 202, answer
    return str(json.loads(answer)["id"])


def test_a_queue_is_seen_held_and_cancelled(server: Any, tmp_path: Path) -> None:
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    running = submit(server, "gated", value_of(0, gate=str(gate), entered=str(entered)))
    until("the first is executed", entered.exists)
    waiting, unwanted = [submit(server, "gated", value_of(number)) for number in (1, 2)]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(infer, server, "gated", VALUE=np.full((1, 1), 3, np.int32))

        def rows() -> list[dict[str, Any]]:
            return list(charonia(server, "queue", "inspect", "gated")[1]["queue"])

        until("all four are in the queue", lambda: len(rows()) == 4)
        queued = rows()
        assert [row["job"] for row in queued] == [running, waiting, unwanted, None]
        code, document = charonia(server, "queue", "ls", "--model", "gated")
        assert (code, document["queues"][0]["requests"]) == (0, 4)
        assert document["queues"][0]["owner"].startswith("batcher-")

        code, _ = charonia(server, "queue", "pause", "gated")
        assert code == 0
        code, document = charonia(server, "queue", "cancel", "gated", "--id", queued[3]["id"], "--id", queued[2]["id"])
        assert (code, len(document["cancelled"])) == (0, 2)
        error = call.exception(50)  # at once, not when the instance is free: the gate is closed
        assert isinstance(error, InferenceServerException)
        assert "cancelled by an operator" in error.message()
    gate.touch()
    assert charonia(server, "jobs", "wait", running, "--timeout", "60")[0] == 0
    # what is held back does not begin although the instance is free
    code, document = charonia(server, "jobs", "wait", waiting, "--timeout", "500ms")
    assert (code, document["state"]) == (1, "queued")
    charonia(server, "queue", "resume", "gated")
    assert charonia(server, "jobs", "wait", waiting, "--timeout", "60")[0] == 0
    code, document = charonia(server, "jobs", "result", waiting)
    echo = next(output for output in document["outputs"] if output["name"] == "ECHO")
    assert (code, echo["data"]) == (0, [1])

    code, document = charonia(server, "jobs", "ls", "--model", "gated")
    states = {job["id"]: job["state"] for job in document["jobs"]}
    assert states == {running: "succeeded", waiting: "succeeded", unwanted: "cancelled"}
    _, document = charonia(server, "jobs", "timeline", waiting)
    assert [event["event"] for event in document["events"]][-2:] == ["batched", "succeeded"]
    until("the queue is empty", lambda: not charonia(server, "queue", "ls", "--model", "gated")[1]["queues"])
    code, document = charonia(server, "audit")
    assert (code, document["findings"]) == (0, [])
    gated_report = next(model for model in document["models"] if model["model"] == "gated")
    assert gated_report["ended"] == {"cancelled": 2, "succeeded": 2}


def test_a_moved_job_overtakes_those_of_lower_levels(server: Any, tmp_path: Path) -> None:
    gate, entered = tmp_path / "gate", tmp_path / "entered"
    running = submit(server, "levels", value_of(0, gate=str(gate), entered=str(entered)))
    until("the first is executed", entered.exists)
    waiting = [submit(server, "levels", value_of(number)) for number in (1, 2, 3, 4)]
    assert charonia(server, "queue", "pause", "levels")[0] == 0
    code, document = charonia(server, "queue", "move", "levels", "--id", waiting[3], "--level", "1")
    assert (code, document["applied"], document["left"]) == (0, True, {})
    code, document = charonia(server, "queue", "move", "levels", "--id", running, "--level", "1")
    assert (code, list(document["left"].values())) == (1, ["it is running"])
    charonia(server, "queue", "resume", "levels")
    gate.touch()
    for job in (running, *waiting):
        assert charonia(server, "jobs", "wait", job, "--timeout", "60")[0] == 0

    batched = {}
    for job in (running, *waiting):
        _, document = charonia(server, "jobs", "timeline", job)
        batched[job] = [event["time_us"] for event in document["events"] if event["event"] == "batched"]
    assert all(len(times) == 1 for times in batched.values())
    # what had been given to the instance ahead of time stays ahead
    assert batched[waiting[3]] < min(batched[waiting[1]], batched[waiting[2]])
    until("the queue is empty", lambda: not charonia(server, "queue", "ls", "--model", "levels")[1]["queues"])
    code, document = charonia(server, "audit", "--model", "levels")
    assert (code, document["findings"]) == (0, [])


def test_a_dead_letter_is_understood_and_replayed(server: Any, cured: Path) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [13]}]}
    job = submit(server, "deadly", body)
    code, document = charonia(server, "jobs", "wait", job, "--timeout", "120")
    assert (code, document["state"]) == (1, "failed")
    until("it is a dead letter", lambda: charonia(server, "dlq", "ls", "deadly")[1]["letters"])

    code, document = charonia(server, "dlq", "show", job)
    assert code == 0
    assert document["inputs"][0]["data"] == [13]
    assert "thirteen, of all numbers" in "\n".join(document["stderr"])
    assert document["version"] == 1

    cured.touch()
    code, document = charonia(server, "dlq", "replay", job)
    (replayed,) = document["replayed"]
    assert charonia(server, "jobs", "wait", replayed["job"], "--timeout", "60")[0] == 0
    _, document = charonia(server, "jobs", "result", replayed["job"])
    assert document["outputs"][0]["data"] == [13]
    assert charonia(server, "dlq", "drop", job)[0] == 0
    assert charonia(server, "dlq", "ls")[1]["letters"] == []
    code, document = charonia(server, "audit", "--model", "deadly")
    assert (code, document["findings"]) == (0, [])
