"""What a generate object says, and how a response looks as one (H30-H33, H39)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import CharoniaError, ErrorCode
from charonia.inference import InferenceResponse
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.tensors import Tensor
from gateway.http.codec.generate_codec import decode_generate, encode_generate, shape_of


def interface(max_batch_size: int = 0, **inputs: tuple[DataType, tuple[int, ...]]) -> ModelInterface:
    specs = {name: TensorSpec(name, datatype, dims) for name, (datatype, dims) in inputs.items()}
    return ModelInterface("m", "python", "", max_batch_size, specs, {})


LLM = interface(PROMPT=(DataType.BYTES, (1,)), STREAM=(DataType.BOOL, (1,)))


def decode(body: Any, view: ModelInterface = LLM, limit: int = 10_000) -> Any:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return decode_generate("m", -1, text, view, limit)[0]


def refused(body: Any, view: ModelInterface = LLM, limit: int = 10_000) -> tuple[ErrorCode, str]:
    with pytest.raises(CharoniaError) as caught:
        decode(body, view, limit)
    return caught.value.code, caught.value.message


def test_members_are_tensors_or_parameters() -> None:
    request = decode(
        {
            "PROMPT": "hello", "STREAM": [True], "id": "mine", "temperature": 0.5, "top": 3, "mode": "x", "on": False,
            "parameters": {"nested": 1, "sequence_id": 7, "sequence_start": True, "priority": 2, "timeout": 9},
        }
    )  # fmt: skip
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs] == [
        ("PROMPT", DataType.BYTES, (1,), b"\x05\0\0\0hello"),
        ("STREAM", DataType.BOOL, (1,), b"\1"),
    ]
    assert request.id == "mine"
    given = {"nested": 1, "sequence_id": 7, "sequence_start": True, "priority": 2, "timeout": 9}
    assert request.parameters == {"temperature": 0.5, "top": 3, "mode": "x", "on": False, **given}
    assert (request.sequence_id, request.sequence_start, request.priority, request.timeout_us) == (7, True, 2, 9)


@pytest.mark.parametrize(
    ("key", "value"),
    [("priority", "high"), ("timeout", -5), ("sequence_id", -1), ("sequence_start", 1), ("binary_data_output", "no"),
     ("triton_x", 1), ("headers", "x"), ("big", 2**63)],
)  # fmt: skip
def test_what_means_nothing_here_is_the_models(key: str, value: Any) -> None:
    request = decode({"PROMPT": "x", key: value})
    assert request.parameters == {key: value}
    assert (request.priority, request.timeout_us, request.sequence_id, request.sequence_start) == (0, 0, 0, False)


def test_a_tensor_may_stand_among_the_nested_parameters() -> None:
    request = decode({"parameters": {"STREAM": False, "PROMPT": ["x"]}})
    assert [t.name for t in request.inputs] == ["STREAM", "PROMPT"]


def test_a_member_that_comes_twice_is_given_twice() -> None:
    """Admission refuses it by its name; the last one must not win quietly."""
    request = decode(b'{"PROMPT": "a", "STREAM": true, "PROMPT": "b"}')
    assert [t.name for t in request.inputs] == ["PROMPT", "STREAM", "PROMPT"]


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ({"PROMPT": 1}, ErrorCode.INTERNAL, "attempt to access JSON non-string as string"),
        ({"PROMPT": {"USER": "x"}}, ErrorCode.INTERNAL, "attempt to access JSON non-string as string"),
        ({"STREAM": "false"}, ErrorCode.INTERNAL, "attempt to access JSON non-boolean as boolean"),
        ({"STREAM": 1, "PROMPT": 1}, ErrorCode.INTERNAL, "attempt to access JSON non-boolean as boolean"),
        ({"id": 5}, ErrorCode.INTERNAL, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"parameters": 1}, ErrorCode.INTERNAL,
         "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"),
        (
            {"parameters": {"nested": {"twice": 1}}},
            ErrorCode.INVALID_ARG,
            "Converting keyword: 'parameters': parameter 'nested' has invalid type. It should be either 'int', 'bool', "
            "or 'string'.",
        ),
        (
            {"id": "7", "PROMPT": "a", "parameters": {"PROMPT": "b"}},
            ErrorCode.INVALID_ARG,
            "Converting keyword: 'parameters': [request id: 7] input 'PROMPT' already exists in request",
        ),
        ({"PARAMS": {"a": 0}}, ErrorCode.INVALID_ARG, "parameter 'PARAMS' has invalid type."),
        ({"PARAMS": None}, ErrorCode.INVALID_ARG, "parameter 'PARAMS' has invalid type."),
        ({"priority": [1]}, ErrorCode.INVALID_ARG, "parameter 'priority' has invalid type."),
        (b"[1]", ErrorCode.INTERNAL, "attempt to get members for non-object"),
        (b"x{", ErrorCode.INTERNAL, "failed to parse the request JSON buffer: Invalid value. at 0"),
        (b"", ErrorCode.INTERNAL, "failed to parse the request JSON buffer: The document is empty."),
        ({"PROMPT": ["a", "b"]}, ErrorCode.INVALID_ARG,
         "The schema can not convert input 'PROMPT' to tensor with proper shape"),
    ],
)  # fmt: skip
def test_what_is_refused(body: Any, code: ErrorCode, text: str) -> None:
    found, message = refused(body)
    assert found is code
    assert text in message


def test_a_nested_word_that_is_an_input() -> None:
    view = interface(parameters=(DataType.FP32, (1,)))
    assert refused({"parameters": 1.0}, view) == (
        ErrorCode.INVALID_ARG, "Keyword 'parameters' for nested schema also given as input tensor name",
    )  # fmt: skip


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.BF16])
def test_types_json_cannot_carry(datatype: DataType) -> None:
    view = interface(X=(datatype, (1,)))
    assert refused({"X": 1.0}, view) == (
        ErrorCode.INVALID_ARG,
        f"receiving {datatype.value} data via JSON is not supported. Please use the binary data format for input X",
    )  # fmt: skip


def test_a_tensor_over_the_limit() -> None:
    view = interface(X=(DataType.FP64, (-1,)))
    body = json.dumps({"X": [1] * 100}).encode()
    assert refused(body, view, 500) == (
        ErrorCode.INVALID_ARG,
        f"request size of {len(body)} bytes with input 'X' of size 800 bytes exceeds the maximum allowed input size of "
        "500. Use --http-max-input-size to increase the limit.",
    )


@pytest.mark.parametrize(
    ("dims", "count", "shape"),
    [
        ((1,), 1, (1,)), ((), 1, ()), ((-1,), 5, (5,)), ((-1,), 0, (0,)), ((-1, -1), 4, (1, 4)), ((-1, 2), 6, (3, 2)),
        ((-1, 16), 32, (2, 16)), ((-1, 2, -1, 3), 12, (1, 2, 2, 3)), ((4,), 3, None), ((-1, 4), 6, None),
        ((2,), 4, None), ((1,), 0, None), ((0,), 0, None), ((), 2, None),
    ],
)  # fmt: skip
def test_shapes(dims: tuple[int, ...], count: int, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        with pytest.raises(CharoniaError):
            shape_of("X", dims, count)
    else:
        assert shape_of("X", dims, count) == shape


def test_a_batching_model_gets_its_batch_dimension() -> None:
    view = interface(8, X=(DataType.INT32, (2,)))
    assert decode({"X": [1, 2]}, view).inputs[0].shape == (1, 2)


def test_a_response() -> None:
    outputs = [
        Tensor.of("TEXT", np.array([["hi"]], dtype=np.object_)),
        Tensor.of("N", np.array([1, 2], np.int32)),
        Tensor.of("X", np.array([np.nan], np.float32)),
        Tensor.of("none", np.array([], np.int32)),
    ]
    response = InferenceResponse("m", 3, outputs, "mine", {"note": "kept", "N": 5, "model_name": "no"})
    assert encode_generate(response) == (
        b'{"N":5,"TEXT":"hi","X":NaN,"id":"mine","model_name":"m","model_version":"3","none":[],"note":"kept"}'
    )


@pytest.mark.parametrize(
    ("output", "encoded"),
    [
        ("OUT", b'{"OUT":"hi","model_name":"m","model_version":"3"}'),
        ("model", b'{"model":"hi","model_name":"m","model_version":"3"}'),
        ("text_output", b'{"model_name":"m","model_version":"3","text_output":"hi"}'),
        ("model_name", b'{"model_name":"m","model_version":"3"}'),
    ],
)
def test_one_text_stands_in_the_order_of_names(output: str, encoded: bytes) -> None:
    text = Tensor.of(output, np.array(["hi"], dtype=np.object_))
    assert encode_generate(InferenceResponse("m", 3, [text])) == encoded
