"""The table of T1: names, numbers, sizes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from protos.model_config_pb2 import DataType as ProtoType

TABLE = [
    ("BOOL", "TYPE_BOOL", 1, 1),
    ("UINT8", "TYPE_UINT8", 2, 1),
    ("UINT16", "TYPE_UINT16", 3, 2),
    ("UINT32", "TYPE_UINT32", 4, 4),
    ("UINT64", "TYPE_UINT64", 5, 8),
    ("INT8", "TYPE_INT8", 6, 1),
    ("INT16", "TYPE_INT16", 7, 2),
    ("INT32", "TYPE_INT32", 8, 4),
    ("INT64", "TYPE_INT64", 9, 8),
    ("FP16", "TYPE_FP16", 10, 2),
    ("FP32", "TYPE_FP32", 11, 4),
    ("FP64", "TYPE_FP64", 12, 8),
    ("BYTES", "TYPE_STRING", 13, 0),
    ("BF16", "TYPE_BF16", 14, 2),
]


@pytest.mark.parametrize(("name", "config_name", "number", "size_bytes"), TABLE)
def test_one_row(name: str, config_name: str, number: int, size_bytes: int) -> None:
    datatype = DataType.of(name)
    assert (datatype.value, datatype.config_name, datatype.number, datatype.size_bytes) == (
        name,
        config_name,
        number,
        size_bytes,
    )
    assert DataType.of_number(number) is datatype
    assert ProtoType.Value(config_name) == number
    assert DataType.of_numpy(datatype.numpy) is datatype
    if size_bytes:
        assert datatype.numpy.itemsize == size_bytes


def test_there_are_no_others() -> None:
    assert [row[0] for row in TABLE] == [t.value for t in sorted(DataType, key=lambda t: t.number)]


@pytest.mark.parametrize("name", ["", "fp32", "TYPE_FP32", "STRING", "INVALID", "FP8"])
def test_other_words_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"invalid datatype '{name}'"):
        DataType.of(name)


@pytest.mark.parametrize("number", [0, 15, -1])
def test_other_numbers_are_refused(number: int) -> None:
    with pytest.raises(InvalidArgument, match="invalid data type number"):
        DataType.of_number(number)


@pytest.mark.parametrize("dtype", ["S3", "U3", "O"])
def test_text_is_bytes(dtype: str) -> None:
    assert DataType.of_numpy(np.dtype(dtype)) is DataType.BYTES


@pytest.mark.parametrize("dtype", ["c8", "M8[s]", "V4", ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(InvalidArgument, match="has no tensor datatype"):
        DataType.of_numpy(np.dtype(dtype))  # type: ignore[call-overload]
