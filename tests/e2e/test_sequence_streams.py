"""Sequences whose requests have several responses, responses in order, and what an executor's end leaves of them.

One server; its executor, in whose process the batcher is too, is killed in the last tests.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e_asking import infer, until
from e2e_server import Server, serving
from talking_models import build
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.e2e
LIMIT_S = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    build(repository)
    return repository


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(models, tmp_path_factory.mktemp("state")) as running:
        yield running


class Gates:
    """Files a request waits for, one for each of its responses."""

    def __init__(self, path: Path) -> None:
        self.prefix = str(path)

    def open(self, *numbers: int) -> None:
        for number in numbers:
            Path(f"{self.prefix}.{number}").touch()

    @property
    def parameters(self) -> dict[str, Any]:
        return {"gates": self.prefix}


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gate")


class Stream:
    """A gRPC stream of the stock client; `next` is its next answer: (id, TOLD, final), or the error's text."""

    def __init__(self, server: Server) -> None:
        self._answers: queue.Queue[Any] = queue.Queue()
        self.client = triton.InferenceServerClient(server.grpc)
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def ask(
        self, model: str, count: int, request_id: str = "", sequence: int | str = 0, flags: str = "", **more: Any
    ) -> None:
        tensor = triton.InferInput("X", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[count]], np.int32))
        self.client.async_stream_infer(
            model,
            [tensor],
            request_id=request_id,
            sequence_id=sequence,
            sequence_start="s" in flags,
            sequence_end="e" in flags,
            **more,
        )

    def next(self) -> Any:
        result, error = self._answers.get(timeout=LIMIT_S)
        if error is not None:
            return error.message()
        response = result.get_response()
        told = result.as_numpy("TOLD")
        final = response.parameters["triton_final_response"].bool_param
        return response.id, None if told is None else told[0].tolist(), final

    def several(self, count: int) -> list[Any]:
        return [self.next() for _ in range(count)]

    def close(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


@pytest.fixture
def stream(server: Server) -> Iterator[Stream]:
    stream = Stream(server)
    yield stream
    stream.close()


def heads(answers: list[Any]) -> list[Any]:
    """(id, sum, number) of responses."""
    return [(answer[0], *answer[1][:2]) for answer in answers]


@pytest.mark.parametrize("model", ["talks", "tells"])
def test_requests_of_a_sequence_stream_one_after_the_other(stream: Stream, gates: Gates, model: str) -> None:
    stream.ask(model, 3, "a", 11, "s", parameters=gates.parameters)
    stream.ask(model, 2, "b", 11)
    stream.ask(model, 0, "c", 11, enable_empty_final_response=True)
    stream.ask(model, 1, "d", 11, "e")
    stream.ask(model, 2, "other", 12, "se")
    gates.open(0)
    first = stream.several(3)
    assert sorted(heads(first)) == [("a", 1, 0), ("other", 1, 0), ("other", 2, 1)], "only its own sequence waits"
    assert next(answer[1][2:4] for answer in first if answer[0] == "a") == [1, 0]
    gates.open(1, 2)
    rest = stream.several(6)
    assert heads(rest[:4]) == [("a", 2, 1), ("a", 3, 2), ("b", 4, 0), ("b", 5, 1)]
    assert rest[4] == ("c", None, True)
    assert heads(rest[5:]) == [("d", 6, 0)]
    assert rest[5][1][2:4] == [0, 1]
    stream.ask(model, 1, "e", 11)
    assert "must specify the START flag" in stream.next()


def test_a_direct_batch_covers_slots_without_a_request(stream: Stream, gates: Gates) -> None:
    """S34: the slot of a sequence that rests, or streams on, is not ready; its null request is answered nowhere."""
    stream.ask("talks", 1, "a", 21, "s")
    assert heads([stream.next()]) == [("a", 1, 0)], "before the other is asked: one batch with it would end with it"
    stream.ask("talks", 2, "b", 22, "s", parameters=gates.parameters)
    gates.open(0)
    assert heads([stream.next()]) == [("b", 1, 0)]
    stream.ask("talks", 1, "a", 21)
    assert stream.next() == ("a", [2, 0, 0, 0, 2, 1], False)
    gates.open(1)
    assert heads([stream.next()]) == [("b", 2, 1)]
    for number in (21, 22):
        stream.ask("talks", 1, "end", number, "e")
    assert sorted(heads(stream.several(2))) == [("end", 3, 0), ("end", 3, 0)]


def test_turns_of_a_request_stream(server: Server, stream: Stream) -> None:
    """Iterative sequences (S41): a response in each turn, the places of which go on."""
    for number, wanted in enumerate([1, 4, 6]):
        stream.ask("counts", wanted, str(number), enable_empty_final_response=True)
    answers = stream.several(1 + 4 + 6 + 3)
    for number, wanted in enumerate([1, 4, 6]):
        mine = [answer for answer in answers if answer[0] == str(number)]
        assert [answer[1] and answer[1][0] for answer in mine] == [*range(1, wanted + 1), None]
        assert [answer[2] for answer in mine] == [False] * wanted + [True]
    body = json.dumps({"X": 3}).encode()
    status, events = server.request("POST", "/v2/models/counts/generate_stream", body)
    told = [json.loads(line[6:])["TOLD"][0] for line in events.decode().splitlines() if line]
    assert (status, told) == (200, [1, 2, 3])


def test_turns_of_a_job_are_events(server: Server) -> None:
    headers = {"Prefer": "respond-async"}
    status, answer = server.request("POST", "/v2/models/counts/generate", b'{"X": 3}', headers)
    assert status == 202
    location = json.loads(answer)["location"]
    status, answer = server.get(location + "/result?wait=30")
    assert [one["outputs"][0]["data"][0] for one in json.loads(answer)] == [1, 2, 3]
    status, events = server.get(location + "/events")
    indices = [
        json.loads(line[6:])["index"]
        for line in events.decode().splitlines()
        if line.startswith("data:") and '"index"' in line
    ]
    assert (status, indices) == (200, [0, 1, 2, 3])


def test_generate_stream_of_a_sequence(server: Server) -> None:
    def told(count: int, **parameters: Any) -> list[int]:
        body = json.dumps({"X": count, "sequence_id": 31, **parameters}).encode()
        status, events = server.request("POST", "/v2/models/tells/generate_stream", body)
        assert status == 200, events
        return [json.loads(line[6:])["TOLD"][0] for line in events.decode().splitlines() if line]

    assert told(2, sequence_start=True) == [1, 2]
    assert told(3, sequence_end=True) == [3, 4, 5]


def test_responses_in_the_order_of_their_requests(stream: Stream, gates: Gates, tmp_path: Path) -> None:
    """`preserve_ordering`: those of the first request come as they are made, others wait for its end."""
    last = Gates(tmp_path / "last")
    stream.ask("ordered", 2, "a", parameters=gates.parameters)
    for name, count in (("b", 2), ("c", 1)):
        stream.ask("ordered", count, name, enable_empty_final_response=True)
    stream.ask("ordered", 1, "d", parameters=last.parameters)
    gates.open(0)
    assert heads([stream.next()]) == [("a", 1, 0)]
    last.open(0)
    gates.open(1)
    names = [(answer[0], answer[2]) for answer in stream.several(7)]
    assert names == [("a", False), ("b", False), ("b", False), ("b", True), ("c", False), ("c", True), ("d", False)]


def test_a_start_shows_the_model_that_the_sequence_before_is_over(server: Server) -> None:
    """S33: before the slot is used again there is an execution in which it is not ready."""

    def step(number: int, value: int, flags: str) -> list[Any]:
        options = {"sequence_id": number, "sequence_start": "s" in flags, "sequence_end": "e" in flags}
        answer = infer(server, "records", "http", options, X=np.array([[value]], np.int32))
        return list(json.loads(answer.as_numpy("TOLD")[0, 0]))

    step(5, 1, "s")
    step(6, 2, "s")
    assert step(5, 3, "s")[2:] == [
        [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
        [[1, 1, 0, 5, 3], [0, 0, 0, 0, 0]],
    ]
    assert len(step(5, 4, "e")) == 5
    assert len(step(5, 5, "s")) == 6, "it had ended"
    assert step(6, 6, "e")[6] == [[0, 0, 0, 0, 0], [0, 1, 1, 6, 6]]


def test_a_producer_waits_for_the_steps_after_it(stream: Stream, tmp_path: Path) -> None:
    """S55: `send` returns for no more than two responses that are not gone through."""
    (tmp_path / "sent").touch()
    stream.ask("bounded", 30, "a", parameters={"sent": str(tmp_path / "sent")})
    answers = stream.several(30)
    assert [answer[1][0] for answer in answers] == list(range(30))
    assert max(answer[1][1] for answer in answers) <= 2


def kill_executor(server: Server, models: Path) -> None:
    """Its successor cannot load the models until `let_load`."""
    for name in ("talks", "tells", "repeats"):
        (models / name / "hold").touch()
    (pid,) = server.pids("executor+batcher")
    os.kill(pid, signal.SIGKILL)


def let_load(models: Path) -> None:
    for path in models.glob("*/hold"):
        path.unlink()


def test_an_executor_that_dies(server: Server, models: Path, stream: Stream, gates: Gates) -> None:
    """What was seen in part and may not be repeated is told at once, while the model is not there again; the sequence
    goes on from what it had settled, or says that it cannot.
    """
    for model in ("talks", "tells", "repeats"):
        stream.ask(model, 2, "first", 41, "s")
        assert heads(stream.several(2)) == [("first", 1, 0), ("first", 2, 1)]
        stream.ask(model, 3, model, 41, parameters=gates.parameters)
    gates.open(0)
    assert sorted(heads(stream.several(3))) == [("repeats", 3, 0), ("talks", 3, 0), ("tells", 3, 0)]
    kill_executor(server, models)
    told = stream.several(2)
    assert all(text.startswith("STREAM_INTERRUPTED: its executor was lost") for text in told), told
    assert "tells" not in {row["name"] for row in ready(server)}
    let_load(models)
    gates.open(1, 2)
    assert heads(stream.several(2)) == [("repeats", 4, 1), ("repeats", 5, 2)]
    stream.ask("repeats", 1, "next", 41, "e")
    stream_tells = heads([stream.next()])
    assert stream_tells == [("next", 6, 0)]
    stream.ask("tells", 1, "next", 41, "e")
    assert heads([stream.next()]) == [("next", 3, 0)], "from the state before the interrupted request"
    stream.ask("talks", 1, "next", 41, "e")
    assert "has lost its state with the executor that held it" in stream.next()


def ready(server: Server) -> list[dict[str, Any]]:
    status, body = server.request("POST", "/v2/repository/index", b'{"ready": true}')
    assert status == 200
    return list(json.loads(body))


def test_a_job_that_is_interrupted(server: Server, models: Path, gates: Gates) -> None:
    until("the models are there", lambda: {"tells", "talks"} <= {row["name"] for row in ready(server)})
    body = json.dumps({"X": 3, "sequence_id": 51, "sequence_start": True, **gates.parameters}).encode()
    gates.open(0)
    status, answer = server.request("POST", "/v2/models/tells/generate", body, {"Prefer": "respond-async"})
    assert status == 202
    location = json.loads(answer)["location"]
    wait_for_response(server, location)
    kill_executor(server, models)
    status, answer = server.get(location + "/result?wait=60")
    let_load(models)
    assert status == 503
    assert json.loads(answer)["error"].startswith("STREAM_INTERRUPTED")
    with pytest.raises(InferenceServerException, match="doesn't support models with decoupled"):
        infer(server, "tells", "grpc", {"sequence_id": 51}, X=np.array([[1]], np.int32))


def wait_for_response(server: Server, location: str) -> None:
    """Read a job's events up to its first response."""
    connection = http.client.HTTPConnection(server.http, timeout=LIMIT_S)
    connection.request("GET", location + "/events")
    with connection.getresponse() as events:
        assert any(line.strip() == b"event: response" for line in iter(events.readline, b""))
    connection.close()
