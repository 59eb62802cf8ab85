from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.inference import InferenceRequest, RegionPart, RegionUse
from gateway.http.codec.request_codec import RequestDecoder
from gateway.http.codec.response_codec import ReplyForm

LIMIT = 4096


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


FP32 = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32"}
BINARY = {**FP32, "parameters": {"binary_data_size": 64}}
ONE_FIELD = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But"
)


class Decode:
    """Decodes for one model, with one decoder as a front has it."""

    def __init__(self, served: Callable[[str], Any]) -> None:
        self.served = served
        self.decoder = RequestDecoder(LIMIT)

    def __call__(
        self, document: Any, raw: bytes = b"", *, header: bytes | None = None, model: str = "identity"
    ) -> tuple[InferenceRequest, ReplyForm]:
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        if header is None and raw:
            header = str(len(text)).encode()
        return self.decoder.decode(model, -1, text + raw, header, self.served(model))

    def error(self, *arguments: Any, **named: Any) -> CharoniaError:
        with pytest.raises(CharoniaError) as caught:
            self(*arguments, **named)
        return caught.value


@pytest.fixture
def decode(served: Callable[[str], Any]) -> Decode:
    return Decode(served)


@pytest.mark.parametrize(("value", "expected"), [(True, {"charonia_receipt": True}), (False, {})])
def test_receipts(decode: Decode, value: bool, expected: dict[str, bool]) -> None:
    request, _ = decode({"inputs": [], "parameters": {"charonia_receipt": value}})
    assert request.parameters == expected


def test_a_json_request_in_full(decode: Decode) -> None:
    request, form = decode(
        {
            "id": "r1",
            "parameters": {
                "sequence_id": 7, "sequence_start": True, "sequence_end": False, "priority": 2, "timeout": 100,
                "charonia_deadline_us": 5, "text": "x", "count": 3, "flag": True, "real": 0.5,
            },
            "inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "INT32", "data": [[1, 2]], "unknown": {}}],
            "outputs": [{"name": "A", "parameters": {"binary_data": True}}, {"name": "B"}],
            "unknown": [],
        }
    )  # fmt: skip
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("INPUT0", DataType.INT32, (1, 2))
    assert bytes(tensor.data) == struct.pack("<2i", 1, 2)
    assert (request.model, request.version, request.id, request.outputs) == ("identity", -1, "r1", ("A", "B"))
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == (7, True, False)
    assert (request.priority, request.timeout_us, request.deadline_ns) == (2, 100, 5000)
    assert request.parameters == {"text": "x", "count": 3, "flag": True, "real": 0.5}
    assert form.is_binary("A")
    assert not form.is_binary("B")
    assert not form.all_binary


