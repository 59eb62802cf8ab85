"""Replies of a real Triton, byte for byte, and ours to the same requests over sockets: statuses, texts, encodings."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from e2e_server import serving
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from loadtest.clients import models

INFER = "/v2/models/simple/infer"
IDENTITY = "/v2/models/simple_identity/infer"
NUMBERS = list(range(16))
NO_ID = "[request id: <id_unknown>] "
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    repository = tmp_path_factory.mktemp("models")
    models.write_simple(repository)
    models.write_others(repository)
    with serving(repository, tmp_path_factory.mktemp("state"), "--http-max-input-size=100000") as running:
        yield running


def tensor(name: str = "INPUT0", **changes: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1, 16], "datatype": "INT32", "data": NUMBERS, **changes}


def pair(**changes: Any) -> dict[str, Any]:
    """A request whose first input is changed."""
    return {"inputs": [tensor(**changes), tensor("INPUT1")]}


def ask(server: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = server.request("POST", path, raw, headers)
    return status, json.loads(answer)


def missing(present: list[str], absent: list[str]) -> str:
    def words(names: list[str]) -> str:
        return ",".join(f"'{name}'" for name in names)

    return (
        f"{NO_ID}expected 2 inputs but got {len(present)} inputs for model 'simple'. Got input(s) [{words(present)}], "
        f"but missing required input(s) [{words(absent)}]. Please provide all required input(s)."
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (INFER, b"x{", 500, "failed to parse the request JSON buffer: Invalid value. at 0"),
        (INFER, b"", 400, NO_ID + "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in "
         "'simple' model configuration"),
        (INFER, {}, 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (INFER, [], 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (INFER, {"inputs": []}, 400, missing([], ["INPUT0", "INPUT1"])),
        (INFER, {"inputs": [tensor("INPUT1")]}, 400, missing(["INPUT1"], ["INPUT0"])),
        (INFER, {"inputs": [tensor("FOO"), tensor("INPUT1")]}, 400,
         "unexpected inference input 'FOO' for model 'simple'"),
        (INFER, {"inputs": [tensor("INPUT1"), tensor("INPUT1")]}, 400,
         NO_ID + "input 'INPUT1' already exists in request"),
        (INFER, pair(datatype="FP32"), 400,
         NO_ID + "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'"),
        (INFER, pair(data=[1.5] * 16), 500,
         "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        (INFER, pair(data=[1] * 8), 500, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        (INFER, pair(shape=[1, -16]), 500,
         "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (INFER, pair(shape=[1, 8], data=[1] * 8), 400,
         NO_ID + "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,8]. " + NOTE),
        (INFER, pair(datatype="BYTES", data=[5] * 16), 500,
         "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (IDENTITY, {"inputs": [tensor("INPUT0", datatype="BYTES", shape=[1, 2], data=["a"])]}, 400,
         NO_ID + "expected 2 string elements for inference input 'INPUT0' for model 'simple_identity', got 1"),
        (IDENTITY, {"inputs": [tensor("INPUT0", datatype="BYTES", shape=[1, 1], data=["a", "b"])]}, 400,
         NO_ID + "unexpected number of string elements 2 for inference input 'INPUT0' for model 'simple_identity', "
         "expecting 1"),
        (IDENTITY, {"inputs": [tensor("INPUT0", datatype="BYTES", shape=[], data=["a", "b"])]}, 400,
         NO_ID + "input 'INPUT0' has no shape but model requires batch dimension for 'simple_identity'"),
        (INFER, {**pair(), "outputs": [{"name": "FOO"}]}, 400,
         "unexpected inference output 'FOO' for model 'simple'"),
        (INFER, {**pair(), "parameters": {"triton_mine": 1}}, 400,
         "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."),
        (INFER, {**pair(), "parameters": {"mine": [1]}}, 400,
         "parameter 'mine' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ("/v2/models/simple/versions/99/infer", pair(), 404,
         "Request for unknown model: 'simple' version 99 is not found"),
        ("/v2/models/simple/versions/abc/infer", pair(), 404, "Not Found"),
        ("/v2/models/simple_sequence/infer", {"inputs": [tensor("INPUT", shape=[1, 1], data=[1])]}, 400,
         "inference request to model 'simple_sequence' must specify a non-zero or non-empty correlation ID"),
        ("/v2/models/simple_sequence/infer",
         {"inputs": [tensor("INPUT", shape=[1, 1], data=[1])], "parameters": {"sequence_id": 5}}, 400,
         "inference request for sequence 5 to model 'simple_sequence' must specify the START flag on the first request "
         "of the sequence"),
        ("/v2/models/repeat_int32/infer", {"inputs": [tensor("IN", shape=[1], data=[1])]}, 501,
         "HTTP end point doesn't support models with decoupled transaction policy"),
        ("/v2/models/repeat_int32/generate", {"IN": [1, 2], "DELAY": [0, 0], "WAIT": 0}, 200,
         "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
         "number of responses"),
        ("/v2/models/simple_identity/generate", {"INPUT0": "a", "parameters": 5}, 500,
         "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"),
        ("/v2/models/simple_identity/generate", {"INPUT0": "a", "parameters": {"mine": {"x": 1}}}, 400,
         "Converting keyword: 'parameters': parameter 'mine' has invalid type. It should be either 'int', 'bool', or "
         "'string'."),
        ("/v2/repository/models/simple/load", b"", 503,
         "explicit model load / unload is not allowed if polling is enabled"),
        ("/v2/models/nope/trace/setting", {}, 400, "Request for unknown model : nope"),
        ("/v2/systemsharedmemory/region/r/register", {"key": "/k", "byte_size": 4}, 501,
         "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."),
    ],
)  # fmt: skip
def test_refusals(path: str, body: Any, status: int, text: str, server: Any) -> None:
    assert ask(server, path, body) == (status, {"error": text})


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2/models/nope/stats", 400, "requested model 'nope' is not available"),
        ("/v2/models/simple/versions/99/stats", 400, "requested model version is not available for model 'simple'"),
        ("/v2/models/simple/versions/99", 404, "Request for unknown model: 'simple' version 99 is not found"),
        ("/v2/models/simple/versions/99/config", 404, "Request for unknown model: 'simple' version 99 is not found"),
        ("/v2/models/nope", 404, "Request for unknown model: 'nope' is not found"),
        (INFER, 405, "Method Not Allowed"),
        ("/v2/systemsharedmemory/region/r/status", 404, "Unable to find system shared memory region: 'r'"),
    ],
)
def test_refusals_of_questions(path: str, status: int, text: str, server: Any) -> None:
    got, body = server.get(path)
    assert (got, json.loads(body)) == (status, {"error": text})


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        (INFER, 501, "Unsupported compression type"),
        ("/v2/models/simple_identity/generate", 400, "Unsupported content-encoding, only 'identity' is supported."),
    ],
)
def test_encodings_that_nobody_knows(path: str, status: int, text: str, server: Any) -> None:
    assert ask(server, path, pair(), {"Content-Encoding": "br"}) == (status, {"error": text})


def test_leniences(server: Any) -> None:
    """T4, T5: integers wrap, any nesting is flattened, unknown keys are ignored."""
    status, answer = ask(server, INFER, {**pair(data=[3_000_000_000, *NUMBERS[1:]]), "unknown": 1})
    assert (status, answer["outputs"][0]["data"][0]) == (200, 3_000_000_000 - 2**32)
    status, answer = ask(server, INFER, pair(data=[NUMBERS[:4], NUMBERS[4:8], *NUMBERS[8:]]))
    assert (status, answer["outputs"][0]["data"]) == (200, [2 * number for number in NUMBERS])
    assert list(answer) == ["model_name", "model_version", "outputs"]
    picture = {
        "inputs": [{"name": "data_0", "shape": [3, 224, 224], "datatype": "FP32", "data": [0.0] * 3 * 224 * 224}]
    }
    connection = http.client.HTTPConnection(server.http, timeout=60)  # that stays open, as those of stock clients do
    with contextlib.closing(connection):
        connection.request("POST", "/v2/models/densenet_onnx/infer", json.dumps(picture))
        refused = connection.getresponse()
        status, answer = refused.status, json.loads(refused.read())
    assert status == 400
    assert "exceeds the maximum allowed input size of 100000 bytes. Use --http-max-input-size" in answer["error"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_binary_requests(encoding: str, server: Any) -> None:
    """H13, H14, H16, H18: the header counts uncompressed bytes, and an output that is listed stays JSON."""
    raw = struct.pack("<16i", *NUMBERS)
    inputs = [{**tensor(name), "parameters": {"binary_data_size": len(raw)}} for name in ("INPUT0", "INPUT1")]
    for one in inputs:
        del one["data"]
    document = {
        "inputs": inputs,
        "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT1", "parameters": {"binary_data": True}}],
    }
    head = json.dumps({**document, "parameters": {"binary_data_output": True}}).encode()
    body = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding](head + raw + raw)
    headers = {"Content-Encoding": encoding, "Inference-Header-Content-Length": str(len(head))}
    status, answer = server.request("POST", INFER, body, headers)
    assert status == 200
    first, second = json.JSONDecoder().raw_decode(answer.decode("latin-1"))[0]["outputs"]
    assert first["data"] == [2 * number for number in NUMBERS]
    assert second["parameters"] == {"binary_data_size": 64}
    assert answer.endswith(bytes(64))


def test_a_raw_request(server: Any) -> None:
    """H17: an element of BYTES needs no length before it."""
    status, answer = server.request(
        "POST", "/v2/models/custom_identity_int32/infer", struct.pack("<3i", 1, 2, 3),
        {"Inference-Header-Content-Length": "0"},
    )  # fmt: skip
    assert (status, answer[-12:]) == (200, struct.pack("<3i", 1, 2, 3))


@pytest.mark.parametrize(
    ("method", "message", "code", "text"),
    [
        ("ModelInfer", pb.ModelInferRequest(model_name="repeat_int32"), "UNIMPLEMENTED",
         "ModelInfer RPC doesn't support models with decoupled transaction policy"),
        ("ModelConfig", pb.ModelConfigRequest(name="nope"), "NOT_FOUND",
         "Request for unknown model: 'nope' is not found"),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="nope"), "INVALID_ARGUMENT",
         "requested model 'nope' is not available"),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="simple"), "UNAVAILABLE",
         "explicit model load / unload is not allowed if polling is enabled"),
        ("ModelMetadata", pb.ModelMetadataRequest(name="simple", version="abc"), "INVALID_ARGUMENT",
         "failed to get model version from specified version string 'abc'"),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key="/k", byte_size=4),
         "UNIMPLEMENTED", "Client shared memory is disabled. Start the server with '--allow-client-shm=true'"),
    ],
)  # fmt: skip
def test_refusals_over_grpc(method: str, message: Any, code: str, text: str, server: Any) -> None:
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)(message)
    assert refused.value.code().name == code
    assert refused.value.details().startswith(text)


def test_the_configuration_over_grpc(server: Any) -> None:
    """G9: defaults are filled in, as over HTTP (H6)."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        config = stub.ModelConfig(pb.ModelConfigRequest(name="simple")).config
    assert (config.backend, config.max_batch_size) == ("onnxruntime", 8)
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert config.version_policy.latest.num_versions == 1
    assert config.default_model_filename == "model.onnx"
