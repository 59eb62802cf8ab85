"""No two requests, and no two callers' keys, share a digest by the way they are put together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from charonia.datatypes import DataType
from charonia.inference import InferenceRequest
from charonia.tensors import Tensor
from gateway.jobs.job_views import Cursor
from gateway.requests.idempotency import key_digest, request_digest

names = st.text(max_size=4)
tensors = st.builds(
    lambda name, shape, kind, data: Tensor(name, kind, tuple(shape), data),
    names,
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from([DataType.UINT8, DataType.INT8]),
    st.binary(max_size=4),
)
values = st.one_of(st.text(max_size=2), st.integers(0, 1), st.booleans(), st.sampled_from([0.0, 1.0]))
requests = st.builds(
    lambda model, version, inputs, outputs, parameters, priority: InferenceRequest(
        model, version, inputs, outputs=tuple(outputs), parameters=parameters, priority=priority
    ),
    names,
    st.integers(-1, 2),
    st.lists(tensors, max_size=2),
    st.lists(names, max_size=2),
    st.dictionaries(names, values, max_size=2),
    st.integers(0, 2),
)


def _content(request: InferenceRequest) -> object:
    return (
        request.model,
        request.version,
        [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs],
        request.outputs,
        sorted((name, type(value).__name__, value) for name, value in request.parameters.items()),
        request.priority,
    )


@given(requests, requests)
def test_digests_are_equal_when_the_requests_are(one: InferenceRequest, other: InferenceRequest) -> None:
    assert len(request_digest(one)) == 16
    assert (request_digest(one) == request_digest(other)) == (_content(one) == _content(other))


@given(requests, st.text(max_size=3), st.integers(0, 9), st.integers(0, 9))
def test_what_a_retry_may_change(request: InferenceRequest, name: str, deadline_ns: int, timeout_us: int) -> None:
    before = request_digest(request)
    request.id, request.deadline_ns, request.timeout_us = name, deadline_ns, timeout_us
    request.inputs = [Tensor(t.name, t.datatype, t.shape, memoryview(bytes(t.data))) for t in request.inputs]
    request.parameters = dict(reversed(request.parameters.items()))
    assert request_digest(request) == before


@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_keys_belong_to_their_tenant_and_model(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (key_digest(*one) == key_digest(*other)) == (one == other)


def test_tensor_bytes_are_told_apart() -> None:
    first, second = (
        InferenceRequest("m", 1, [Tensor("x", DataType.FP32, (2,), np.array(a, np.float32).tobytes())])
        for a in ([1, 2], [1, 3])
    )
    assert request_digest(first) != request_digest(second)


@given(st.booleans(), names, st.integers(0, 2**62), st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)))
def test_cursors_come_back_as_they_went(ended: bool, model: str, time_us: int, job_id: bytes) -> None:
    try:
        model.encode()
    except UnicodeEncodeError:
        return
    cursor = Cursor(ended, model, time_us, job_id)
    assert Cursor.parse(cursor.text()) == cursor
