"""Loading, reloading and unloading models while the server runs (R1-R29, R40, H40-H42), as clients see it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from controlled_models import factor
from e2e_asking import (
    Gate,
    client,
    index,
    infer,
    inputs,
    pending,
    post,
    settle,
    statistics,
    until,
    until_requests_wait_without,
)
from e2e_models import WIDTH, gated, put, scaling, scaling_graph
from e2e_server import serving
from tritonclient.utils import InferenceServerException

KINDS = ["http", "grpc"]


def configuration(**fields: Any) -> str:
    """A complete configuration of a scaling model as the load API takes it."""
    tensor = {"data_type": "TYPE_FP32", "dims": [WIDTH]}
    return json.dumps(
        {
            "backend": "onnxruntime",
            "max_batch_size": 8,
            "input": [{"name": "INPUT0", **tensor}],
            "output": [{"name": "OUTPUT0", **tensor}],
            **fields,
        }
    )


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server in explicit mode that was told to load `a` alone, and its repository."""
    directory = tmp_path_factory.mktemp("explicit")
    models = directory / "models"
    scaling(models, "a", 2)
    scaling(models, "idle", 3)
    with serving(models, directory / "state", "--model-control-mode=explicit", "--load-model=a") as server:
        yield SimpleNamespace(server=server, models=models, directory=directory)


def test_only_named_models_are_loaded_at_start(explicit: Any) -> None:
    server = explicit.server
    assert factor(server, "a") == 2
    rows = index(server)
    assert rows["a", "1"] == {"name": "a", "version": "1", "state": "READY"}
    assert rows["idle", ""] == {"name": "idle"}, "a model that was never loaded has only its name (H40)"
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'idle' is not found"):
        factor(server, "idle")
    assert {row["name"] for row in post(server, "/v2/repository/index", {"ready": True})[1]} == {"a"}
    assert post(server, "/v2/repository/index", {"ready": 1}) == (
        400,
        {"error": "Invalid value for 'ready': expected a boolean"},
    )


def test_the_index_follows_the_directories(explicit: Any) -> None:
    """H40: Triton lists the repository for each index; here a new name is in it after a second at the latest."""
    server = explicit.server
    scaling(explicit.models, "newcomer", 3)
    until("it has the new name", lambda: ("newcomer", "") in index(server))
    assert index(server)["newcomer", ""] == {"name": "newcomer"}, "it was not loaded"
    shutil.rmtree(explicit.models / "newcomer")
    until("the name is gone", lambda: ("newcomer", "") not in index(server))


@pytest.mark.parametrize("kind", KINDS)
def test_load_reload_unload(kind: str, explicit: Any) -> None:
    server, name = explicit.server, f"b_{kind}"
    scaling(explicit.models, name, 5)
    with client(kind, server) as asking:
        asking.load_model(name)
        assert asking.is_model_ready(name), "a load returns when the model is ready (H41)"
        assert factor(server, name, kind) == 5
        asking.load_model(name)
        settle(server, name)
        assert statistics(server, name)["inference_count"] == 1, "a reload without a change is no reload (R22)"
        scaling(explicit.models, name, 6)
        asking.load_model(name)
        assert factor(server, name, kind) == 6
        settle(server, name)
        assert statistics(server, name)["inference_count"] == 1, "a reload starts counting anew (X6)"
        asking.unload_model(name)
        assert not asking.is_model_ready(name), "an unload returns when the model is not ready (H42)"
        until("the model is unloaded", lambda: index(server)[name, "1"].get("reason") == "unloaded")
        for value in (5, 6):  # content that was served before starts counting anew all the same
            scaling(explicit.models, name, value)
            asking.load_model(name)
            assert statistics(server, name)["inference_count"] == 0
            assert factor(server, name, kind) == value
            settle(server, name)  # else it may be counted after the next load
        asking.unload_model(name)
        until("the model is unloaded again", lambda: index(server)[name, "1"].get("reason") == "unloaded")
        assert index(server)[name, "1"]["state"] == "UNAVAILABLE"
        assert not asking.is_model_ready(name)
        with pytest.raises(InferenceServerException, match=f"Request for unknown model: '{name}' has no available ver"):
            factor(server, name, kind)
        with pytest.raises(InferenceServerException, match=f"'{name}' version 1 is not at ready state"):
            factor(server, name, kind, "1")
        asking.unload_model(name)
        asking.load_model(name)
        assert factor(server, name, kind) == 6
    assert server.get("/v2/health/ready")[0] == 200