def test_binary_tensors_follow_in_the_order_of_inputs(decode: Decode) -> None:
    document = {
        "inputs": [
            {"name": "A", "shape": [2], "datatype": "UINT8", "parameters": {"binary_data_size": 2}},
            {"name": "J", "shape": [1], "datatype": "UINT8", "data": [9]},
            {"name": "B", "shape": [3], "datatype": "UINT8", "parameters": {"binary_data_size": 3}},
        ]
    }
    request, _ = decode(document, b"aabbb")
    assert [(t.name, bytes(t.data)) for t in request.inputs] == [("A", b"aa"), ("J", b"\x09"), ("B", b"bbb")]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (b"x{", "failed to parse the request JSON buffer: Invalid value. at 0"),
        ({}, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ([], "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({"inputs": 5}, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": [{"data": []}]}, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
        ({"inputs": [{"name": 5, "data": []}]}, "Unable to parse 'name': attempt to access JSON non-string as string"),
        ({"inputs": [{"name": "I", "datatype": "FP32", "data": []}]},
         "Unable to parse 'shape': attempt to access non-existing object member 'shape'"),
        (
            {"inputs": [{**FP32, "shape": [1, -16], "data": []}]},
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"inputs": [{**FP32, "shape": [1.5], "data": []}]},
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"inputs": [{**FP32, "shape": [True], "data": []}]},
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"inputs": [{"name": "I", "shape": [1], "data": []}]},
            "Unable to parse 'datatype': attempt to access non-existing object member 'datatype'",
        ),
        ({"inputs": [{**FP32, "shape": [1, 16], "data": [0.0] * 8}]},
         "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ({"inputs": [{**FP32, "shape": [9, 16], "data": []}]},
         "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ({"id": 5, "inputs": []}, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"inputs": [], "parameters": []}, "failed to get request params.: attempt to get members for non-object"),
        ({"inputs": [], "parameters": {"timeout": -1}},
         "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"inputs": [], "parameters": {"sequence_start": 1}},
         "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean"),
        *(({"inputs": [], "parameters": {"sequence_id": value}},
           "Unable to parse 'sequence_id': attempt to access JSON non-string as string") for value in (-1, 1.5, True)),
        ({"inputs": [], "outputs": [{"name": "O", "parameters": {"classification": -1}}]},
         "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"inputs": [], "outputs": {}}, "Unable to parse 'outputs': attempt to access JSON non-array as array"),
        ({"inputs": [], "outputs": [{}]},
         "Unable to parse 'name': attempt to access non-existing object member 'name'"),
    ],
)  # fmt: skip
def test_json_and_type_errors_are_internal(decode: Decode, document: Any, text: str) -> None:
    error = decode.error(document)
    assert isinstance(error, InternalError)
    assert error.message == text


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (
            {"inputs": [], "parameters": {"k": [1]}},
            "parameter 'k' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"inputs": [], "parameters": {"k": nested(200)}},
            "parameter 'k' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"inputs": [{**FP32, "data": nested(200)}]},
            "JSON nesting depth exceeds maximum allowed limit (100)",
        ),
        (
            {"inputs": [], "parameters": {"k": None}},
            "parameter 'k' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"inputs": [], "parameters": {"triton_x": 1}},
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            {"inputs": [], "parameters": {"charonia_receipt": 1}},
            "parameter 'charonia_receipt' must be a boolean",
        ),
        (
            {"inputs": [5]},
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'. But no field is set",
        ),
        ({"inputs": [{**FP32, "datatype": "fp32", "data": []}]}, "invalid datatype for input INPUT0"),
        (
            {
                "inputs": [],
                "outputs": [{"name": "O", "parameters": {"shared_memory_region": "r", "classification": 1}}],
            },
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            {"inputs": [BINARY]},
            "unexpected size for input 'INPUT0', expecting 64 additional bytes for model 'identity'",
        ),
        (
            {"inputs": [{**FP32, "shape": [2**63], "data": []}]},
            "invalid shape for input 'INPUT0': shape [-9223372036854775808] contains one or more invalid dimensions",
        ),
        (
            {"inputs": [{**FP32, "shape": [2**62, 4], "data": []}]},
            "invalid shape for input 'INPUT0': shape [4611686018427387904,4] causes total element count to exceed "
            "maximum size of 9223372036854775807",
        ),
        (
            {"inputs": [{**FP32, "shape": [2**62], "data": []}]},
            "byte size overflow for input 'INPUT0': element count (4611686018427387904) * data type size (4) exceeds "
            "maximum allowed size (9223372036854775807)",
        ),
        ({"inputs": [FP32]}, ONE_FIELD + " no field is set"),
        ({"inputs": [{**FP32, "shape": [0]}]}, ONE_FIELD + " no field is set"),
        ({"inputs": [{}]}, ONE_FIELD + " no field is set"),
        ({"inputs": [{**BINARY, "data": []}]}, ONE_FIELD + " set 'data' 'binary_data_size'"),
        (
            {"inputs": [{**FP32, "parameters": {"binary_data_size": 64, "shared_memory_region": "r"}}]},
            ONE_FIELD + " set 'binary_data_size' 'shared_memory_region'",
        ),
        (
            {"inputs": [{**FP32, "shape": [1, 1025], "data": []}]},
            "JSON input 'INPUT0' has a byte_size (4100 bytes) that exceeds the maximum allowed value of 4096 bytes. "
            "Use --http-max-input-size to increase the limit.",
        ),
        (
            {"inputs": [{**FP32, "datatype": "FP16", "data": [1]}]},
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input INPUT0",
        ),
    ],
)
def test_semantic_errors_are_invalid_arguments(decode: Decode, document: Any, text: str) -> None:
    error = decode.error(document)
    assert isinstance(error, InvalidArgument)
    assert error.message == text


def region(name: str = "r", **named: Any) -> dict[str, Any]:
    return {"shared_memory_region": name, **{f"shared_memory_{key}": value for key, value in named.items()}}


@pytest.mark.parametrize("header", [True, False])
def test_tensors_in_shared_memory(decode: Decode, header: bool) -> None:
    document = {
        "inputs": [
            {**FP32, "name": "A", "parameters": region(byte_size=64, offset=128)},
            {**FP32, "name": "B", "parameters": {"binary_data_size": 64}} if header else {**FP32, "data": [[1] * 16]},
            {**FP32, "name": "C", "parameters": region("s")},
        ],
        "outputs": [
            {"name": "O", "parameters": {**region(byte_size=2**64 - 1), "binary_data": False}},
            {"name": "P", "parameters": {"binary_data": True}},
        ],
    }
    for _ in range(2):  # the second time from memory
        request, form = decode(document, b"x" * 64 if header else b"")
        assert [len(tensor.data) for tensor in request.inputs] == [0, 64, 0]
        assert request.regions == RegionUse(
            {0: RegionPart("r", 128, 64), 2: RegionPart("s", 0, 0)}, {"O": RegionPart("r", 0, 2**64 - 1)}
        )
        assert (form.in_regions, form.all_binary) == ({"O"}, False)
    assert decode({"inputs": [{**FP32, "data": [[1] * 16]}]})[0].regions is None


