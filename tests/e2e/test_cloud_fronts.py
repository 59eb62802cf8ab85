"""The fronts of SageMaker and Vertex AI as their platforms see them (H55): one `serve` for each, over HTTP."""

from __future__ import annotations

import json
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_asking import until
from e2e_models import SCALING_IO, WIDTH, put, python, scaling
from e2e_server import Server, serving, start

SAGEMAKER = "application/vnd.sagemaker-triton.binary+json;json-header-size="
VERTEX_AI = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
PREDICT, HEALTH = "/v1/endpoints/3/deployedModels/4:predict", "/v1/endpoints/3/deployedModels/4"
AIP = {"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "0", "AIP_PREDICT_ROUTE": PREDICT, "AIP_HEALTH_ROUTE": HEALTH}
ON_LOOPBACK = ("--sagemaker-address=127.0.0.1", "--vertex-ai-address=127.0.0.1")
SAYS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        said = [pb_utils.get_input_tensor_by_name(r, "text_input").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]) for text in said]
"""
SAYS_CONFIG = """
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

ENSEMBLE = (
    """
platform: "ensemble"
max_batch_size: 8
"""
    + SCALING_IO
    + """
ensemble_scheduling {
  step [
    { model_name: "part" model_version: -1
      input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "once" } },
    { model_name: "part" model_version: -1
      input_map { key: "INPUT0" value: "once" } output_map { key: "OUTPUT0" value: "OUTPUT0" } }
  ]
}
"""
)

Answer = tuple[int, dict[str, str], bytes]


def front_of(server: Server, name: str) -> str:
    """host:port of a front of a server that has no other."""

    def listens() -> bool:
        assert server.process.poll() is None, server.log()
        return "ready: Ctrl-C" in server.log()

    until("it is ready", listens)
    return str(json.loads((server.state_dir / "endpoints.json").read_text())[name])


