"""Requests carry the case's tensor in each dialect, and answers are read back."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from loadtest.bench.cases import CASES, content, find, models_of
from loadtest.bench.messages import grpc_message, http_message
from loadtest.model import LoadTestError

CASE = CASES["identity"]


def test_a_framed_grpc_request() -> None:
    message = grpc_message(CASE)
    assert message.body[0] == 0
    assert int.from_bytes(message.body[1:5], "big") == len(message.body) - 5
    request = service_pb2.ModelInferRequest.FromString(message.body[5:])
    assert request.raw_input_contents == [content(CASE).tobytes()]
    typed = service_pb2.ModelInferResponse(model_name="identity")
    typed.outputs.add(name="OUTPUT0", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1.0, 2.0])
    assert message.parse(typed.SerializeToString(), {}).tolist() == [1.0, 2.0]


def test_the_binary_extension() -> None:
    message = http_message(CASE, "v2bin")
    length = int(message.headers["Inference-Header-Content-Length"])
    assert message.body[length:] == content(CASE).tobytes()
    assert json.loads(message.body[:length])["inputs"][0]["parameters"] == {"binary_data_size": 64}
    answer = b"{}" + np.float32(3).tobytes()
    assert message.parse(answer, {"inference-header-content-length": "2"}).tolist() == [3.0]


@pytest.mark.parametrize("style", ["v2json", "model+raw", "model+b64", "model+list", "model+same"])
def test_small_tensors_are_json_in_all_other_dialects(style: str) -> None:
    document = json.loads(http_message(CASE, style).body)
    if style == "model+list":
        (document,) = document["reqs"]
    assert document["inputs"][0]["shape"] == [1, 16]


def test_large_tensors_are_raw_or_base64() -> None:
    big = CASES["identity_big"]
    assert http_message(big, "model+raw").body == http_message(big, "model+same").body == content(big).tobytes()
    message = http_message(big, "model+b64")
    assert base64.b64decode(json.loads(message.body)["b64"]) == content(big).tobytes()
    assert np.array_equal(message.parse(message.body, {}), content(big).ravel())


def test_cases_are_found_by_name() -> None:
    assert [case.name for case in find("mlp,identity")] == ["mlp", "identity"]
    assert [case.name for case in models_of(find("mixed"))] == ["identity", "identity_levels", "mlp", "identity_py"]
    with pytest.raises(LoadTestError, match="unknown model nothing"):
        find("identity,nothing")
