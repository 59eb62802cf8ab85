"""Batches are padded, cut and divided for models of fixed batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from charonia.backend import Array, Outcome, Timings
from charonia.errors import InvalidArgument
from executors.batches.sized_batches import execute_sized


class Doubling:
    """Doubles; a row of -1 fails. Keeps what it was given."""

    def __init__(self, plain: bool = False) -> None:
        self.plain = plain
        self.batches: list[list[float]] = []

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array] | Outcome:
        x = inputs["x"]
        self.batches.append(x[:, 0].tolist())
        found = dict.fromkeys(outputs, x * 2)
        if self.plain:
            return found
        failures = {row: InvalidArgument("below 0") for row, value in enumerate(x[:, 0]) if value == -1}
        return Outcome(found, Timings(1, 10, 100), failures)

    def close(self) -> None: ...


def rows(*values: float) -> dict[str, Array]:
    return {"x": np.array(values, np.float32).reshape(-1, 1)}


@pytest.mark.parametrize(
    ("values", "batches"),
    [
        ([1, 2, 3, 4], [[1, 2, 3, 4]]),
        ([1], [[1, 1]]),
        ([1, 2, 3], [[1, 2, 3, 3]]),
        ([1, 2, 3, 4, 5, 6, 7], [[1, 2, 3, 4], [5, 6, 7, 7]]),
        ([1, 2, 3, 4, 5, 6], [[1, 2, 3, 4], [5, 6]]),
    ],
)
def test_each_call_has_a_size_of_the_model(values: list[float], batches: list[list[float]]) -> None:
    instance = Doubling()
    found = execute_sized(instance, (4, 2), rows(*values), ["y"])
    assert isinstance(found, Outcome)
    assert instance.batches == batches
    assert found.arrays["y"][:, 0].tolist() == [2 * value for value in values]
    calls = len(batches)
    assert found.timings == Timings(calls, 10 * calls, 100 * calls)


def test_failed_rows_keep_their_places_and_added_rows_do_not_fail() -> None:
    found = execute_sized(Doubling(), (2, 4), rows(-1, 2, 3, 4, 5, 6, -1), ["y"])
    assert isinstance(found, Outcome)
    assert sorted(found.failures) == [0, 6]


def test_timings_are_left_out_when_a_call_has_none() -> None:
    found = execute_sized(Doubling(plain=True), (2,), rows(1, 2, 3), ["y"])
    assert isinstance(found, Outcome)
    assert found.timings is None
    assert found.arrays["y"][:, 0].tolist() == [2, 4, 6]


def test_strings_are_added_too() -> None:
    class Upper:
        def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
            assert len(inputs["x"]) == 4
            return {"y": np.array([[word.upper() for word in row] for row in inputs["x"]], np.object_)}

        def close(self) -> None: ...

    words = {"x": np.array([[b"a"], [b"b"]], np.object_)}
    found = execute_sized(Upper(), (4,), words, ["y"])
    assert isinstance(found, Outcome)
    assert found.arrays["y"].tolist() == [[b"A"], [b"B"]]