@pytest.mark.parametrize(
    ("place", "members", "kind", "text"),
    [
        ("inputs", {"parameters": region(1)}, InternalError,
         "Unable to parse 'shared_memory_region': attempt to access JSON non-string as string"),
        *(
            (place, {"parameters": region(**{key: value})}, InternalError,
             f"Unable to parse 'shared_memory_{key}': attempt to access JSON non-unsigned-integer as unsigned-integer")
            for place in ("inputs", "outputs") for key in ("offset", "byte_size")
            for value in (-1, 2**64, 1.5, "1", True, None)
        ),
        ("inputs", {"parameters": region(), "data": [1]}, InvalidArgument,
         "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
         "'shared_memory_region' in 'parameters'. But set 'data' 'shared_memory_region'"),
        ("inputs", {"parameters": {**region(), "binary_data_size": 4}, "data": [1]}, InvalidArgument,
         "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
         "'shared_memory_region' in 'parameters'. But set 'data' 'binary_data_size' 'shared_memory_region'"),
        ("outputs", {"parameters": {**region(), "classification": 0}}, InvalidArgument,
         "Output can't set both 'shared_memory_region' and 'classification'"),
        ("outputs", {"parameters": {**region(), "binary_data": True}}, InvalidArgument,
         "Output can't set both 'shared_memory_region' and 'binary_data'"),
    ],
)  # fmt: skip
def test_wrong_words_about_shared_memory(
    decode: Decode, place: str, members: dict[str, Any], kind: type[CharoniaError], text: str
) -> None:
    error = decode.error({"inputs": [], place: [{**FP32, **members}]})
    assert (type(error), error.message) == (kind, text)


@pytest.mark.parametrize(
    ("raw_size", "text"),
    [
        (60, "unexpected size for input 'INPUT0', expecting 4 additional bytes for model 'identity'"),
        (65, "unexpected additional input data for model 'identity'"),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_bytes_must_add_up(decode: Decode, raw_size: int, text: str, again: bool) -> None:
    if again:  # the JSON part is known by now
        decode({"inputs": [BINARY]}, b"\0" * 64)
    assert decode.error({"inputs": [BINARY]}, b"\0" * raw_size).message == text


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        (b"", "Unable to parse Inference-Header-Content-Length, got: "),
        *(
            (text, f"Unable to parse Inference-Header-Content-Length, value is out of range [ -2147483648, 2147483647 ]"
             f", got: {text.decode()}")
            for text in (b"9" * 30, b"9223372036854775807", b"-2147483649")
        ),
        (b"-5", "inference header size should be in range (0, 13), got: -5"),
        (b"14", "inference header size should be in range (0, 13), got: 14"),
    ],
)  # fmt: skip
def test_header_length_is_checked(decode: Decode, header: bytes, text: str) -> None:
    error = decode.error(b'{"inputs":[]}', header=header)
    assert isinstance(error, InvalidArgument)
    assert error.message == text


@pytest.mark.parametrize("header", [b"13 ", b" 13", b"+13", b"13abc", b"0013"])
def test_a_header_length_is_the_number_at_the_beginning(decode: Decode, header: bytes) -> None:
    assert not decode(b'{"inputs":[]}', header=header)[0].inputs


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_large_numbers_are_doubles(decode: Decode, number: int) -> None:
    request, _ = decode({"inputs": [], "parameters": {"k": number, "headers": "x"}})
    assert request.parameters == {"k": float(number), "headers": "x"}


@pytest.mark.parametrize("given", [None, 5, "x", []])
def test_parameters_of_tensors_that_are_no_object_are_none(decode: Decode, given: Any) -> None:
    document = {
        "inputs": [{**FP32, "shape": [1], "data": [1.0], "parameters": given}],
        "outputs": [{"name": "O", "parameters": given}],
    }
    request, reply = decode(document)
    assert (request.inputs[0].shape, request.outputs, reply.listed) == ((1,), ("O",), {"O": False})


def test_the_json_part_is_bounded(decode: Decode) -> None:
    document = b'{"inputs":[]}' + b" " * LIMIT
    assert decode.error(document).message == (
        f"request JSON size of {len(document)} bytes exceeds the maximum allowed input size of 4096 bytes. Use "
        "--http-max-input-size to increase the limit."
    )


