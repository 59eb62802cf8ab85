"""Writes an ONNX model with one node as bytes: the few protobuf messages that it needs, without the library for it.

Names and numbers of fields are those of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

import numpy as np

from charonia.backend import Array

DOMAIN = "ai.onnx.ml"
_DOMAIN_VERSION = 3
_IR_VERSION = 8
_OPSET = 17
_INT, _STRING, _TENSOR, _FLOATS, _INTS, _STRINGS = 2, 3, 4, 6, 7, 8
"""Kinds of attributes (AttributeProto.AttributeType)."""
Attribute = int | str | list[bytes] | Array
"""An array has one dimension, of integers, FP32, or FP64 (which becomes a tensor)."""
_ELEMENT_TYPES = {np.dtype(np.float32): 1, np.dtype(np.float64): 11}


def model_bytes(op: str, attributes: dict[str, Attribute], dtype: np.dtype, widths: tuple[int, int]) -> bytes:
    """A graph `input` -> op -> `output`: [rows, widths[0]] of `dtype` to [rows, widths[1]] of FP32."""
    node = _text(1, "input") + _text(2, "output") + _text(4, op) + _text(7, DOMAIN)
    node += b"".join(_message(5, _attribute(name, value)) for name, value in attributes.items())
    graph = _message(1, node) + _text(2, "trees")
    graph += _message(11, _value_info("input", dtype, widths[0]))
    graph += _message(12, _value_info("output", np.dtype(np.float32), widths[1]))
    opsets = _message(8, _text(1, DOMAIN) + _integer(2, _DOMAIN_VERSION)) + _message(
        8, _text(1, "") + _integer(2, _OPSET)
    )
    return _integer(1, _IR_VERSION) + opsets + _message(7, graph)


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, int):
        return _text(1, name) + _integer(3, value) + _integer(20, _INT)
    if isinstance(value, str):
        return _text(1, name) + _message(4, value.encode()) + _integer(20, _STRING)
    if isinstance(value, list):
        written = {text: _message(9, text) for text in set(value)}
        return _text(1, name) + b"".join([written[text] for text in value]) + _integer(20, _STRINGS)
    if value.dtype == np.float32:
        return _text(1, name) + _message(7, value.tobytes()) + _integer(20, _FLOATS)
    if value.dtype == np.float64:
        tensor = _integer(1, len(value)) + _integer(2, _ELEMENT_TYPES[value.dtype]) + _message(9, value.tobytes())
        return _text(1, name) + _message(5, tensor) + _integer(20, _TENSOR)
    return _text(1, name) + _message(8, _varints(value)) + _integer(20, _INTS)


def _value_info(name: str, dtype: np.dtype, width: int) -> bytes:
    dims = _message(1, _text(2, "rows")) + _message(1, _integer(1, width))
    tensor = _integer(1, _ELEMENT_TYPES[dtype]) + _message(2, dims)
    return _text(1, name) + _message(2, _message(1, tensor))


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    return _varints(np.array([value])) if value > 0x7F else bytes((value,))


def _varints(values: Array) -> bytes:
    """Numbers of at least 0, seven bits a byte, the low ones first; the high bit says that more follow."""
    values = values.astype(np.int64)
    size = max(1, -(-int(values.max(initial=0)).bit_length() // 7))
    shifted = values[:, None] >> (7 * np.arange(size))
    more = (shifted >> 7) > 0
    needed = np.concatenate([np.ones((len(values), 1), bool), more[:, :-1]], axis=1)
    written: bytes = ((shifted & 0x7F) | (more << 7)).astype(np.uint8)[needed].tobytes()
    return written
