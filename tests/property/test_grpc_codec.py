"""Tensors survive the gRPC codec in every form, replies are what protobuf would write, and no bytes fail untyped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from inference_doubles import SERVED, infer

from charonia.datatypes import DataType
from charonia.errors import CharoniaError
from charonia.inference import InferenceResponse
from charonia.tensors import Tensor
from gateway.grpc.convert import ResponseEncoder, infer_request, stream_answer
from gateway.grpc.job_calls import CANCEL, JOB_ID, WAIT
from gateway.grpc.statuses import Status
from gateway.requests.preferences import PARAMETERS as DELIVERY_PARAMETERS
from protos import grpc_service_pb2 as pb

FIELDS = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
}


NUMBERS = st.sampled_from(sorted(FIELDS, key=lambda t: t.number))
ARRAYS = NUMBERS.flatmap(
    lambda t: hnp.arrays(t.numpy, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
)


@settings(deadline=None)
@given(st.lists(ARRAYS, min_size=1, max_size=3), st.booleans(), st.text(max_size=10))
def test_tensors_survive_raw_and_typed(arrays: list[Any], raw: bool, request_id: str) -> None:
    message = pb.ModelInferRequest(model_name="m", id=request_id)
    for position, array in enumerate(arrays):
        datatype = DataType.of_numpy(array.dtype)
        item = message.inputs.add(name=f"T{position}", datatype=datatype.value, shape=array.shape)
        if raw:
            message.raw_input_contents.append(array.tobytes())
        elif array.size:
            getattr(item.contents, FIELDS[datatype]).extend(array.ravel().tolist())
    request, _ = infer_request(pb.ModelInferRequest.FromString(message.SerializeToString()))
    assert request.id == request_id
    for array, tensor in zip(arrays, request.inputs, strict=True):
        assert (tensor.datatype, tensor.shape) == (DataType.of_numpy(array.dtype), array.shape)
        if raw:
            assert tensor.data == array.tobytes()
        else:  # a NaN's bits are not the codec's to keep
            np.testing.assert_array_equal(tensor.array(), array)
    reply = pb.ModelInferResponse.FromString(
        ResponseEncoder().encode(InferenceResponse("m", 1, request.inputs, request.id), {}, SERVED)
    )
    for array, output, content in zip(arrays, reply.outputs, reply.raw_output_contents, strict=True):
        back = np.frombuffer(content, DataType.of(output.datatype).numpy).reshape(tuple(output.shape))
        np.testing.assert_array_equal(back, array)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=8), max_size=6), st.booleans())
def test_byte_strings_survive_raw_and_typed(elements: list[bytes], raw: bool) -> None:
    oracle = Tensor.of("I", np.array(elements, dtype=np.object_))
    message = pb.ModelInferRequest(model_name="m")
    item = message.inputs.add(name="I", datatype="BYTES", shape=[len(elements)])
    if raw:
        message.raw_input_contents.append(bytes(oracle.data))
    elif elements:
        item.contents.bytes_contents.extend(elements)
    (tensor,) = infer_request(message)[0].inputs
    assert tensor == oracle
    assert tensor.array().tolist() == elements


PARAMETERS = st.dictionaries(
    st.text(max_size=5),
    st.text(max_size=5) | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False),
    max_size=3,
)
OUTPUTS = st.lists(
    st.builds(
        Tensor,
        st.text(max_size=200),
        st.sampled_from(list(DataType)),
        st.lists(st.integers(0, 2**62), max_size=4).map(tuple),
        st.binary(max_size=300) | st.binary(max_size=300).map(memoryview) | st.just(b"x" * 20_000),
    ),
    max_size=4,
)
RESPONSES = st.builds(
    InferenceResponse, st.text(max_size=200), st.integers(0, 2**62), OUTPUTS, st.text(max_size=200), PARAMETERS
)


def plain(response: InferenceResponse) -> pb.ModelInferResponse:
    """The reply as protobuf's own classes build it."""
    message = pb.ModelInferResponse(model_name=response.model, model_version=str(response.version), id=response.id)
    for key, value in response.parameters.items():
        if isinstance(value, bool):
            message.parameters[key].bool_param = value
        elif isinstance(value, int):
            kind = "uint64_param" if value >= 2**63 else "int64_param"
            setattr(message.parameters[key], kind, value)
        elif isinstance(value, float):
            message.parameters[key].double_param = value
        else:
            message.parameters[key].string_param = value
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
        message.raw_output_contents.append(bytes(tensor.data))
    return message


ENCODER = ResponseEncoder()
"""One for all examples: what it remembers of one reply must not show in another."""


@settings(deadline=None)
@given(RESPONSES)
def test_a_reply_is_what_protobuf_would_write(response: InferenceResponse) -> None:
    for _ in range(2):
        data = ENCODER.encode(response, {}, SERVED)
        assert pb.ModelInferResponse.FromString(data) == plain(response)
    expected = plain(response)
    expected.parameters["triton_final_response"].bool_param = True
    found = pb.ModelStreamInferResponse.FromString(stream_answer(data))
    assert found == pb.ModelStreamInferResponse(infer_response=expected)


def valid() -> bytes:
    message = pb.ModelInferRequest(model_name="m", id="x", raw_input_contents=[b"\0" * 8, b"\1\2\3\4"])
    message.parameters["sequence_id"].int64_param = 1
    message.parameters["priority"].uint64_param = 1
    message.parameters["own"].string_param = "v"
    message.inputs.add(name="A", datatype="INT32", shape=[1, 2])
    message.inputs.add(name="B", datatype="UINT8", shape=[4])
    message.outputs.add(name="A").parameters["classification"].int64_param = 2
    message.outputs.add(name="B")
    return message.SerializeToString()


