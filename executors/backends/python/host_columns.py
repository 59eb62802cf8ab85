"""Columns in the model process: the inputs of an EXECUTE_COLUMNS as tensors, and answers of one form as columns.

What comes out is what the single requests and answers would give; answers that differ are left to `model_host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from .api.dtypes import BF16, BYTES, triton_to_numpy_type
from .api.inference import InferenceRequest, InferenceResponse
from .api.tensor import Tensor
from .frames import Buffer, places


def inputs_of(count: int, described: Sequence[Sequence[Any]], data: memoryview) -> list[list[Tensor]]:
    """For each column the tensors of the requests, as views of the frame's data."""
    offsets = places([size for _, _, _, size, _ in described])
    return [
        _tensors(count, name, number, tuple(shape), data[at : at + size], sizes)
        for (name, number, shape, size, sizes), at in zip(described, offsets, strict=True)
    ]


def _tensors(
    count: int, name: str, number: int, shape: tuple[int, ...], data: memoryview, sizes: Sequence[int] | None
) -> list[Tensor]:
    if sizes is None and number not in (BYTES, BF16) and shape and len(data):
        dtype = np.dtype(triton_to_numpy_type(number))
        if len(data) == count * prod(shape) * dtype.itemsize:
            return Tensor.rows(name, number, shape, np.frombuffer(data, dtype).reshape(count, *shape))
    # each makes its array when it is read: of BYTES a copy; of BF16 with a package that most models never need
    ends = accumulate([len(data) // count] * count if sizes is None else sizes, initial=0)
    return [Tensor.received(name, number, shape, data[begin:end]) for begin, end in pairwise(ends)]


class Column:
    """One output of all answers: their arrays, or their encodings where these are not the arrays' bytes."""

    __slots__ = ("_arrays", "_encoded", "_shape", "described", "size")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Raises `ValueError` for tensors of different sizes. Their names, types and shapes are those of the first."""
        first = tensors[0]
        name, number, shape = first.name(), first.triton_dtype(), first.shape()
        self._shape = shape
        self._encoded: list[Buffer] = []
        self._arrays = Tensor.plain_arrays(tensors) if shape else None
        if self._arrays is not None:
            if {array.shape for array in self._arrays} != {tuple(shape)}:
                raise ValueError("an array has got another shape since its tensor was made")
            self.size = self._arrays[0].nbytes * len(tensors)
        else:
            self._encoded = [tensor.encoded() for tensor in tensors]
            if len({len(one) for one in self._encoded}) != 1:
                raise ValueError("the encodings have different sizes")
            self.size = len(self._encoded[0]) * len(tensors)
        self.described = [name, number, shape, self.size]

    def joined(self) -> Buffer:
        """The bytes of all, one after the other."""
        if self._arrays is None:
            return b"".join(self._encoded)
        if not self.size:
            return b""
        dtype = self._arrays[0].dtype.newbyteorder("<")
        joined = np.empty((len(self._arrays) * self._shape[0], *self._shape[1:]), dtype)
        np.concatenate(self._arrays, out=joined)
        return joined.reshape(-1).view(np.uint8).data


def columns_of(
    requests: Sequence[InferenceRequest], answers: Sequence[InferenceResponse | None]
) -> list[Column] | None:
    """The wanted outputs of these answers as columns, None when they are none or not of one form.

    They have one form when all have the same outputs, in names, types, shapes and bytes, and nothing besides. What goes
    wrong with one of them goes wrong again, and is worded, when they are packed one by one.
    """
    wanted = requests[0].requested_output_names()
    rows: list[list[Tensor]] = []
    form: list[tuple[str, int, tuple[int, ...]]] | None = None
    for request, answer in zip(requests, answers, strict=True):
        if (
            answer is None
            or request.outcome is not None
            or request.is_rescheduled()
            or answer.error() is not None
            or answer.checked_parameters
            or request.requested_output_names() != wanted
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


__all__ = ["Column", "columns_of", "inputs_of"]
