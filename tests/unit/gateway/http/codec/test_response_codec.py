from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.inference import InferenceResponse
from charonia.tensors import Tensor
from gateway.http.codec.response_codec import ALL_BINARY, ReplyForm, ResponseEncoder, status_line

FLOATS = Tensor.of("O", np.array([[1.0, 2.0]], dtype=np.float32))
INTS = Tensor.of("P", np.array([3], dtype=np.int32))


def form(**named: Any) -> ReplyForm:
    made = ReplyForm(**named)
    made.settle()
    return made


def test_json_replies_have_h15s_order(served: Callable[[str], Any]) -> None:
    response = InferenceResponse('m"x', 3, [FLOATS, INTS], "id1", {"k": 1, "b": True})
    headers, body = ResponseEncoder().encode(response, form(), served("identity"))
    assert body == (
        b'{"id":"id1","model_name":"m\\"x","model_version":"3","parameters":{"k":1,"b":true},"outputs":['
        b'{"name":"O","datatype":"FP32","shape":[1,2],"data":[1.0,2.0]},'
        b'{"name":"P","datatype":"INT32","shape":[1],"data":[3]}]}'
    )
    assert headers == [(b"content-type", b"application/json")]


@pytest.mark.parametrize("request_id", ["", "7", 'quo"te'])
@pytest.mark.parametrize("outputs", [[FLOATS], [FLOATS, INTS]])
@pytest.mark.parametrize("rounds", [1, 2])
def test_binary_replies_say_where_the_bytes_begin(
    served: Callable[[str], Any], request_id: str, outputs: list[Tensor], rounds: int
) -> None:
    encoder = ResponseEncoder()
    response = InferenceResponse("m", 1, outputs, request_id)
    for _ in range(rounds):  # the second time from memory
        headers, body = encoder.encode(response, ALL_BINARY, served("identity"))
    at = int(dict(headers)[b"inference-header-content-length"])
    document = json.loads(body[:at])
    assert document.pop("id", "") == request_id
    assert document == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": t.name, "datatype": t.datatype.value, "shape": list(t.shape),
             "parameters": {"binary_data_size": len(t.data)}} for t in outputs
        ],
    }  # fmt: skip
    assert body[at:] == b"".join(t.data for t in outputs)
    assert dict(headers)[b"content-type"] == b"application/octet-stream"


def test_replies_of_another_signature_are_not_mixed_up(served: Callable[[str], Any]) -> None:
    encoder = ResponseEncoder()
    for shape in ((1, 2), (2, 1)):
        response = InferenceResponse("m", 1, [Tensor("O", DataType.FP32, shape, b"\0" * 8)])
        headers, body = encoder.encode(response, ALL_BINARY, served("identity"))
        at = int(dict(headers)[b"inference-header-content-length"])
        assert json.loads(body[:at])["outputs"][0]["shape"] == list(shape)


def test_default_binary_counts_only_for_unlisted_outputs(served: Callable[[str], Any]) -> None:
    mixed = form(binary_by_default=True, listed={"O": False})
    assert not mixed.all_binary
    headers, body = ResponseEncoder().encode(InferenceResponse("m", 1, [FLOATS]), mixed, served("identity"))
    assert json.loads(body)["outputs"][0]["data"] == [1.0, 2.0]
    assert headers == [(b"content-type", b"application/json")]


def test_one_binary_output_of_two(served: Callable[[str], Any]) -> None:
    headers, body = ResponseEncoder().encode(
        InferenceResponse("m", 1, [FLOATS, INTS]), form(listed={"O": False, "P": True}), served("identity")
    )
    at = int(dict(headers)[b"inference-header-content-length"])
    first, second = json.loads(body[:at])["outputs"]
    assert first["data"] == [1.0, 2.0]
    assert second["parameters"] == {"binary_data_size": 4}
    assert body[at:] == INTS.data


def test_response_parameters_come_with_binary_outputs_too(served: Callable[[str], Any]) -> None:
    response = InferenceResponse("m", 1, [FLOATS], "", {"k": "v"})
    headers, body = ResponseEncoder().encode(response, ALL_BINARY, served("identity"))
    at = int(dict(headers)[b"inference-header-content-length"])
    assert json.loads(body[:at])["parameters"] == {"k": "v"}


def test_half_floats_need_binary(served: Callable[[str], Any]) -> None:
    response = InferenceResponse("m", 1, [Tensor("O", DataType.FP16, (1,), b"\0\0")])
    ResponseEncoder().encode(response, ALL_BINARY, served("identity"))
    with pytest.raises(InvalidArgument, match="sending FP16 data via JSON is not supported"):
        ResponseEncoder().encode(response, form(), served("identity"))


def test_memory_stays_bounded(served: Callable[[str], Any]) -> None:
    encoder = ResponseEncoder()
    for i in range(3000):
        encoder.encode(InferenceResponse(f"m{i}", 1, [FLOATS]), ALL_BINARY, served("identity"))
    assert len(encoder._signatures) <= 1024


def test_outputs_in_shared_memory_are_described_only(served: Callable[[str], Any]) -> None:
    outputs = [Tensor("O", DataType.FP32, (1, 2), b""), INTS]
    wanted = form(listed={"O": False, "P": True}, in_regions={"O"})
    _, body = ResponseEncoder().encode(InferenceResponse("m", 1, outputs), wanted, served("identity"))
    assert body == (
        b'{"model_name":"m","model_version":"1","outputs":[{"name":"O","datatype":"FP32","shape":[1,2]},'
        b'{"name":"P","datatype":"INT32","shape":[1],"parameters":{"binary_data_size":4}}]}\3\0\0\0'
    )


def test_a_status_has_the_same_words_with_every_python() -> None:
    words = {413: b"Request Entity Too Large", 422: b"Unprocessable Entity", 404: b"Not Found", 299: b""}
    for status, phrase in words.items():
        assert status_line(status) == b"HTTP/1.1 %d %b\r\n" % (status, phrase)