def typed() -> bytes:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="A", datatype="INT16", shape=[1, 2]).contents.int_contents.extend([1, 2])
    message.inputs.add(name="B", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"v")
    message.inputs.add(name="C", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1.0, 2.0])
    return message.SerializeToString()


def check_typed(data: bytes) -> None:
    """The answer is a reply or a status with a text; the catch-all's text is neither."""
    reply, status = infer(data)
    if status is None:
        pb.ModelInferResponse.FromString(reply)
        return
    code, details, _ = status
    assert code is not Status.UNKNOWN
    assert details
    assert details != "internal server error", data


@settings(deadline=None, max_examples=examples(400))
@given(st.sampled_from([valid(), typed()]), st.data())
def test_damaged_messages(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(damaged)))
        match draw.draw(st.sampled_from("rid")):
            case "r":
                damaged[at : at + 1] = draw.draw(st.binary(min_size=1, max_size=1))
            case "i":
                damaged[at:at] = draw.draw(st.binary(max_size=4))
            case _:
                del damaged[at : at + draw.draw(st.integers(1, 4))]
    check_typed(bytes(damaged))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    check_typed(data)


VALUES = st.one_of(
    st.builds(lambda v: pb.InferParameter(bool_param=v), st.booleans()),
    st.builds(lambda v: pb.InferParameter(int64_param=v), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda v: pb.InferParameter(uint64_param=v), st.integers(0, 2**64 - 1)),
    st.builds(lambda v: pb.InferParameter(double_param=v), st.floats()),
    st.builds(lambda v: pb.InferParameter(string_param=v), st.text(max_size=5)),
    st.just(pb.InferParameter()),
)
NAMES = st.sampled_from(
    [
        "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "charonia_deadline_us", "headers",
        "classification", "binary_data", "binary_data_output", "shared_memory_region", "shared_memory_offset",
        "shared_memory_byte_size", "triton_x", "own",
        "triton_enable_empty_final_response",
    ]
)  # fmt: skip
MAPS = st.dictionaries(NAMES, VALUES, max_size=3)
DIMS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=4)
CONTENTS = st.none() | st.builds(
    pb.InferTensorContents,
    bool_contents=st.lists(st.booleans(), max_size=2),
    int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
    uint64_contents=st.lists(st.integers(0, 2**64 - 1), max_size=1),
    fp32_contents=st.lists(st.floats(width=32), max_size=1),
    bytes_contents=st.lists(st.binary(max_size=3), max_size=1),
)
MESSAGES = st.builds(
    pb.ModelInferRequest,
    model_name=st.text(max_size=5),
    model_version=st.text(max_size=3),
    id=st.text(max_size=300),
    parameters=MAPS,
    inputs=st.lists(
        st.builds(
            pb.ModelInferRequest.InferInputTensor,
            name=st.text(max_size=3),
            datatype=st.sampled_from([t.value for t in DataType]) | st.text(max_size=4),
            shape=DIMS,
            parameters=MAPS,
            contents=CONTENTS,
        ),
        max_size=3,
    ),
    outputs=st.lists(
        st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=st.text(max_size=3), parameters=MAPS),
        max_size=2,
    ),
    raw_input_contents=st.lists(st.binary(max_size=8), max_size=3),
)


@settings(deadline=None, max_examples=examples(300))
@given(MESSAGES)
def test_whatever_a_message_says(message: pb.ModelInferRequest) -> None:
    try:
        request, classes = infer_request(message)
    except CharoniaError as error:
        assert error.message
        return
    assert [t.name for t in request.inputs] == [item.name for item in message.inputs]
    assert request.outputs == tuple(item.name for item in message.outputs)
    assert all(count > 0 for count in classes.values())
    assert 0 <= request.deadline_ns < 2**63
    assert 0 <= request.timeout_us < 2**63
    assert 0 <= request.priority < 2**64
    assert not {"triton_x", "priority"} & set(request.parameters)


WORDS = st.sampled_from([*sorted(DELIVERY_PARAMETERS), JOB_ID, WAIT, CANCEL, "charonia_deadline_us"])
OF_ANY_KIND = st.one_of(
    st.builds(lambda v: pb.InferParameter(string_param=v), st.sampled_from(["respond-async", "5", "keep", "nan", "x"])),
    st.builds(lambda v: pb.InferParameter(int64_param=v), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda v: pb.InferParameter(uint64_param=v), st.integers(0, 2**64 - 1)),
    st.builds(lambda v: pb.InferParameter(double_param=v), st.floats()),
    st.builds(lambda v: pb.InferParameter(bool_param=v), st.booleans()),
    st.builds(pb.InferParameter),
)


@settings(deadline=None, max_examples=examples(200))
@given(st.dictionaries(WORDS, OF_ANY_KIND, max_size=3), st.booleans())
def test_whatever_is_said_about_delivery(words: dict[str, pb.InferParameter], inputs: bool) -> None:
    message = pb.ModelInferRequest.FromString(typed()) if inputs else pb.ModelInferRequest(model_name="m")
    for key, value in words.items():
        message.parameters[key].CopyFrom(value)
    _, status = infer(message.SerializeToString())
    assert status is None or status[0] in (
        Status.INVALID_ARGUMENT,
        Status.NOT_FOUND,
        Status.RESOURCE_EXHAUSTED,
    )


def test_the_undamaged_messages_are_served() -> None:
    """Else the damage above would be tried on messages that fail anyway."""
    for data in (typed(), valid()):
        reply, status = infer(data)
        assert status is None
        assert reply
    with pytest.raises(CharoniaError):
        infer_request(pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor(datatype="odd")]))