def test_an_unknown_model_cannot_be_loaded_but_unloaded(explicit: Any) -> None:
    text = "failed to load 'nowhere', failed to poll from model repository"
    assert post(explicit.server, "/v2/repository/models/nowhere/load") == (500, {"error": text})
    with (
        client("grpc", explicit.server) as asking,
        pytest.raises(InferenceServerException, match=text) as caught,
    ):
        asking.load_model("nowhere")
    assert "INTERNAL" in caught.value.status()
    assert post(explicit.server, "/v2/repository/models/nowhere/unload") == (200, None)
    assert ("nowhere", "") not in index(explicit.server)


def test_repository_names_and_odd_parameters_are_refused(explicit: Any) -> None:
    server = explicit.server
    assert post(server, "/v2/repository/other/models/a/load") == (
        501,
        {"error": "'repository_name' specification is not supported"},
    )
    for name in ("...", "..my_model", "model..1", r"back\slash"):
        text = f"failed to load '{name}', failed to poll from model repository"
        assert post(server, f"/v2/repository/models/{name}/load") == (500, {"error": text})
    with client("grpc", server) as asking:
        for name in ("..", "../etc"):
            text = f"invalid model name '{name}', model name must not contain path traversal characters"
            with pytest.raises(InferenceServerException) as caught:
                asking.load_model(name)
            assert caught.value.message() == text
            asking.unload_model(name)
    status, answer = post(server, "/v2/repository/models/a/load", {"parameters": {"colour": "red"}})
    assert (status, answer) == (500, {"error": "unexpected error on creating Triton parameter"})
    assert factor(server, "a") == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_reload_leaves_the_old_version_serving(kind: str, explicit: Any) -> None:
    server, name = explicit.server, f"fails_{kind}"
    scaling(explicit.models, name, 7)
    with client(kind, server) as asking:
        asking.load_model(name)
        put(explicit.models / name / "1" / "model.onnx", b"no model at all")
        with pytest.raises(InferenceServerException) as caught:
            asking.load_model(name)
        assert caught.value.message().startswith(
            f"load failed for model '{name}': version 1 is at UNAVAILABLE state: "
        ), caught.value
        assert caught.value.message().endswith(";\n")
        if kind == "grpc":
            assert "INVALID_ARGUMENT" in caught.value.status()
        assert factor(server, name, kind) == 7
        assert index(server)[name, "1"]["state"] == "READY"
        put(explicit.models / name / "config.pbtxt", "this is no configuration")
        with pytest.raises(InferenceServerException) as caught:
            asking.load_model(name)
        assert caught.value.message() == f"failed to load '{name}', failed to poll from model repository"
        assert factor(server, name, kind) == 7
        scaling(explicit.models, name, 8, config="dynamic_batching { }")
        asking.load_model(name)
        assert factor(server, name, kind) == 8


def test_a_model_that_never_loaded_shows_its_reason(explicit: Any) -> None:
    server = explicit.server
    scaling(explicit.models, "broken", 1)
    put(explicit.models / "broken" / "1" / "model.onnx", b"no model at all")
    status, answer = post(server, "/v2/repository/models/broken/load")
    assert status == 400
    assert answer["error"].startswith("load failed for model 'broken': version 1 is at UNAVAILABLE state: ")
    row = index(server)["broken", "1"]
    assert row["state"] == "UNAVAILABLE"
    reason = answer["error"].partition("UNAVAILABLE state: ")[2].removesuffix(";\n")
    assert row["reason"] == reason != ""
    assert server.get("/v2/models/broken/ready")[0] == 400
    assert server.get("/v2/health/ready")[0] == 400, "a failed model makes the server unready (R40)"
    scaling(explicit.models, "broken", 9)
    assert post(server, "/v2/repository/models/broken/load") == (200, None)
    assert factor(server, "broken") == 9
    assert server.get("/v2/health/ready")[0] == 200


