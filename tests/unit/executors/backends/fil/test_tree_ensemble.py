"""Graphs of forests, run by onnxruntime, against a walk through the trees in Python."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from executors.backends.fil.forest import GREATER, GREATER_OR_EQUAL, LESS, LESS_OR_EQUAL, Forest
from executors.backends.fil.tree_ensemble import ensemble_bytes, is_expressible

COMPARES = {LESS: float.__lt__, LESS_OR_EQUAL: float.__le__, GREATER: float.__gt__, GREATER_OR_EQUAL: float.__ge__}


def forest(
    tests: list[tuple[int, float] | list[int]], *, missing_left: bool, dtype: Any = np.float32, to_right: bool = False
) -> Forest:
    """A tree for each test of the one feature, a comparison or a list of categories: 1 on the left, 2 on the right."""
    count = len(tests)
    first = 3 * np.arange(count)
    inner = np.arange(3 * count) % 3 == 0
    numeric = [test if isinstance(test, tuple) else (LESS, 0.0) for test in tests]
    return Forest(
        features=1, classes=count, task="regression", postprocessor="identity", sigmoid_alpha=1, ratio_c=1,
        base_scores=[0.0] * count, divisor=1, double=dtype is np.float64, roots=first,
        tree=np.repeat(np.arange(count), 3), left=np.where(inner, np.arange(3 * count) + 1, -1),
        right=np.where(inner, np.arange(3 * count) + 2, -1), feature=np.zeros(3 * count, np.int64),
        threshold=np.repeat(np.array([value for _, value in numeric], dtype), 3),
        comparison=np.repeat([word for word, _ in numeric], 3), default_left=np.full(3 * count, missing_left),
        leaf_value=np.tile(np.array([0, 1, 2], dtype), count), leaf_class=np.repeat(np.arange(count), 3),
        categories={
            3 * index: (np.array(test), to_right) for index, test in enumerate(tests) if isinstance(test, list)
        },
    )  # fmt: skip


def walked(of: Forest, value: float) -> list[float]:
    answers = []
    for root in of.roots.tolist():
        if math.isnan(value):
            goes_left = bool(of.default_left[root])
        elif root in of.categories:
            listed, to_right = of.categories[root]
            found = 0 <= value <= 1 << 24 and int(value) in listed
            goes_left = found != to_right
        else:
            goes_left = COMPARES[int(of.comparison[root])](value, float(of.threshold[root]))
        answers.append(1.0 if goes_left else 2.0)
    return answers


def run(of: Forest, values: list[float], *, double: bool = False) -> list[list[float]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(ensemble_bytes(of, double=double), options, providers=["CPUExecutionProvider"])
    rows = np.array(values, np.float32)[:, None].astype(np.float64 if double else np.float32)
    found: list[list[float]] = session.run(["output"], {"input": rows})[0].tolist()
    return found


def around(numbers: list[float]) -> list[float]:
    near = np.array(numbers, np.float32)
    ends = [np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf)]
    return [*near.tolist(), *ends[0].tolist(), *ends[1].tolist(), math.nan, math.inf, -math.inf, -0.0]


THRESHOLDS = [0.0, 1.5, -2.25, 0.1, 1e-40, 3e38]


@pytest.mark.parametrize("missing_left", [True, False])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("words", [[LESS], [LESS_OR_EQUAL], [GREATER], [GREATER_OR_EQUAL], list(COMPARES)], ids=str)
def test_comparisons(words: list[int], double: bool, missing_left: bool) -> None:
    """Also thresholds of 64 bits in a graph of 32: values of 32 bits are on the same side of both."""
    of = forest(
        list(itertools.product(words, THRESHOLDS)),
        missing_left=missing_left,
        dtype=np.float64 if double else np.float32,
    )
    values = around(THRESHOLDS)
    assert run(of, values) == [walked(of, np.float32(value).item()) for value in values]
    assert run(of, values, double=True) == [walked(of, np.float32(value).item()) for value in values]


@pytest.mark.parametrize("missing_left", [True, False])
@pytest.mark.parametrize("to_right", [True, False])
@pytest.mark.parametrize("more", [[], [(LESS, 1.5)], [(LESS_OR_EQUAL, 1.5)]], ids=["alone", "<", "<="])
def test_categories(more: list[tuple[int, float]], to_right: bool, missing_left: bool) -> None:
    lists = [[0], [3], [2, 3, 7], [0, 1, 2], [1, 3, 5, 7, 9, 11], [16777215]]
    of = forest([*lists, *more], missing_left=missing_left, to_right=to_right)
    values = [*around([float(number) for number in range(13)]), -0.5, 2.999, 3.5, 16777215.0, 16777216.0]
    assert run(of, values) == [walked(of, value) for value in values]


def test_leaves_of_all_classes_and_a_tree_of_one_leaf() -> None:
    of = forest([(LESS, 0.5), (LESS, 0.5)], missing_left=True)
    of.classes = 3
    of.leaf_vectors = {1: np.array([1, 0, 5], np.float32), 2: np.array([0, 2, 0], np.float32)}
    lone = 6
    of.roots = np.array([0, 3, lone])
    of.tree, of.left, of.right = np.r_[of.tree, 2], np.r_[of.left, -1], np.r_[of.right, -1]
    of.feature, of.comparison = np.r_[of.feature, 0], np.r_[of.comparison, 0]
    of.threshold = np.r_[of.threshold, np.float32(0)]
    of.default_left, of.leaf_class = np.r_[of.default_left, False], np.r_[of.leaf_class, 2]
    of.leaf_value = np.r_[of.leaf_value, np.float32(100)]
    assert run(of, [0.0, 1.0]) == [[1, 1, 105], [0, 4, 100]]


def test_what_a_graph_cannot_say() -> None:
    assert is_expressible(forest([(LESS, 0.0)], missing_left=True))
    for tests in ([(1, 0.0)], [[]], [[1 << 24]]):
        assert not is_expressible(forest(tests, missing_left=True))
