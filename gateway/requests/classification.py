"""The classification extension: an output's best values as "<value>:<index>[:<label>]" strings (H19). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.tensors import Tensor, join_bytes_elements

MAX_ELEMENTS = 1_000_000

_UNSUPPORTED = frozenset((DataType.BYTES, DataType.BOOL, DataType.FP16, DataType.BF16))
_FLOATS = frozenset((DataType.FP32, DataType.FP64))


def classified(
    outputs: Sequence[Tensor], classes: Mapping[str, int], batching: bool, labels: Mapping[str, list[str]]
) -> list[Tensor]:
    """The outputs; those named in `classes` are replaced by their best values. Raises as `classify`."""
    return [classify(t, classes[t.name], batching, labels.get(t.name, [])) if t.name in classes else t for t in outputs]


def classify(tensor: Tensor, count: int, batching: bool, labels: list[str]) -> Tensor:
    """BYTES tensor [batch, k] (or [k] without batching) of the k = min(count, classes) largest values, descending.

    Equal values keep their index order; NaN is the smallest. `labels[i]` names index i, "" or missing for none.
    Raises `InvalidArgument` for a type without an order, and for more than `MAX_ELEMENTS` values.
    """
    if tensor.datatype in _UNSUPPORTED:
        raise InvalidArgument(f"class result not available for output due to unsupported type '{tensor.datatype.name}'")
    if prod(tensor.shape) > MAX_ELEMENTS:
        raise InvalidArgument("classification output tensor too large")
    values = np.frombuffer(tensor.data, dtype=tensor.datatype.numpy)
    rows = tensor.shape[0] if batching and tensor.shape else 1
    classes = values.size // rows if rows else prod(tensor.shape[1:])
    kept = min(count, classes)
    floats = tensor.datatype in _FLOATS
    strings: list[str] = []
    for row in values.reshape(rows, classes):
        for index in _best(row, kept, floats):
            value = f"{float(row[index]):.6f}" if floats else str(int(row[index]))
            label = labels[index] if index < len(labels) else ""
            strings.append(f"{value}:{index}:{label}" if label else f"{value}:{index}")
    shape = (rows, kept) if batching else (kept,)
    return Tensor(tensor.name, DataType.BYTES, shape, join_bytes_elements(strings))


def _best(row: npt.NDArray[np.generic], kept: int, floats: bool) -> list[int]:
    if floats:
        row = np.where(np.isnan(row.astype(np.float64)), -np.inf, row)
    # ascending and stable over the reversed row, read backwards: descending, ties by index
    order = row.size - 1 - np.argsort(row[::-1], kind="stable")[::-1]
    return [int(index) for index in order[:kept]]
