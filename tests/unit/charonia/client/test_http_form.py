"""What the client writes is what the server's front reads, and the other way round; answers of others are checked."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import echo_handler
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from charonia.client import ConnectionLost, Incomprehensible, Refused, SharedArray
from charonia.client.http_form import HttpAnswer, HttpCall, HttpForm, error_of, read_event, read_result
from charonia.client.results import OVER, Inference
from charonia.datatypes import DataType
from charonia.errors import (
    Cancelled,
    CharoniaError,
    DeadlineExceeded,
    ErrorCode,
    InvalidArgument,
    ResourceExhausted,
    StreamInterrupted,
    Unavailable,
    UnknownError,
    Unsupported,
)
from charonia.inference import InferenceResponse, RegionPart
from charonia.tensors import Tensor
from gateway.http.codec.error_replies import STATUS
from gateway.http.codec.request_codec import RequestDecoder
from gateway.http.codec.response_codec import ReplyForm, ResponseEncoder

SERVED: Any = echo_handler.EchoHandler().served_model("identity", "")
ANY_ARRAY = st.one_of(
    *[
        arrays.arrays(dtype=datatype.numpy, shape=arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
        for datatype in DataType
        if datatype not in (DataType.BYTES, DataType.BF16)
    ],
    st.lists(st.binary(max_size=9) | st.text(max_size=9), max_size=5).map(lambda items: objects(*items)),
    st.lists(st.floats(width=16), max_size=5).map(lambda items: np.array(items, dtype=ml_dtypes.bfloat16)),
)


def objects(*items: bytes | str) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), dtype=np.object_)
    array[:] = items
    return array


def as_bytes(array: np.ndarray[Any, Any]) -> list[Any]:
    return [item.encode() if isinstance(item, str) else item for item in array.tolist()]


def server_reads(call: HttpCall) -> tuple[Any, ReplyForm]:
    length = call.headers.get("inference-header-content-length")
    return RequestDecoder(1 << 20).decode("identity", -1, call.body, length and length.encode(), SERVED)


def answer(headers: list[tuple[bytes, bytes]], body: bytes, status: int = 200) -> HttpAnswer:
    return HttpAnswer(status, {name.decode(): value.decode() for name, value in headers}, body)


def json_answer(document: Any, binary: bytes = b"", status: int = 200, **headers: str) -> HttpAnswer:
    text = json.dumps(document).encode()
    if binary:
        headers["inference-header-content-length"] = str(len(text))
    return HttpAnswer(status, headers, text + binary)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), ANY_ARRAY, max_size=3))
def test_the_front_reads_what_is_written(inputs: dict[str, np.ndarray[Any, Any]]) -> None:
    request, form = server_reads(HttpForm().infer(Inference.of("identity", inputs, {}), None).call)
    assert form.all_binary
    assert [tensor.name for tensor in request.inputs] == list(inputs)
    for tensor, (name, array) in zip(request.inputs, inputs.items(), strict=True):
        expected = Tensor.of(name, array)
        assert (tensor.datatype, tensor.shape) == (expected.datatype, expected.shape)
        assert bytes(tensor.data) == bytes(expected.data)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), ANY_ARRAY, max_size=3))
def test_what_the_front_writes_is_read(outputs: dict[str, np.ndarray[Any, Any]]) -> None:
    response = InferenceResponse("identity", 1, [Tensor.of(name, array) for name, array in outputs.items()], "r1")
    result = read_result(answer(*ResponseEncoder().encode(response, ReplyForm(True, all_binary=True), SERVED)))
    assert (result.model, result.version, result.id) == ("identity", "1", "r1")
    assert list(result.outputs) == list(outputs)
    for name, array in outputs.items():
        if array.dtype == np.object_:
            assert result[name].tolist() == as_bytes(array)
        else:
            np.testing.assert_array_equal(result[name].view(np.uint8), np.ascontiguousarray(array).view(np.uint8))


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1, -2]], np.int8),
        np.array([2**64 - 1, 0], np.uint64),
        np.array([2**63 - 1, -(2**63)], np.int64),
        np.array([True, False]),
        np.array([0.1, float("nan"), float("-inf")], np.float32),
        objects("é", "", "a\0"),
        np.zeros((0, 3), np.int64),
    ],
    ids=str,
)
def test_json_both_ways(array: np.ndarray[Any, Any]) -> None:
    """For servers without the binary extension, and for results of jobs that asked for JSON."""
    form = HttpForm()
    form.binary = False
    call = form.infer(Inference.of("identity", {"X": array}, {"outputs": ["X"]}), None).call
    assert "inference-header-content-length" not in call.headers
    if array.dtype.kind != "f":  # no JSON has NaN, so that strict servers refuse it
        request, reply = server_reads(call)
        assert bytes(request.inputs[0].data) == bytes(Tensor.of("X", array).data)
        assert not reply.is_binary("X")
    response = InferenceResponse("identity", 1, [Tensor.of("X", array)])
    result = read_result(answer(*ResponseEncoder().encode(response, ReplyForm(), SERVED)))
    assert result["X"].shape == array.shape
    assert bytes(result.tensors["X"].data) == bytes(Tensor.of("X", array).data)


def test_what_else_a_request_says() -> None:
    inference = Inference.of(
        "a/b",
        {"INPUT0": [1.0]},
        {
            "outputs": {"A": 3, "B": 0}, "version": 2, "request_id": "r", "priority": 4, "idempotency_key": "k",
            "parameters": {"timeout": 9, "sequence_id": "s", "sequence_start": True, "speed": 0.5},
        },
    )  # fmt: skip
    call = HttpForm().infer(inference, 1.5).call
    assert (call.method, call.path) == ("POST", "/v2/models/a%2Fb/versions/2/infer")
    assert call.headers["idempotency-key"] == "k"
    assert call.headers["charonia-timeout-ms"] == "1500"
    request, form = server_reads(call)
    assert (request.id, request.priority, request.timeout_us) == ("r", 4, 9)
    assert (request.sequence_id, request.sequence_start, request.parameters) == ("s", True, {"speed": 0.5})
    assert (request.outputs, form.classes, form.listed) == (("A", "B"), {"A": 3}, {"A": True, "B": True})
    assert "prefer" not in call.headers
    assert HttpForm().submit(inference, None).call.headers["prefer"] == "respond-async"


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ({"X": [[1], [2, 3]]}, {}),
        ({"X": [None]}, {}),
        ({"X": [1 + 2j]}, {}),
        ({"X": [["a"], [b"b"], [3]]}, {}),
        ({}, {"outputs": "OUTPUT0"}),
        ({}, {"parameters": {"p": [1]}}),
        ({}, {"idempotency_key": "naïve"}),
        ({}, {"idempotency_key": "a\nb"}),
    ],
)
def test_what_no_server_could_take_is_refused(inputs: Any, options: Any) -> None:
    with pytest.raises(InvalidArgument):
        Inference.of("m", inputs, options)


def test_an_option_that_there_is_not_is_no_option() -> None:
    with pytest.raises(TypeError, match="timout_s"):
        Inference.of("m", {}, {"timout_s": 5})  # type: ignore[typeddict-unknown-key]


def test_tensors_in_shared_memory() -> None:
    given, target = (SharedArray("r", at, np.arange(4, dtype=np.int32)) for at in (0, 64))
    inference = Inference.of("identity", {"A": given, "B": np.ones(1, np.int32)}, {"outputs": {"Y": target, "Z": 0}})
    request, form = server_reads(HttpForm().infer(inference, None).call)
    assert dict(request.regions.inputs) == {0: RegionPart("r", 0, 16)}
    assert dict(request.regions.outputs) == {"Y": RegionPart("r", 64, 16)}
    assert bytes(request.inputs[1].data) == bytes(np.ones(1, np.int32))
    assert form.is_binary("Z")
    shown = {"name": "Y", "datatype": "INT32", "shape": [2]}
    result = read_result(json_answer({"outputs": [shown]}), inference.targets)
    assert result["Y"].tolist() == [0, 1]
    target.array[0] = 9
    assert result["Y"].tolist() == [9, 1], "it is where the server writes it"
    for wrong in ({**shown, "shape": [5]}, {**shown, "name": "Z"}, {**shown, "shape": [-1]}):
        with pytest.raises(Incomprehensible):
            read_result(json_answer({"outputs": [wrong]}), inference.targets)


def test_strings_keep_their_zeros_and_may_be_mixed_with_bytes() -> None:
    inference = Inference.of("m", {"X": ["a\0", b"\xff"], "Y": [b"a\0"]}, {})
    assert [tensor.array().tolist() for tensor in inference.inputs] == [[b"a\0", b"\xff"], [b"a\0"]]


@pytest.mark.parametrize("array", [np.ones(1, np.float16), objects(b"\xff")], ids=["FP16", "not UTF-8"])
def test_json_without_the_binary_extension_has_bounds(array: np.ndarray[Any, Any]) -> None:
    form = HttpForm()
    form.binary = False
    inference = Inference.of("m", {"X": array}, {})
    if array.dtype == np.object_:
        with pytest.raises(InvalidArgument, match="no binary tensors"):
            form.infer(inference, None)
    else:
        assert json.loads(form.infer(inference, None).call.body)["inputs"][0]["data"] == [1.0]


# -- answers that are errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", list(ErrorCode), ids=lambda code: code.name)
def test_each_status_of_the_front_is_its_class_again(code: ErrorCode) -> None:
    """But for codes that share 400 with others."""
    error = error_of(STATUS[code], {}, b'{"error":"words"}')
    if STATUS[code] != 400:
        assert error.code == code
    else:
        assert isinstance(error, InvalidArgument)
    assert error.message == "words"


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "message"),
    [
        (503, {"retry-after": "3"}, b'{"error":"draining"}', Refused, "draining"),
        (503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, b"", Refused, "the server answered with status 503"),
        (503, {}, b'{"error":"STREAM_INTERRUPTED: lost"}', StreamInterrupted, "STREAM_INTERRUPTED: lost"),
        (502, {}, b"<html>Bad Gateway</html>", ConnectionLost, "<html>Bad Gateway</html>"),
        (400, {}, b'{"error":"request was cancelled"}', Cancelled, "request was cancelled"),
        (418, {}, b"\xff", UnknownError, "\ufffd"),
        (404, {}, b'{"detail":"Not Found"}', CharoniaError, '{"detail":"Not Found"}'),
        (302, {}, b"", UnknownError, "the server answered with status 302"),
    ],
)
def test_errors_of_servers_and_proxies(
    status: int, headers: dict[str, str], body: bytes, kind: type[CharoniaError], message: str
) -> None:
    error = error_of(status, headers | {"charonia-receipt": "{}"}, body)
    assert isinstance(error, kind)
    assert error.receipt == "{}"
    assert error.message == message


def test_retry_after_is_kept() -> None:
    error = error_of(429, {"retry-after": "7"}, b'{"error":"full"}')
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s == 7
    assert isinstance(refused := error_of(503, {"retry-after": "7"}, b""), Refused)
    assert refused.retry_after_s == 7


OUTPUT = {"name": "Y", "datatype": "INT32", "shape": [2], "data": [1, 2]}
BINARY_OUTPUT = {"name": "Y", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize(
    "wrong",
    [
        HttpAnswer(200, {}, b"<html>"),
        HttpAnswer(200, {}, b"[" * 100_000),
        HttpAnswer(200, {"inference-header-content-length": "-1"}, b"{}"),
        HttpAnswer(200, {"inference-header-content-length": "3"}, b"{}"),
        json_answer([1]),
        json_answer({"model_name": "m"}),
        json_answer({"outputs": [7]}),
        json_answer({"outputs": [{**OUTPUT, "datatype": "INT33"}]}),
        json_answer({"outputs": [{**OUTPUT, "shape": [3]}]}),
        json_answer({"outputs": [{**OUTPUT, "shape": [-2, -1]}]}),
        json_answer({"outputs": [{**OUTPUT, "shape": [2.0]}]}),
        json_answer({"outputs": [{**OUTPUT, "data": ["a", "b"]}]}),
        json_answer({"outputs": [{**OUTPUT, "data": [[1], [2, 3]]}]}),
        json_answer({"outputs": [{**OUTPUT, "data": None}]}),
        json_answer({"outputs": [BINARY_OUTPUT]}),
        json_answer({"outputs": [BINARY_OUTPUT]}, bytes(7)),
        json_answer({"outputs": [BINARY_OUTPUT]}, bytes(9)),
        json_answer({"outputs": [{**BINARY_OUTPUT, "parameters": {"binary_data_size": -1}}]}, bytes(8)),
        json_answer({"outputs": [{**BINARY_OUTPUT, "datatype": "BYTES"}]}, b"\xff\xff\xff\xff....")
    ],
)  # fmt: skip
def test_an_answer_that_is_none_of_the_protocol(wrong: HttpAnswer) -> None:
    with pytest.raises(Incomprehensible):
        read_result(wrong)


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_a_receipt_is_read_and_nothing_else_taken_for_one() -> None:
    exchange = HttpForm().submit(Inference.of("m", {}, {"idempotency_key": "k"}), None)
    status = exchange.read(json_answer({"id": "x.m", "state": "queued", "position": 3}, status=202))
    assert (status.id, status.state, status.position, status.ended) == ("x.m", "queued", 3, False)
    with pytest.raises(Incomprehensible):
        exchange.read(json_answer({"outputs": []}))


def test_results_of_a_job() -> None:
    exchange = HttpForm().results("x/y.m", 2.5)
    assert exchange.call.path == "/v2/jobs/x%2Fy.m/result?wait=2.500&binary=true"
    assert exchange.read(json_answer({"id": "x", "state": "running"}, status=202)).state == "running"
    assert [r["Y"].tolist() for r in exchange.read(json_answer({"outputs": [OUTPUT]}))] == [[1, 2]]
    assert [r["Y"].tolist() for r in exchange.read(json_answer([{"outputs": [OUTPUT]}] * 2))] == [[1, 2]] * 2
    assert exchange.read(json_answer([])) == []
    with pytest.raises(UnknownError, match="words"):
        exchange.read(json_answer([{"outputs": [OUTPUT]}, {"error": "words"}]))
    with pytest.raises(DeadlineExceeded):
        exchange.read(json_answer({"error": "late"}, status=504))


def event(kind: str, data: Any, place: str = "2-1") -> Any:
    return SimpleNamespace(event=kind, data=data if isinstance(data, str) else json.dumps(data), id=place)


def test_events_of_a_job() -> None:
    assert read_event(event("message", "")) is None
    batched = read_event(event("batched", {"number": 2, "time_us": 5, "detail": {"executor": "e"}}, "2"))
    assert batched is not None
    assert (batched.place, batched.kind, batched.number, batched.ends) == ("2", "batched", 2, False)
    response = read_event(
        event("response", {"attempt": 1, "index": 4, "final": False, "response": {"outputs": [OUTPUT]}})
    )
    assert response is not None
    assert response.response is not None
    assert (response.response.place, response.response["Y"].tolist(), response.final) == ((1, 4), [1, 2], False)
    assert response.response.parameters == {"triton_final_response": False}
    empty = {"model_name": "m", "outputs": [], "parameters": {"x": 1}}
    last = read_event(event("response", {"attempt": 1, "index": 4, "final": True, "response": empty}))
    assert last is not None
    assert last.response is not None
    assert (last.response.tensors, last.final) == ({}, True)
    assert last.response.parameters == {"x": 1, "triton_final_response": True}
    flag = read_event(event("response", {"attempt": 1, "index": 4, "final": True}))
    assert flag is not None
    assert (flag.response, flag.error, flag.final) == (None, "", True)
    failed = read_event(event("response", {"attempt": 1, "index": 4, "final": True, "response": {"error": "words"}}))
    assert failed is not None
    assert (failed.error, failed.response, failed.final) == ("words", None, True)
    assert read_event(HttpAnswer(204, {}, b"")).kind == OVER  # type: ignore[union-attr]
    with pytest.raises(Unavailable):
        read_event(HttpAnswer(503, {}, b""))
    for wrong in ("{", "[1]"):
        with pytest.raises(Incomprehensible):
            read_event(event("batched", wrong))


def test_a_stream_over_http_needs_jobs() -> None:
    with pytest.raises(Unsupported, match="grpc://"):
        HttpForm().stream(Inference.of("m", {}, {}), None)


@pytest.mark.parametrize(
    ("ask", "status", "ready"),
    [
        (HttpForm().live(), 200, True),
        (HttpForm().ready("", ""), 400, False),
        (HttpForm().ready("m", "1"), 503, False),
    ],
)
def test_health(ask: Any, status: int, ready: bool) -> None:
    assert ask.read(HttpAnswer(status, {}, b"")) is ready
