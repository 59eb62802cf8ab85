"""Converts the `data` arrays of JSON tensors to raw bytes and back (interface items T4, T5). Pure.

`charonia.calls.admission` checks whether a tensor fits its model.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import numpy as np
import orjson

from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.tensors import Tensor, join_bytes_elements, split_bytes_elements

_SIGNED = frozenset((DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64))
_FLOATS = frozenset((DataType.FP32, DataType.FP64))
_BINARY_ONLY = frozenset((DataType.FP16, DataType.BF16))

MAX_DEPTH = 100
"""Elements must be nested in fewer arrays than this, the `data` array included (E8)."""

_MANY_VALUES = 1024
"""So many are written without an object for each: half the time, and a third of the memory."""

NOT_SIGNED = "attempt to access JSON non-signed-integer as signed-integer"
NOT_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NOT_STRING = "attempt to access JSON non-string as string"
NOT_BOOLEAN = "attempt to access JSON non-boolean as boolean"
NOT_NUMBER = "attempt to access JSON non-number as double"
NOT_ARRAY = "attempt to access JSON non-array as array"


def encode_elements(name: str, datatype: DataType, data: Any, count: int) -> bytes:
    """Raw bytes of `count` elements in a JSON array of any nesting (T4). Integers wrap to the type.

    Raises `InvalidArgument` for FP16 and BF16, `InternalError` (E4) for elements of the wrong type or another count.
    """
    if datatype in _BINARY_ONLY:
        raise InvalidArgument(
            f"receiving {datatype.name} data via JSON is not supported. Please use the binary data format for input "
            f"{name}"
        )
    elements, types = _flatten(data)
    if datatype is DataType.BYTES:
        raw = _encode_bytes(elements, types)
    elif datatype is DataType.BOOL:
        if not types <= {bool}:
            raise _data_error(NOT_BOOLEAN)
        raw = bytes(elements)
    elif datatype in _FLOATS:
        if not types <= {int, float}:
            raise _data_error(NOT_NUMBER)
        with np.errstate(over="ignore"):  # a double past FP32 becomes infinity, as a C cast does
            raw = np.array(elements, dtype=np.float64).astype(datatype.numpy).tobytes()
    else:
        raw = _encode_integers(datatype, elements, types)
    if len(elements) != count:
        raise _data_error("Shape does not match true shape of 'data' field")
    return raw


def encode_strings(data: Any) -> tuple[bytes, int]:
    """Raw BYTES of the strings in a JSON array of any nesting, and how many there are.

    Whether that is what the shape says is judged with the model's other checks, as in Triton: a wrong number of
    strings is the client's error (400), where one of numbers is a text that does not parse (500).
    """
    elements, types = _flatten(data)
    return _encode_bytes(elements, types), len(elements)


def render_elements(tensor: Tensor) -> bytes:
    """The flat JSON array of a tensor (H15), with bare NaN, Infinity and -Infinity tokens (T5).

    Raises `InvalidArgument` for FP16, BF16 (T4) and for BYTES elements that are not UTF-8, which no JSON can carry.
    """
    datatype = tensor.datatype
    if datatype in _BINARY_ONLY:
        raise InvalidArgument(
            f"sending {datatype.name} data via JSON is not supported. Please use the binary data format for output "
            f"{tensor.name}"
        )
    if datatype is DataType.BYTES:
        try:
            return orjson.dumps([element.decode() for element in split_bytes_elements(tensor.data)])
        except UnicodeDecodeError:
            raise InvalidArgument(
                "sending BYTES data that is not UTF-8 via JSON is not supported. Please use the binary data format "
                f"for output {tensor.name}"
            ) from None
    array = np.frombuffer(tensor.data, dtype=datatype.numpy)
    if datatype in _FLOATS:
        if not np.isfinite(array).all():
            return json.dumps(array.tolist(), separators=(",", ":")).encode()
        array = array.astype(np.float64, copy=False)  # an FP32 is written with all digits of a double, as Triton does
    if len(array) < _MANY_VALUES:
        return orjson.dumps(array.tolist())
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def _flatten(data: Any) -> tuple[list[Any], set[type]]:
    """The elements in order and the set of their types. One level at a time, since levels may be mixed (T4)."""
    if not isinstance(data, list):
        raise _data_error(NOT_ARRAY)
    elements = data
    for _ in range(MAX_DEPTH - 1):
        types = set(map(type, elements))
        if list not in types:
            return elements, types
        if types == {list}:
            elements = list(chain.from_iterable(elements))
        else:
            elements = list(chain.from_iterable(e if type(e) is list else (e,) for e in elements))
    raise InvalidArgument(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


def _encode_bytes(elements: list[Any], types: set[type]) -> bytes:
    if not types <= {str}:
        raise InternalError(f"Unable to parse JSON bytes array: {NOT_STRING}")
    return join_bytes_elements(elements)


def _encode_integers(datatype: DataType, elements: list[Any], types: set[type]) -> bytes:
    if not elements:
        return b""
    if datatype in _SIGNED:
        if types != {int} or max(elements) >= 2**63:
            raise _data_error(NOT_SIGNED)
        return np.array(elements, dtype=np.int64).astype(datatype.numpy).tobytes()
    if types != {int} or min(elements) < 0:
        raise _data_error(NOT_UNSIGNED)
    return np.array(elements, dtype=np.uint64).astype(datatype.numpy).tobytes()


def _data_error(why: str) -> CharoniaError:
    return InternalError(f"Unable to parse 'data': {why}")
