"""The trees of a treelite model as arrays, all of them checked: what comes from a file may be any nonsense.

Used by `reader_process` alone. Nodes of all trees are numbered through: children are such numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from charonia.backend import Array

LESS, LESS_OR_EQUAL, GREATER, GREATER_OR_EQUAL = 2, 3, 4, 5
"""Treelite's comparisons of a value with a threshold. 1 is equality."""
MAX_DEPTH = 2000
"""Engines follow a tree by recursion when they load it."""
MAX_CLASSES = 100_000

_TASKS = ("binary", "regression", "multiclass", "ranking", "isolation")
_NUMERIC, _CATEGORICAL = 1, 2
_OF_NODES = ("node_type", "cleft", "cright", "split_index", "default_left", "leaf_value", "threshold", "cmp")
_RANGES = ("leaf_vector_begin", "leaf_vector_end", "category_list_begin", "category_list_end")


@dataclass(slots=True)
class Forest:
    """All trees of a model. Arrays of nodes have one entry for each node of each tree, a tree's root first."""

    features: int
    classes: int
    task: str
    postprocessor: str
    sigmoid_alpha: float
    ratio_c: float
    base_scores: list[float]
    divisor: float
    """What sums of leaves are divided by, for ensembles that average."""
    double: bool
    """Whether thresholds and leaves have 64 bits."""
    roots: Array
    tree: Array
    left: Array
    right: Array
    """Children, -1 for leaves."""
    feature: Array
    threshold: Array
    comparison: Array
    default_left: Array
    """Where a missing value goes."""
    leaf_value: Array
    leaf_class: Array
    """The class that a leaf adds its value to."""
    leaf_vectors: dict[int, Array] = field(default_factory=dict)
    """Leaves that add to every class."""
    categories: dict[int, tuple[Array, bool]] = field(default_factory=dict)
    """Nodes that ask whether a value is in a list, and whether those in it go right."""


def read_forest(model: Any) -> Forest:
    """Return the trees of a `treelite.Model`. Raises `ValueError` for one that cannot be run or is not supported."""
    header = model.get_header_accessor()
    targets = _number(header, "num_target")
    _require(targets == 1, f"it has {targets} targets, one is supported")
    counts = header.get_field("num_class")
    _require(len(counts) == 1 and 1 <= counts[0] <= MAX_CLASSES, f"it has {list(counts[:3])} classes")
    classes, trees, features = int(counts[0]), int(model.num_tree), int(model.num_feature)
    _require(trees > 0, "it has no trees")
    bases = [float(base) for base in header.get_field("base_scores")]
    _require(len(bases) == classes and bool(np.isfinite(bases).all()), "its base scores are not one number a class")
    task = _number(header, "task_type")
    _require(0 <= task < len(_TASKS), f"its task type is {task}")
    of_tree = header.get_field("class_id")
    _require(len(of_tree) == trees, f"it has {trees} trees and the classes of {len(of_tree)}")
    _require(trees == 0 or bool((of_tree >= -1).all() and (of_tree < classes).all()), "a tree is of an unknown class")
    average = bool(_number(header, "average_tree_output"))
    forest = _joined([_Tree(model.get_tree_accessor(index)) for index in range(trees)], of_tree, classes)
    forest.features, forest.task, forest.base_scores = features, _TASKS[task], bases
    forest.postprocessor = str(header.get_field("postprocessor"))
    forest.sigmoid_alpha = float(header.get_field("sigmoid_alpha")[0])
    forest.ratio_c = float(header.get_field("ratio_c")[0])
    forest.double = model.input_type == "float64"
    # without leaf vectors each class has trees of its own
    shared = bool((of_tree == -1).all())
    forest.divisor = (trees if shared else max(1, trees / classes)) if average and trees else 1
    _require(
        shared or not average or bool((np.bincount(of_tree, minlength=classes) == forest.divisor).all()),
        "its classes have different numbers of trees, whose average is not supported",
    )
    _check(forest)
    return forest


class _Tree:
    """One tree's arrays as treelite has them, of equal lengths."""

    def __init__(self, accessor: Any) -> None:
        self.size = _number(accessor, "num_nodes")
        self.arrays = {name: accessor.get_field(name) for name in (*_OF_NODES, *_RANGES, "category_list_right_child")}
        _require(self.size > 0, f"a tree has {self.size} nodes")
        for name, array in self.arrays.items():
            _require(len(array) == self.size, f"a tree of {self.size} nodes has {len(array)} entries of {name}")
        self.vectors = self._lists(accessor, "leaf_vector")
        self.categories = self._lists(accessor, "category_list")

    def _lists(self, accessor: Any, name: str) -> dict[int, Array]:
        """The list of each node that has one."""
        content = accessor.get_field(name)
        begins, ends = self.arrays[f"{name}_begin"], self.arrays[f"{name}_end"]
        _require(bool((begins <= ends).all() and (ends <= len(content)).all()), f"an entry of {name} is out of range")
        return {int(node): content[begins[node] : ends[node]].copy() for node in np.flatnonzero(begins < ends)}


