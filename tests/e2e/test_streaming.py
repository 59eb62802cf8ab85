"""Models that answer more than once, from python senders to stock clients: streams, events, jobs, a lost executor."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e_asking import on_the_page, until
from e2e_models import python
from e2e_server import Server, serving
from gated_streams import CONFIG, SOURCE, Gates

LIMIT_S = 60
REPEATABLE = 'parameters { key: "charonia.repeatable" value { string_value: "true" } }\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    python(models, "squares", SOURCE, CONFIG)
    python(models, "again", SOURCE, CONFIG + REPEATABLE)
    python(models, "counted", SOURCE, CONFIG + REPEATABLE)  # of one test alone: streams are counted when they end
    with serving(models, tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture(scope="module")
def other_gateway(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Where it listens: another gateway over the same log."""
    said = tmp_path_factory.mktemp("other") / "gateway.log"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "charonia"), "gateway", "--log-url", server.log_url, "--http-port=0",
                "--grpc-port=0", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-port=0",
            ],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def up() -> re.Match[str] | None:
        assert process.poll() is None, said.read_text()
        return re.search(r"gateway is up, http on ([\d.:]+)", said.read_text())

    try:
        found = until("the gateway is up", up)
        assert found is not None
        yield SimpleNamespace(http=found[1])
    finally:
        process.terminate()
        process.wait(LIMIT_S)


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path)


