"""The one request that a case sends over each protocol, and the check of its answer; no load is made here.

Styles of HTTP bodies: "v2bin" is the binary tensor extension, "v2json" plain KServe v2 JSON; the others are those of
servers without the v2 protocol (see `loadtest.peers`).
"""

from __future__ import annotations

import base64
import http.client
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.model import LoadTestError

from .cases import CASES, Array, Case, content, expected

GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
CHECK_TIMEOUT_S = 60
LARGE_ELEMENTS = 100_000
"""Above this many elements, servers without a binary protocol are asked with raw bytes or base64, not decimal text."""

Parse = Callable[[bytes, Mapping[str, str]], Array]


@dataclass(frozen=True)
class Message:
    """One request: path, headers and body as the load generator sends them, and how its answer is read."""

    protocol: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    parse: Parse = field(repr=False)


def grpc_message(case: Case) -> Message:
    """A framed ModelInferRequest with raw contents."""
    from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

    tensor = content(case)
    request = service_pb2.ModelInferRequest(model_name=case.name)
    request.inputs.add(name=case.input, datatype="FP32", shape=case.shape)
    request.raw_input_contents.append(tensor.tobytes())
    body = request.SerializeToString()

    def parse(answer: bytes, _: Mapping[str, str]) -> Array:
        response = service_pb2.ModelInferResponse.FromString(answer)
        if response.raw_output_contents:
            return np.frombuffer(response.raw_output_contents[0], np.float32)
        return np.asarray(response.outputs[0].contents.fp32_contents, np.float32)

    headers = {"content-type": "application/grpc", "te": "trailers"}
    return Message("grpc", GRPC_PATH, headers, b"\0" + struct.pack(">I", len(body)) + body, parse)


def _json_document(case: Case) -> dict[str, Any]:
    tensor = content(case)
    values = [round(float(value), 7) for value in tensor.ravel()]
    return {"inputs": [{"name": case.input, "datatype": "FP32", "shape": list(case.shape), "data": values}]}


def _json_values(document: Any) -> Array:
    if "b64" in document:
        return np.frombuffer(base64.b64decode(document["b64"]), np.float32)
    return np.asarray(document["outputs"][0]["data"], np.float32)


def _binary_values(body: bytes, headers: Mapping[str, str]) -> Array:
    """The first output of an answer, which some servers give as JSON though they were asked for binary."""
    start = headers.get("inference-header-content-length")
    if start is None:
        return _json_values(json.loads(body))
    return np.frombuffer(body[int(start) :], np.float32)


def http_message(case: Case, style: str) -> Message:
    """A request in one of the styles "v2bin", "v2json", "model+raw", "model+b64", "model+list" or "model+same"."""
    tensor = content(case)
    json_type, raw_type = {"content-type": "application/json"}, {"content-type": "application/octet-stream"}
    path = f"/v2/models/{case.name}/infer" if style.startswith("v2") else f"/m/{case.name}"
    if style == "v2bin":
        parameters = {"binary_data_size": tensor.nbytes}
        spec = {"name": case.input, "datatype": "FP32", "shape": list(case.shape), "parameters": parameters}
        head = json.dumps(
            {"inputs": [spec], "parameters": {"binary_data_output": True}}, separators=(",", ":")
        ).encode()
        headers = {**raw_type, "Inference-Header-Content-Length": str(len(head))}
        return Message("http", path, headers, head + tensor.tobytes(), _binary_values)
    large = tensor.size > LARGE_ELEMENTS
    if large and style in ("model+raw", "model+same"):
        raw_path = f"/raw/{case.name}" if style == "model+raw" else path
        return Message("http", raw_path, raw_type, tensor.tobytes(), lambda body, _: np.frombuffer(body, np.float32))
    document: Any = _json_document(case)
    if large and style in ("model+b64", "model+list"):
        document = {"b64": base64.b64encode(tensor.tobytes()).decode()}
    if style == "model+list":
        text = json.dumps({"reqs": [document]}).encode()
        return Message("http", path, json_type, text, lambda body, _: _json_values(json.loads(body)[0]))
    return Message("http", path, json_type, json.dumps(document).encode(), lambda b, _: _json_values(json.loads(b)))


def mixed_message(protocol: str) -> Message:
    """Stands for the mixed trace, whose generator makes and checks its own requests."""
    return Message(protocol, "", {}, b"", lambda *_: content(CASES["mixed"]))


def ask(message: Message, address: str) -> tuple[Array, int]:
    """Sends the request once; the answer's values and its length in bytes as the load generator counts data.

    Raises LoadTestError when the server refuses it.
    """
    if message.protocol == "grpc":
        import grpc

        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(address, options=options) as channel:
            try:
                call = channel.unary_unary(message.path, None, None)
                answer: bytes = call(message.body[5:], timeout=CHECK_TIMEOUT_S)
            except grpc.RpcError as error:
                raise LoadTestError(f"{error.code().name}: {error.details()}") from None
        return message.parse(answer, {}), len(answer) + 5
    connection = http.client.HTTPConnection(address, timeout=CHECK_TIMEOUT_S)
    try:
        connection.request("POST", message.path, message.body, dict(message.headers))
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise LoadTestError(f"POST http://{address}{message.path}: {error}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise LoadTestError(f"HTTP {response.status}: {body[:300].decode(errors='replace')}")
    return message.parse(body, {name.lower(): value for name, value in response.getheaders()}), len(body)


def check(message: Message, address: str, case: Case, repository: Path) -> int:
    """Compares the answer with the input or with bare onnxruntime; the answer's length in bytes.

    Raises LoadTestError when they differ.
    """
    right = expected(case, repository).ravel()
    values, size_bytes = ask(message, address)
    if values.size != right.size:
        raise LoadTestError(f"{values.size} values, {right.size} expected")
    distance = float(np.abs(values.ravel() - right).max())
    if not distance <= 1e-3 * max(1.0, float(np.abs(right).max())):
        raise LoadTestError(f"values differ from the right ones by up to {distance:g}")
    return size_bytes
