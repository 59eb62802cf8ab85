"""Compares the answers of two versions to one request, with tolerances. Pure.

Says which outputs differ, for a shadow; `answer_differences` says by how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia.datatypes import DataType
from charonia.tensors import Tensor

FLOATS = frozenset({DataType.FP16, DataType.BF16, DataType.FP32, DataType.FP64})
PIECE = 65_536
"""Numbers compared at a time: so many take little memory beside large answers."""


def differing(given: Sequence[Tensor], other: Sequence[Tensor], tolerances: Mapping[str, float]) -> list[str]:
    """The outputs of `given` that `other` has otherwise or not at all, and those that it alone has, sorted.

    Numbers a and b are alike when |a - b| <= t * max(1, |a|) with the output's tolerance t, that of "" for outputs that
    are not named, 0 for none. NaN is like NaN. Datatypes and shapes must be equal; BYTES and BOOL have no tolerance.
    """
    others = {tensor.name: tensor for tensor in other}
    found = {tensor.name for tensor in given} ^ others.keys()
    for tensor in given:
        counterpart = others.get(tensor.name)
        if counterpart is not None and not _alike(
            tensor, counterpart, tolerances.get(tensor.name, tolerances.get("", 0.0))
        ):
            found.add(tensor.name)
    return sorted(found)


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.datatype is not other.datatype or one.shape != other.shape:
        return False
    if bytes(one.data) == bytes(other.data):
        return True
    if one.datatype in (DataType.BYTES, DataType.BOOL):
        return False
    if not tolerance and one.datatype not in FLOATS:
        return False  # large integers that differ may be one float64
    a, b = numbers_of(one), numbers_of(other)
    return all(_close(a[at : at + PIECE], b[at : at + PIECE], tolerance) for at in range(0, a.size, PIECE))


def _close(a: npt.NDArray[Any], b: npt.NDArray[Any], tolerance: float) -> bool:
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.abs(a - b) <= tolerance * np.maximum(1.0, np.abs(a))
    finite = np.isfinite(a) & np.isfinite(b)
    return bool(np.all((close & finite) | (a == b) | (np.isnan(a) & np.isnan(b))))


def numbers_of(tensor: Tensor) -> npt.NDArray[Any]:
    """The numbers of a tensor in one row, in a datatype of NumPy."""
    if tensor.datatype is DataType.BF16:
        bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    return tensor.array().reshape(-1)
