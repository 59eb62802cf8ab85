"""Strings that stay encoded: joined for a batch, cut into its answers, and only where there are many."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from charonia.backend import Outcome
from charonia.datatypes import DataType
from charonia.errors import InternalError, InvalidArgument
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.tensors import Tensor, join_bytes_elements
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request, unpack_response
from executors.batches.answers import pack_answers
from executors.batches.assembly import Planner, Workspace, join
from executors.batches.encoded_strings import MANY_STRINGS, EncodedStrings, encoded, row_bounds
from executors.batches.execution import Batch

STRINGS = TensorSpec("s", DataType.BYTES, (-1,))
OUT = TensorSpec("t", DataType.BYTES, (-1,))
PARTS = [np.array(rows, dtype=np.object_) for rows in ([[b"a", b""], [b"bc", b"\xff"]], [[b"d", b"efg"]])]


def interface(inputs: list[TensorSpec], outputs: list[TensorSpec]) -> ModelInterface:
    return ModelInterface(
        name="m",
        backend="test",
        platform="",
        max_batch_size=8,
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


def cut(model: ModelInterface, run: list[Any], results: dict[str, Any]) -> list[list[Tensor]]:
    """The answers as a gateway decodes them."""
    return [unpack_response(packed).outputs for packed in pack_answers(model, 1, run, results)]


def planned(model: Any, parts: list[np.ndarray]) -> list[Any]:
    planner = Planner(model)
    records = [record(Tensor.of("s", part), rows=len(part)) for part in parts]
    return [(planner.plan(one), one) for one in records]


def test_a_batch_is_joined_and_cut_without_an_object_for_each_string() -> None:
    model = interface([STRINGS], [OUT])
    run = planned(model, PARTS)
    joined = cast("EncodedStrings", join(model, run, Workspace(), encoded=True)["s"])
    assert joined == EncodedStrings((3, 2), joined.data, (0, 2, 3), joined.ends)
    assert bytes(joined.data) == b"".join(join_bytes_elements(part) for part in PARTS)
    assert [bytes(joined.between(0, 2)), bytes(joined.between(2, 3))] == [join_bytes_elements(part) for part in PARTS]
    answers = cut(model, run, {"t": cast("Any", joined)})
    assert [answer[0].array().tolist() for answer in answers] == [part.tolist() for part in PARTS]


def test_a_single_request_is_a_view() -> None:
    model = interface([STRINGS], [OUT])
    run = planned(model, PARTS[:1])
    alone = cast("EncodedStrings", join(model, run, Workspace(), encoded=True)["s"])
    assert alone.rows == alone.ends == ()
    assert np.shares_memory(np.frombuffer(alone.data, np.uint8), np.frombuffer(run[0][1].record, np.uint8))
    assert cut(model, run, {"t": cast("Any", alone)})[0][0].array().tolist() == PARTS[0].tolist()


def test_results_with_other_rows_than_the_batch_are_refused() -> None:
    model = interface([STRINGS], [OUT])
    run = planned(model, PARTS)
    wrong = encoded(np.concatenate([*PARTS, PARTS[1]]), (0, 2, 3))
    assert wrong.rows == ()
    with pytest.raises(InternalError, match=r"unexpected shape \[4,2\] .* expecting a batch dimension of 3"):
        cut(model, run, {"t": cast("Any", wrong)})


def test_results_are_encoded_for_their_requests() -> None:
    array = np.concatenate(PARTS)
    found = encoded(array, (0, 2, 3))
    assert [bytes(found.between(0, 2)), bytes(found.between(2, 3))] == [join_bytes_elements(part) for part in PARTS]
    assert bytes(found.between(0, 3)) == bytes(found.data) == join_bytes_elements(array)
    assert found.dtype == array.dtype
    assert bytes(encoded(array, ()).data) == join_bytes_elements(array)


def test_requests_whose_rows_failed_are_left_out() -> None:
    model = interface([STRINGS], [OUT])
    parts = [PARTS[0], PARTS[1], PARTS[0]]
    whole = encoded(np.concatenate(parts), (0, 2, 3, 5))
    rest = whole.only([(0, 2), (3, 5)])
    assert (rest.shape, rest.rows) == ((4, 2), (0, 2, 4))
    answers = cut(model, [one for one in planned(model, parts) if one[0].rows == 2], {"t": cast("Any", rest)})
    assert [answer[0].array().tolist() for answer in answers] == [PARTS[0].tolist()] * 2
    assert bytes(whole.only([(2, 3)]).data) == join_bytes_elements(PARTS[1])
    assert whole.only([]).shape == (0, 2)

    class Failing:
        takes_encoded_strings = True

        def execute(self, inputs: Any, outputs: Any) -> Any:
            raise AssertionError("strings that are many")

        def execute_encoded(self, inputs: Any, outputs: Any, rows: Any) -> Outcome:
            assert rows == inputs["s"].rows
            return Outcome({"t": inputs["s"]}, failures={2: InvalidArgument("bad")})

        def close(self) -> None: ...

    many = [np.full((rows, MANY_STRINGS), b"a", np.object_) for rows in (2, 1, 2)]
    planner = Planner(model)
    batch = Batch(planner, 1, [record(Tensor.of("s", part), rows=len(part)) for part in many])
    executed = batch.run_on(Failing(), Workspace())
    found = [unpack_response(answer) for answer in executed.answers]
    assert [None if one.error is None else one.error.message for one in found] == [None, "bad", None]
    assert [one.outputs[0].shape for one in (found[0], found[2])] == [(2, MANY_STRINGS)] * 2


def test_bounds_are_those_of_several_requests() -> None:
    assert row_bounds([4]) == ()
    assert row_bounds([2, 1, 3]) == (0, 2, 3, 6)
