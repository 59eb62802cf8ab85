"""When two answers are alike."""

from __future__ import annotations

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.releases.answer_comparison import differing
from charonia.tensors import Tensor


def answer(*values: float, name: str = "y") -> Tensor:
    return Tensor.of(name, np.array(values, np.float32))


@pytest.mark.parametrize(
    ("one", "other", "tolerances", "found"),
    [
        ([answer(1, 2)], [answer(1, 2)], {}, []),
        ([answer(1, 2)], [answer(1, 2.001)], {}, ["y"]),
        ([answer(1, 2)], [answer(1, 2.001)], {"": 0.001}, []),
        ([answer(1, 2)], [answer(1, 2.001)], {"": 1, "y": 1e-6}, ["y"]),
        ([answer(1000)], [answer(1001)], {"y": 0.01}, []),
        ([answer(float("nan"), float("inf"))], [answer(float("nan"), float("inf"))], {}, []),
        ([answer(float("inf"))], [answer(1)], {"": 10}, ["y"]),
        ([answer(1)], [answer(1, 1)], {"": 9}, ["y"]),
        ([answer(1), answer(2, name="z")], [answer(1), answer(2, name="w")], {}, ["w", "z"]),
        ([Tensor.of("y", np.array([b"a"]))], [Tensor.of("y", np.array([b"b"]))], {"": 9}, ["y"]),
        ([Tensor.of("y", np.array([1 << 60]))], [Tensor.of("y", np.array([(1 << 60) + 1]))], {}, ["y"]),
        ([Tensor.of("y", np.array([1 << 60]))], [Tensor.of("y", np.array([(1 << 60) + 1]))], {"": 0.1}, []),
        ([answer(*[1] * 70_000, 2)], [answer(*[1] * 70_000, 2.5)], {"": 0.1}, ["y"]),
        ([answer(0.0)], [answer(-0.0)], {}, []),
        (
            [Tensor("y", DataType.BF16, (1,), b"\x80\x3f")], [Tensor("y", DataType.BF16, (1,), b"\x81\x3f")],
            {"": 0.01}, [],
        ),
    ],
)  # fmt: skip
def test_comparisons(one: list[Tensor], other: list[Tensor], tolerances: dict[str, float], found: list[str]) -> None:
    assert differing(one, other, tolerances) == found
