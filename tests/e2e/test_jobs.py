"""Jobs as users meet them: submitted over either protocol, followed, retried, cancelled, and outliving every part."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from e2e_asking import client, inputs, pending, until
from e2e_jobs import ASYNC, GATED, WAIT_S, EventReader, Held, ask, output, result, submit, value_of, view
from e2e_models import WIDTH, gated, scaling
from e2e_server import serving
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    scaling(repository, "scale", 2)
    gated(repository, "gated", GATED)
    return repository


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(models, tmp_path_factory.mktemp("state"), "--allow-webhooks=true") as running:
        yield running


@pytest.fixture
def hold(server: Any, tmp_path: Path) -> Iterator[Callable[[], Held]]:
    held: list[Held] = []

    def make() -> Held:
        held.append(Held(server, tmp_path))
        return held[-1]

    yield make
    for one in held:
        one.open()
        result(server, one.location)


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "binary", "raw"])
def test_a_job_gives_what_a_call_gives(server: Any, form: str) -> None:
    values = struct.pack(f"<{WIDTH}f", *range(WIDTH))
    tensor: dict[str, Any] = {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32"}
    headers: dict[str, str] = {}
    match form:
        case "json":
            body = json.dumps({"id": "mine", "inputs": [{**tensor, "data": list(range(WIDTH))}]}).encode()
        case "binary":
            text = json.dumps(
                {
                    "inputs": [{**tensor, "parameters": {"binary_data_size": len(values)}}],
                    "parameters": {"binary_data_output": True},
                }
            ).encode()
            body, headers = text + values, {"Inference-Header-Content-Length": str(len(text))}
        case _:
            body, headers = values, {"Inference-Header-Content-Length": "0"}
    direct = ask(server, "POST", "/v2/models/scale/infer", body, headers)
    status, answered, receipt = ask(server, "POST", "/v2/models/scale/infer", body, {**headers, **ASYNC})
    told = json.loads(receipt)
    assert (status, answered["preference-applied"]) == (202, "respond-async")
    assert (told["location"], told["durability"]) == (answered["location"], "memory")
    fetched = ask(server, "GET", f"{told['location']}/result?wait={WAIT_S}")
    assert direct[0] == 200
    assert fetched == direct
    again = ask(server, "GET", f"{told['location']}/result")  # as often as wanted
    assert again == direct
    ended = view(server, told["location"])
    assert (ended["state"], ended["attempts"], ended["has_result"]) == ("succeeded", 1, True)
    timings = ended["timings"]
    assert timings["accepted_us"] <= timings["batched_us"] <= timings["ended_us"]


def test_a_stock_client_reads_a_result(server: Any) -> None:
    location = submit(server, 41)
    _, headers, body = ask(server, "GET", f"{location}/result?wait={WAIT_S}&binary=true")
    read = httpclient.InferenceServerClient.parse_response_body(
        body, header_length=int(headers["inference-header-content-length"])
    )
    assert read.as_numpy("ECHO").tolist() == [[41]]


def test_a_stock_grpc_client_needs_nothing_else(server: Any, hold: Callable[[], Held]) -> None:
    held = hold()
    with client("grpc", server) as asking:
        wanted = inputs("grpc", VALUE=np.array([[7]], np.int32))
        receipt = asking.infer("gated", wanted, headers={"prefer": "respond-async", "idempotency-key": "grpc"})
        told = receipt.get_response()
        assert not told.outputs
        job_id = told.parameters["charonia_job_id"].string_param
        assert told.parameters["charonia_job_state"].string_param == "queued"
        assert told.parameters["charonia_durability"].string_param == "memory"

        def fetch(wait_s: int) -> Any:
            return asking.infer("gated", [], parameters={"charonia_job_id": job_id, "charonia_wait_s": wait_s})

        assert fetch(0).get_response().parameters["charonia_job_state"].string_param == "queued"
        held.open()
        assert fetch(WAIT_S).as_numpy("ECHO").tolist() == [[7]]
        # the other protocol knows it too
        status, answer = result(server, f"/v2/jobs/{job_id}")
        assert (status, output(answer, "ECHO")) == (200, 7)
        # and a retry with its key finds it
        again = asking.infer("gated", wanted, headers={"idempotency-key": "grpc"})
        assert again.as_numpy("EXECUTION").item() == output(answer, "EXECUTION")


# -- events ------------------------------------------------------------------------------------------------------------


def test_many_readers_see_the_same_events(server: Any, hold: Callable[[], Held]) -> None:
    held = hold()
    location = submit(server, 1)
    readers = [EventReader(server, location) for _ in range(2)]
    until("both see that it was accepted", lambda: all(r.kinds == {1: "accepted"} for r in readers))
    held.open()
    for reader in readers:
        reader.join(WAIT_S)
        assert not reader.is_alive(), "the stream ends after the last event"
    kinds = readers[0].kinds
    assert kinds == readers[1].kinds
    assert list(kinds.values()) == ["accepted", "batched", "succeeded"]
    late = EventReader(server, location, last=1)
    late.join(WAIT_S)
    assert late.kinds == {number: kind for number, kind in kinds.items() if number > 1}
    assert EventReader(server, location, last=max(kinds)).status == 204
    timeline = json.loads(ask(server, "GET", location + "/timeline")[2])
    assert [event["event"] for event in timeline["events"]] == list(kinds.values())
    assert timeline["events"][1]["detail"].get("executor")


# -- idempotency -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefer", [ASYNC, {}], ids=["async", "sync"])
def test_a_retry_with_its_key_is_the_same_job(server: Any, prefer: dict[str, str]) -> None:
    headers = {**prefer, "Idempotency-Key": f"once-{bool(prefer)}"}

    def infer(number: int) -> tuple[int, dict[str, Any]]:
        status, answered, body = ask(server, "POST", "/v2/models/gated/infer", value_of(number), headers)
        return result(server, answered["location"]) if status == 202 else (status, json.loads(body))

    first, again = infer(5), infer(5)
    assert first[0] == 200
    assert again == first
    assert infer(6)[0] == 422
    _, answer = result(server, submit(server, 5))
    assert output(answer, "EXECUTION") == output(first[1], "EXECUTION") + 1, "the retries were not executed"


def test_a_retry_after_a_lost_connection_gets_the_result(server: Any, hold: Callable[[], Held]) -> None:
    held = hold()
    body, host = value_of(9), server.http.rpartition(":")
    with socket.create_connection((host[0], int(host[2]))) as gone:
        gone.sendall(
            b"POST /v2/models/gated/infer HTTP/1.1\r\nHost: x\r\nIdempotency-Key: lost\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        until("it is accepted", lambda: len(active(server)) == 2)
    with ThreadPoolExecutor(1) as pool:
        retry = pool.submit(ask, server, "POST", "/v2/models/gated/infer", body, {"Idempotency-Key": "lost"})
        held.open()
        status, _, answer = retry.result()
    assert (status, output(json.loads(answer), "ECHO")) == (200, 9)
    (job,) = [job for job in listed(server, "model=gated") if job["location"] != held.location][:1]
    assert (job["state"], job["attempts"]) == ("succeeded", 1)


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"Idempotency-Key": "k" * 256}, "Idempotency-Key of 256 bytes exceeds the maximum of 255"),
        ({"Charonia-Durability": "forever"}, "invalid durability 'forever'"),
        ({"Charonia-Webhook": "ftp://example.org"}, ""),
        ({"Charonia-Webhook": "http://127.0.0.1:1/hook"}, ""),
        ({"Charonia-Retention": "-5"}, "'charonia_retention_s' must be a whole number of 0 or more"),
    ],
)
def test_what_is_refused_leaves_no_job(server: Any, headers: dict[str, str], says: str) -> None:
    before = len(listed(server, "model=gated&limit=1000"))
    status, _, body = ask(server, "POST", "/v2/models/gated/infer", value_of(1), {**ASYNC, **headers})
    assert status == 400
    assert says in json.loads(body)["error"]
    assert len(listed(server, "model=gated&limit=1000")) == before


def active(server: Any) -> list[dict[str, Any]]:
    return [job for job in listed(server, "model=gated") if job["state"] in ("queued", "running")]


def listed(server: Any, query: str) -> list[dict[str, Any]]:
    status, _, body = ask(server, "GET", f"/v2/jobs?{query}")
    assert status == 200, body
    return list(json.loads(body)["jobs"])


# -- cancelling, deadlines ---------------------------------------------------------------------------------------------


def test_cancelling_what_waits_and_what_runs(server: Any, hold: Callable[[], Held]) -> None:
    held = hold()
    waiting, last = submit(server, 1), submit(server, 2)
    before = view(server, waiting)
    assert (before["state"], before["position"], before["queue_length"]) == ("queued", 2, 3)
    assert before["wait_reason"]
    status, _, body = ask(server, "DELETE", waiting)
    assert (status, json.loads(body)["state"]) == (200, "cancelled")
    assert result(server, waiting)[0] == 400
    status, _, body = ask(server, "DELETE", held.location)
    assert (status, json.loads(body)["state"]) == (200, "cancelled")
    held.open()
    assert result(server, last)[0] == 200
    for location in (waiting, held.location):
        assert view(server, location)["state"] == "cancelled", "and it stays so"
    assert view(server, waiting)["timings"]["batched_us"] is None, "it was never given out"


def test_a_client_that_leaves_takes_its_request_along(server: Any, hold: Callable[[], Held]) -> None:
    held = hold()
    body, host = value_of(3), server.http.rpartition(":")
    with socket.create_connection((host[0], int(host[2]))) as gone:
        gone.sendall(
            b"POST /v2/models/gated/infer HTTP/1.1\r\nHost: x\r\nPrefer: wait=60\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        until("it is accepted", lambda: len(active(server)) == 2)
    until("it is cancelled", lambda: len(active(server)) == 1)
    held.open()


def test_an_ordinary_request_goes_with_its_client(server: Any, hold: Callable[[], Held]) -> None:
    held = hold()
    body, host = value_of(3), server.http.rpartition(":")
    with socket.create_connection((host[0], int(host[2]))) as gone:
        gone.sendall(
            b"POST /v2/models/gated/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        until("it is queued", lambda: pending(server, "gated") == 1)
    until("it is not any more", lambda: pending(server, "gated") == 0)
    held.open()
    before = output(result(server, held.location)[1], "EXECUTION")
    assert output(result(server, submit(server, 1))[1], "EXECUTION") == before + 1


def test_many_are_cancelled_at_once(server: Any, hold: Callable[[], Held]) -> None:
    hold()
    locations = [submit(server, number) for number in range(5)]
    other = submit_scale(server)
    assert ask(server, "DELETE", "/v2/jobs")[0] == 400
    status, _, body = ask(server, "DELETE", "/v2/jobs?model=gated&state=queued")
    assert (status, json.loads(body)) == (200, {"cancelled": 5})
    assert {view(server, location)["state"] for location in locations} == {"cancelled"}
    assert result(server, other)[0] == 200


def submit_scale(server: Any) -> str:
    tensor = {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32", "data": [1] * WIDTH}
    body = json.dumps({"inputs": [tensor]}).encode()
    status, headers, _ = ask(server, "POST", "/v2/models/scale/infer", body, ASYNC)
    assert status == 202
    return headers["location"]


def test_the_answer_comes_at_the_deadline(server: Any, hold: Callable[[], Held]) -> None:
    hold()
    began = time.monotonic()
    status, _, body = ask(server, "POST", "/v2/models/gated/infer", value_of(1), {"Charonia-Timeout-Ms": "300"})
    assert (status, time.monotonic() - began < 20) == (504, True), body
    with client("grpc", server) as asking:
        wanted = inputs("grpc", VALUE=np.array([[1]], np.int32))
        soon = {"charonia_deadline_us": time.time_ns() // 1000 + 300_000}
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            asking.infer("gated", wanted, parameters=soon)
    # one with a deadline must be accepted before it, however busy the machine is
    for wanted_ms in (1500, 6000, 24_000):
        headers = {**ASYNC, "Charonia-Timeout-Ms": str(wanted_ms)}
        status, answered, body = ask(server, "POST", "/v2/models/gated/infer", value_of(1), headers)
        if status == 202:
            break
    assert status == 202, body
    location = answered["location"]
    assert result(server, location)[0] == 504
    assert view(server, location)["state"] == "expired"


# -- listing -----------------------------------------------------------------------------------------------------------


def test_a_listing_by_pages(server: Any, hold: Callable[[], Held]) -> None:
    hold()
    locations = {submit(server, number) for number in range(7)}
    seen: list[str] = []
    cursor = ""
    while True:
        body = ask(server, "GET", f"/v2/jobs?model=gated&state=queued&limit=3&cursor={cursor}")[2]
        page = json.loads(body)
        assert len(page["jobs"]) <= 3
        seen += [job["location"] for job in page["jobs"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert (len(seen), set(seen)) == (7, locations)
    ask(server, "DELETE", "/v2/jobs?model=gated&state=queued")
