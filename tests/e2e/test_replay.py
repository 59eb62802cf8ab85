"""Requests of a real server are recorded, and asked again of candidates: one answers alike, another one does not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from e2e_asking import client, inputs, until
from e2e_models import WIDTH, python, scaling
from e2e_server import serving

from charonia.cli import main

RECORDED = 'parameters { key: "charonia.record_share" value { string_value: "1" } }'
SCALING = f"version_policy {{ all {{}} }} instance_group [ {{ count: 1 kind: KIND_CPU }} ] {RECORDED}"
FACTORS = {1: 2.0, 2: 2.0, 3: 2.5}

SPELLS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        for request in requests:
            value = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy().ravel()[0])
            key = request.correlation_id()
            self.sums[key] = value + (0 if request.flags() & 1 else self.sums[key])
            sender = request.get_response_sender()
            for digit in str(self.sums[key]):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("DIGIT", np.array([digit.encode()], object))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Sums of a sequence, each spelt by one response for each digit."""
SPELLING = f"""
max_batch_size: 0
version_policy {{ all {{}} }}
input [ {{ name: "X" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "DIGIT" data_type: TYPE_STRING dims: [ 1 ] }} ]
model_transaction_policy {{ decoupled: true }}
sequence_batching {{ max_sequence_idle_microseconds: 60000000 }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{RECORDED}
"""

