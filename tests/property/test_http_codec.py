"""No body makes the front fail untyped, and what goes in as JSON or binary comes out unchanged."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from inference_doubles import post

from charonia.datatypes import DataType
from charonia.tensors import Tensor
from gateway.http.codec.jsontext import MAX_DEPTH, parse_json


def check_typed(status: int, headers: dict[bytes, bytes], body: bytes) -> None:
    """A reply is a success or a typed error with a text; the catch-all's text is neither."""
    assert headers[b"content-length"] == b"%d" % len(body)
    if status == 200:
        return
    assert 400 <= status < 600
    error = json.loads(body)["error"]
    assert isinstance(error, str)
    assert error
    assert error != "internal server error", body


VALID = {
    "id": "x",
    "parameters": {"sequence_id": 1, "priority": 1, "timeout": 5, "custom": "v", "binary_data_output": True},
    "inputs": [
        {"name": "A", "shape": [1, 2], "datatype": "INT32", "data": [[1, 2]]},
        {"name": "B", "shape": [4], "datatype": "UINT8", "parameters": {"binary_data_size": 4}},
        {"name": "C", "shape": [1], "datatype": "BYTES", "data": ["text"]},
        {
            "name": "D",
            "shape": [2],
            "datatype": "INT8",
            "parameters": {"shared_memory_region": "r", "shared_memory_offset": 1, "shared_memory_byte_size": 2},
        },
    ],
    "outputs": [
        {"name": "A", "parameters": {"binary_data": False}},
        {"name": "B", "parameters": {"classification": 2}},
        {"name": "D", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 2}},
    ],
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["FP32", "BYTES"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A valid document with a few members anywhere in it replaced or taken out."""
    document = json.loads(json.dumps(VALID))
    for _ in range(draw(st.integers(1, 3))):
        place: Any = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if draw(st.booleans()):
                place[key] = draw(VALUES)
            else:
                del place[key]
            break
    return document


HEADER = st.none() | st.integers(-2, 400).map(lambda n: b"%d" % n) | st.binary(max_size=6)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.binary(max_size=300), HEADER, st.sampled_from([b"", b"gzip", b"deflate", b"br"]))
def test_arbitrary_bytes(body: bytes, header: bytes | None, encoding: bytes) -> None:
    headers = {} if header is None else {b"inference-header-content-length": header}
    if encoding:
        headers[b"content-encoding"] = encoding
    check_typed(*post([body], headers))


@settings(deadline=None, max_examples=examples(300))
@given(mutated(), st.integers(-3, 3), st.booleans(), st.binary(max_size=8))
def test_mutated_requests(document: Any, shift: int, binary: bool, tail: bytes) -> None:
    text = json.dumps(document).encode()
    headers = {b"inference-header-content-length": b"%d" % (len(text) + shift)} if binary else {}
    check_typed(*post([text + tail], headers))


@settings(deadline=None)
@given(mutated(), st.data())
def test_damaged_text(document: Any, data: st.DataObject) -> None:
    text = bytearray(json.dumps(document).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    check_typed(*post([bytes(text)], {}))


JSON_TYPES = [t for t in DataType if t not in (DataType.FP16, DataType.BF16, DataType.BYTES)]
ARRAYS = st.sampled_from(JSON_TYPES).flatmap(
    lambda t: hnp.arrays(t.numpy, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
)


@settings(deadline=None)
@given(st.lists(ARRAYS, min_size=1, max_size=3), st.booleans(), st.booleans(), st.text(max_size=10))
def test_tensors_survive_json_and_binary(arrays: list[Any], binary_in: bool, binary_out: bool, request_id: str) -> None:
    tensors = [Tensor.of(f"T{i}", array) for i, array in enumerate(arrays)]
    inputs: list[dict[str, Any]] = []
    for tensor, array in zip(tensors, arrays, strict=True):
        item: dict[str, Any] = {"name": tensor.name, "shape": list(array.shape), "datatype": tensor.datatype.value}
        if binary_in:
            item["parameters"] = {"binary_data_size": len(tensor.data)}
        else:
            item["data"] = array.tolist()
        inputs.append(item)
    document = {"id": request_id, "inputs": inputs, "parameters": {"binary_data_output": binary_out}}
    text = json.dumps(document).encode()
    raw = b"".join(bytes(t.data) for t in tensors) if binary_in else b""
    status, headers, body = post([text + raw], {b"inference-header-content-length": b"%d" % len(text)} if raw else {})
    assert status == 200, body
    at = int(headers.get(b"inference-header-content-length", len(body)))
    answer = json.loads(body[:at])
    assert answer.get("id", "") == request_id
    for tensor, array, output in zip(tensors, arrays, answer["outputs"], strict=True):
        assert (output["name"], output["shape"]) == (tensor.name, list(array.shape))
        if binary_out:
            size = output["parameters"]["binary_data_size"]
            if binary_in:
                assert body[at : at + size] == bytes(tensor.data)
            else:  # JSON has one NaN, whatever its bits were
                back = np.frombuffer(body[at : at + size], dtype=tensor.datatype.numpy).reshape(array.shape)
                np.testing.assert_array_equal(back, array)
            at += size
        else:
            back = np.array(output["data"], dtype=tensor.datatype.numpy).reshape(array.shape)
            np.testing.assert_array_equal(back, array)


def cut(value: Any, depth: int) -> Any:
    """A value with 0 in the place of what is nested deeper than this."""
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        return 0
    if isinstance(value, dict):
        return {key: cut(one, depth - 1) for key, one in value.items()}
    return [cut(one, depth - 1) for one in value]


@settings(deadline=None)
@given(
    st.recursive(
        st.text(alphabet='[]{}"\\a', max_size=6) | st.just(math.pi),
        lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner),
    ),
    st.integers(0, MAX_DEPTH + 10),
)
def test_depth_is_what_it_is_whatever_the_strings_hold(value: Any, wrap: int) -> None:
    for _ in range(wrap):
        value = [value, "[", "]]]", '"[{']
    text = json.dumps(value).encode()
    assert parse_json(text) == cut(value, MAX_DEPTH)
