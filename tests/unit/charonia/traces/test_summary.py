"""Where the time went, from trace files: ours, and Triton's with one object for each time (N7)."""

from __future__ import annotations

from typing import Any

import pytest

from charonia.errors import InvalidArgument
from charonia.traces.summary import summary


def request(number: int, model: str, parent: int = 0, **stamps: int) -> list[dict[str, Any]]:
    named = {"id": number, "model_name": model, "model_version": 1, "request_id": ""}
    return [
        named | ({"parent_id": parent} if parent else {}),
        *({"id": number, "timestamps": [{"name": name, "ns": ns * 1000}]} for name, ns in stamps.items()),
    ]


def whole(number: int, model: str, begin: int, parent: int = 0, **more: int) -> list[dict[str, Any]]:
    """Of 100 us, 10 in the queue, 2 + 50 + 8 of compute."""
    return request(
        number, model, parent, REQUEST_START=begin, QUEUE_START=begin + 5, COMPUTE_START=begin + 15,
        COMPUTE_INPUT_END=begin + 17, COMPUTE_OUTPUT_START=begin + 67, COMPUTE_END=begin + 75, REQUEST_END=begin + 100,
        **more,
    )  # fmt: skip


FIGURES = {
    "request_us": 100.0, "request_p99_us": 100.0, "queue_us": 10.0, "compute_us": 60.0, "input_us": 2.0,
    "infer_us": 50.0, "output_us": 8.0, "overhead_us": 30.0, "share": 1.0,
}  # fmt: skip


def test_one_model() -> None:
    objects = whole(1, "m", 0, HTTP_RECV_START=-7, HTTP_RECV_END=-4, HTTP_SEND_START=101, HTTP_SEND_END=106)
    document = summary([[*objects, *request(2, "m", REQUEST_START=0, REQUEST_END=300)]])
    assert document == {
        "traces": 2,
        "models": [
            {"path": ["m"], "count": 2, **FIGURES, "receive_us": 3.0, "send_us": 5.0, "request_us": 200.0,
             "request_p99_us": 300.0, "overhead_us": 165.0}
        ],
    }  # fmt: skip


def test_an_ensembles_overhead_is_what_its_steps_do_not_explain() -> None:
    objects = request(1, "e", REQUEST_START=0, QUEUE_START=5, REQUEST_END=400)
    # two at once, then one by itself: 100 + 50 + 100 us in which any of them was under way
    objects += whole(2, "a", 20, parent=1) + whole(3, "a", 70, parent=1) + whole(4, "b", 200, parent=1)
    document = summary([objects, whole(1, "a", 0)])
    rows = {tuple(row.pop("path")): row for row in document["models"]}
    assert document["traces"] == 2
    assert list(rows) == [("e",), ("e", "a"), ("e", "b"), ("a",)]
    assert rows[("e",)] == {
        "count": 1, "request_us": 400.0, "request_p99_us": 400.0, "steps_us": 250.0, "overhead_us": 150.0,
        "share": 1.0,
    }  # fmt: skip
    assert rows[("e", "a")] == {"count": 2, **FIGURES, "share": 0.5}
    assert rows[("e", "b")] == {"count": 1, **FIGURES, "share": 0.25}
    assert rows[("a",)] == {"count": 1, **FIGURES}
    assert [row["path"] for row in summary([objects, whole(1, "a", 0)], ["a"])["models"]] == [["a"]]


def test_calls_are_part_of_the_callers_compute() -> None:
    objects = whole(1, "caller", 0) + whole(2, "callee", 20, parent=1)
    rows = summary([objects])["models"]
    assert [row["path"] for row in rows] == [["caller"], ["caller", "callee"]]
    assert "steps_us" not in rows[0]
    assert rows[0]["overhead_us"] == 30.0


def test_tensors_and_requests_without_times_do_not_disturb() -> None:
    tensor = {"id": 1, "activity": "TENSOR_QUEUE_INPUT", "tensor": {"name": "x", "data": "1"}}
    document = summary([[*whole(1, "m", 0), tensor, *request(2, "n"), *request(3, "o", parent=77)], []])
    assert [row["path"] for row in document["models"]] == [["m"], ["n"], ["o"]]
    assert document["models"][1] == {"path": ["n"], "count": 1}


@pytest.mark.parametrize(
    "objects", [[1], [{}], [{"id": "1"}], [{"id": 1, "timestamps": 5}], [{"id": 1, "timestamps": [{"name": "x"}]}]]
)
def test_what_is_no_trace_is_said(objects: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="no trace file"):
        summary([objects])
