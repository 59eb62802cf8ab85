"""The mixed trace has its ten forms and its shares, and finds wrong answers."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
from tritonclient.grpc import service_pb2

from loadtest.bench.mixed import FORMS, Request, Trace, grpc_bytes, http_bytes, http_fault, tensor_fault

TENSOR = np.arange(16, dtype=np.float32).reshape(1, 16)


def test_shares_of_the_trace() -> None:
    trace, total = Trace(7), 20_000
    drawn = [trace.next() for _ in range(total)]
    assert len(FORMS) == len({request.form for request, _ in drawn}) == 10
    counts = Counter(
        "wrong" if request.refused else "priority" if request.priority else "cancel" if cancel else "plain"
        for request, cancel in drawn
    )
    assert 0.015 < counts["wrong"] / total < 0.025
    assert 0.04 < counts["priority"] / total < 0.06
    assert 0.006 < counts["cancel"] / total < 0.014
    assert len({trace.new_id() for _ in range(100)}) == 100


def test_http_messages_and_answers() -> None:
    request = Request(FORMS[0], TENSOR, 0, False)
    head, _, body = http_bytes(request, "x1", "h:1").partition(b"\r\n\r\n")
    assert b"POST /v2/models/identity/infer HTTP/1.1" in head
    assert body.endswith(TENSOR.tobytes())
    part = json.dumps({"id": "x1", "outputs": [{"name": "OUTPUT0"}]}).encode()
    assert http_fault(request, "x1", 200, len(part), part + TENSOR.tobytes()) is None
    assert http_fault(request, "x2", 200, len(part), part + TENSOR.tobytes()) == "the id of another request"
    other = part + (TENSOR + 1).tobytes()
    assert http_fault(request, "x1", 200, len(part), other) == "values of another request"
    assert http_fault(request, "x1", 503, None, b"busy") == "HTTP 503: busy"


def test_a_wrong_request_must_be_refused() -> None:
    wrong = Request(FORMS[0], TENSOR[:, :-1], 0, True)
    assert http_fault(wrong, "x1", 400, None, b"") is None
    assert http_fault(wrong, "x1", 200, None, b"{}") == "a wrong request was answered 200"


def test_grpc_messages() -> None:
    request = Request(FORMS[2], TENSOR, 1, False)
    message = service_pb2.ModelInferRequest.FromString(grpc_bytes(request, "x1"))
    assert message.id == "x1"
    assert list(message.inputs[0].contents.fp32_contents) == TENSOR.ravel().tolist()
    assert message.parameters["priority"].uint64_param == 1


def test_only_identities_are_compared_by_value() -> None:
    assert tensor_fault(Request(FORMS[8], np.zeros((1, 784), np.float32), 0, False), np.ones(10, np.float32)) is None
    assert tensor_fault(Request(FORMS[9], np.zeros((2, 784), np.float32), 0, False), np.ones(10, np.float32))
