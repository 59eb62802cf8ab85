"""Requests of any shapes in one ragged batch: each gets its own elements back, and the marks say where they lie."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from charonia.calls.admission import Admission
from charonia.datatypes import DataType
from charonia.inference import InferenceRequest
from charonia.models.interface import BatchInput, ModelInterface, TensorSpec
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request, unpack_response
from executors.batches.answers import pack_answers
from executors.batches.assembly import Planner, Workspace, groups, join
from executors.batches.ragged import batch_inputs

FIXED = [t for t in DataType if t is not DataType.BYTES]


def _model(datatype: DataType, limit: int) -> ModelInterface:
    return ModelInterface(
        name="m",
        backend="test",
        platform="",
        max_batch_size=limit,
        inputs={"x": TensorSpec("x", datatype, (-1, -1), allow_ragged_batch=True)},
        outputs={"y": TensorSpec("y", datatype, (-1, -1)), "n": TensorSpec("n", DataType.INT32, (1,))},
        required_inputs=frozenset({"x"}),
        batch_inputs=(BatchInput("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", ("marks",), DataType.INT32, "x"),),
        scattered_outputs={"y": "x"},
    )


def _record(number: int, tensor: Tensor, pad: int, outputs: tuple[str, ...]) -> RequestRecord:
    packed = pack_request(
        number.to_bytes(16, "big"),
        b"e" * pad,
        b"",
        request_meta(1, "h", [tensor], outputs, {}),
        [tensor.data],
        rows=tensor.shape[0],
        signature=0,
        level=0,
        accepted_ns=0,
    )
    return unpack_request(packed)


@given(
    data=st.data(),
    datatype=st.sampled_from([*FIXED, DataType.BYTES]),
    dims=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=7),
    limit=st.integers(3, 12),
)
def test_every_request_gets_back_what_it_sent(
    data: st.DataObject, datatype: DataType, dims: list[tuple[int, int, int]], limit: int
) -> None:
    model = _model(datatype, limit)
    planner, workspace = Planner(model), Workspace()
    tensors, records = [], []
    for number, shape in enumerate(dims):
        count = int(np.prod(shape))
        if datatype is DataType.BYTES:
            words = np.empty(shape, np.object_)
            words.ravel()[:] = data.draw(st.lists(st.binary(max_size=4), min_size=count, max_size=count))
            tensor = Tensor.of("x", words)
        else:
            size = count * datatype.size_bytes
            tensor = Tensor("x", datatype, shape, data.draw(st.binary(min_size=size, max_size=size)))
        outputs = data.draw(st.sampled_from([(), ("y",), ("n", "y"), ("n",)]))
        tensors.append(tensor)
        records.append(_record(number, tensor, data.draw(st.integers(0, 3)), outputs))
    answered = []
    for run in groups(model, [(index, planner.plan(record)) for index, record in enumerate(records)]):
        plans = [plan for _, plan in run]
        rows = sum(plan.rows for plan in plans)
        assert rows <= limit
        arrays = join(model, [(plan, records[index]) for index, plan in run], workspace)
        marks = batch_inputs(model, plans)["marks"]
        assert arrays["x"].shape == (marks[-1],)
        assert marks.tolist() == list(accumulate([int(np.prod(dims[i])) for i, _ in run], initial=0))
        results = {"y": arrays["x"], "n": np.arange(rows, dtype=np.int32).reshape(rows, 1)}
        packed = pack_answers(model, 1, [(plan, records[index]) for index, plan in run], results)
        first = 0
        for (index, plan), answer in zip(run, packed, strict=True):
            answered.append(index)
            outputs = unpack_response(answer).outputs
            assert tuple(t.name for t in outputs) == plan.outputs
            for tensor in outputs:
                if tensor.name == "n":
                    assert tensor.array().ravel().tolist() == list(range(first, first + plan.rows))
                else:
                    assert tensor.shape == tensors[index].shape
                    assert bytes(tensor.data) == bytes(tensors[index].data)
            first += plan.rows
    assert answered == list(range(len(records)))


@given(
    sets=st.lists(st.sets(st.sampled_from("abc")), min_size=1, max_size=8),
    ragged=st.booleans(),
)
def test_only_requests_with_the_same_inputs_share_a_batch(sets: list[set[str]], ragged: bool) -> None:
    """Optional inputs (I8), at both ends: the signature the scheduler goes by and the executor's own groups."""
    model = ModelInterface(
        name="m",
        backend="test",
        platform="",
        max_batch_size=64,
        inputs={
            name: TensorSpec(name, DataType.INT8, (1,), optional=name != "r", allow_ragged_batch=ragged)
            for name in "abcr"
        },
        outputs={"y": TensorSpec("y", DataType.INT8, (1,))},
        required_inputs=frozenset("r"),
    )
    admission, planner = Admission(model, 1, "h"), Planner(model)
    planned, signatures = [], []
    for index, names in enumerate(sets):
        tensors = [Tensor(name, DataType.INT8, (1, 1), b"x") for name in [*sorted(names), "r"]]
        signatures.append(admission.admit(InferenceRequest("m", 1, tensors)).signature)
        packed = pack_request(
            bytes(16),
            b"e",
            b"",
            request_meta(1, "h", tensors, (), {}),
            [t.data for t in tensors],
            rows=1,
            signature=0,
            level=0,
            accepted_ns=0,
        )
        planned.append((index, planner.plan(unpack_request(packed))))
    for run in groups(model, planned):
        assert len({frozenset(sets[index]) for index, _ in run}) == 1
    for one, first in zip(sets, signatures, strict=True):
        for other, second in zip(sets, signatures, strict=True):
            assert (first == second) == (one == other)