class TestRepeatedRequests:
    def test_equal_json_parts_are_read_once_and_bytes_are_fresh(self, decode: Decode) -> None:
        for value in (1, 2, 3):
            request, _ = decode({"inputs": [BINARY]}, bytes([value]) * 64)
            assert bytes(request.inputs[0].data) == bytes([value]) * 64
        assert len(decode.decoder._templates) == 1

    def test_ids_that_stand_first_do_not_make_new_entries(self, decode: Decode) -> None:
        for i in range(5):
            request, _ = decode({"id": f"r{i}", "inputs": [BINARY]}, b"\0" * 64)
            assert request.id == f"r{i}"
        assert len(decode.decoder._templates) == 1

    @pytest.mark.parametrize("name", ['with "quote"', "back\\slash", "tab\t", "ünï", ""])
    def test_any_id_comes_through(self, decode: Decode, name: str) -> None:
        for ascii_only in (True, False):
            text = json.dumps({"id": name, "inputs": [BINARY]}, ensure_ascii=ascii_only).encode()
            request, _ = decode(text, b"\0" * 64)
            assert request.id == name

    def test_a_second_id_wins(self, decode: Decode) -> None:
        text = b'{"id":"a",' + json.dumps({"id": "b", "inputs": [BINARY]}).encode()[1:]
        assert decode(text, b"\0" * 64)[0].id == "b"

    def test_offsets_of_a_broken_json_part_count_in_what_was_sent(self, decode: Decode) -> None:
        text = b'{"id":"a","inputs":x}'
        error = decode.error(text, b"\0")
        assert error.message == "failed to parse the request JSON buffer: Invalid value. at 19"

    def test_parameters_are_not_shared_between_requests(self, decode: Decode) -> None:
        document = {"inputs": [BINARY], "parameters": {"k": 1}}
        first, _ = decode(document, b"\0" * 64)
        first.parameters["other"] = 2
        assert decode(document, b"\0" * 64)[0].parameters == {"k": 1}

    def test_written_out_tensors_are_not_remembered(self, decode: Decode) -> None:
        decode({"inputs": [{"name": "I", "shape": [1], "datatype": "UINT8", "data": [9]}, BINARY]}, b"\0" * 64)
        assert not decode.decoder._templates

    def test_memory_stays_bounded(self, decode: Decode) -> None:
        for i in range(3000):
            decode({"inputs": [BINARY], "parameters": {"k": i}}, b"\0" * 64)
        assert len(decode.decoder._templates) <= 1024

    def test_a_long_id_is_refused(self, decode: Decode) -> None:
        wide = RequestDecoder(10**6)
        text = json.dumps({"id": "x" * 70_000, "inputs": [BINARY]}).encode()
        with pytest.raises(InvalidArgument, match="request id of 70000 bytes"):
            wide.decode("identity", -1, text + b"\0" * 64, str(len(text)).encode(), decode.served("identity"))


class TestRawRequests:
    @pytest.mark.parametrize("header", [None, b"0"])
    def test_an_empty_body_is_raw(self, decode: Decode, header: bytes | None) -> None:
        error = decode.error(b"", header=header, model="simple")
        assert isinstance(error, InvalidArgument)
        assert error.message == (
            "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in "
            "'simple' model configuration"
        )

    def test_fixed_dims(self, decode: Decode) -> None:
        request, form = decode(b"\0" * 64, header=b"0")
        assert request.inputs[0].shape == (1, 16)
        assert form.all_binary

    def test_the_dynamic_dimension_is_derived(self, decode: Decode) -> None:
        request, _ = decode(b"\0" * 40, header=b"0", model="wide")
        assert request.inputs[0].shape == (1, 5, 2)

    def test_two_dynamic_dimensions_cannot_be(self, decode: Decode) -> None:
        assert decode.error(b"\0" * 40, header=b"0", model="wider").message == (
            "[request id: <id_unknown>] The shape of the raw input 'INPUT0' can not be deduced because there are more "
            "than one variable-sized dimension"
        )

    def test_bytes_get_their_length_prefix(self, decode: Decode) -> None:
        request, _ = decode(b"hello", header=b"0", model="text")
        assert bytes(request.inputs[0].data) == b"\x05\0\0\0hello"
        assert request.inputs[0].shape == (1, 1)
        assert "For BYTE datatype raw input 'INPUT0', the model must have input shape [1]" in (
            decode.error(b"hello", header=b"0", model="texts").message
        )


@pytest.mark.parametrize("value", [-1, "1", True, 1.5, None, []])
def test_a_deadline_that_is_none(decode: Decode, value: object) -> None:
    error = decode.error({"inputs": [], "parameters": {"charonia_deadline_us": value}})
    assert (type(error), error.message) == (
        InvalidArgument,
        "'charonia_deadline_us' must be a whole number of 0 or more",
    )
