"""Turns a `Forest` into an ONNX graph of one TreeEnsembleRegressor, whose answers are sums of leaves.

All nodes get one comparison, `<` or `<=`: engines have a faster way for that. `>` and `>=` swap the children; where
both remain, `x < t` is `x <= the number before t`. A list of categories becomes a chain of nodes, one for each end
of a run of numbers: whether truncated x is in {2, 3, 7} is decided by x < 2, x < 4, x < 7, x < 8.
"""

from __future__ import annotations

import numpy as np

from charonia.backend import Array

from .forest import GREATER, GREATER_OR_EQUAL, LESS, Forest
from .onnx_encoding import Attribute, model_bytes

_MAX_CATEGORY = 1 << 24
"""Larger whole numbers have no FP32 each."""


class _Nodes:
    """The nodes of the graph: `true` and `false` are children, `missing` says that a missing value goes to `true`."""

    def __init__(self, forest: Forest) -> None:
        swapped = np.isin(forest.comparison, (GREATER, GREATER_OR_EQUAL)) & (forest.left >= 0)
        swapped[list(forest.categories)] = False
        self.tree = forest.tree
        self.feature = forest.feature
        self.true = np.where(swapped, forest.right, forest.left)
        self.false = np.where(swapped, forest.left, forest.right)
        self.missing = forest.default_left != swapped
        self.strict = np.isin(forest.comparison, (LESS, GREATER_OR_EQUAL))
        self.threshold = forest.threshold

    def add_categories(self, forest: Forest) -> None:
        added: dict[str, list[Array]] = {name: [] for name in self.__dict__}
        size = len(self.tree)
        for node, (categories, to_right) in forest.categories.items():
            ends = np.flatnonzero(np.diff(categories) != 1)
            runs = np.stack([categories[np.r_[0, ends + 1]], categories[np.r_[ends, len(categories) - 1]] + 1], axis=1)
            bounds = runs.ravel()
            inside, outside = forest.left[node], forest.right[node]
            if to_right:
                inside, outside = outside, inside
            missing_inside = bool(forest.default_left[node]) != to_right
            count = len(bounds)
            numbers = np.r_[node, size + np.arange(count - 1)]
            size += count - 1
            odd = np.arange(count) % 2 == 1
            chain = {
                "tree": np.full(count, forest.tree[node]),
                "feature": np.full(count, forest.feature[node]),
                "true": np.where(odd, inside, outside),
                "false": np.r_[numbers[1:], outside],
                "missing": np.arange(count) == int(missing_inside),
                "strict": np.ones(count, bool),
                "threshold": bounds.astype(self.threshold.dtype),
            }
            for name, values in chain.items():
                getattr(self, name)[node] = values[0]
                added[name].append(values[1:])
        for name, parts in added.items():
            setattr(self, name, np.concatenate([getattr(self, name), *parts]))


def is_expressible(forest: Forest) -> bool:
    """Whether `ensemble_bytes` can be used: without equality, empty lists and very large categories."""
    inner = forest.left >= 0
    inner[list(forest.categories)] = False
    lists = [categories for categories, _ in forest.categories.values()]
    return bool((forest.comparison[inner] >= LESS).all()) and all(
        len(some) and some[0] >= 0 and some[-1] < _MAX_CATEGORY for some in lists
    )


def ensemble_bytes(forest: Forest, *, double: bool = False) -> bytes:
    """The graph. Raises `ValueError` where a threshold cannot be written; sums are FP32 unless `double`."""
    nodes = _Nodes(forest)
    dtype = np.dtype(np.float64 if double else np.float32)
    nodes.threshold = _rounded(nodes.threshold, nodes.strict, dtype)
    if forest.categories:
        nodes.add_categories(forest)
    inner = nodes.true >= 0
    strict = bool(nodes.strict[inner].all())
    if not strict:
        changed = nodes.strict & inner
        nodes.threshold[changed] = np.nextafter(nodes.threshold[changed], dtype.type(-np.inf))
    order = np.argsort(nodes.tree, kind="stable")  # a tree's nodes follow each other, its root first
    mode = b"BRANCH_LT" if strict else b"BRANCH_LEQ"
    real = "_as_tensor" if double else ""
    weights = _weights(forest)
    inner = inner[order]
    attributes: dict[str, Attribute] = {
        "n_targets": forest.classes,
        "nodes_treeids": nodes.tree[order],
        "nodes_nodeids": order,
        "nodes_featureids": np.where(inner, nodes.feature[order], 0),
        f"nodes_values{real}": np.where(inner, nodes.threshold[order], 0).astype(dtype),
        "nodes_modes": [mode if branches else b"LEAF" for branches in inner.tolist()],
        "nodes_truenodeids": np.where(inner, nodes.true[order], 0),
        "nodes_falsenodeids": np.where(inner, nodes.false[order], 0),
        "nodes_missing_value_tracks_true": (inner & nodes.missing[order]).astype(np.int64),
        "target_treeids": weights[0],
        "target_nodeids": weights[1],
        "target_ids": weights[2],
        f"target_weights{real}": weights[3].astype(dtype),
    }
    return model_bytes("TreeEnsembleRegressor", attributes, dtype, (forest.features, forest.classes))


def _rounded(thresholds: Array, strict: Array, dtype: np.dtype) -> Array:
    """Thresholds that decide alike for every value of `dtype`: x <= t is x <= t rounded down, x < t rounded up."""
    with np.errstate(over="ignore"):
        near = thresholds.astype(dtype)
    up = strict & (near < thresholds)
    down = ~strict & (near > thresholds)
    near[up] = np.nextafter(near[up], dtype.type(np.inf))
    near[down] = np.nextafter(near[down], dtype.type(-np.inf))
    return near


def _weights(forest: Forest) -> tuple[Array, Array, Array, Array]:
    """Tree, node, class and value of everything that leaves add."""
    vectors = np.array(sorted(forest.leaf_vectors), np.int64)
    scalar = forest.left < 0
    scalar[vectors] = False
    leaves = np.flatnonzero(scalar)
    nodes = np.concatenate([leaves, np.repeat(vectors, forest.classes)])
    classes = np.concatenate([forest.leaf_class[leaves], np.tile(np.arange(forest.classes), len(vectors))])
    values = np.concatenate([forest.leaf_value[leaves], *(forest.leaf_vectors[node] for node in vectors.tolist())])
    order = np.argsort(nodes, kind="stable")
    return forest.tree[nodes[order]], nodes[order], classes[order], values[order]
