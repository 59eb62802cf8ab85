"""Large bodies and replies are read and written in worker processes as they are in the loop."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from charonia.inference import InferenceResponse
from charonia.tensors import Tensor
from gateway.http.codec.conversions import parse, read_reply, read_template, reply_task, request_of, write
from gateway.http.codec.response_codec import ReplyForm, ResponseEncoder

SERVED: Any = SimpleNamespace(labels={}, interface=SimpleNamespace(batching=True))


@pytest.mark.parametrize("binary", [False, True])
def test_an_output_in_a_region_beside_a_large_one(binary: bool) -> None:
    large = Tensor.of("LARGE", np.arange(5000, dtype=np.int32).reshape(1, -1))
    placed = Tensor("PLACED", large.datatype, (1, 5000), b"")  # written to its region before
    response = InferenceResponse("m", 1, [large, placed], "id", {})
    form = ReplyForm(listed={"LARGE": binary, "PLACED": False}, in_regions={"PLACED"})
    form.settle()
    headers, body = ResponseEncoder().encode(response, form, SERVED)

    task = reply_task(response, form, SERVED)
    note, made = write(task.note, [memoryview(data) for data in task.buffers])
    written, reply = read_reply((note, [memoryview(part) for part in made]))
    assert (written, reply.joined()) == (list(headers), body)


@pytest.mark.parametrize(
    ("shape", "elements"), [([2], {"I": ""}), ([2, 1], {"I": ""}), ([1], {}), ([3], {}), ([], {}), ([0], {})]
)
def test_only_strings_that_are_as_many_as_their_shape_says_are_counted(
    shape: list[int], elements: dict[str, str]
) -> None:
    body = {"inputs": [{"name": "I", "datatype": "BYTES", "shape": shape, "data": ["a", ["bc"]]}]}
    note, made = parse(1 << 20, [memoryview(json.dumps(body).encode())])
    request = request_of(read_template((note, [memoryview(part) for part in made])), "m", 1)
    assert request.elements == elements
    none = 0 in shape or not shape
    assert bytes(request.inputs[0].data) == (b"" if none else b"\1\0\0\0a\2\0\0\0bc")
