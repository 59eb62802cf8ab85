"""Files that hold just what a step takes are handed on; anything else is put together anew."""

from __future__ import annotations

import numpy as np
import pytest

from batcher.ensembles.step_tensors import Value, is_true, renamed, size_of, values_of
from charonia.tensors import Tensor
from charonia.wire import FILE, Reference

REFERENCE = Reference(FILE, "ensemble.e/1", 32)
FIRST = Tensor.of("a", np.arange(4, dtype=np.float32))
SECOND = Tensor.of("b", np.arange(4, dtype=np.float32) + 4)


def test_a_whole_file_is_handed_on_in_its_own_order() -> None:
    values = values_of([FIRST, SECOND], REFERENCE)
    tensors, reference = renamed({"two": values["b"], "one": values["a"]})
    assert reference == REFERENCE
    assert [(t.name, bytes(t.data)) for t in tensors] == [("one", bytes(FIRST.data)), ("two", bytes(SECOND.data))]
    assert size_of(values) == 32


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "other"]])
def test_a_part_of_a_file_is_not(names: list[str]) -> None:
    values = values_of([FIRST, SECOND], REFERENCE)
    values["other"] = Value(SECOND)
    tensors, reference = renamed({f"i{at}": values[name] for at, name in enumerate(names)})
    assert reference is None
    assert [t.name for t in tensors] == [f"i{at}" for at in range(len(names))]


def test_no_file_at_all() -> None:
    assert renamed({}) == ([], None)
    assert renamed(values_of([FIRST], None))[1] is None


@pytest.mark.parametrize(("flags", "true"), [([], False), ([False, False], False), ([False, True], True)])
def test_any_true_element_counts(flags: list[bool], true: bool) -> None:
    assert is_true(Value(Tensor.of("go", np.array(flags, np.bool_)))) is true
