"""Runs over memory that stays at its place, on the CPU: the same answers as without. Graphs need a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from executors.backends.onnxruntime import bound_runs
from executors.backends.onnxruntime.bound_runs import BoundRuns

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def session(tmp_path: Path) -> ort.InferenceSession:
    """`double` is twice x, `rows` as many numbers as x has rows."""
    float_, integer = TensorProto.FLOAT, TensorProto.INT64
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "x"], ["double"]),
            helper.make_node("Shape", ["x"], ["rows"], start=0, end=1),
        ],
        "g",
        [helper.make_tensor_value_info("x", float_, ["n", 4])],
        [
            helper.make_tensor_value_info("double", float_, ["n", 4]),
            helper.make_tensor_value_info("rows", integer, [1]),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    return ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])


def runs_of(session: ort.InferenceSession, made: list[str]) -> BoundRuns:
    def run_options(graph: str) -> ort.RunOptions:
        made.append(graph)
        return ort.RunOptions()

    return BoundRuns(ort, session, "cpu", 0, run_options)


def test_answers_are_copies_and_those_of_their_own_batch(session: ort.InferenceSession) -> None:
    made: list[str] = []
    runs = runs_of(session, made)
    first = runs.run({"x": X}, ["double", "rows"])
    second = runs.run({"x": X + 10}, ["double"])
    third = runs.run({"x": X[:, ::-1]}, ["double"])
    other = runs.run({"x": X[:1]}, ["rows"])
    assert np.array_equal(first["double"], 2 * X)
    assert np.array_equal(second["double"], 2 * X + 20)
    assert np.array_equal(third["double"], 2 * X[:, ::-1])
    assert (first["rows"].tolist(), other["rows"].tolist()) == ([2], [1])
    assert X.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]], "the caller's memory is not written"
    assert sorted(second) == ["double"]
    assert made == ["-1", "0", "1"], "a graph for each form, none for the first run"


def test_more_forms_than_are_kept_run_as_they_come(
    session: ort.InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound_runs, "_MAX_FORMS", 1)
    made: list[str] = []
    runs = runs_of(session, made)
    for rows in (1, 2, 3, 2, 1):
        x = np.full((rows, 4), rows, np.float32)
        assert np.array_equal(runs.run({"x": x}, ["double"])["double"], 2 * x)
    assert made == ["-1", "0"]


def test_a_run_that_fails_leaves_the_others_as_they_are(session: ort.InferenceSession) -> None:
    runs = runs_of(session, [])
    runs.run({"x": X}, ["double"])
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT|invalid dimensions"):
        runs.run({"x": np.zeros((2, 5), np.float32)}, ["double"])
    assert np.array_equal(runs.run({"x": X}, ["double"])["double"], 2 * X)
