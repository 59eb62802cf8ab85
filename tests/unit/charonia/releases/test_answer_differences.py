"""How answers differ, and by how much."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.datatypes import DataType
from charonia.errors import AlreadyExists, InternalError, InvalidArgument, UnknownError
from charonia.releases.answer_comparison import differing
from charonia.releases.answer_differences import (
    DATATYPE,
    ERROR,
    EXACT,
    EXTRA,
    MISSING,
    RESPONSES,
    SHAPE,
    VALUES,
    Answer,
    Comparison,
    Tolerance,
    compared,
)
from charonia.tensors import Tensor


def answer(*values: float, name: str = "y") -> Tensor:
    return Tensor.of(name, np.array(values, np.float32))


def words(*values: bytes) -> Tensor:
    return Tensor.of("y", np.array(values, np.object_))


def one(a: Tensor, b: Tensor, tolerance: Tolerance = EXACT) -> Comparison:
    (found,) = compared([Answer([a])], [Answer([b])], {"": tolerance})
    return found


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "kind", "differing"),
    [
        (answer(1, 2), answer(1, 2), Tolerance(), "", 0),
        (answer(1, 2), answer(1, 2.5), Tolerance(), VALUES, 1),
        (answer(1, 2), answer(1, 2.5), Tolerance(absolute=0.5), "", 0),
        (answer(1, 2), answer(1, 2.5), Tolerance(relative=0.25), "", 0),
        (answer(1, 2), answer(1.25, 2.5), Tolerance(absolute=0.25), VALUES, 1),
        (answer(1, 2), answer(1.25, 2.375), Tolerance(0.125, 0.125), "", 0),
        (answer(0), answer(0.1), Tolerance(relative=9), VALUES, 1),
        (answer(math.nan, math.inf), answer(math.nan, math.inf), Tolerance(), "", 0),
        (answer(math.nan, 1), answer(1, math.nan), Tolerance(9, 9), VALUES, 2),
        (answer(math.inf), answer(-math.inf), Tolerance(9, 9), VALUES, 1),
        (answer(0.0), answer(-0.0), Tolerance(), "", 0),
        (answer(*[1] * 70_000, 2), answer(*[1] * 70_000, 3), Tolerance(), VALUES, 1),
        (answer(1), answer(1, 1), Tolerance(9), SHAPE, 0),
        (answer(1), Tensor.of("y", np.array([1.0])), Tolerance(9), DATATYPE, 0),
        (words(b"a", b"b"), words(b"a", b"b"), Tolerance(), "", 0),
        (words(b"a", b"b"), words(b"a", b"cc"), Tolerance(9, 9), VALUES, 1),
        (Tensor.of("y", np.array([True])), Tensor.of("y", np.array([False])), Tolerance(9, 9), VALUES, 1),
        (Tensor.of("y", np.array([1 << 60])), Tensor.of("y", np.array([(1 << 60) + 1])), Tolerance(), VALUES, 1),
        (Tensor.of("y", np.array([1 << 60])), Tensor.of("y", np.array([(1 << 60) + 1])), Tolerance(1), "", 0),
        (
            Tensor("y", DataType.BF16, (1,), b"\x80\x3f"), Tensor("y", DataType.BF16, (1,), b"\x81\x3f"),
            Tolerance(0.01), "", 0,
        ),
    ],
)  # fmt: skip
def test_outputs(a: Tensor, b: Tensor, tolerance: Tolerance, kind: str, differing: int) -> None:
    found = one(a, b, tolerance)
    assert (found.output, found.kind, found.differing) == ("y", kind, differing)


def test_figures_say_how_far_numbers_are_apart_also_within_the_tolerance() -> None:
    found = one(answer(4, 0, 8), answer(5, 2, 8), Tolerance(absolute=2))
    assert (found.kind, found.elements, found.worst_absolute, found.worst_relative) == ("", 3, 2.0, 0.25)
    found = one(answer(4, 0, 8), answer(5, 2, 8))
    assert found.detail == "2 of 3 elements differ, by up to 2 (relative 0.25)"
    assert math.isinf(one(answer(1), answer(math.nan)).worst_absolute)


def test_each_output_has_its_tolerance() -> None:
    recorded = Answer([answer(1), answer(1, name="z"), answer(1, name="gone")])
    given = Answer([answer(1.5), answer(1.5, name="z"), answer(1, name="new")])
    found = compared([recorded], [given], {"": Tolerance(1), "z": Tolerance()})
    assert [(f.output, f.kind) for f in found] == [("y", ""), ("z", VALUES), ("gone", MISSING), ("new", EXTRA)]


@pytest.mark.parametrize(
    ("recorded", "given", "kinds"),
    [
        ([Answer(error=InternalError("a"))], [Answer(error=InternalError("b"))], []),
        ([Answer(error=InternalError("a"))], [Answer(error=InvalidArgument("a"))], [ERROR]),
        ([Answer(error=UnknownError("a"))], [Answer(error=InvalidArgument("a"))], []),
        ([Answer(error=AlreadyExists("a"))], [Answer(error=UnknownError("a"))], []),
        ([Answer([answer(1)])], [Answer(error=InternalError("a"))], [ERROR]),
        ([Answer(error=InternalError("a"))], [Answer([answer(1)])], [ERROR]),
        ([], [], []),
        ([Answer([answer(1)])] * 2, [Answer([answer(1)])], ["", RESPONSES]),
        ([Answer([answer(1)])], [Answer([answer(2)]), Answer([answer(1)])], [VALUES, RESPONSES]),
    ],
)
def test_whole_answers(recorded: list[Answer], given: list[Answer], kinds: list[str]) -> None:
    assert [found.kind for found in compared(recorded, given, {})] == kinds


def test_responses_are_compared_in_order() -> None:
    a, b = Answer([answer(1)]), Answer([answer(2)])
    found = compared([a, b], [b, a], {})
    assert [one.detail.partition(":")[0] for one in found if one.kind] == ["response 0", "response 1"]


NUMBERS = st.lists(st.sampled_from([0.0, 1.0, -1.0, 1.5, 1e30, math.inf, -math.inf, math.nan]), min_size=1, max_size=4)


@given(a=NUMBERS, b=NUMBERS, datatype=st.sampled_from([np.float64, np.float32, np.float16]))
@settings(max_examples=examples(300), deadline=None)
def test_without_tolerance_it_finds_what_a_shadow_finds(a: list[float], b: list[float], datatype: Any) -> None:
    with np.errstate(over="ignore"):
        first, second = Tensor.of("y", np.array(a, datatype)), Tensor.of("y", np.array(b, datatype))
    assert bool(one(first, second).kind) is bool(differing([first], [second], {}))