def test_no_request_notices_a_reload(explicit: Any) -> None:
    server = explicit.server
    scaling(explicit.models, "live", 1, config="dynamic_batching { }")
    with client("http", server) as asking:
        asking.load_model("live")
    stop = threading.Event()
    allowed = {1.0}
    answered = [0] * 16

    def keep_asking(number: int) -> set[float]:
        kind = KINDS[number % 2]
        seen: set[float] = set()
        value = np.full((1 + number % 3, WIDTH), number + 1, np.float32)
        with client(kind, server) as asking:
            while not stop.is_set():
                answer = asking.infer("live", inputs(kind, INPUT0=value)).as_numpy("OUTPUT0")
                assert answer.shape == value.shape
                times = float(answer[0, 0]) / (number + 1)
                assert (answer == value * times).all()
                assert times in allowed
                seen.add(times)
                answered[number] += 1
        return seen

    with ThreadPoolExecutor(16) as pool, client("grpc", server) as control:
        clients = [pool.submit(keep_asking, number) for number in range(16)]

        def wait_for_answers() -> None:
            wanted = [count + 1 for count in answered]

            def came() -> bool:
                for future in clients:
                    if future.done():
                        future.result()
                return all(count >= want for count, want in zip(answered, wanted, strict=True))

            until("each client has another answer", came)

        try:
            wait_for_answers()
            for number in range(2, 8):
                allowed.add(float(number))
                extra = f"dynamic_batching {{ max_queue_delay_microseconds: {number} }}"
                scaling(explicit.models, "live", number, config=extra)
                control.load_model("live")
                wait_for_answers()
                # what is asked after the load has returned is answered by the new version
                assert factor(server, "live") == number
        finally:
            stop.set()
        seen = [future.result() for future in clients]
    assert set().union(*seen) == allowed


@pytest.mark.parametrize("name", ["queued", "queued_as_waves"])
def test_unload_finishes_what_was_accepted(name: str, explicit: Any, tmp_path: Path) -> None:
    server, value = explicit.server, np.zeros((1, 1), np.int32)
    gated(explicit.models, name, "max_batch_size: 4" + (" dynamic_batching { }" if name != "queued" else ""))
    with client("http", server) as control, ThreadPoolExecutor(8) as pool:
        control.load_model(name)
        before = [infer(server, name, VALUE=value) for _ in range(3)]  # what is like them may travel in waves
        with Gate(server, name, tmp_path, pool) as gate:
            waiting = [pool.submit(infer, server, name, VALUE=np.full((1, 1), n, np.int32)) for n in range(5)]
            until("five requests wait", lambda: pending(server, name) == 5)
            control.unload_model(name)
            until("it unloads", lambda: index(server)[name, "1"]["state"] == "UNLOADING")
            assert not control.is_model_ready(name)
            with pytest.raises(InferenceServerException, match=f"Request for unknown model: '{name}' has no available"):
                infer(server, name, VALUE=value)
            with pytest.raises(InferenceServerException, match=f"'{name}' version 1 is not at ready state"):
                infer(server, name, "grpc", {"model_version": "1"}, VALUE=value)
            gate.open()
            assert gate.request.result().as_numpy("EXECUTION").tolist() == [[1 + len(before)]]
            assert [f.result().as_numpy("ECHO").tolist() for f in waiting] == [[[n]] for n in range(5)]
        until("it is unloaded", lambda: index(server)[name, "1"].get("reason") == "unloaded")


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_override_lasts_until_unload(kind: str, explicit: Any) -> None:
    server, name = explicit.server, f"overridden_{kind}"
    scaling(explicit.models, name, 4)
    with client(kind, server) as asking:
        asking.load_model(name, config=configuration(max_batch_size=2))

        def largest() -> int:
            return int(json.loads(server.get(f"/v2/models/{name}/config")[1])["max_batch_size"])

        assert largest() == 2
        assert factor(server, name, kind) == 4
        two_too_many = np.ones((4, WIDTH), np.float32)
        with pytest.raises(InferenceServerException, match=f"inference request batch-size must be <= 2 for '{name}'"):
            infer(server, name, kind, INPUT0=two_too_many)
        asking.load_model(name)
        assert largest() == 2, "a plain load keeps the override (R24)"
        with pytest.raises(InferenceServerException) as caught:
            asking.load_model(name, config="{ not json")
        assert caught.value.message() == f"failed to load '{name}', failed to poll from model repository"
        assert largest() == 2
        asking.unload_model(name)
        asking.load_model(name)
        assert largest() == 8
        assert (infer(server, name, kind, INPUT0=two_too_many).as_numpy("OUTPUT0") == 4).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_override_replaces_the_model_directory(kind: str, explicit: Any) -> None:
    server, name = explicit.server, f"files_{kind}"
    scaling(explicit.models, name, 4)
    with client(kind, server) as asking:
        asking.load_model(name)
        asking.load_model(name, config=configuration(), files={"file:3/model.onnx": scaling_graph(11)})
        assert factor(server, name, kind) == 11
        until("versions on disk are not used (R25)", lambda: index(server)[name, "1"]["state"] == "UNAVAILABLE")
        assert json.loads(server.get(f"/v2/models/{name}")[1])["versions"] == ["3"]
        asking.load_model(name)
        assert factor(server, name, kind) == 4, "a plain load takes the repository again"
        until("the version of the request is gone", lambda: index(server)[name, "3"]["state"] == "UNAVAILABLE")
        assert json.loads(server.get(f"/v2/models/{name}")[1])["versions"] == ["1"]
        asking.load_model(name, config=configuration(), files={"file:1/model.onnx": scaling_graph(13)})
        assert factor(server, name, kind) == 13
        asking.load_model(name)
        assert factor(server, name, kind) == 4, "also where the version has the same number"
        asking.load_model(name, config=configuration(), files={"file:3/model.onnx": scaling_graph(11)})
        asking.unload_model(name)
        asking.load_model(name)
        assert factor(server, name, kind) == 4
        # a model the repository does not have at all
        asking.load_model(f"new_{kind}", config=configuration(), files={"file:1/model.onnx": scaling_graph(12)})
        with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
            asking.load_model(f"new_{kind}")
        assert factor(server, f"new_{kind}", kind) == 12, "what serves goes on"


