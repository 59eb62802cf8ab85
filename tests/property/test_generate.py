"""Whatever text comes to `generate`, it is a request or a typed refusal; shapes hold what they are given."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from charonia.datatypes import DataType
from charonia.errors import CharoniaError
from charonia.inference import InferenceResponse
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.tensors import Tensor
from gateway.http.codec.generate_codec import decode_generate, encode_generate, shape_of

DIMS = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 16]), max_size=4)
TYPES = {"T": DataType.BYTES, "I": DataType.INT32, "U": DataType.UINT8, "F": DataType.FP32, "B": DataType.BOOL}
NAMES = st.sampled_from([*TYPES, "id", "parameters", "sequence_id", "priority", "timeout", "temperature", "x"])
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(NAMES, v, max_size=4), max_leaves=8)


def interface(dims: dict[str, list[int]], max_batch_size: int) -> ModelInterface:
    specs = {name: TensorSpec(name, TYPES[name], tuple(dims.get(name, [1]))) for name in TYPES}
    return ModelInterface("m", "python", "", max_batch_size, specs, {})


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.dictionaries(st.sampled_from(list(TYPES)), DIMS), st.booleans())
def test_any_object_is_a_request_or_a_refusal(
    document: dict[str, Any], dims: dict[str, list[int]], batching: bool
) -> None:
    try:
        request, _ = decode_generate("m", -1, json.dumps(document).encode(), interface(dims, int(batching)), 10_000)
    except CharoniaError:
        return
    for tensor in request.inputs:
        size = TYPES[tensor.name].size_bytes
        assert all(dim >= 0 for dim in tensor.shape)
        if tensor.datatype is not DataType.BYTES:
            assert len(tensor.data) == prod(tensor.shape) * size


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,T1a\\ue-. ', max_size=40).map(str.encode))
def test_any_text_is_a_request_or_a_refusal(text: bytes) -> None:
    try:
        decode_generate("m", -1, text, interface({}, 0), 10_000)
    except CharoniaError:
        return


@given(DIMS, st.integers(0, 100))
def test_a_shape_holds_all_elements(dims: list[int], count: int) -> None:
    try:
        shape = shape_of("T", tuple(dims), count)
    except CharoniaError:
        return
    assert prod(shape) == count
    assert all(fixed in (-1, dim) for fixed, dim in zip(dims, shape, strict=True))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4), st.text(max_size=8), st.text(max_size=8))
def test_a_response_is_json(values: list[int], name: str, text: str) -> None:
    data = b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    response = InferenceResponse("m", 1, [Tensor("y", DataType.INT32, (len(values),), data)], name, {"p": text})
    told = json.loads(encode_generate(response))
    assert told["y"] == (values[0] if len(values) == 1 else values)
    assert told["p"] == text
    assert told.get("id", "") == name
