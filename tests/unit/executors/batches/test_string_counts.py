"""How many strings batches and their answers are expected to have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request, unpack_wave, wave_head
from executors.batches.assembly import Planner, Workspace
from executors.batches.encoded_strings import MANY_BYTES, MANY_STRINGS, EncodedStrings, encoded
from executors.batches.execution import Batch
from executors.batches.string_counts import StringCounts
from executors.batches.wave_execution import WaveBatch

STRINGS = TensorSpec("s", DataType.BYTES, (-1,))
NUMBERS = TensorSpec("n", DataType.INT32, (-1,))
OUT = TensorSpec("t", DataType.BYTES, (-1,))


def interface(inputs: list[TensorSpec], outputs: list[TensorSpec], max_batch_size: int = 8) -> ModelInterface:
    return ModelInterface(
        name="m",
        backend="test",
        platform="",
        max_batch_size=max_batch_size,
        inputs={spec.name: spec for spec in inputs},
        outputs={spec.name: spec for spec in outputs},
        required_inputs=frozenset(spec.name for spec in inputs),
    )


def record(*tensors: Tensor, rows: int = 1) -> RequestRecord:
    meta = request_meta(1, "h", tensors, (), {})
    data = [tensor.data for tensor in tensors]
    return unpack_request(
        pack_request(bytes(16), b"e", b"", meta, data, rows=rows, signature=0, level=0, accepted_ns=0)
    )


def batch(model: ModelInterface, *records: RequestRecord, planner: Planner | None = None) -> Batch:
    return Batch(planner or Planner(model), 1, records)


@pytest.mark.parametrize(
    ("rows", "length", "are_many"),
    [
        (MANY_STRINGS // 2, 0, False),
        (MANY_STRINGS // 2 + 1, 0, True),
        (1, MANY_BYTES // 2 - 4, False),
        (1, MANY_BYTES // 2, True),
    ],
)
def test_strings_of_all_requests_count_and_their_lengths(rows: int, length: int, are_many: bool) -> None:
    model = interface([STRINGS, NUMBERS], [OUT])
    part = np.full((1, rows), b"x" * length, dtype=np.object_)
    one = record(Tensor.of("n", np.zeros((1, MANY_STRINGS), np.int32)), Tensor.of("s", part))
    assert batch(model, one, one).has_many_strings is are_many


def test_what_the_executor_reads_itself_never_counts() -> None:
    model = interface([replace(STRINGS, allow_ragged_batch=True)], [OUT])
    one = record(Tensor.of("s", np.full((1, MANY_STRINGS + 1), b"", dtype=np.object_)))
    assert not batch(model, one).has_many_strings


@pytest.mark.parametrize(("max_batch_size", "shape"), [(4, (2, 3)), (0, (3,))])
def test_fixed_dims_say_how_many_strings_an_output_has(max_batch_size: int, shape: tuple[int, ...]) -> None:
    rows = shape[0] if max_batch_size else 1
    for strings, are_many in ((MANY_STRINGS // rows, False), (MANY_STRINGS // rows + 1, True)):
        model = interface([NUMBERS], [replace(OUT, dims=(strings, 1)), replace(NUMBERS, name="o")], max_batch_size)
        one = record(Tensor.of("n", np.zeros(shape, np.int32)), rows=rows)
        assert batch(model, one).has_many_strings is are_many
    counts = StringCounts(model)
    assert not counts.learns
    assert not counts.are_many([((), ("o",), rows, 1)]), "an output that nobody wants"


def test_other_outputs_have_as_many_strings_as_in_the_answers_before() -> None:
    counts = StringCounts(interface([NUMBERS], [OUT]))
    asked = record(Tensor.of("n", np.zeros((1, 100), np.int32)))

    def are_many(count: int) -> bool:
        return counts.are_many([(asked.meta.inputs, asked.meta.outputs, 1, count)])

    assert not are_many(10_000), "none came yet"
    counts.learn(400, {"t": np.full((1, 100), b"", np.object_)})
    assert not are_many(MANY_STRINGS // 100)
    assert are_many(MANY_STRINGS // 100 + 1)

    counts.learn(400, {"t": np.full((1, 8 * MANY_STRINGS), b"", np.object_)})
    for _ in range(3):
        assert are_many(1)
        counts.learn(400, {"t": np.full((1, 1), b"", np.object_)})
    assert not are_many(1), "eight times less"


@pytest.mark.parametrize(
    "found",
    [
        np.full((1, 4), b"x" * (MANY_BYTES // 4), np.object_),
        np.full((1, 4), "x" * (MANY_BYTES // 4), np.object_),
        cast("Any", EncodedStrings((1, 4), bytes(MANY_BYTES))),
        np.full((1, MANY_STRINGS), "x"),
    ],
)
def test_long_strings_count_as_several(found: Any) -> None:
    counts = StringCounts(interface([NUMBERS], [OUT]))
    asked = record(Tensor.of("n", np.zeros((1, 1), np.int32)))
    for results, are_many in (({}, False), ({"t": np.empty((1, 0), np.object_)}, False), ({"t": found}, True)):
        counts.learn(4, results)
        assert counts.are_many([(asked.meta.inputs, (), 1, 2)]) is are_many


def test_elements_that_are_no_strings_count_as_short_ones() -> None:
    StringCounts(interface([NUMBERS], [OUT])).learn(4, {"t": np.array([[None, 7, "x"]], np.object_)})


class Giving:
    """Answers with so many strings, of requests in rows of their own."""

    takes_encoded_strings = False

    def __init__(self, count: int) -> None:
        self.count = count
        self.elsewhere = 0

    def execute(self, inputs: Any, outputs: Any) -> Any:
        return {"t": np.full((len(inputs["n"]), self.count), b"abc", np.object_)}

    def execute_encoded(self, inputs: Any, outputs: Any, rows: Any) -> Any:
        self.elsewhere += 1
        return {"t": encoded(self.execute(inputs, outputs)["t"], rows)}

    def close(self) -> None: ...


def test_batches_and_waves_learn_and_run_with_their_strings_encoded() -> None:
    model = interface([NUMBERS], [OUT])
    planner = Planner(model)
    number = Tensor.of("n", np.zeros((1, 1), np.int32))
    one = record(number)
    meta = request_meta(1, "h", [number], (), {})
    head = wave_head(
        *(b"p" * 15, 2, b"g-1", meta), rows=1, signature=7, level=0, accepted_ns=1, reply_by_reference=False
    )
    wave = unpack_wave(head + bytes(8))
    small, instance = Giving(2), Giving(MANY_STRINGS)
    for made in (Batch(planner, 1, [one, one]), WaveBatch(planner, 1, [wave])):
        made.run_on(small, Workspace())
        assert not made.has_many_strings
    Batch(planner, 1, [one, one]).run_on(instance, Workspace())
    instance.takes_encoded_strings = True
    for made in (Batch(planner, 1, [one, one]), WaveBatch(planner, 1, [wave])):
        assert made.has_many_strings
        executed = made.run_on(instance, Workspace())
        assert not executed.failures
    assert instance.elsewhere == 2