def test_a_file_override_needs_a_configuration_and_stays_inside(explicit: Any, tmp_path: Path) -> None:
    server = explicit.server
    content = base64.b64encode(scaling_graph(1)).decode()
    status, answer = post(server, "/v2/repository/models/a/load", {"parameters": {"file:1/model.onnx": content}})
    text = "Load parameter 'config' must be specified for model file override"
    assert (status, answer) == (400, {"error": text})
    for path in ("../../escape.onnx", "1/../../../escape.onnx", f"{tmp_path}/escape.onnx"):
        body = {"parameters": {"config": configuration(), f"file:{path}": content}}
        status, answer = post(server, "/v2/repository/models/a/load", body)
        assert status == 400, (path, answer)
        assert not (tmp_path / "escape.onnx").exists()
    text = "failed to load 'a', failed to poll from model repository"
    for path in ("1/" + "A" * 300, "1/file", "1/model.onnx/model.onnx"):  # too long for a name; a file and a directory
        files = {f"file:{path}": content, "file:1/model.onnx": content, "file:1/file/inside": content}
        body = {"parameters": {"config": configuration(), **files}}
        assert post(server, "/v2/repository/models/a/load", body) == (500, {"error": text}), path
    assert factor(server, "a") == 2


@pytest.mark.long
def test_brought_files_outlive_one_of_two_executors(tmp_path: Path) -> None:
    """R25: the executor that takes the place of a killed one has no such files, and must not serve the repository's."""
    models = tmp_path / "models"
    scaling(models, "a", 2)
    flags = ("--executors=2", "--model-control-mode=explicit", "--load-model=a", "--heartbeat-ttl-secs=2")
    with serving(models, tmp_path / "state", *flags) as server, client("http", server) as asking:
        asking.load_model("a", config=configuration(), files={"file:1/model.onnx": scaling_graph(11)})
        assert factor(server, "a") == 11
        first, second = server.pids("executor")
        os.kill(first, signal.SIGKILL)

        def is_left_to_the_other() -> bool:
            assert factor(server, "a") == 11
            return server.log().count("executor is up") == 3

        until("the new executor is up, and has left the model to the other one", is_left_to_the_other)
        left = re.search(r"a is not loaded here: executor (\S+) serves files", server.log())
        assert left is not None
        until_requests_wait_without(server.log_url, left[1], "a")
        os.kill(second, signal.SIGKILL)

        def has_the_repositorys() -> bool:
            return factor(server, "a") == 2  # a request waits for the load and does not fail

        until("no executor has the files any more, and the repository's are loaded", has_the_repositorys)
        asking.load_model("a", config=configuration(), files={"file:1/model.onnx": scaling_graph(12)})
        assert factor(server, "a") == 12
