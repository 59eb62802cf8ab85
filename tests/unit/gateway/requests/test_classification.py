from __future__ import annotations

import math

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.tensors import Tensor, split_bytes_elements
from gateway.requests.classification import classify


def strings(tensor: Tensor) -> list[str]:
    return [element.decode() for element in split_bytes_elements(tensor.data)]


def test_best_first_with_labels_where_there_are_any() -> None:
    tensor = Tensor.of("O", np.array([[1.5, 20.0, 3.0], [9.0, 8.0, 7.0]], dtype=np.float32))
    best = classify(tensor, 2, True, ["cat", "dog"])
    assert best.datatype is DataType.BYTES
    assert best.shape == (2, 2)
    assert strings(best) == ["20.000000:1:dog", "3.000000:2", "9.000000:0:cat", "8.000000:1:dog"]


def test_without_a_batch_dimension_and_more_wanted_than_there_are() -> None:
    best = classify(Tensor.of("O", np.array([1, -3, 2], dtype=np.int64)), 10, False, [])
    assert best.shape == (3,)
    assert strings(best) == ["2:2", "1:0", "-3:1"]


def test_ties_keep_their_order_and_nan_is_last() -> None:
    tensor = Tensor.of("O", np.array([math.nan, 1.0, 2.0, 1.0, math.inf]))
    assert strings(classify(tensor, 5, False, [])) == [
        "inf:4", "2.000000:2", "1.000000:1", "1.000000:3", "nan:0",
    ]  # fmt: skip


def test_the_largest_unsigned_value_is_the_best() -> None:
    tensor = Tensor.of("O", np.array([2**64 - 1, 0, 2**63], dtype=np.uint64))
    assert strings(classify(tensor, 3, False, [])) == [f"{2**64 - 1}:0", f"{2**63}:2", "0:1"]


def test_dimensions_beyond_the_batch_are_one_row() -> None:
    tensor = Tensor.of("O", np.arange(8, dtype=np.uint8).reshape(2, 2, 2))
    assert classify(tensor, 1, True, []).shape == (2, 1)


def test_an_empty_batch() -> None:
    assert classify(Tensor("O", DataType.FP32, (0, 4), b""), 2, True, []).shape == (0, 2)


@pytest.mark.parametrize("name", ["BYTES", "BOOL", "FP16", "BF16"])
def test_types_without_order(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        classify(Tensor("O", DataType[name], (0,), b""), 1, False, [])
    assert caught.value.message == f"class result not available for output due to unsupported type '{name}'"


def test_too_many_values() -> None:
    with pytest.raises(InvalidArgument, match="classification output tensor too large"):
        classify(Tensor("O", DataType.UINT8, (1_000_001,), b"\0" * 1_000_001), 1, False, [])
