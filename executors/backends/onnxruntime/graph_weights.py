"""Counts the bytes of the tensors that an ONNX file holds: its initialisers and constants, subgraphs included.

onnxruntime's Python interface does not say how much memory a session has. Only the lengths and shapes in the file are
read, so weights beside the file are counted without being opened.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from math import prod
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GRAPH = 7
_NODES, _INITIALIZERS, _SPARSE_INITIALIZERS = 1, 5, 15
_ATTRIBUTES = 5
_TENSOR, _SUBGRAPH, _TENSORS, _SUBGRAPHS, _SPARSE_TENSOR = 5, 6, 10, 11, 22
_DIMS, _DATA_TYPE, _STRINGS = 1, 2, 6
_SPARSE_VALUES, _SPARSE_INDICES = 1, 2
"""Numbers of fields in ModelProto, GraphProto, NodeProto, AttributeProto, TensorProto and SparseTensorProto."""
_STRING = 8
_BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    **dict.fromkeys((21, 22, 23), 4),
    15: 128,
}
"""Bits of an element by TensorProto.DataType."""
_MOST_DEPTH = 32
_ORT_FORMAT = b"ORTM"

_Span = tuple[int, int]


def weight_bytes(path: Path) -> int | None:
    """Return the bytes of all tensors in a file; None for one in onnxruntime's own format, which is not read here.

    Raises `ValueError` for bytes that are no ONNX model.
    """
    if path.stat().st_size == 0:
        raise ValueError("an empty file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[4:8] == _ORT_FORMAT:
            return None
        graphs = [span for field, span in _fields(data, (0, len(data))) if field == _GRAPH and isinstance(span, tuple)]
        return sum(_graph_bytes(data, span, 0) for span in graphs)


def _graph_bytes(data: mmap.mmap, graph: _Span, depth: int) -> int:
    if depth > _MOST_DEPTH:
        raise ValueError("graphs in graphs without end")
    total = 0
    for field, span in _fields(data, graph):
        if not isinstance(span, tuple):
            continue
        if field == _INITIALIZERS:
            total += _tensor_bytes(data, span)
        elif field == _SPARSE_INITIALIZERS:
            total += _sparse_bytes(data, span)
        elif field == _NODES:
            for part, attribute in _fields(data, span):
                if part == _ATTRIBUTES and isinstance(attribute, tuple):
                    total += _attribute_bytes(data, attribute, depth)
    return total


def _attribute_bytes(data: mmap.mmap, attribute: _Span, depth: int) -> int:
    total = 0
    for field, span in _fields(data, attribute):
        if not isinstance(span, tuple):
            continue
        if field in (_TENSOR, _TENSORS):
            total += _tensor_bytes(data, span)
        elif field in (_SUBGRAPH, _SUBGRAPHS):
            total += _graph_bytes(data, span, depth + 1)
        elif field == _SPARSE_TENSOR:
            total += _sparse_bytes(data, span)
    return total


def _sparse_bytes(data: mmap.mmap, sparse: _Span) -> int:
    parts = (_SPARSE_VALUES, _SPARSE_INDICES)
    return sum(
        _tensor_bytes(data, span) for field, span in _fields(data, sparse) if field in parts and isinstance(span, tuple)
    )


def _tensor_bytes(data: mmap.mmap, tensor: _Span) -> int:
    dims: list[int] = []
    kind = text_bytes = 0
    for field, found in _fields(data, tensor):
        if field == _DIMS:
            if isinstance(found, int):
                dims.append(found)
            else:
                at, end = found
                while at < end:
                    dim, at = _varint(data, at, end)
                    dims.append(dim)
        elif field == _DATA_TYPE and isinstance(found, int):
            kind = found
        elif field == _STRINGS and isinstance(found, tuple):
            text_bytes += found[1] - found[0]
    return text_bytes if kind == _STRING else (prod(dims) * _BITS.get(kind, 0) + 7) // 8


def _fields(data: mmap.mmap, span: _Span) -> Iterator[tuple[int, int | _Span]]:
    """The fields of a message: numbers as they are, what has a length by where it lies."""
    at, end = span
    while at < end:
        key, at = _varint(data, at, end)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at, end)
            yield field, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at, end)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field of kind {kind} is none of protobuf's")
        if size > end - at:
            raise ValueError("a field is longer than its message")
        yield field, (at, at + size)
        at += size


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number without an end")