ENDS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.int32))]))
            sender.send({last}flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""One response, and at the end of versions 1 and 2 one without outputs, of version 3 the flag alone."""
ENDING = f"""
max_batch_size: 0
version_policy {{ all {{}} }}
input [ {{ name: "X" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }} ]
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
{RECORDED}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("replay")
    for version, factor in FACTORS.items():
        scaling(directory / "models", "scaling", factor, version=version, config=SCALING)
        scaling(directory / "models", "later", factor, version=version, config=SCALING)
    scaling(directory / "models", "plain", 2.0)
    for version in (1, 2):
        python(directory / "models", "spelling", SPELLS, SPELLING, version=version)
    for version, last in ((1, "pb_utils.InferenceResponse([]), "), (2, "pb_utils.InferenceResponse([]), "), (3, "")):
        for model in ("ending", "ending_later"):
            source = ENDS.replace("{last}", last)
            python(directory / "models", model, source, ENDING, version=version)
    with serving(directory / "models", directory / "state") as server:
        yield server


Asking = Callable[..., tuple[int, Any]]


@pytest.fixture
def replay(server: Any, capsys: pytest.CaptureFixture[str]) -> Asking:
    """Runs `charonia replay`: the exit code, and the JSON that it printed, or what it said on stderr."""

    def run(*words: str, url: str = "") -> tuple[int, Any]:
        words = ("--from=journal", "--json", *words, f"--log-url={server.log_url}", f"--url={url or server.http}")
        if not url:
            code = main(["replay", *words])
            printed = capsys.readouterr()
            return code, json.loads(printed.out) if printed.out else printed.err
        command = [str(Path(sys.executable).parent / "charonia"), "replay", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr

    return run


def interrupted(server: Any, number: int, *words: str) -> tuple[int, Any, str]:
    """Sends a signal to `charonia replay` once it has said how far it is: the exit code, the JSON, its last words."""
    program = str(Path(sys.executable).parent / "charonia")
    command = [
        program,
        "replay",
        "--from=journal",
        "--json",
        *words,
        f"--log-url={server.log_url}",
        f"--url={server.http}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            # zeros are the same times any factor, and the first ones differ from no candidate
            if " of 40 requests, " in line and (words[0].endswith("2") or " 0 differ" not in line):
                break
        running.send_signal(number)
        printed, said = running.communicate(timeout=60)
    return running.returncode, json.loads(printed), said.splitlines()[-1]


def recorded(server: Any, model: str, count: int) -> None:
    line = f'charonia_recorded_requests_total{{model="{model}",result="recorded"}} {count}'
    until(f"{count} requests of {model} are recorded", lambda: line in server.scrape().splitlines())


def test_a_candidate_is_released_by_its_answers(server: Any, replay: Asking) -> None:
    code, said = replay("--to=scaling:2")
    assert (code, "it records 100 % of the requests without a tenant" in said) == (2, True), said
    code, said = replay("--to=plain:1")
    assert (code, 'it records no requests: set parameters { key: "charonia.record_share"' in said) == (2, True), said
    code, said = replay("--to=unknown:1")
    assert (code, "it is not served" in said) == (2, True), said
    for kind in ("http", "grpc"):
        with client(kind, server) as asking:
            for number in range(20):
                values = np.full((1, WIDTH), number, np.float32)
                asking.infer("scaling", inputs(kind, INPUT0=values), model_version="1", request_id=f"{kind}-{number}")
    recorded(server, "scaling", 40)

    code, same = replay("--to=scaling:2")
    assert (code, same["verdict"], same["compared"], same["same"]) == (0, "same", 40, 40), same
    assert same["answered_by"] == {"1": 40}
    code, different = replay("--to=scaling:3", "--worst=3", "--rate=1000")
    # zeros are the same times any factor
    assert (code, different["verdict"], different["different"]) == (1, "different", 38)
    (output,) = different["outputs"]
    assert (output["name"], output["different"], output["kinds"]) == ("OUTPUT0", 38, {"values": 38})
    assert (output["worst_absolute"], round(output["worst_relative"], 6)) == (9.5, 0.25)
    assert {one["request_id"] for one in different["worst"]} <= {f"{k}-{n}" for k in ("http", "grpc") for n in (19, 18)}
    code, tolerant = replay("--to=scaling:3", "--relative=OUTPUT0=0.3")
    assert (code, tolerant["same"]) == (0, 40)
    for number, differ in ((signal.SIGINT, 0), (signal.SIGTERM, 1)):
        code, partial, said = interrupted(server, number, f"--to=scaling:{2 + differ}", "--rate=1")
        compared = partial["compared"]
        assert (code, 0 < compared < 40, partial["unanswered"][0]["count"]) == (2 - differ, True, 40 - compared)
        assert (
            said == f"charonia replay: interrupted: the report is of the {compared} requests that were compared before"
        )
    assert replay("--model=scaling", "--drop") == (0, {"model": "scaling", "deleted": 40}), "replays are not recorded"


def test_what_was_answered_later_is_asked_again_too(server: Any, replay: Asking) -> None:
    """The recording has the inputs, and the job its answer."""
    jobs = []
    for number in range(6):
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, WIDTH], "data": [float(number)] * WIDTH}
        body = json.dumps({"inputs": [tensor]}).encode()
        status, said = server.request("POST", "/v2/models/later/versions/1/infer", body, {"prefer": "respond-async"})
        assert status == 202, said
        jobs.append(json.loads(said)["id"])
    for job in jobs:
        assert server.get(f"/v2/jobs/{job}/result?wait=30")[0] == 200
    recorded(server, "later", 6)
    code, same = replay("--to=later:2")
    assert (code, same["compared"], same["same"], same["unreplayable"]) == (0, 6, 6, []), same
    code, different = replay("--to=later:3")
    assert (code, different["different"]) == (1, 5), different  # zeros are the same times any factor
    code, tolerant = replay("--to=later:3", "--absolute=OUTPUT0=0.1", "--relative=0.25")
    assert (code, tolerant["same"]) == (0, 6), tolerant


def test_sequences_and_streams_are_asked_again_in_order(server: Any, replay: Asking) -> None:
    answers: list[Any] = []
    with grpcclient.InferenceServerClient(server.grpc) as asking:
        asking.start_stream(lambda result, error: answers.append(error or result))
        for step in range(4):
            for sequence in (7, 8):
                value = grpcclient.InferInput("X", [1], "INT32")
                value.set_data_from_numpy(np.array([100 * sequence], np.int32))
                asking.async_stream_infer(
                    "spelling", [value], model_version="1", sequence_id=sequence, sequence_start=step == 0,
                    sequence_end=step == 3,
                )  # fmt: skip
        until("all digits came", lambda: len(answers) >= 30)
        asking.stop_stream()
    assert not [one for one in answers if isinstance(one, Exception)], answers
    recorded(server, "spelling", 8)
    for url in ("", f"grpc://{server.grpc}"):
        code, found = replay("--to=spelling:2", url=url)
        assert (code, found["compared"], found["same"], found["unreplayable"]) == (0, 8, 8, []), found


def test_a_last_response_without_outputs_is_compared(server: Any, replay: Asking) -> None:
    """Of streams, and of jobs, which keep their answers themselves."""
    value = grpcclient.InferInput("X", [1], "INT32")
    value.set_data_from_numpy(np.zeros(1, np.int32))
    answers: list[Any] = []
    with grpcclient.InferenceServerClient(server.grpc) as asking:
        asking.start_stream(lambda result, error: answers.append(error or result))
        asking.async_stream_infer("ending", [value], model_version="1")
        asking.stop_stream()  # waits for all responses
    assert [len(answer.get_response().outputs) for answer in answers] == [1, 0]
    body = json.dumps({"inputs": [{"name": "X", "datatype": "INT32", "shape": [1], "data": [0]}]}).encode()
    path = "/v2/models/ending_later/versions/1/infer"
    status, said = server.request("POST", path, body, {"prefer": "respond-async"})
    assert status == 202, said
    assert server.get(f"/v2/jobs/{json.loads(said)['id']}/result?wait=30")[0] == 200
    for model in ("ending", "ending_later"):
        recorded(server, model, 1)
        for url in ("", f"grpc://{server.grpc}"):
            code, found = replay(f"--to={model}:2", url=url)
            assert (code, found["compared"], found["same"]) == (0, 1, 1), f"{model} {url} {json.dumps(found)}"
            code, found = replay(f"--to={model}:3", url=url)
            assert (code, found["different"]) == (1, 1), (model, url, found)
            assert "recorded were 2 responses, now there are 1" in json.dumps(found)
