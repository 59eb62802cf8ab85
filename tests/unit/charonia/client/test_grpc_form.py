"""What the client writes over gRPC is what the server's front reads, and the other way round."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from charonia.client import ConnectionLost, Incomprehensible, NotConnected, Refused, SharedArray
from charonia.client.grpc_form import GrpcForm, error_of, plain, read_result, write_inference
from charonia.client.results import Inference
from charonia.datatypes import DataType
from charonia.errors import (
    CharoniaError,
    ErrorCode,
    InternalError,
    ResourceExhausted,
    StreamInterrupted,
    UnknownError,
    Unsupported,
)
from charonia.inference import InferenceResponse, RegionPart
from charonia.tensors import Tensor
from gateway.grpc.convert import ResponseEncoder, infer_request, stream_answer, stream_error
from gateway.grpc.statuses import STATUS, Status
from protos import grpc_service_pb2 as pb

JOB = {"charonia_job_id": "x.m", "charonia_job_state": "queued", "charonia_position": 2, "charonia_eta_s": 0.5}
ANY_ARRAY = st.one_of(
    *[
        arrays.arrays(dtype=datatype.numpy, shape=arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
        for datatype in DataType
        if datatype not in (DataType.BYTES, DataType.BF16)
    ],
    st.lists(st.floats(width=16), max_size=5).map(lambda items: np.array(items, dtype=ml_dtypes.bfloat16)),
)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)


def described(**parameters: Any) -> pb.ModelInferResponse:
    """A response without outputs, as the front describes a job."""
    response = InferenceResponse("m", 1, [])
    response.parameters = parameters
    return pb.ModelInferResponse.FromString(ResponseEncoder().encode(response, {}, None))


def streamed(response: InferenceResponse, *, final: bool) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse.FromString(
        stream_answer(ResponseEncoder().encode(response, {}, None), final=final)
    )


@given(st.dictionaries(NAMES, ANY_ARRAY, min_size=1, max_size=3))
def test_the_front_reads_what_is_written(inputs: dict[str, np.ndarray[Any, Any]]) -> None:
    message = write_inference(Inference.of("identity", inputs, {}))
    request, _ = infer_request(pb.ModelInferRequest.FromString(message.SerializeToString()))
    for tensor, (name, array) in zip(request.inputs, inputs.items(), strict=True):
        expected = Tensor.of(name, array)
        assert (tensor.name, tensor.datatype, tuple(tensor.shape)) == (name, expected.datatype, expected.shape)
        assert bytes(tensor.data) == bytes(expected.data)


@given(st.dictionaries(NAMES, ANY_ARRAY, max_size=3))
def test_what_the_front_writes_is_read(outputs: dict[str, np.ndarray[Any, Any]]) -> None:
    response = InferenceResponse("identity", 1, [Tensor.of(name, array) for name, array in outputs.items()], "r1")
    result = read_result(pb.ModelInferResponse.FromString(ResponseEncoder().encode(response, {}, None)))
    assert (result.model, result.version, result.id, list(result.outputs)) == ("identity", "1", "r1", list(outputs))
    for name, array in outputs.items():
        assert bytes(result.tensors[name].data) == bytes(Tensor.of(name, array).data)
        assert result[name].shape == array.shape


def test_what_else_a_request_says() -> None:
    options: Any = {
        "outputs": {"A": 3, "B": 0}, "version": 2, "request_id": "r", "priority": 4,
        "parameters": {"timeout": 9, "sequence_id": "s", "sequence_start": True, "speed": 0.5},
    }  # fmt: skip
    message = write_inference(Inference.of("m", {"X": [1.0]}, options))
    request, classes = infer_request(message)
    assert (message.model_version, request.id, request.priority, request.timeout_us) == ("2", "r", 4, 9)
    assert (request.sequence_id, request.sequence_start) == ("s", True)
    assert request.parameters == {"speed": 0.5}
    assert (request.outputs, dict(classes)) == (("A", "B"), {"A": 3})


def test_tensors_in_shared_memory() -> None:
    given, target = (SharedArray("r", at, np.arange(4, dtype=np.int32)) for at in (0, 64))
    options: Any = {"outputs": {"Y": target, "Z": 0}}
    inference = Inference.of("m", {"A": given, "B": np.ones(1, np.int32)}, options)
    request, _ = infer_request(write_inference(inference))
    assert request.regions is not None
    assert dict(request.regions.inputs) == {0: RegionPart("r", 0, 16)}
    assert dict(request.regions.outputs) == {"Y": RegionPart("r", 64, 16)}
    assert bytes(request.inputs[1].data) == bytes(np.ones(1, np.int32))
    response = pb.ModelInferResponse(raw_output_contents=[b"", bytes(4)])
    response.outputs.add(name="Y", datatype="INT32", shape=[2])
    response.outputs.add(name="Z", datatype="INT32", shape=[1])
    result = read_result(response, inference.targets)
    assert (result["Y"].tolist(), result["Z"].tolist()) == ([0, 1], [0])
    response.outputs[0].shape[0] = 5
    with pytest.raises(Incomprehensible):
        read_result(response, inference.targets)


def test_delivery_is_said_in_metadata() -> None:
    inference = Inference.of("m", {}, {"idempotency_key": "k"})
    assert GrpcForm().infer(inference, 1.0).call.metadata == (("idempotency-key", "k"),)
    assert set(GrpcForm().submit(inference, 1.5).call.metadata) == {
        ("idempotency-key", "k"),
        ("prefer", "respond-async"),
        ("charonia-timeout-ms", "1500"),
    }


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("UINT16", "uint_contents", [0, 65_535]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -1.0]),
        ("FP64", "fp64_contents", [0.1, 1e300]),
        ("BYTES", "bytes_contents", [b"a\0", b""]),
    ],
)
def test_other_servers_answer_with_typed_contents(datatype: str, field: str, values: list[Any]) -> None:
    response = pb.ModelInferResponse(model_name="m")
    output = response.outputs.add(name="Y", datatype=datatype, shape=[2])
    getattr(output.contents, field).extend(values)
    assert read_result(response)["Y"].tolist() == values


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [
        ("INT33", [1], [bytes(4)]),
        ("INT32", [2], [bytes(4)]),
        ("INT32", [-1], [bytes(4)]),
        ("INT32", [1], [bytes(4), bytes(4)]),
        ("BYTES", [1], [b"\xff\xff\xff\xff"]),
        ("FP16", [1], []),
        ("INT32", [2**62, 4], [b""]),
    ],
)
def test_an_answer_that_is_none_of_the_protocol(datatype: str, shape: list[int], raw: list[bytes]) -> None:
    response = pb.ModelInferResponse(raw_output_contents=raw)
    response.outputs.add(name="Y", datatype=datatype, shape=shape)
    with pytest.raises(Incomprehensible):
        read_result(response)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", list(ErrorCode), ids=lambda code: code.name)
def test_each_status_of_the_front_is_its_class_again(code: ErrorCode) -> None:
    error = error_of(STATUS[code], "words", {})
    assert error.code == code
    assert error.message == "words"


@pytest.mark.parametrize(
    ("status", "details", "trailers", "kind"),
    [
        (Status.UNAVAILABLE, "Socket closed", {}, ConnectionLost),
        (Status.UNAVAILABLE, "failed to connect to all addresses; last error: UNKNOWN: x", {}, NotConnected),
        (Status.UNAVAILABLE, "draining", {"retry-after-ms": "1500"}, Refused),
        (Status.UNAVAILABLE, "STREAM_INTERRUPTED: lost", {}, StreamInterrupted),
        (Status.ABORTED, "words", {}, UnknownError),
    ],
)
def test_what_unavailable_means(status: int, details: str, trailers: dict[str, str], kind: type[CharoniaError]) -> None:
    error = error_of(status, details, trailers | {"charonia-receipt": "{}"})
    assert type(error) is kind
    assert error.receipt == "{}"
    assert not isinstance(error, Refused) or error.retry_after_s == 1.5


@pytest.mark.parametrize(("trailers", "retry_after_s"), [({"retry-after-ms": "7000"}, 7), ({}, 0), ({"x": "y"}, 0)])
def test_only_a_refusal_that_ends_says_when(trailers: dict[str, str], retry_after_s: int) -> None:
    """RESOURCE_EXHAUSTED is also what gRPC says of a message that is too large, for ever."""
    error = error_of(Status.RESOURCE_EXHAUSTED, "full", trailers | {"charonia-receipt": "{}"})
    assert error.receipt == "{}"
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s == retry_after_s


# -- jobs and streams --------------------------------------------------------------------------------------------------


def test_a_receipt_is_read_and_nothing_else_taken_for_one() -> None:
    exchange = GrpcForm().submit(Inference.of("m", {}, {"idempotency_key": "k"}), None)
    status = exchange.read(described(**JOB))
    assert (status.id, status.state, status.position, status.eta_s) == ("x.m", "queued", 2, 0.5)
    assert status.fields["model_name"] == "m"
    with pytest.raises(Incomprehensible):
        exchange.read(described())


def test_the_result_of_a_job_or_its_state() -> None:
    exchange = GrpcForm().results("x.m", 2.5)
    assert exchange.call.message.parameters["charonia_wait_s"].double_param == 2.5
    status: Any = exchange.read(described(**JOB))
    assert status.state == "queued"
    results: Any = exchange.read(described())
    assert len(results) == 1


def test_responses_of_a_job_are_resumed_by_their_index() -> None:
    exchange = GrpcForm().responses("x.m", "")
    assert "charonia_after_index" not in exchange.call.message.parameters
    response = InferenceResponse("m", 1, [Tensor.of("Y", np.ones(1, np.int32))])
    response.parameters = {"charonia_attempt": 1, "charonia_index": 3}
    event = exchange.read(streamed(response, final=False))
    assert event is not None
    assert event.response is not None
    assert (event.place, event.response.place, event.final) == ("3", (1, 3), False)
    assert GrpcForm().responses("x.m", event.place).call.message.parameters["charonia_after_index"].int64_param == 3
    response.outputs = []
    flag = exchange.read(streamed(response, final=True))
    assert flag is not None
    assert (flag.response, flag.final) == (None, True)
    response.parameters["charonia_empty_response"] = True
    last = exchange.read(streamed(response, final=True))
    assert last is not None
    assert last.response is not None
    assert (last.response.tensors, last.response.place, last.final) == ({}, (1, 3), True)
    waiting = exchange.read(pb.ModelStreamInferResponse(infer_response=described(**JOB)))
    assert waiting is not None
    assert (waiting.kind, waiting.ends, waiting.final) == ("waiting", False, False)


def test_the_flag_that_ends_a_stream_is_sent_to_those_who_ask_for_it() -> None:
    asked = Inference.of("m", {}, {"parameters": {"triton_enable_empty_final_response": True}})
    message = GrpcForm().stream(asked, None).call.message
    assert message.parameters["triton_enable_empty_final_response"].bool_param
    exchange = GrpcForm().stream(Inference.of("m", {}, {}), None)
    assert not exchange.call.message.parameters
    response = InferenceResponse("m", 1, [Tensor.of("Y", np.ones(1, np.int32))])
    result = exchange.read(streamed(response, final=True))
    assert result is not None
    assert result["Y"].tolist() == [1]
    response.outputs = []
    empty = exchange.read(streamed(response, final=True))
    assert empty is not None
    assert (empty.tensors, empty.parameters) == ({}, {"triton_final_response": True})
    failed = pb.ModelStreamInferResponse.FromString(stream_error(InternalError("words"), pb.ModelInferRequest()))
    with pytest.raises(UnknownError, match="words"):
        exchange.read(failed)


def test_what_jobs_show_over_http_only() -> None:
    for ask in (lambda: GrpcForm().job("x.m"), lambda: GrpcForm().events("x.m", "")):
        with pytest.raises(Unsupported, match="HTTP"):
            ask()


def test_messages_as_json_has_them() -> None:
    statistics = pb.ModelStatistics(name="m", inference_count=2**63)
    statistics.inference_stats.success.count = 3
    statistics.batch_stats.add(batch_size=4)
    statistics.response_stats["0"].success.ns = 5
    document = plain(statistics)
    assert document["inference_count"] == 2**63
    assert document["inference_stats"]["success"] == {"count": 3, "ns": 0}
    assert document["batch_stats"][0]["batch_size"] == 4
    assert document["response_stats"]["0"]["success"]["ns"] == 5
