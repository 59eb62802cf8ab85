"""The 14 tensor element types of the interface (T1-T3): wire name, config name and number, NumPy dtype, byte size.

Pure vocabulary. Encoding of whole tensors is in `charonia.tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np

from .errors import InvalidArgument


class DataType(Enum):
    """One member per type; `.value` is the wire name (interface item T1), which is also the member's name."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"
    BF16 = "BF16"

    # Set below, once; plain attributes because they are read on the hot path.
    numpy: np.dtype[Any]
    size_bytes: int
    number: int

    __hash__ = object.__hash__
    """Members are keys on the hot path, and Enum hashes their names."""

    @property
    def config_name(self) -> str:
        """`TYPE_FP32` and so on; BYTES is `TYPE_STRING` in a model configuration (T1)."""
        return "TYPE_STRING" if self is DataType.BYTES else f"TYPE_{self.value}"

    @staticmethod
    def of(wire_name: str) -> DataType:
        """The type of a wire name. Raises `InvalidArgument` for any other word."""
        found = DATATYPES.get(wire_name)
        if found is None:
            raise InvalidArgument(f"invalid datatype '{wire_name}', expected one of {', '.join(DATATYPES)}")
        return found

    @staticmethod
    def of_number(number: int) -> DataType:
        """The type of a `model_config.proto` enum number (1..14). Raises `InvalidArgument` for others, 0 included."""
        found = _BY_NUMBER.get(number)
        if found is None:
            raise InvalidArgument(f"invalid data type number {number}, expected 1 to 14")
        return found

    @staticmethod
    def of_numpy(dtype: np.dtype[Any]) -> DataType:
        """The type that holds a NumPy dtype; object, bytes and str arrays are BYTES. Raises `InvalidArgument`."""
        found = _BY_DTYPE.get(dtype)
        if found is None:
            if dtype.kind in "OSU":
                return DataType.BYTES
            raise InvalidArgument(f"numpy dtype '{dtype}' has no tensor datatype")
        return found


# number in model_config.proto, NumPy dtype, bytes per element (BYTES: variable, 0 here)
_TABLE: dict[DataType, tuple[int, object, int]] = {
    DataType.BOOL: (1, np.bool_, 1),
    DataType.UINT8: (2, np.uint8, 1),
    DataType.UINT16: (3, "<u2", 2),
    DataType.UINT32: (4, "<u4", 4),
    DataType.UINT64: (5, "<u8", 8),
    DataType.INT8: (6, np.int8, 1),
    DataType.INT16: (7, "<i2", 2),
    DataType.INT32: (8, "<i4", 4),
    DataType.INT64: (9, "<i8", 8),
    DataType.FP16: (10, "<f2", 2),
    DataType.FP32: (11, "<f4", 4),
    DataType.FP64: (12, "<f8", 8),
    DataType.BYTES: (13, np.object_, 0),
    DataType.BF16: (14, ml_dtypes.bfloat16, 2),
}
for _type, (_number, _dtype, _size) in _TABLE.items():
    _type.number, _type.numpy, _type.size_bytes = _number, np.dtype(_dtype), _size  # type: ignore[call-overload]

DATATYPES: Mapping[str, DataType] = {t.value: t for t in DataType}
"""The types by their wire names, for callers with an error of their own for other words."""

_BY_NUMBER = {t.number: t for t in DataType}
_BY_DTYPE = {t.numpy: t for t in DataType}

CONTENTS_FIELDS: dict[DataType, str] = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}
"""The list of `InferTensorContents` that holds a type (G5); FP16 and BF16 have none."""
