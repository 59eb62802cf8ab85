"""The objects of a trace file (N3-N5)."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np

from charonia.datatypes import DataType
from charonia.tensors import Tensor, join_bytes_elements
from charonia.traces.reports import QUEUE_INPUT, Report, ReportedTensor
from charonia.traces.triton_text import objects


def written(report: Report) -> list[dict[str, object]]:
    return [json.loads(one) for one in objects(report, partial(next, itertools.count(1)))]


def test_parents_come_before_their_children() -> None:
    inner = Report(b"3" * 8, "inner", 1, "q", (("QUEUE_START", 7),))
    outer = Report(b"2" * 8, "step", 1, "q", (("QUEUE_START", 6),), children=(inner,))
    root = Report(b"1" * 8, "ensemble", 2, "q", (("REQUEST_END", 9), ("QUEUE_START", 5)), children=(outer, inner))
    assert written(root) == [
        {"id": 1, "model_name": "ensemble", "model_version": 2, "request_id": "q"},
        {"id": 1, "timestamps": [{"name": "QUEUE_START", "ns": 5}, {"name": "REQUEST_END", "ns": 9}]},
        {"id": 2, "model_name": "step", "model_version": 1, "request_id": "q", "parent_id": 1},
        {"id": 2, "timestamps": [{"name": "QUEUE_START", "ns": 6}]},
        {"id": 3, "model_name": "inner", "model_version": 1, "request_id": "q", "parent_id": 2},
        {"id": 3, "timestamps": [{"name": "QUEUE_START", "ns": 7}]},
        {"id": 4, "model_name": "inner", "model_version": 1, "request_id": "q", "parent_id": 1},
        {"id": 4, "timestamps": [{"name": "QUEUE_START", "ns": 7}]},
    ]


def test_attributes_stand_beside_the_name() -> None:
    report = Report(b"1" * 8, "m", 1, "q", (), about=(("charonia.batch_id", "b-1"), ("charonia.rows", 2)))
    assert written(report)[0]["attributes"] == {"charonia.batch_id": "b-1", "charonia.rows": 2}


def test_at_level_tensors_alone_there_are_no_times() -> None:
    inner = Report(b"3" * 8, "inner", 1, "q", (("QUEUE_START", 7),))
    root = Report(b"1" * 8, "m", 2, "q", (("REQUEST_END", 9),), children=(inner,))
    found = objects(root, partial(next, itertools.count(1)), timestamps=False)
    assert [json.loads(one)["id"] for one in found] == [1, 2]
    assert not [one for one in found if b"timestamps" in one]


def tensor(array: np.ndarray, **changes: object) -> dict[str, object]:
    reported = replace(ReportedTensor.of(QUEUE_INPUT, Tensor.of("x", array)), **changes)  # type: ignore[arg-type]
    (_, _, told) = written(Report(b"1" * 8, "m", 1, "", (), tensors=(reported,)))
    assert (told["id"], told["activity"]) == (1, "TENSOR_QUEUE_INPUT")
    return told["tensor"]  # type: ignore[return-value]


def test_tensors_are_text() -> None:
    floats = np.array([[1, 2.5]], np.float32)
    assert tensor(floats) == {"name": "x", "data": "1.0,2.5", "shape": "1,2", "dtype": "FP32"}
    assert tensor(np.array([True, False]))["data"] == "1,0"
    assert tensor(np.array([0.1, -1e-8], np.float32))["data"] == "0.1,-1e-8"
    assert tensor(np.array([0.1, np.nan, -np.inf]))["data"] == "0.1,nan,-inf"
    for number in (np.float16, np.float64, np.int8, np.int16, np.uint8, np.uint16, np.uint32, np.uint64):
        expected = "1.0,2.0" if np.dtype(number).kind == "f" else "1,2"
        assert tensor(np.array([1, 2], number))["data"] == expected
    assert tensor(np.array([-1, 2**40], np.int64))["data"] == "-1,1099511627776"
    assert tensor(np.array([b"caf\xc3\xa9", b"\xff", b""], np.object_))["data"] == "café,\ufffd,"
    assert tensor(np.zeros((0, 4), np.float32))["data"] == ""
    half = ReportedTensor(QUEUE_INPUT, "x", DataType.BF16, (2,), b"\x80\x3f\x00\x40", 4)
    assert tensor(np.zeros(1), datatype=half.datatype, data=half.data, size_bytes=4)["data"] == "1.0,2.0"


def test_a_cut_tensor_says_so_and_has_whole_elements() -> None:
    whole = np.arange(3, dtype=np.int32)
    assert tensor(whole, data=whole.tobytes()[:10]) == {
        "name": "x", "data": "0,1", "shape": "3", "dtype": "INT32", "size_bytes": 12,
    }  # fmt: skip
    texts = np.array([b"ab", b"cdef"], np.object_)
    data = join_bytes_elements([b"ab", b"cdef"])
    for cut in (len(data) - 1, 7):
        assert tensor(texts, data=data[:cut])["data"] == "ab"
    assert tensor(texts, data=data[:3])["data"] == ""
