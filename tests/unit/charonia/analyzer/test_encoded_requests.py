"""The bytes of requests, read back by other code: JSON, protobuf, HPACK."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hpack import Decoder

from charonia.analyzer.encoded_requests import GrpcRequests, HttpRequests, RequestPlan, SentTensor, Turn
from protos import grpc_service_pb2 as pb

X = SentTensor("X", "INT32", (1, 2), np.array([1, 2], np.int32).tobytes())
T = SentTensor("T", "BYTES", (1,), b"\x02\0\0\0hi")


def plan(**more: Any) -> RequestPlan:
    fields: dict[str, Any] = {
        "model": "a/b", "version": "3", "authority": "host:1", "secure": False, "headers": (("X-Key", "v"),),
        "steps": (((X, T),),), "parameters": {"p": 5, "q": "t", "r": True, "s": 0.5}, "outputs": {},
    }  # fmt: skip
    return RequestPlan(**{**fields, **more})


def parsed_http(message: bytes) -> tuple[list[str], dict[str, Any], bytes]:
    head, _, body = message.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    assert int(headers["content-length"]) == len(body)
    at = int(headers.get("inference-header-content-length", len(body)))
    return lines, json.loads(body[:at]), body[at:]


def parsed_grpc(message: bytes) -> Any:
    assert message[0] == 0
    assert int.from_bytes(message[1:5], "big") == len(message) - 5
    return pb.ModelInferRequest.FromString(message[5:])


def test_http() -> None:
    lines, document, tensors = parsed_http(HttpRequests(plan()).message(0, 0, None))
    assert lines[0] == "POST /v2/models/a%2Fb/versions/3/infer HTTP/1.1"
    assert "X-Key: v" in lines
    assert document["parameters"] == {"p": 5, "q": "t", "r": True, "s": 0.5, "binary_data_output": True}
    assert document["inputs"][0] == {
        "name": "X", "datatype": "INT32", "shape": [1, 2], "parameters": {"binary_data_size": 8}
    }  # fmt: skip
    assert tensors == X.data + T.data


def test_http_with_json_tensors() -> None:
    _, document, tensors = parsed_http(HttpRequests(plan(json_inputs=True, json_outputs=True)).message(0, 0, None))
    assert [item["data"] for item in document["inputs"]] == [[1, 2], ["hi"]]
    assert "binary_data_output" not in document["parameters"]
    assert tensors == b""


def test_http_of_a_sequence() -> None:
    requests = HttpRequests(plan())
    _, document, tensors = parsed_http(requests.message(0, 0, Turn(7, True, False)))
    assert document["parameters"]["sequence_id"] == 7
    assert document["parameters"]["sequence_start"] is True
    assert tensors == X.data + T.data
    assert "sequence_id" not in parsed_http(requests.message(0, 0, None))[1]["parameters"]


@pytest.mark.parametrize("turn", [None, Turn(9, False, True)])
def test_grpc(turn: Turn | None) -> None:
    message = parsed_grpc(GrpcRequests(plan()).message(0, 0, turn))
    assert (message.model_name, message.model_version) == ("a/b", "3")
    assert [tensor.name for tensor in message.inputs] == ["X", "T"]
    assert list(message.raw_input_contents) == [X.data, T.data]
    assert message.parameters["p"].int64_param == 5
    assert message.parameters["r"].bool_param
    assert ("sequence_id" in message.parameters) == (turn is not None)
    if turn is not None:
        assert message.parameters["sequence_id"].int64_param == 9
        assert message.parameters["sequence_end"].bool_param


def test_shared_memory() -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    placed = plan(steps=(((SentTensor("X", "INT32", (1, 2), b"", place),),),), outputs={"Y": place})
    _, document, tensors = parsed_http(HttpRequests(placed).message(0, 0, None))
    assert document["inputs"][0]["parameters"] == document["outputs"][0]["parameters"] == place
    message = parsed_grpc(GrpcRequests(placed).message(0, 0, None))
    assert not tensors
    assert not message.raw_input_contents
    assert message.outputs[0].parameters["shared_memory_region"].string_param == "r"


@pytest.mark.parametrize(("name", "expand"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_compression(name: str, expand: Any) -> None:
    requests = GrpcRequests(plan(compression=name))
    message = requests.message(0, 0, None)
    assert message[0] == 1
    assert expand(message[5:]) == GrpcRequests(plan()).message(0, 0, None)[5:]
    assert ("grpc-encoding", name) in Decoder().decode(requests.header_block)


@pytest.mark.parametrize("length", [1, 126, 127, 128, 5000])
def test_headers_of_any_length(length: int) -> None:
    block = GrpcRequests(plan(headers=(("X-Key", "v" * length),), streaming=True, secure=True)).header_block
    fields = dict(Decoder().decode(block))
    assert fields["x-key"] == "v" * length
    assert fields[":path"] == "/inference.GRPCInferenceService/ModelStreamInfer"
    assert (fields[":method"], fields[":scheme"], fields[":authority"]) == ("POST", "https", "host:1")


def test_streams_of_decoupled_models_ask_for_the_mark_of_the_end() -> None:
    message = parsed_grpc(GrpcRequests(plan(streaming=True, decoupled=True)).message(0, 0, None))
    assert message.parameters["triton_enable_empty_final_response"].bool_param


def test_a_plan_reaches_a_worker_as_it_is() -> None:
    import msgpack

    whole = plan()
    assert RequestPlan.unpacked(msgpack.unpackb(msgpack.packb(whole.packed()))) == whole
