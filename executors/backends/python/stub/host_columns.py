"""Converts columns in the model process: inputs of an EXECUTE_COLUMNS to tensors, and answers of one form to columns.

The results are the same as with single requests and answers. `model_host` packs answers that differ in form.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from executors.backends.python.api.inference import InferenceRequest
from executors.backends.python.api.response import InferenceResponse
from executors.backends.python.api.tensor import BF16, BYTES, Tensor, triton_to_numpy_type
from executors.backends.python.protocol.frames import Buffer, tensor_offsets


class ColumnsAsked:
    """The content of an EXECUTE_COLUMNS. It is not changed: one of the same form has the same."""

    __slots__ = (
        *("count", "described", "expected", "ids", "outputs", "parameters", "places", "put", "sizes", "timeout_us"),
    )

    def __init__(self, content: Sequence[Any]) -> None:
        """Raises what content of another form leads to."""
        self.count, self.outputs, parameters, self.timeout_us, self.ids, described, self.put, self.expected = content
        self.parameters: str = parameters or "{}"
        self.described = [(name, number, tuple(shape), parts) for name, number, shape, _, parts in described]
        """Of each column: name, type number, shape of one request, and the sizes of the requests' parts or None."""
        self.sizes = [size for _, _, _, size, _ in described]
        """Of the columns, in bytes."""
        self.places = [(at, at + size) for at, size in zip(tensor_offsets(self.sizes), self.sizes, strict=True)]
        """Where they begin and end in the data of the frame."""


def inputs_of(count: int, described: Sequence[tuple[Any, ...]], data: Sequence[memoryview]) -> list[list[Tensor]]:
    """For each column, the tensors of the requests as views of its data."""
    return [
        _tensors(count, name, number, shape, part, sizes)
        for (name, number, shape, sizes), part in zip(described, data, strict=True)
    ]


def _tensors(
    count: int, name: str, number: int, shape: tuple[int, ...], data: memoryview, sizes: Sequence[int] | None
) -> list[Tensor]:
    if count == 1:
        return [Tensor.received(name, number, shape, data)]
    if sizes is None and number not in (BYTES, BF16) and shape and len(data):
        dtype = np.dtype(triton_to_numpy_type(number))
        if len(data) == count * prod(shape) * dtype.itemsize:
            return Tensor.rows(name, number, shape, np.frombuffer(data, dtype).reshape(count, *shape))
    # a tensor makes its array when it is read: BYTES are copied, BF16 needs a package that most models never import
    ends = accumulate([len(data) // count] * count if sizes is None else sizes, initial=0)
    return [Tensor.received(name, number, shape, data[begin:end]) for begin, end in pairwise(ends)]


class Column:
    """One output of all answers: their arrays, or their encodings where these differ from the arrays' bytes."""

    __slots__ = ("_arrays", "_encoded", "_shape", "described", "size")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """All tensors must have the first one's name, type and shape. Raises `ValueError` for different sizes."""
        first = tensors[0]
        name, number, shape = first.name(), first.triton_dtype(), first.shape()
        self._shape = shape
        self._encoded: list[Buffer] = []
        self._arrays = Tensor.plain_arrays(tensors) if shape and len(tensors) > 1 else None
        if self._arrays is not None:
            if {array.shape for array in self._arrays} != {tuple(shape)}:
                raise ValueError("an array has got another shape since its tensor was made")
            self.size = self._arrays[0].nbytes * len(tensors)
        else:
            self._encoded = [tensor.encoded() for tensor in tensors]
            if len(tensors) > 1 and len({*map(len, self._encoded)}) > 1:
                raise ValueError("the encodings have different sizes")
            self.size = len(self._encoded[0]) * len(tensors)
        self.described = (name, number, tuple(shape), self.size)

    def joined(self) -> Buffer:
        """The bytes of all tensors, one after the other."""
        if self._arrays is None:
            return b"".join(self._encoded) if len(self._encoded) > 1 else self._encoded[0]
        joined = np.empty(self.size, np.uint8)
        self.join_into(joined.data)
        return joined.data

    def join_into(self, room: memoryview) -> None:
        """Copy the bytes of all tensors, one after the other, into a buffer."""
        if not self.size:
            return
        if self._arrays is None:
            at = 0
            for encoded in self._encoded:
                room[at : at + len(encoded)] = encoded
                at += len(encoded)
            return
        dtype = self._arrays[0].dtype.newbyteorder("<")
        shape = (len(self._arrays) * self._shape[0], *self._shape[1:])
        np.concatenate(self._arrays, out=np.frombuffer(room, np.uint8).view(dtype).reshape(shape))


def columns_of(
    requests: Sequence[InferenceRequest], answers: Sequence[InferenceResponse | None]
) -> list[Column] | None:
    """Return the wanted outputs of these answers as columns; None when they do not have one form.

    They have one form when all have the same outputs, with equal names, types, shapes and sizes, and nothing else.
    Errors are ignored here: they occur again, with their texts, when the answers are packed one by one.
    """
    wanted = requests[0].outputs
    rows: list[list[Tensor]] = []
    form: list[tuple[str, int, tuple[int, ...]]] | None = None
    for request, answer in zip(requests, answers, strict=True):
        if (
            answer is None
            or request.sender is not None
            or request.is_rescheduled()
            or answer.error() is not None
            or answer.checked_parameters
            or request.outputs != wanted
        ):
            return None
        tensors = answer.output_tensors()
        found = [tensor.form for tensor in tensors]
        if form is None:
            form = found
        elif found != form:
            return None
        rows.append(tensors)
    try:
        kept = [place for place, (name, _, _) in enumerate(form or ()) if not wanted or name in wanted]
        return [Column([row[place] for row in rows]) for place in kept] or None
    except ValueError:
        return None


__all__ = ["Column", "ColumnsAsked", "columns_of", "inputs_of"]
