from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.grpc.envelope import NoEnvelope, raw_at, split
from protos import grpc_service_pb2 as pb

_names = st.text(max_size=20)
_parameter = st.one_of(
    st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
    st.builds(pb.InferParameter, string_param=_names),
    st.builds(pb.InferParameter, double_param=st.floats(allow_nan=False)),
)
_inputs = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=_names,
    datatype=st.sampled_from(["FP32", "BYTES"]),
    shape=st.lists(st.integers(-1, 2**40), max_size=4),
)
_messages = st.builds(
    pb.ModelInferRequest,
    model_name=_names,
    model_version=_names,
    id=_names,
    parameters=st.dictionaries(_names, _parameter, max_size=3),
    inputs=st.lists(_inputs, max_size=3),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=3),
)


@given(_messages)
def test_what_is_split_is_the_message(message: pb.ModelInferRequest) -> None:
    packed = memoryview(message.SerializeToString())
    head, raw = split(packed)
    assert [bytes(one) for one in raw] == list(message.raw_input_contents)
    assert all(one.obj is packed.obj for one in raw)
    whole = pb.ModelInferRequest.FromString(b"".join(head))
    assert not whole.raw_input_contents
    whole.raw_input_contents.extend(bytes(one) for one in raw)
    assert whole == message


@given(_messages, st.data())
def test_the_place_of_the_tensor_is_known_from_the_begin(message: pb.ModelInferRequest, data: st.DataObject) -> None:
    packed = message.SerializeToString()
    come = data.draw(st.integers(0, len(packed)))
    at = raw_at(packed[:come])
    if at:
        first = message.raw_input_contents[0]
        assert packed[at : at + len(first)] == first
    elif come == len(packed):
        assert not message.raw_input_contents


@given(_messages, st.integers(1, 30))
def test_fields_in_any_order_mean_the_same(message: pb.ModelInferRequest, more: int) -> None:
    later = pb.ModelInferRequest(model_name="later", raw_input_contents=[b"x" * more])
    packed = message.SerializeToString() + later.SerializeToString()
    head, raw = split(memoryview(packed))
    expected = pb.ModelInferRequest.FromString(packed)
    assert [bytes(one) for one in raw] == list(expected.raw_input_contents)
    assert pb.ModelInferRequest.FromString(b"".join(head)).model_name == "later"


@given(st.binary(max_size=200))
def test_anything_else_is_left_to_protobuf(data: bytes) -> None:
    raw_at(data)
    try:
        head, raw = split(memoryview(data))
    except NoEnvelope:
        return
    assert len(head) + sum(map(len, raw)) <= len(data)


@pytest.mark.parametrize(
    "data", [b"\x3a", b"\x3a\x05abc", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b"]
)
def test_what_is_cut_short_or_malformed_has_no_envelope(data: bytes) -> None:
    with pytest.raises(NoEnvelope):
        split(memoryview(data))
