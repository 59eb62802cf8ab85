"""Files that hold just what a step takes are handed on; anything else is put together anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batcher.ensembles.step_tensors import Value, answer_of, inputs_of, is_true, renamed, rows_of, size_of, values_of
from charonia.datatypes import DataType
from charonia.models.ensemble import EnsembleGraph, Step
from charonia.models.interface import TensorSpec
from charonia.tensors import Tensor
from charonia.wire import FILE, Reference

REFERENCE = Reference(FILE, "ensemble.e/1", 32)
FIRST = Tensor.of("a", np.arange(4, dtype=np.float32))
SECOND = Tensor.of("b", np.arange(4, dtype=np.float32) + 4)
STEP = Step(0, "m", -1, {}, {})


def test_a_whole_file_is_handed_on_in_its_own_order() -> None:
    values = values_of([FIRST, SECOND], REFERENCE)
    tensors, reference = renamed(STEP, {"two": values["b"], "one": values["a"]})
    assert reference == REFERENCE
    assert [(t.name, bytes(t.data)) for t in tensors] == [("one", bytes(FIRST.data)), ("two", bytes(SECOND.data))]
    assert size_of(values) == 32


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "other"]])
def test_a_part_of_a_file_is_not(names: list[str]) -> None:
    values = values_of([FIRST, SECOND], REFERENCE)
    values["other"] = Value(SECOND)
    tensors, reference = renamed(STEP, {f"i{at}": values[name] for at, name in enumerate(names)})
    assert reference is None
    assert [t.name for t in tensors] == [f"i{at}" for at in range(len(names))]


def test_no_file_at_all() -> None:
    assert renamed(STEP, {}) == ([], None)
    assert renamed(STEP, values_of([FIRST], None))[1] is None


def test_a_batch_dimension_is_added_and_taken_off_and_the_file_stays() -> None:
    batching = Step(0, "m", -1, {}, {}, batching=True, dims={"one": (4,), "two": (4,)})
    values = values_of([FIRST, SECOND], REFERENCE)
    step_inputs = {"one": values["a"], "two": values["b"]}
    tensors, reference = renamed(batching, step_inputs)
    assert [t.shape for t in tensors] == [(1, 4), (1, 4)]
    assert reference == REFERENCE
    assert rows_of(batching, step_inputs) == 1
    made = values_of(tensors, None, rows_of(batching, step_inputs))
    assert [t.shape for t in renamed(Step(1, "n", -1, {}, {}, dims=batching.dims), made)[0]] == [(4,), (4,)]
    graph = EnsembleGraph("e", (), (), ("one",), dims={"one": (4,)})
    assert [t.shape for t in answer_of(graph, {"one": made["one"]})] == [(4,)]
    assert [t.shape for t in answer_of(replace(graph, batching=True), {"one": made["one"]})] == [(1, 4)]


def test_steps_know_an_ensembles_tensors_as_reshaped() -> None:
    specs = {
        "a": TensorSpec("a", DataType.FP32, (-1, 2), (2, -1)),
        "y": TensorSpec("y", DataType.FP32, (-1,), (-1, 1)),
    }
    graph = EnsembleGraph("e", (), ("a", "b"), ("y", "z"), dims={"y": (-1, 1), "z": (4,)}, reshaped=specs)
    data = np.arange(6, dtype=np.float32)
    for batching, head in ((False, ()), (True, (1,))):
        graph = replace(graph, batching=batching)
        tensors = [Tensor.of("a", data.reshape(*head, 3, 2)), SECOND]
        assert [t.shape for t in inputs_of(graph, tensors)] == [(*head, 2, 3), (4,)]
        rows = len(head)
        made = values_of([Tensor.of("y", data.reshape(*head, 6, 1)), Tensor.of("z", data)], None, rows)
        assert [t.shape for t in answer_of(graph, made)] == [(*head, 6), (6,)]
        # python models may answer in other shapes than they are configured with
        other = values_of([Tensor.of("y", data.reshape(*head, 3, 2))], None, rows)
        assert [t.shape for t in answer_of(graph, other)] == [(*head, 3, 2)]
    assert [bytes(t.data) for t in inputs_of(graph, tensors)] == [data.tobytes(), bytes(SECOND.data)]


@pytest.mark.parametrize(("flags", "true"), [([], False), ([False, False], False), ([False, True], True)])
def test_any_true_element_counts(flags: list[bool], true: bool) -> None:
    assert is_true(Value(Tensor.of("go", np.array(flags, np.bool_)))) is true
