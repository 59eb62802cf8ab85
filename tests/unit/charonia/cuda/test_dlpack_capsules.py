"""Capsules made here are taken by NumPy, and the other way round; memory lives as long as either end uses it."""

from __future__ import annotations

import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from charonia.cuda.dlpack_capsules import CPU, capsule_of, described
from charonia.datatypes import DataType


class Producer:
    """Memory of NumPy under capsules of ours."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **_options: Any) -> Any:
        array = self.array
        return capsule_of(array, (CPU, 0), array.ctypes.data, DataType.of_numpy(array.dtype), array.shape)


@pytest.mark.parametrize("kind", ["int8", "uint64", "float16", "float64", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_there_and_back(kind: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, kind)
    for found in (np.from_dlpack(Producer(array)), _array_of(array), _array_of(Producer(array))):
        assert (found.dtype, found.shape) == (array.dtype, shape)
        assert np.array_equal(found, array)
        assert not array.size or np.shares_memory(found, array)


def test_bf16_which_numpy_does_not_know() -> None:
    array = np.array([1, 2.5], ml_dtypes.bfloat16)
    found = _array_of(Producer(array))
    assert found.dtype == array.dtype
    assert found.tolist() == [1, 2.5]


def test_layouts_with_gaps() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    one = described(array[::2, 1::2].T)
    assert (one.shape, one.strides, one.span_bytes) == ((3, 2), (8, 48), 4 * (12 + 4 + 1))
    assert np.array_equal(one.over(one.address, one.capsule), array[::2, 1::2].T)
    with pytest.raises(ValueError, match="strides below 0"):
        described(array[::-1])


def test_other_types() -> None:
    with pytest.raises(ValueError, match="DLPack type 5 of 64 bits and 1 lanes is no tensor datatype"):
        described(np.ones(2, np.complex64))


def test_memory_ends_with_its_last_user() -> None:
    producer = Producer(np.arange(3.0))
    memory = weakref.ref(producer.array)
    unused, taken, viewed = producer.__dlpack__(), np.from_dlpack(producer), _array_of(producer)
    del producer
    for holder in (unused, taken, viewed):
        assert holder is not None
        assert memory() is not None
    del holder, unused, taken
    assert viewed.tolist() == [0, 1, 2]
    del viewed
    assert memory() is None


def _array_of(producer: Any) -> Any:
    one = described(producer)
    return one.over(one.address, one.capsule)
