"""Responses of a job as JSON and among its events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from charonia.errors import InternalError
from charonia.facts.jobs import JobEvent
from charonia.inference import InferenceResponse
from charonia.tensors import Tensor
from gateway.http.codec.job_json import EventWriter, response_json
from gateway.http.codec.response_codec import ReplyForm


def response(index: int, **more: Any) -> InferenceResponse:
    outputs = [Tensor.of("y", np.array([index], np.int32))]
    return InferenceResponse("m", 1, outputs, "mine", final=False, place=(1, index), **more)


def fields(event: bytes) -> dict[str, Any]:
    assert event.endswith(b"\n\n")
    told = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
    return {**told, "data": json.loads(told["data"])}


def write(writer: EventWriter, happening: JobEvent | InferenceResponse, served: Any) -> bytes:
    if isinstance(happening, JobEvent):
        return writer.event(happening)
    text = () if happening.is_flag else (response_json(happening, ReplyForm(), served),)
    return b"".join(writer.response(happening, text))


def test_ids_say_how_far_a_reader_is_in_both_rows(served: Callable[[str], Any]) -> None:
    writer = EventWriter(0, 0)
    flag = InferenceResponse("m", 1, [], final=True, place=(2, 2))
    happenings: list[JobEvent | InferenceResponse] = [
        JobEvent(1, "accepted", 1), JobEvent(2, "batched", 2), response(0), response(1), flag,
        JobEvent(3, "succeeded", 3),
    ]  # fmt: skip
    told = [fields(write(writer, happening, served("identity"))) for happening in happenings]
    assert [(each["id"], each["event"]) for each in told] == [
        ("1", "accepted"), ("2", "batched"), ("2-1", "response"), ("2-2", "response"), ("2-3", "response"),
        ("3-3", "succeeded"),
    ]  # fmt: skip
    assert told[2]["data"] == {
        "attempt": 1, "index": 0, "final": False,
        "response": {
            "id": "mine", "model_name": "m", "model_version": "1",
            "outputs": [{"name": "y", "datatype": "INT32", "shape": [1], "data": [0]}],
        },
    }  # fmt: skip
    assert told[4]["data"] == {"attempt": 2, "index": 2, "final": True}


def test_a_reader_that_comes_back_counts_on(served: Callable[[str], Any]) -> None:
    writer = EventWriter(2, 1)
    assert fields(write(writer, response(1), served("identity")))["id"] == "2-2"
    assert fields(write(writer, JobEvent(3, "succeeded", 3), served("identity")))["id"] == "3-2"


def test_errors_and_what_json_cannot_carry(served: Callable[[str], Any]) -> None:
    failed = InferenceResponse("m", 1, [], error=InternalError("no"), final=False, place=(1, 0))
    assert response_json(failed, ReplyForm(), served("identity")) == b'{"error":"no"}'
    half = InferenceResponse("m", 1, [Tensor.of("y", np.array([1], np.float16))], place=(1, 0))
    assert "sending FP16 data via JSON" in json.loads(response_json(half, ReplyForm(), served("identity")))["error"]
