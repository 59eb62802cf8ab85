"""No byte of one request is ever in another's answer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from charonia.datatypes import DataType
from charonia.models.interface import ModelInterface, TensorSpec
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request, unpack_response
from executors.batches.answers import pack_answers
from executors.batches.assembly import Planner, Workspace, groups, join

FIXED = [t for t in DataType if t is not DataType.BYTES]

shapes = st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple)


def _record(number: int, tensors: list[Tensor], rows: int, pad: int, outputs: tuple[str, ...]) -> RequestRecord:
    packed = pack_request(
        number.to_bytes(16, "big"),
        b"e" * pad,
        b"",
        request_meta(1, "h", tensors, outputs, {}),
        [t.data for t in tensors],
        rows=rows,
        signature=0,
        level=0,
        accepted_ns=0,
    )
    return unpack_request(packed)


@given(
    data=st.data(),
    datatype=st.sampled_from(FIXED),
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    limit=st.integers(4, 24),
    dims=shapes,
)
def test_every_answer_is_made_of_its_own_request_alone(
    data: st.DataObject, datatype: DataType, rows: list[int], limit: int, dims: tuple[int, ...]
) -> None:
    """An identity model over random bytes, a second input of strings, random order and wanted outputs."""
    width = len(dims)
    specs = [TensorSpec("x", datatype, (-1,) * width), TensorSpec("s", DataType.BYTES, (-1,))]
    outs = [TensorSpec("y", datatype, (-1,) * width), TensorSpec("t", DataType.BYTES, (-1,))]
    model = ModelInterface(
        name="m",
        backend="test",
        platform="",
        max_batch_size=limit,
        inputs={s.name: s for s in specs},
        outputs={s.name: s for s in outs},
        required_inputs=frozenset({"x", "s"}),
    )
    planner, workspace = Planner(model), Workspace()
    records, sent = [], []
    for number, count in enumerate(rows):
        own = data.draw(st.sampled_from([dims, dims[::-1]]))
        size = count * int(np.prod(own)) * datatype.size_bytes
        raw = data.draw(st.binary(min_size=size, max_size=size))
        words = data.draw(st.lists(st.binary(max_size=5), min_size=2 * count, max_size=2 * count))
        strings = np.empty((count, 2), dtype=np.object_)
        strings.ravel()[:] = words
        tensors = [Tensor("x", datatype, (count, *own), raw), Tensor.of("s", strings)]
        if data.draw(st.booleans()):
            tensors.reverse()
        outputs = data.draw(st.sampled_from([(), ("y",), ("t", "y")]))
        records.append(_record(number, tensors, count, data.draw(st.integers(0, 3)), outputs))
        sent.append({t.name: t for t in tensors})
    planned = [(index, planner.plan(record)) for index, record in enumerate(records)]
    seen = []
    for run in groups(model, planned):
        pairs = [(plan, records[index]) for index, plan in run]
        arrays = join(model, pairs, workspace)
        assert sum(plan.rows for plan, _ in pairs) <= limit
        packed = pack_answers(model, 1, pairs, {"y": arrays["x"], "t": arrays["s"]})
        for array in arrays.values():  # the buffers may be written again as soon as the answers are packed
            if array.flags.writeable and array.dtype != np.object_:
                array.view(np.uint8).fill(0xAA)
        assert [unpack_response(answer).id for answer in packed] == [record.id for _, record in pairs]
        answers = [unpack_response(answer).outputs for answer in packed]
        for (index, plan), answer in zip(run, answers, strict=True):
            seen.append(index)
            assert [t.name for t in answer] == list(plan.outputs)
            for tensor in answer:
                original = sent[index]["x" if tensor.name == "y" else "s"]
                assert tensor.shape == original.shape
                assert bytes(tensor.data) == bytes(original.data)
    assert seen == list(range(len(records)))