def ask(where: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{where}{path}", data, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def document(*values: float) -> dict[str, Any]:
    rows = list(values) * WIDTH
    return {"inputs": [{"name": "INPUT0", "shape": [len(values), WIDTH], "datatype": "FP32", "data": sorted(rows)}]}


def binary(rows: int, value: float) -> tuple[bytes, int]:
    """A body with a binary tensor, and the length of its JSON part."""
    data = struct.pack("<f", value) * (rows * WIDTH)
    tensor = {"name": "INPUT0", "shape": [rows, WIDTH], "datatype": "FP32"}
    head = json.dumps(
        {
            "inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return head + data, len(head)


def outputs(answer: Answer) -> list[float]:
    status, _, body = answer
    assert status == 200, body
    return list(json.loads(body)["outputs"][0]["data"])


@pytest.fixture(scope="module")
def sagemaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """One model for `/invocations` and no other front, as the container of SageMaker is started."""
    directory = tmp_path_factory.mktemp("sagemaker")
    scaling(directory / "models", "double", 2)
    server = start(
        directory / "models", directory / "state", "--allow-sagemaker=true", "--sagemaker-port=0", "--allow-http=false",
        "--allow-grpc=false", "--gateways=2", *ON_LOOPBACK,
        environment={"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "double"},
    )  # fmt: skip
    try:
        yield server, front_of(server, "sagemaker")
    finally:
        assert server.stop() == 0, server.log()


def test_sagemaker(sagemaker: tuple[Server, str]) -> None:
    server, where = sagemaker
    for _ in range(8):  # whichever gateway has the connection
        assert ask(where, "GET", "/ping")[0] == 200
        assert outputs(ask(where, "POST", "/invocations", document(1.5))) == [3.0] * WIDTH
    for rows in (1, 8 * 1024):
        body, head = binary(8 if rows > 1 else 1, 1.5)
        status, headers, reply = ask(where, "POST", "/invocations", body, Content_Type=SAGEMAKER + str(head))
        assert status == 200
        at = int(headers["content-type"].removeprefix(SAGEMAKER))
        assert set(struct.unpack(f"<{len(reply[at:]) // 4}f", reply[at:])) == {3.0}
    assert ask(where, "POST", "/invocations", document(1.5), Content_Type=SAGEMAKER)[2] == (
        b'{"error":"Unable to parse inference header size, got: "}'
    )
    assert ask(where, "GET", "/v2")[0] == 400
    # neither HTTP nor gRPC listens
    assert set(json.loads((server.state_dir / "endpoints.json").read_text())) == {"sagemaker", "metrics", "log"}


def test_sagemaker_generates(tmp_path: Path) -> None:
    python(tmp_path / "models", "says", SAYS, SAYS_CONFIG)
    environment = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "says", "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate_stream"}
    flags = ("--allow-sagemaker=true", "--sagemaker-port=0", *ON_LOOPBACK)
    with serving(tmp_path / "models", tmp_path / "state", *flags, environment=environment) as server:
        where = front_of(server, "sagemaker")
        status, headers, body = ask(where, "POST", "/invocations", {"text_input": "hello"})
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert json.loads(body.removeprefix(b"data: "))["text_output"] == "hello"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str, Path]]:
    """A multi-model endpoint: a server without models, its front, and the directory of SageMaker's models.

    With two gateways and two executors: whichever is asked knows of every model.
    """
    directory = tmp_path_factory.mktemp("endpoint")
    (directory / "none").mkdir()
    environment = {"SAGEMAKER_BASE_DIR": str(directory / "ml"), "SAGEMAKER_TRITON_PING_MODE": "live"}
    server = start(
        directory / "none", directory / "state", "--allow-sagemaker=true", "--sagemaker-port=0", "--allow-http=false",
        "--allow-grpc=false", "--gateways=2", "--executors=2", "--model-control-mode=explicit",
        "--model-namespacing=true", *ON_LOOPBACK, environment=environment,
    )  # fmt: skip
    try:
        yield server, front_of(server, "sagemaker"), directory / "ml" / "models"
    finally:
        assert server.stop() == 0, server.log()


def listed(where: str) -> dict[str, str]:
    status, _, body = ask(where, "GET", "/models")
    assert status == 200
    return {entry["modelName"]: entry["modelUrl"] for entry in json.loads(body)["models"]}


def everywhere(where: str, wanted: dict[str, str]) -> None:
    """Until each gateway lists these models: the one that was not asked hears of it a moment later."""
    # by chance one of two gateways has none of these connections in 1 of 8 million cases
    until(f"the models are {wanted}", lambda: all(listed(where) == wanted for _ in range(24)))


def test_models_of_an_endpoint(endpoint: tuple[Server, str, Path]) -> None:
    _, where, models = endpoint
    assert listed(where) == {}
    # one with a configuration at the top, one in a directory of its own, one that asks for its own name
    scaling(models / "h1", "model", 2)
    scaling(models / "h2" / "model", "inner", 3)
    for alias in ("h1", "h2"):
        status, _, body = ask(where, "POST", "/models", {"model_name": alias, "url": f"{models}/{alias}/model"})
        assert (status, body) == (200, b"")
    wanted = {"h1": str(models / "h1"), "h2": str(models / "h2" / "model")}
    everywhere(where, wanted)
    for alias, factor in (("h1", 2), ("h2", 3)):
        assert outputs(ask(where, "POST", f"/models/{alias}/invoke", document(1.5))) == [1.5 * factor] * WIDTH
        entry = json.loads(ask(where, "GET", f"/models/{alias}")[2])
        assert entry == {"modelName": alias, "modelUrl": wanted[alias]}
    body, head = binary(2, 1.5)
    _, headers, reply = ask(where, "POST", "/models/h2/invoke", body, Content_Type=SAGEMAKER + str(head))
    assert struct.unpack(f"<{2 * WIDTH}f", reply[int(headers["content-type"].removeprefix(SAGEMAKER)) :])[0] == 4.5
    # a model that is there already
    status, _, body = ask(where, "POST", "/models", {"model_name": "h1", "url": f"{models}/h1/model"})
    assert (status, json.loads(body)) == (409, {"error": "model 'h1' has already been loaded"})
    status, _, body = ask(where, "POST", "/models", {"model_name": "h3", "url": f"{models}/h1/model"})
    assert (status, json.loads(body)["error"]) == (
        409,
        f"model repository '{models / 'h1'}' has already been registered",
    )
    for alias in ("h1", "h2"):
        assert ask(where, "DELETE", f"/models/{alias}")[0] == 200
    everywhere(where, {})
    for method, path in (("DELETE", "/models/h1"), ("GET", "/models/h1"), ("POST", "/models/h1/invoke")):
        assert ask(where, method, path)[:3:2] == (404, b"")
    # and it can be loaded again, as another model
    scaling(models / "h1", "model", 5)
    ask(where, "POST", "/models", {"model_name": "h1", "url": f"{models}/h1/model"})
    everywhere(where, {"h1": str(models / "h1")})
    assert outputs(ask(where, "POST", "/models/h1/invoke", document(1.0))) == [5.0] * WIDTH
    assert ask(where, "DELETE", "/models/h1")[0] == 200


def test_an_ensemble_of_an_endpoint(endpoint: tuple[Server, str, Path]) -> None:
    """Its parts are the directories beside it; SageMaker's own name of the model stands in a header."""
    _, where, models = endpoint
    for alias, factor in (("e1", 2), ("e2", 7)):
        archive = models / alias / "model"
        scaling(archive, "part", factor)
        put(archive / "whole" / "config.pbtxt", ENSEMBLE)
        (archive / "whole" / "1").mkdir()
        status, _, body = ask(
            where, "POST", "/models", {"model_name": alias, "url": str(archive)},
            X_Amzn_SageMaker_Target_Model=f"{alias}.tar.gz",
        )  # fmt: skip
        assert (status, body) == (200, b"")
    everywhere(where, {alias: str(models / alias / "model") for alias in ("e1", "e2")})
    for alias, factor in (("e1", 2), ("e2", 7)):
        invoked = ask(
            where, "POST", f"/models/{alias}/invoke", document(1.0), X_Amzn_SageMaker_Target_Model=f"{alias}.tar.gz"
        )
        assert outputs(invoked) == [factor * factor] * WIDTH
        deleted = ask(where, "DELETE", f"/models/{alias}", X_Amzn_SageMaker_Target_Model=f"{alias}.tar.gz")
        assert deleted[:3:2] == (200, b"")
    everywhere(where, {})


def test_models_that_cannot_be_loaded(endpoint: tuple[Server, str, Path]) -> None:
    _, where, models = endpoint
    python(models / "broken", "model", "raise MemoryError('no room')", SAYS_CONFIG)
    python(models / "failing", "model", "raise ValueError('a bug')", SAYS_CONFIG)
    for name in ("one", "other"):
        scaling(models / "several" / "model", name, 2)
    (models / "empty" / "model").mkdir(parents=True)
    (models / "link").symlink_to("/")

    def load(alias: object, url: object, **headers: str) -> tuple[int, str]:
        status, _, body = ask(where, "POST", "/models", {"model_name": alias, "url": url}, **headers)
        return status, json.loads(body)["error"]

    status, text = load("broken", f"{models}/broken/model")
    assert (status, "no room" in text) == (507, True)
    status, text = load("failing", f"{models}/failing/model")
    assert (status, "a bug" in text) == (400, True)
    # what failed is not there: it may be tried again
    assert load("failing", f"{models}/failing/model")[0] == 400
    form = f"expected a path of the form {models}/<hash>/model[/<subdir>]"
    for url in ("", "/etc", f"{models}/../x/model", f"{models}/h/other", f"{models}/h/model/a/b", "/proc/self", "../x"):
        assert load("x", url) == (400, f"Invalid \"url\" '{url}': {form}")
    missing = models / "missing" / "model"
    assert load("x", str(missing)) == (400, f"failed to register '{missing}', repository not found")
    several = models / "several" / "model"
    expected = "expected one model, or several of which one is an ensemble, got one, other"
    assert load("x", f"{several}/") == (400, f"failed to register '{several}': {expected}")
    assert "got no directory" in load("x", f"{models}/empty/model")[1]
    assert "must not contain path traversal" in load("a/b", str(several))[1]
    assert "must not contain path traversal" in load("x", str(several), X_Amzn_SageMaker_Target_Model="a/b")[1]
    assert load("", str(several))[0] == 400
    assert load(1, str(several)) == (400, "attempt to access JSON non-string as string")
    assert ask(where, "POST", "/models", b"{")[0] == 400
    assert ask(where, "POST", "/models", b"[]")[0] == 400
    assert ask(where, "PUT", "/models")[:3:2] == (400, b"")
    everywhere(where, {})


def test_failures_of_an_invocation(endpoint: tuple[Server, str, Path]) -> None:
    """Each is a 400; 507 for memory, whereupon SageMaker makes room."""
    _, where, models = endpoint
    raising = SAYS.replace("        said =", "        raise MemoryError('no room')\n        said =")
    python(models / "hungry", "model", raising, SAYS_CONFIG)
    url = f"{models}/hungry/model"
    assert ask(where, "POST", "/models", {"model_name": "hungry", "url": url})[0] == 200
    everywhere(where, {"hungry": str(models / "hungry")})
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    status, _, body = ask(where, "POST", "/models/hungry/invoke", {"inputs": [tensor]})
    assert (status, "no room" in json.loads(body)["error"]) == (507, True)
    assert ask(where, "POST", "/models/hungry/invoke", {"inputs": []})[0] == 400
    assert ask(where, "POST", "/models/hungry/invoke", b"{")[0] == 400
    gone = ask(where, "POST", "/models/hungry/invoke", {"inputs": [tensor]}, X_Amzn_SageMaker_Target_Model="none")
    assert gone[0] == 400
    assert ask(where, "POST", "/models/hungry/invoke", b"x", Content_Encoding="br")[0] == 415
    assert ask(where, "DELETE", "/models/hungry")[0] == 200


def test_models_need_the_explicit_mode(sagemaker: tuple[Server, str]) -> None:
    _, where = sagemaker
    status, _, body = ask(where, "POST", "/models", {"model_name": "a", "url": "/opt/ml/models/a/model"})
    text = "repository registration is not allowed if model control mode is not EXPLICIT"
    assert (status, json.loads(body)) == (400, {"error": text})


def test_vertex_ai(tmp_path: Path) -> None:
    """By its environment alone; the header makes a prediction another call, where that changes nothing."""
    scaling(tmp_path / "models", "double", 2)
    server = start(tmp_path / "models", tmp_path / "state", *ON_LOOPBACK, environment=AIP)
    try:
        where = front_of(server, "vertex-ai")
        assert ask(where, "GET", HEALTH)[0] == 200
        assert outputs(ask(where, "POST", PREDICT, document(1.5))) == [3.0] * WIDTH
        body, head = binary(8, 1.5)
        status, headers, reply = ask(where, "POST", PREDICT, body, Content_Type=VERTEX_AI + str(head))
        assert (status, headers["content-type"]) == (200, "application/octet-stream")
        assert reply.endswith(struct.pack("<f", 3.0))

        def redirected(path: str, body: Any = b"") -> Answer:
            return ask(where, "POST", PREDICT, body, X_Vertex_Ai_Triton_Redirect=path)

        assert outputs(redirected("v2/models/double/versions/1/infer", document(2.0))) == [4.0] * WIDTH
        assert json.loads(redirected("v2/models/double")[2])["name"] == "double"
        assert json.loads(redirected("v2/repository/index")[2])[0]["state"] == "READY"
        # the page of all parts: the executor's families are not the gateway's own
        for name in (b"nv_inference_request_success", b"charonia_executor"):
            until(f"{name!r} is on the page", lambda name=name: name in redirected("metrics")[2])
        assert redirected("v2/repository/models/double/unload")[0] == 403
        assert ask(where, "GET", "/v2")[0] == 400
        assert set(json.loads((server.state_dir / "endpoints.json").read_text())) == {"vertex-ai", "metrics", "log"}
    finally:
        assert server.stop() == 0, server.log()


def test_vertex_ai_needs_its_model(tmp_path: Path) -> None:
    for name in ("double", "other"):
        scaling(tmp_path / "models", name, 2)
    server = start(tmp_path / "models", tmp_path / "state", *ON_LOOPBACK, environment=AIP)
    assert server.process.wait(180) == 1
    assert "Expect the model repository contains only a single model if default model is not specified" in server.log()
    with serving(
        tmp_path / "models", tmp_path / "state", *ON_LOOPBACK, "--allow-http=true", "--allow-grpc=true",
        "--vertex-ai-default-model=other",
        environment=AIP,
    ) as server:  # fmt: skip
        assert outputs(ask(front_of(server, "vertex-ai"), "POST", PREDICT, document(1.5))) == [3.0] * WIDTH
