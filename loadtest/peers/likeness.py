"""Sends the calls of `compared_calls` to Triton and to Charonia, and says which are answered otherwise.

What differs by intent, or by Triton's version, is in `ACCEPTED`, each with its reason. A server may end a connection
without an answer, and both may do so alike; a server that is gone, or that gives no answer in time, is like no other.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from loadtest.bench.servers import Endpoints
from loadtest.model import LoadTestError

from .compared_calls import Call, GrpcCall, HttpCall

TIMEOUT_S = 20
NO_ANSWER = f"no answer within {TIMEOUT_S} s"
_HEADERS = ("content-type", "content-encoding", "inference-header-content-length", "transfer-encoding")
_DECODERS = {"gzip": gzip.decompress, "deflate": zlib.decompress}

ACCEPTED = (
    (r"generate\w* \w+: .*error", "2.51 answers each error of a model with 400, later releases with its status"),
    (r"generate\w* (scripted|chain): (two|zero)", "as above: a wrong number of responses is an error of the model"),
    (r"generate\w* \w+: request", "`id` is no parameter here, and `timeout` and the like have their meaning (H30)"),
    (r"stream (direct|oldest) (whole 3|with.*)", "an error before the inference names the model, and is final (G22)"),
    (r"stream parameters: (wrong|negative) .*|stream parameters: reserved", "as above"),
    (r"header length (-104|24)", "the bytes behind the JSON begin with a zero, where Triton's parser stops"),
)
"""Names of calls, as regular expressions, that may be answered otherwise, and why."""


@dataclass(frozen=True)
class Difference:
    """A call and both answers, and why it may be; empty where nothing explains it."""

    name: str
    triton: str
    charonia: str
    reason: str


def read_body(data: bytes, headers: dict[str, str]) -> Any:
    """A body without its encoding: JSON as values, with what follows it; events as a list; else text."""
    decode = _DECODERS.get(headers.get("content-encoding", ""))
    data = data if decode is None else decode(data)
    if "inference-header-content-length" in headers:
        length = int(headers["inference-header-content-length"])
        return [json.loads(data[:length]), data[length:].hex()]
    if data.startswith(b"data: ") and data.endswith(b"\n\n"):
        return [json.loads(event.removeprefix(b"data: ")) for event in data[:-2].split(b"\n\n")]
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "backslashreplace")


def _check_live(address: str, failure: str) -> None:
    """Raises `LoadTestError` where no server answers at the HTTP address, which a call's failure makes likely."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        raise LoadTestError(f"the server at {address} is gone ({error}), the call before found: {failure}") from error
    finally:
        connection.close()


def ask_http(address: str, call: HttpCall) -> Any:
    """Status, headers that matter and body; of an error, no content type. Raises `LoadTestError` without a server."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request(call.method, call.path, call.body, dict(call.headers))
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders() if name.lower() in _HEADERS}
        body = read_body(answer.read(), headers)
    except TimeoutError:
        return NO_ANSWER
    except (OSError, http.client.HTTPException) as error:
        _check_live(address, repr(error))
        return repr(error)
    finally:
        connection.close()
    if answer.status >= http.client.BAD_REQUEST:
        headers.pop("content-type", None)
    return [answer.status, headers, body]


def _parameters(message: Any) -> dict[str, str]:
    chosen = {key: (value.WhichOneof("parameter_choice"), value) for key, value in message.items()}
    return {key: f"{kind} {getattr(value, kind)}" for key, (kind, value) in sorted(chosen.items())}


def _response(message: Any) -> Any:
    outputs = [[tensor.name, tensor.datatype, list(tensor.shape)] for tensor in message.outputs]
    raw = [data.hex() for data in message.raw_output_contents]
    return [message.model_name, message.model_version, message.id, _parameters(message.parameters), outputs, raw]


def ask_grpc(stub: Any, call: GrpcCall) -> Any:
    """The responses of a call, each error with its text, and the status at the end. Raises `LoadTestError` without a
    server.
    """
    found: list[Any] = []
    try:
        if call.streamed:
            for response in stub.ModelStreamInfer(iter(call.requests), timeout=TIMEOUT_S):
                found.append([response.error_message, _response(response.infer_response)])
        else:
            found.append(_response(stub.ModelInfer(call.requests[0], timeout=TIMEOUT_S)))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return [*found, NO_ANSWER]
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            try:
                stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=TIMEOUT_S)
            except grpc.RpcError:
                raise LoadTestError(f"the server is gone, the call before found: {error.details()}") from error
        return [*found, error.code().name, error.details()]
    return [*found, "OK"]


def answers(endpoints: Endpoints, calls: Sequence[Call]) -> Iterator[str]:
    """The answer to each call, as JSON text with sorted keys. Raises `LoadTestError` without a server."""
    with grpc.insecure_channel(str(endpoints.grpc)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for call in calls:
            found = ask_http(str(endpoints.http), call) if isinstance(call, HttpCall) else ask_grpc(stub, call)
            yield json.dumps(found, sort_keys=True)


def reason_for(name: str) -> str:
    """Why a call may be answered otherwise; empty when nothing is known."""
    return next((reason for pattern, reason in ACCEPTED if re.fullmatch(pattern, name)), "")


def differences(triton: Endpoints, charonia: Endpoints, calls: Sequence[Call]) -> list[Difference]:
    """The calls that are answered otherwise, or by neither in time. Each is sent to both, one after the other.

    Raises `LoadTestError` where one of the servers is gone.
    """
    pairs = zip(calls, answers(triton, calls), answers(charonia, calls), strict=True)
    return [
        Difference(call.name, one, other, "" if NO_ANSWER in one else reason_for(call.name))
        for call, one, other in pairs
        if one != other or NO_ANSWER in one
    ]
