from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument
from charonia.tensors import Tensor, join_bytes_elements
from gateway.http.codec.jsondata import encode_elements, encode_strings, render_elements


@pytest.mark.parametrize(
    ("datatype", "data", "raw"),
    [
        ("BOOL", [True, False], b"\x01\x00"),
        ("INT8", [127, 128, -129], struct.pack("<3b", 127, -128, 127)),
        ("UINT8", [255, 256], b"\xff\x00"),
        ("INT32", [3_000_000_000], struct.pack("<i", -1294967296)),
        ("INT64", [-(2**63), 2**63 - 1], struct.pack("<2q", -(2**63), 2**63 - 1)),
        ("UINT64", [2**64 - 1], b"\xff" * 8),
        ("UINT16", [65536 + 7], struct.pack("<H", 7)),
        ("FP32", [1, 2.5], struct.pack("<2f", 1.0, 2.5)),
        ("FP32", [1e300], struct.pack("<f", math.inf)),
        ("FP64", [0.1], struct.pack("<d", 0.1)),
        ("BYTES", ["a", "ü"], b"\x01\0\0\0a\x02\0\0\0\xc3\xbc"),
        ("INT32", [[1, 2], [3, [4]], 5], struct.pack("<5i", 1, 2, 3, 4, 5)),
        ("INT32", [], b""),
    ],
)
def test_json_arrays_become_raw_bytes(datatype: str, data: list[Any], raw: bytes) -> None:
    element_type = DataType[datatype]
    count = 5 if raw and isinstance(data[0], list) else len(data)
    assert encode_elements("I", element_type, data, count) == raw


@pytest.mark.parametrize(
    ("datatype", "data", "text"),
    [
        ("INT32", [1.5], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("INT32", [1.0], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("INT32", [True], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("INT32", [None], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("INT64", [2**63], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("UINT8", [-1], "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("UINT8", ["1"], "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("BOOL", [1], "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
        ("FP32", ["1"], "Unable to parse 'data': attempt to access JSON non-number as double"),
        ("FP32", [False], "Unable to parse 'data': attempt to access JSON non-number as double"),
        ("BYTES", [5], "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        ("INT32", [1, 2], "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ("INT32", [], "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ("INT32", {"a": 1}, "Unable to parse 'data': attempt to access JSON non-array as array"),
    ],
)
def test_wrong_elements_are_internal_errors(datatype: str, data: Any, text: str) -> None:
    with pytest.raises(InternalError) as caught:
        encode_elements("I", DataType[datatype], data, 1)
    assert caught.value.message == text


def test_strings_are_counted_and_not_judged() -> None:
    assert encode_strings(["a", ["ü", [""]]]) == (join_bytes_elements(["a", "ü", ""]), 3)
    assert encode_strings([]) == (b"", 0)
    with pytest.raises(InternalError, match="attempt to access JSON non-array as array"):
        encode_strings("a")


@pytest.mark.parametrize(("datatype", "element"), [("INT32", 7), ("BYTES", "a")])
def test_data_nests_less_than_a_hundred_levels(datatype: str, element: Any) -> None:
    data: Any = element
    for _ in range(99):
        data = [data]
    raw = encode_elements("I", DataType[datatype], [element], 1)
    assert encode_elements("I", DataType[datatype], data, 1) == raw
    for deeper in ([data], [1, data], [[data]]):
        with pytest.raises(InvalidArgument, match=r"^JSON nesting depth exceeds maximum allowed limit \(100\)$"):
            encode_elements("I", DataType[datatype], deeper, 1)


@pytest.mark.parametrize("name", ["FP16", "BF16"])
def test_half_floats_travel_only_in_binary(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        encode_elements("I", DataType[name], [1.0], 1)
    assert caught.value.message == (
        f"receiving {name} data via JSON is not supported. Please use the binary data format for input I"
    )
    with pytest.raises(InvalidArgument) as caught:
        render_elements(Tensor("O", DataType[name], (1,), b"\0\0"))
    assert caught.value.message == (
        f"sending {name} data via JSON is not supported. Please use the binary data format for output O"
    )


def test_output_arrays_are_flat_and_not_finite_floats_bare() -> None:
    values = np.array([[1.0, math.nan], [math.inf, -math.inf]], dtype=np.float32)
    assert render_elements(Tensor.of("O", values)) == b"[1.0,NaN,Infinity,-Infinity]"
    assert render_elements(Tensor.of("O", np.array([[1, 2], [3, 4]], dtype=np.int64))) == b"[1,2,3,4]"
    assert render_elements(Tensor.of("O", np.array([True, False]))) == b"[true,false]"


@pytest.mark.parametrize("name", ["FP32", "FP64", "INT8", "INT64", "UINT8", "UINT64", "BOOL"])
def test_many_values_are_written_as_few_are(name: str) -> None:
    raw = np.random.default_rng(7).bytes(40_000)
    dtype = DataType[name].numpy
    array = np.frombuffer(raw, np.uint8).astype(bool) if name == "BOOL" else np.frombuffer(raw, dtype)
    if array.dtype.kind == "f":
        array = array[np.isfinite(array)]
    assert len(array) > 4000
    parts = [render_elements(Tensor.of("O", array[at : at + 100])) for at in range(0, len(array), 100)]
    assert render_elements(Tensor.of("O", array)) == b"[" + b",".join(part[1:-1] for part in parts) + b"]"


def test_bytes_outputs_are_strings_or_refused() -> None:
    text = Tensor("O", DataType.BYTES, (2,), join_bytes_elements(['"quoted"', "ü"]))
    assert json.loads(render_elements(text)) == ['"quoted"', "ü"]
    with pytest.raises(InvalidArgument, match="Please use the binary data format for output O"):
        render_elements(Tensor("O", DataType.BYTES, (1,), join_bytes_elements([b"\xff"])))
