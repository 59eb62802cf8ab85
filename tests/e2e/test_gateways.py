"""What is begun at one gateway is read at another: sequences, jobs, streams; and all gateways say the same.

Two gateways, a batcher, an executor that loads on demand, one that loads what it is told to. Started once; the last
test kills the first gateway.
"""

from __future__ import annotations

import http.client
import json
import queue
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e_asking import client, index, infer, inputs, post, until
from e2e_models import WIDTH, python, scaling
from e2e_parts import Part, parts_over_a_log

pytestmark = pytest.mark.e2e

LIMIT_S = 60
ONE_EACH = "instance_group [ { count: 1 kind: KIND_CPU } ]"

SUMS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            key = request.correlation_id()
            before = 0 if request.flags() & 1 else self.sums[key]
            self.sums[key] = before + pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", self.sums[key])]))
        return responses
"""
SUMS_IO = (
    'max_batch_size: 8 input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 8 } } "
)

COUNTS = '''
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """COUNT -> so many VALUEs; with the parameter `gates`, each once there is a file `gates`.<index>."""

    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            gates = json.loads(request.parameters() or "{}").get("gates", "")
            sender = request.get_response_sender()
            for index in range(count):
                while gates and not os.path.exists(f"{gates}.{index}") and not sender.is_cancelled():
                    time.sleep(0.002)
                if sender.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", np.array([index], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
'''
COUNTS_IO = (
    'input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    "model_transaction_policy { decoupled: true } "
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("gateways")
    models = directory / "models"
    python(models, "sums", SUMS, SUMS_IO + ONE_EACH)
    python(models, "counts", COUNTS, COUNTS_IO + ONE_EACH)
    scaling(models, "double", 2, config=ONE_EACH)
    by_hand = 'parameters { key: "charonia.pool" value { string_value: "by-hand" } }'
    scaling(models, "triple", 3, config=f"{ONE_EACH} {by_hand}")
    with parts_over_a_log(directory) as parts:
        parts.start("batcher", "batcher")
        repository = f"--model-repository={models}"
        on_demand = parts.start("executor", "on-demand", repository, "--max-loaded-models=3")
        told = parts.start("executor", "told", repository, "--pool=by-hand", "--model-control-mode=explicit")
        for executor in (on_demand, told):
            executor.until_says("executor is up")

        def gateway(name: str) -> Part:
            return parts.gateway(name, "--strict-readiness=false")

        yield SimpleNamespace(one=gateway("one"), other=gateway("other"), gateway=gateway)


def body_of(count: int, gates: Path | str = "") -> Any:
    tensor = {"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [count]}
    return {"inputs": [tensor], "parameters": {"gates": str(gates)} if gates else {}}


def submit(gateway: Any, model: str, body: Any) -> str:
    """The id of a job."""
    path, headers = f"/v2/models/{model}/infer", {"Prefer": "respond-async"}
    status, answer = gateway.request("POST", path, json.dumps(body).encode(), headers)
    assert status == 202, answer
    return str(json.loads(answer)["id"])


def events(gateway: Any, job: str, after: str = "") -> Iterator[tuple[str, str, Any]]:
    """Id, kind and data of each event of a job, as they come."""
    connection = http.client.HTTPConnection(gateway.http, timeout=LIMIT_S)
    try:
        connection.request("GET", f"/v2/jobs/{job}/events", headers={"Last-Event-ID": after} if after else {})
        answer = connection.getresponse()
        assert answer.status == 200
        fields: dict[str, str] = {}
        while line := answer.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
                continue
            if "data" in fields:
                yield fields["id"], fields["event"], json.loads(fields["data"])
            fields = {}
    finally:
        connection.close()


def values(seen: list[tuple[str, str, Any]]) -> list[int]:
    """What the responses among events say."""
    return [data["response"]["outputs"][0]["data"][0] for _, _, data in seen if "response" in data]


def test_the_steps_of_a_sequence_go_to_either_gateway_by_either_protocol(stack: Any) -> None:
    total = 0
    for step in range(1, 13):
        total += step
        gateway, kind = (stack.one, stack.other)[step % 2], ("http", "grpc")[step // 2 % 2]
        options = {"sequence_id": "walks", "sequence_start": step == 1, "sequence_end": step == 12}
        found = infer(gateway, "sums", kind, options, X=np.array([[step]], np.int32)).as_numpy("SUM")
        assert found.tolist() == [[total]], f"step {step}"


def test_a_job_is_read_followed_and_cancelled_at_another_gateway(stack: Any, tmp_path: Path) -> None:
    numbers = np.full((1, WIDTH), 4, np.float32)
    for begin, end in ((stack.one, stack.other), (stack.other, stack.one)):
        with client("grpc", begin) as asking:
            receipt = asking.infer("double", inputs("grpc", INPUT0=numbers), headers={"prefer": "respond-async"})
        job = receipt.get_response().parameters["charonia_job_id"].string_param
        with client("grpc", end) as asking:
            answer = asking.infer("double", [], parameters={"charonia_job_id": job, "charonia_wait_s": LIMIT_S})
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), 2 * numbers)
        status, told = end.get(f"/v2/jobs/{job}/result")
        assert (status, json.loads(told)["outputs"][0]["data"]) == (200, [8.0] * WIDTH)
        assert [kind for _, kind, _ in events(end, job)][-1] == "succeeded"
        assert end.get("/v2/jobs?model=double") == begin.get("/v2/jobs?model=double")

    held = submit(stack.one, "counts", body_of(3, tmp_path / "never"))
    following = events(stack.other, held)
    assert [next(following)[1], next(following)[1]] == ["accepted", "batched"]
    status, view = stack.other.request("DELETE", f"/v2/jobs/{held}")
    assert (status, json.loads(view)["state"]) == (200, "cancelled")
    assert [kind for _, kind, _ in events(stack.one, held)][-1] == "cancelled"


def test_a_model_that_is_loaded_by_hand_is_so_for_both(stack: Any) -> None:
    """Beside an executor that loads on demand, which is not asked."""
    assert index(stack.one)["triple", ""] == {"name": "triple"}
    assert post(stack.one, "/v2/repository/models/triple/load") == (200, None)
    numbers = np.ones((1, WIDTH), np.float32)
    for gateway in (stack.one, stack.other):
        until("it is ready", lambda gateway=gateway: gateway.get("/v2/models/triple/ready")[0] == 200)
        np.testing.assert_array_equal(infer(gateway, "triple", INPUT0=numbers).as_numpy("OUTPUT0"), 3 * numbers)
    status, answer = post(stack.other, "/v2/repository/models/nobody/load")
    assert (status, answer["error"]) == (500, "failed to load 'nobody', failed to poll from model repository")
    assert post(stack.other, "/v2/repository/models/triple/unload") == (200, None)
    for gateway in (stack.one, stack.other):
        until("it is not", lambda gateway=gateway: gateway.get("/v2/models/triple/ready")[0] == 400)
    np.testing.assert_array_equal(infer(stack.one, "double", INPUT0=numbers).as_numpy("OUTPUT0"), 2 * numbers)


def said(gateway: Any) -> dict[str, Any]:
    """What a stock client is told about the server and its models."""
    with client("grpc", gateway) as asking:
        told = {
            "ready": [asking.is_server_ready(), *map(asking.is_model_ready, ("sums", "double", "triple"))],
            "index": asking.get_model_repository_index(as_json=True),
            "statistics": asking.get_inference_statistics(as_json=True),
            "metadata": [asking.get_model_metadata(model, as_json=True) for model in ("sums", "counts", "double")],
            "configuration": asking.get_model_config("sums", as_json=True),
        }
    with client("http", gateway) as asking:
        told |= {"over HTTP": [asking.get_model_repository_index(), asking.get_inference_statistics()]}
        told |= {"ready over HTTP": [asking.is_server_ready(), asking.is_model_ready("triple")]}
    return told


def alike(*gateways: Any) -> dict[str, Any]:
    """What all say, once the last answers are counted."""

    def look() -> dict[str, Any] | None:
        first, *others = map(said, gateways)
        return first if all(other == first for other in others) else None

    return until("all gateways say the same", look)


def test_readiness_index_and_statistics_are_the_same_whoever_is_asked(stack: Any) -> None:
    told = alike(stack.one, stack.other)
    assert told["ready"] == [True, True, True, False]
    counts = {row["name"]: row["inference_stats"]["success"]["count"] for row in told["over HTTP"][1]["model_stats"]}
    assert counts["sums"] == 12
    assert counts["double"] == 3


@pytest.mark.long
def test_a_stream_is_read_on_at_another_gateway_when_its_own_is_killed(stack: Any, tmp_path: Path) -> None:
    gates = tmp_path / "gate"

    def open_gates(*numbers: int) -> None:
        for number in numbers:
            gates.with_suffix(f".{number}").touch()

    open_gates(0, 1, 2)
    job = submit(stack.one, "counts", body_of(6, gates))
    seen = []
    reading = events(stack.one, job)
    while values(seen) != [0, 1, 2]:
        seen.append(next(reading))
    stack.one.process.send_signal(signal.SIGKILL)
    stack.one.process.wait()
    with suppress(OSError, http.client.HTTPException):  # the reading ends
        for event in reading:  # one about the job may have been sent after the responses
            seen.append(event)
    assert values(seen) == [0, 1, 2]

    more = events(stack.other, job, after=seen[-1][0])
    open_gates(3)
    seen.append(next(more))
    open_gates(4, 5)
    seen += more
    assert values(seen) == [0, 1, 2, 3, 4, 5]
    assert seen[-1][1] == "succeeded"
    numbers = [place for place, _, _ in seen]
    assert len(set(numbers)) == len(numbers), "nothing came twice"

    # the same again by a stock client, from the beginning
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(stack.other.grpc) as asking:
        asking.start_stream(lambda result, error: answers.put((result, error)))
        asking.async_stream_infer("counts", [], parameters={"charonia_job_id": job})
        found = []
        while len(found) < 6:
            result, error = answers.get(timeout=LIMIT_S)
            assert error is None, error
            found.append(int(result.as_numpy("VALUE")[0]))
        asking.stop_stream()
    assert found == [0, 1, 2, 3, 4, 5]

    status, view = stack.other.get(f"/v2/jobs/{job}")
    assert (status, json.loads(view)["attempts"]) == (200, 1)
    alike(stack.other, stack.gateway("third"))