def _joined(trees: list[_Tree], class_of_tree: Array, classes: int) -> Forest:
    sizes = [tree.size for tree in trees]
    roots = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if trees else np.zeros(0, np.int64)
    first = np.repeat(roots, sizes)

    def all_of(name: str) -> Array:
        return np.concatenate([tree.arrays[name] for tree in trees]) if trees else np.zeros(0, np.int64)

    def children(name: str) -> Array:
        inside = all_of(name).astype(np.int64)
        _require(bool((inside >= -1).all() and (inside < np.repeat(sizes, sizes)).all()), "a child is out of range")
        return np.where(inside < 0, -1, inside + first)

    forest = Forest(
        0,
        classes,
        "",
        "",
        1.0,
        1.0,
        [],
        1.0,
        False,
        roots,
        np.repeat(np.arange(len(trees)), sizes),
        children("cleft"),
        children("cright"),
        all_of("split_index").astype(np.int64),
        all_of("threshold"),
        all_of("cmp").astype(np.int64),
        all_of("default_left").astype(bool),
        all_of("leaf_value"),
        np.repeat(class_of_tree.astype(np.int64), sizes),
    )
    kinds = all_of("node_type")
    for root, tree in zip(roots.tolist(), trees, strict=True):
        forest.leaf_vectors.update((root + node, vector) for node, vector in tree.vectors.items())
        to_right = tree.arrays["category_list_right_child"]
        for node in np.flatnonzero(tree.arrays["node_type"] == _CATEGORICAL).tolist():
            categories = tree.categories.get(node, np.zeros(0, np.int64)).astype(np.int64)
            forest.categories[root + node] = np.unique(categories), bool(to_right[node])
    inner = forest.left >= 0
    _require(bool((inner == (forest.right >= 0)).all()), "a node has one child")
    _require(bool(np.isin(kinds[inner], (_NUMERIC, _CATEGORICAL)).all()), "a node has an unknown kind of test")
    return forest


def _check(forest: Forest) -> None:
    """Raise `ValueError` unless every path from a root ends at a leaf, and every node can be evaluated."""
    inner = forest.left >= 0
    children = np.concatenate([forest.left[inner], forest.right[inner]])
    parents = np.bincount(children, minlength=len(inner))
    _require(bool((parents[forest.roots] == 0).all() and (parents <= 1).all()), "a node is the child of two nodes")
    reached, level, depth = 0, forest.roots, 0
    while level.size:
        reached, depth = reached + level.size, depth + 1
        _require(depth <= MAX_DEPTH, f"a tree is deeper than {MAX_DEPTH}")
        level = level[inner[level]]
        level = np.concatenate([forest.left[level], forest.right[level]])
    _require(reached == len(inner), "a node is on no path from a root")
    asked = forest.feature[inner]
    _require(bool((asked >= 0).all() and (asked < forest.features).all()), "a node tests a feature that there is not")
    numeric = inner.copy()
    numeric[list(forest.categories)] = False
    _require(bool(np.isin(forest.comparison[numeric], (1, 2, 3, 4, 5)).all()), "a node has an unknown comparison")
    _require(not np.isnan(forest.threshold[numeric]).any(), "a threshold is not a number")
    vectors = np.zeros(len(inner), bool)
    vectors[list(forest.leaf_vectors)] = True
    _require(
        all(len(vector) == forest.classes for vector in forest.leaf_vectors.values()), "a leaf is of another width"
    )
    scalar = ~inner & ~vectors
    _require(bool((forest.leaf_class[~inner & vectors] == -1).all()), "a leaf of one class has values for all")
    if forest.classes == 1:
        forest.leaf_class[scalar] = 0
    _require(bool((forest.leaf_class[scalar] >= 0).all()), "a leaf of all classes has one value")
    _require(bool(np.isfinite(forest.leaf_value[scalar]).all()), "a leaf is not a number")
    _require(all(np.isfinite(vector).all() for vector in forest.leaf_vectors.values()), "a leaf is not a number")


def _number(accessor: Any, name: str) -> int:
    found = accessor.get_field(name)
    _require(len(found) == 1, f"{name} is {len(found)} numbers")
    return int(found[0])


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(fault)