class Stream:
    """A gRPC stream of the stock client; `next` is its next answer: (id, value, final), or the error."""

    def __init__(self, server: Server) -> None:
        self._answers: queue.Queue[Any] = queue.Queue()
        self.client = triton.InferenceServerClient(server.grpc)
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def ask(self, model: str, count: int, request_id: str = "", **more: Any) -> None:
        tensor = triton.InferInput("COUNT", [1], "INT32")
        tensor.set_data_from_numpy(np.array([count], np.int32))
        self.client.async_stream_infer(model, [tensor], request_id=request_id, **more)

    def follow(self, model: str, **parameters: Any) -> None:
        self.client.async_stream_infer(model, [], parameters=parameters)

    def next(self) -> Any:
        result, error = self._answers.get(timeout=LIMIT_S)
        if error is not None:
            return error.message()
        response = result.get_response()
        value = result.as_numpy("VALUE")
        final = response.parameters["triton_final_response"].bool_param
        return response.id, None if value is None else int(value[0]), final

    def raw(self) -> Any:
        result, error = self._answers.get(timeout=LIMIT_S)
        assert error is None, error
        return result.get_response()

    def close(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


@pytest.fixture
def stream(server: Server) -> Iterator[Stream]:
    stream = Stream(server)
    yield stream
    stream.close()


class Events:
    """An answer of server-sent events on a connection of its own; `next` is the next one by its fields, {} the end."""

    def __init__(
        self, server: Any, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self._connection = http.client.HTTPConnection(server.http, timeout=LIMIT_S)
        self._connection.request(method, path, body, headers or {})
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.content_type = self._answer.headers["content-type"]

    def next(self) -> dict[str, str]:
        fields: dict[str, str] = {}
        while line := self._answer.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
        return fields

    def data(self) -> Any:
        return json.loads(self.next()["data"])

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()


def generate(server: Any, model: str, body: dict[str, Any], **headers: str) -> Events:
    return Events(server, "POST", f"/v2/models/{model}/generate_stream", json.dumps(body), headers)


def test_responses_come_as_they_are_made(stream: Stream, gates: Gates) -> None:
    stream.ask("squares", 3, "a", parameters=gates.parameters)
    stream.ask("squares", 2, "b", enable_empty_final_response=True)
    assert [stream.next() for _ in range(3)] == [("b", 0, False), ("b", 1, False), ("b", None, True)]
    for index in range(3):
        gates.open(index)
        assert stream.next() == ("a", index * index, False)
    stream.ask("squares", 2, "c", parameters={"flagged": True}, enable_empty_final_response=True)
    assert [stream.next() for _ in range(2)] == [("c", 0, False), ("c", 1, True)]
    stream.ask("squares", 3, "d", parameters={"fail_at": 1})
    assert [stream.next() for _ in range(3)] == [("d", 0, False), "An Error Occurred", ("d", 4, False)]


def test_a_last_response_without_outputs_is_a_response(stream: Stream) -> None:
    """G24: only a flag without a response is left out where the client did not ask for it."""
    for count in (0, 1):
        stream.ask("squares", count, "bare", parameters={"ends": "bare"})
        expected = [("bare", 0, False)] * count + [("bare", None, True)]
        assert [stream.next() for _ in range(count + 1)] == expected
    stream.ask("squares", 0, "flag")  # a message of it would be one too many below
    stream.ask("squares", 2, "part", parameters={"bare_at": 0})
    assert [stream.next() for _ in range(2)] == [("part", None, False), ("part", 1, False)]
    stream.ask("squares", 0, "error", parameters={"ends": "error"})
    assert stream.next() == "The End"
    for ends, version in (("bare", "1"), ("", "")):
        stream.ask("squares", 0, "both", parameters={"ends": ends}, enable_empty_final_response=True)
        answer = stream.raw()
        assert (answer.id, answer.model_name, answer.model_version) == ("both", "squares", version)
        assert answer.parameters["triton_final_response"].bool_param
        assert not answer.outputs
    stream.ask("squares", 0, "last", model_version="1", enable_empty_final_response=True)
    assert stream.raw().model_version == "1"  # of the request


def test_a_last_response_without_outputs_over_http(server: Server, stream: Stream) -> None:
    about = {"model_name": "squares", "model_version": "1"}
    asked = {"ends": "bare"}
    status, body = server.request("POST", "/v2/models/squares/generate", json.dumps({"COUNT": 0, **asked}).encode())
    assert (status, json.loads(body)) == (200, about)
    status, body = server.request("POST", "/v2/models/squares/generate", json.dumps({"COUNT": 1, **asked}).encode())
    assert "exactly 1 response" in json.loads(body)["error"]
    with generate(server, "squares", {"COUNT": 1, **asked}) as events:
        assert [events.data(), events.data(), events.next()] == [{**about, "VALUE": 0}, about, {}]
    tensor = {"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [1]}
    body = json.dumps({"inputs": [tensor], "parameters": asked}).encode()
    status, answer = server.request("POST", "/v2/models/squares/infer", body, {"Prefer": "respond-async"})
    assert status == 202
    job = json.loads(answer)["id"]
    stream.follow("squares", charonia_job_id=job)
    assert [stream.next() for _ in range(2)] == [("", 0, False), ("", None, True)]
    status, body = server.request("GET", f"/v2/jobs/{job}/result")
    assert [len(response["outputs"]) for response in json.loads(body)] == [1, 0]
    with Events(server, "GET", f"/v2/jobs/{job}/events") as events:
        told = list(iter(events.next, {}))
    last = [json.loads(event["data"]) for event in told if event.get("event") == "response"][-1]
    assert last == {"attempt": 1, "index": 1, "final": True, "response": {**about, "outputs": []}}


def test_a_stream_that_is_left(server: Server, gates: Gates) -> None:
    stream = Stream(server)
    stream.ask("squares", 3, "a", parameters=gates.parameters)
    gates.open(0)
    assert stream.next() == ("a", 0, False)
    stream.close()
    until("the model sees it", gates.left.exists)


def test_generate(server: Server) -> None:
    status, body = server.request("POST", "/v2/models/squares/generate", b'{"COUNT": 1, "id": "x"}')
    assert (status, json.loads(body)) == (
        200, {"id": "x", "model_name": "squares", "model_version": "1", "VALUE": 0},
    )  # fmt: skip
    for count in (0, 2):
        status, body = server.request("POST", "/v2/models/squares/generate", b'{"COUNT": %d}' % count)
        assert status == 200
        assert "generate expects model to produce exactly 1 response" in json.loads(body)["error"]
    tensor = {"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [1]}
    status, body = server.request("POST", "/v2/models/squares/infer", json.dumps({"inputs": [tensor]}).encode())
    assert (status, json.loads(body)["error"]) == (
        501, "HTTP end point doesn't support models with decoupled transaction policy",
    )  # fmt: skip


def test_generate_stream(server: Server, gates: Gates) -> None:
    gates.open(0)
    with generate(server, "squares", {"COUNT": 2, "parameters": {**gates.parameters, "fail_at": 1}}) as events:
        assert (events.status, events.content_type) == (200, "text/event-stream; charset=utf-8")
        assert events.data()["VALUE"] == 0
        gates.open(1)
        assert events.data() == {"error": "An Error Occurred"}
        assert events.next() == {}
    with generate(server, "squares", {"COUNT": 1, "fail_at": 0}) as events:
        assert (events.status, events.data()) == (500, {"error": "An Error Occurred"})
    with generate(server, "squares", {"COUNT": "one"}) as events:
        assert (events.status, events.content_type) == (500, "application/json")


def test_a_generation_that_is_left(server: Server, gates: Gates) -> None:
    gates.open(0)
    with generate(server, "squares", {"COUNT": 3, **gates.parameters}) as events:
        assert events.data()["VALUE"] == 0
    until("the model sees it", gates.left.exists)


def test_a_job_is_followed_from_where_its_reader_was_at_any_gateway(
    server: Server, other_gateway: Any, stream: Stream, gates: Gates
) -> None:
    tensor = {"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [4]}
    body = json.dumps({"inputs": [tensor], "parameters": gates.parameters, "id": "mine"}).encode()
    status, answer = server.request("POST", "/v2/models/squares/infer", body, {"Prefer": "respond-async"})
    assert status == 202
    job = json.loads(answer)
    gates.open(0, 1)
    told: list[dict[str, str]] = []
    with Events(server, "GET", job["location"] + "/events") as events:
        assert events.next() == {"retry": "1000"}
        while len([each for each in told if each["event"] == "response"]) < 2:
            told.append(events.next())
    seen = told[-1]["id"]
    assert seen.endswith("-2")

    stream.follow("squares", charonia_job_id=job["id"])
    assert [stream.next() for _ in range(2)] == [("mine", 0, False), ("mine", 1, False)]
    gates.open(2, 3)
    rest = [stream.raw() for _ in range(2)]
    assert [r.parameters["charonia_index"].int64_param for r in rest] == [2, 3]
    stream.follow("squares", charonia_job_id=job["id"], charonia_after_index=2)
    assert stream.next() == ("mine", 9, False)

    told = []
    with Events(other_gateway, "GET", job["location"] + "/events", headers={"Last-Event-ID": seen}) as events:
        assert events.next() == {"retry": "1000"}
        while event := events.next():
            told.append(event)
    assert told[-1]["event"] == "succeeded"
    responses = [json.loads(each["data"]) for each in told if each["event"] == "response"]
    assert [r["index"] for r in responses] == [2, 3, 4]
    assert [r["response"]["outputs"][0]["data"] for r in responses[:2]] == [[4], [9]]
    assert (responses[2]["final"], "response" in responses[2]) == (True, False)
    assert server.request("GET", job["location"] + "/events", None, {"Last-Event-ID": told[-1]["id"]})[0] == 204

    status, answer = server.get(job["location"] + "/result?wait=50")
    assert status == 200
    assert [r["outputs"][0]["data"][0] for r in json.loads(answer)] == [0, 1, 4, 9]


def test_a_key_attaches_to_the_stream_of_the_first(server: Server, other_gateway: Any, gates: Gates) -> None:
    body = {"COUNT": 3, **gates.parameters}
    gates.open(0)
    with generate(server, "squares", body, **{"Idempotency-Key": "order-1"}) as events:
        assert events.data()["VALUE"] == 0
    # the connection broke
    with generate(other_gateway, "squares", body, **{"Idempotency-Key": "order-1"}) as events:
        assert events.data()["VALUE"] == 0
        gates.open(1, 2)
        assert [events.data()["VALUE"] for _ in range(2)] == [1, 4]
        assert events.next() == {}
    assert not gates.left.exists()


@pytest.mark.parametrize("model", ["squares", "again"])
def test_an_executor_that_dies_in_mid_stream(server: Server, stream: Stream, gates: Gates, model: str) -> None:
    stream.ask(model, 5, "a", parameters=gates.parameters)
    gates.open(0, 1)
    assert [stream.next() for _ in range(2)] == [("a", 0, False), ("a", 1, False)]
    for pid in server.pids("executor+batcher"):
        os.kill(pid, signal.SIGKILL)
    gates.open(2, 3, 4)
    if model == "squares":
        assert str(stream.next()).startswith("STREAM_INTERRUPTED: ")
    else:
        assert [stream.next() for _ in range(3)] == [("a", 4, False), ("a", 9, False), ("a", 16, False)]
    stream.ask(model, 1, "b")
    assert stream.next() == ("b", 0, False)


def test_requests_are_counted_once(server: Server) -> None:
    status, body = server.get("/v2/models/counted/stats")
    assert status == 200
    statistics = json.loads(body)["model_stats"][0]["inference_stats"]
    before = statistics["success"]["count"]
    assert server.request("POST", "/v2/models/counted/generate_stream", b'{"COUNT": 5}')[0] == 200

    def succeeded() -> int:
        statistics = json.loads(server.get("/v2/models/counted/stats")[1])["model_stats"][0]["inference_stats"]
        return int(statistics["success"]["count"])

    until("it is counted", lambda: succeeded() > before)
    assert succeeded() == before + 1
    on_the_page(server, 'nv_inference_request_success{model="counted",version="1"}')
