"""Reports of traced requests travel with answers, of which they are never the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.datatypes import DataType
from charonia.errors import InvalidArgument, InvalidRecord
from charonia.tensors import Tensor
from charonia.traces.reports import MOST_TENSOR_BYTES, QUEUE_INPUT, Report, ReportedTensor, tensors_of
from charonia.wire import pack_failure, pack_response, refer_response, report_response, time_response, unpack_response
from charonia.wire.records import FILE, Reference

ID = bytes(16)
OUTPUT = Tensor("y", DataType.FP32, (2,), bytes(range(8)))


def report(*children: Report, name: str = "m") -> Report:
    tensor = ReportedTensor.of(QUEUE_INPUT, OUTPUT)
    return Report(b"12345678", name, 1, "é", (("QUEUE_START", 5),), "why", (("rows", 2),), (tensor,), children)


def test_a_tree_comes_back() -> None:
    tree = report(report(report(name="c"), name="b"), report(name="d"))
    assert Report.unpack(tree.pack()) == tree


@given(st.binary(max_size=60) | st.builds(lambda at: report().pack()[:at], st.integers(0, 90)))
def test_what_is_none_is_refused(data: bytes) -> None:
    if data != report().pack():
        with pytest.raises(InvalidRecord):
            Report.unpack(data)


def test_a_tree_too_deep_is_refused() -> None:
    tree = report()
    for _ in range(100):
        tree = report(tree)
    with pytest.raises(InvalidRecord):
        Report.unpack(tree.pack())


def test_an_answer_keeps_all_else() -> None:
    placed = pack_response(ID, "m", 1, [OUTPUT], {"a": 1}, final=False, place=(2, 3))
    read = unpack_response(report_response(time_response(placed, (1, 2, 3)), report()))
    assert (read.report, read.times, read.place, read.final) == (report(), (1, 2, 3), (2, 3), False)
    assert (read.outputs, read.parameters) == ([OUTPUT], {"a": 1})
    failed = unpack_response(report_response(pack_failure(ID, "m", 1, InvalidArgument("no")), report()))
    assert (failed.report, failed.error and failed.error.message) == (report(), "no")
    reference = Reference(FILE, "g/1", 8)
    elsewhere = refer_response(report_response(placed, report()), reference)
    read = unpack_response(elsewhere, lambda _: OUTPUT.data)
    assert (read.report, read.outputs) == (report(), [OUTPUT])


def test_an_answer_outlives_its_report() -> None:
    record = report_response(pack_response(ID, "m", 1, [OUTPUT], {}), report())
    packed = report().pack()
    read = unpack_response(record.replace(packed, b"\xc1" * len(packed)))
    assert (read.report, read.outputs) == (None, [OUTPUT])
    for end in range(24, len(record)):
        with pytest.raises(InvalidRecord):
            unpack_response(record[:end])


def test_of_a_large_tensor_the_beginning_is_kept() -> None:
    large = Tensor("x", DataType.UINT8, (MOST_TENSOR_BYTES + 9,), memoryview(bytes(MOST_TENSOR_BYTES + 9)))
    (kept,) = tensors_of(QUEUE_INPUT, [large])
    assert (len(kept.data), kept.size_bytes, kept.shape) == (MOST_TENSOR_BYTES, MOST_TENSOR_BYTES + 9, large.shape)
