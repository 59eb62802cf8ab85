"""Element types in model code: NumPy types, numbers and `TYPE_` names (P7, P8), and the BYTES encoding.

Separate from `charonia.datatypes`, which imports ml_dtypes: a model process imports that only when a model uses BF16.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import TritonModelException

Array = npt.NDArray[Any]

BYTES = 13
BF16 = 14

_NUMPY_BY_NUMBER: dict[int, Any] = {
    1: np.bool_,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    6: np.int8,
    7: np.int16,
    8: np.int32,
    9: np.int64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    BYTES: np.object_,
}
_NUMBER_BY_WORD = {
    "TYPE_BOOL": 1,
    "TYPE_UINT8": 2,
    "TYPE_UINT16": 3,
    "TYPE_UINT32": 4,
    "TYPE_UINT64": 5,
    "TYPE_INT8": 6,
    "TYPE_INT16": 7,
    "TYPE_INT32": 8,
    "TYPE_INT64": 9,
    "TYPE_FP16": 10,
    "TYPE_FP32": 11,
    "TYPE_FP64": 12,
    "TYPE_STRING": BYTES,
    "TYPE_BF16": BF16,
}
_NUMBER_BY_DTYPE = {np.dtype(kind): number for number, kind in _NUMPY_BY_NUMBER.items()}
_LENGTH = struct.Struct("<I")


def triton_to_numpy_type(data_type: int) -> Any:
    """The NumPy type of a type number; None for an unknown number (P8). BF16 needs ml_dtypes."""
    if data_type == BF16:
        import ml_dtypes

        return ml_dtypes.bfloat16
    return _NUMPY_BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The type number of a NumPy type or dtype; None when there is none (P8). bytes and str are BYTES."""
    dtype = np.dtype(data_type)
    number = _NUMBER_BY_DTYPE.get(dtype)
    if number is not None:
        return number
    if dtype.kind in "SU":
        return BYTES
    if dtype.name == "bfloat16":
        return BF16
    return _NUMBER_BY_DTYPE.get(dtype.newbyteorder("<"))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The NumPy type of a configuration's type such as `TYPE_FP32` (P8). Raises `KeyError` for an unknown one."""
    return triton_to_numpy_type(_NUMBER_BY_WORD[triton_type_string])


def number_of(dtype: np.dtype[Any]) -> int:
    """The type number of an array's dtype. Raises `TritonModelException` for a dtype that has none."""
    number = _NUMBER_BY_DTYPE.get(dtype) or numpy_to_triton_type(dtype)
    if number is None:
        raise TritonModelException(f"Tensor dtype '{dtype}' is not supported by the python backend.")
    return number


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """The raw encoding of an array of bytes or str objects, row-major; None for an array of numbers (P8)."""
    if input_tensor.dtype.kind not in "OSU":
        return b"" if input_tensor.size == 0 else None
    parts = []
    for element in input_tensor.ravel().tolist():
        if isinstance(element, (bytes, bytearray, memoryview)):
            body = bytes(element)
        else:
            body = str(element).encode()
        parts.append(_LENGTH.pack(len(body)))
        parts.append(body)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: Any) -> Array:
    """The elements of a raw BYTES encoding as a one-dimensional object array (P8). Takes bytes or a uint8 array."""
    view = memoryview(encoded_tensor).cast("B") if len(encoded_tensor) else memoryview(b"")
    elements: list[bytes] = []
    at, end = 0, len(view)
    while at < end:
        (length,) = _LENGTH.unpack_from(view, at)
        at += _LENGTH.size
        if length > end - at:
            raise ValueError(f"element {len(elements)} has {length} bytes, only {end - at} are left")
        elements.append(bytes(view[at : at + length]))
        at += length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array
