"""Inference messages to and from the neutral forms, item by item (G4-G8, G18-G20, G24)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from charonia.datatypes import DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.inference import MAX_CLIENT_ID_BYTES, InferenceRequest, InferenceResponse, RegionPart, RegionUse
from charonia.tensors import Tensor, join_bytes_elements
from gateway.grpc.convert import ResponseEncoder, infer_request, stream_answer, stream_error
from protos import grpc_service_pb2 as pb

REGION: dict[str, Any] = {"shared_memory_region": {"string_param": "r"}}
SIZED = {**REGION, "shared_memory_byte_size": {"int64_param": 4}}
WRONG_REGIONS: list[tuple[dict[str, Any], str]] = [
    ({"shared_memory_region": {"int64_param": 1}},
     "invalid value type for 'shared_memory_region' parameter for tensor 'I', expected string_param."),
    *(
        ({**given, f"shared_memory_{key}": value}, text)
        for key in ("offset", "byte_size")
        for given, value, text in (
            (REGION, {"uint64_param": 1},
             f"invalid value type for 'shared_memory_{key}' parameter for tensor 'I', expected int64_param."),
            ({}, {"int64_param": 1},
             f"'shared_memory_{key}' can not be specified without 'shared_memory_region' parameter for tensor 'I'"),
        )
    ),
]  # fmt: skip


def message(**members: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="m", **members)


def tensor(name: str = "I", datatype: str = "INT32", shape: tuple[int, ...] = (2,), **members: Any) -> Any:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **members)


def contents(**fields: Any) -> pb.InferTensorContents:
    return pb.InferTensorContents(**fields)


def parameters(**values: Any) -> dict[str, pb.InferParameter]:
    return {key: pb.InferParameter(**value) for key, value in values.items()}


def refusal(of: pb.ModelInferRequest) -> CharoniaError:
    with pytest.raises(CharoniaError) as caught:
        infer_request(of)
    return caught.value


class TestContents:
    @pytest.mark.parametrize(
        ("datatype", "field", "values", "expected"),
        [
            ("BOOL", "bool_contents", [True, False], np.array([1, 0], np.bool_)),
            ("INT8", "int_contents", [-128, 127], np.array([-128, 127], np.int8)),
            ("INT8", "int_contents", [130, -200], np.array([-126, 56], np.int8)),
            ("INT16", "int_contents", [-5, 70_000], np.array([-5, 4464], np.int16)),
            ("INT32", "int_contents", [-(2**31), 2**31 - 1], np.array([-(2**31), 2**31 - 1], np.int32)),
            ("INT64", "int64_contents", [-(2**63), 2**63 - 1], np.array([-(2**63), 2**63 - 1], np.int64)),
            ("UINT8", "uint_contents", [255, 256], np.array([255, 0], np.uint8)),
            ("UINT16", "uint_contents", [65_535, 0], np.array([65_535, 0], np.uint16)),
            ("UINT32", "uint_contents", [2**32 - 1, 0], np.array([2**32 - 1, 0], np.uint32)),
            ("UINT64", "uint64_contents", [2**64 - 1, 0], np.array([2**64 - 1, 0], np.uint64)),
            ("FP32", "fp32_contents", [0.1, -0.0], np.array([0.1, -0.0], np.float32)),
            ("FP64", "fp64_contents", [0.1, 1e300], np.array([0.1, 1e300], np.float64)),
        ],
    )
    def test_typed(self, datatype: str, field: str, values: list[Any], expected: Any) -> None:
        request, _ = infer_request(message(inputs=[tensor(datatype=datatype, contents=contents(**{field: values}))]))
        assert request.inputs == [Tensor("I", DataType[datatype], (2,), expected.tobytes())]

    def test_typed_bytes(self) -> None:
        given = tensor(datatype="BYTES", contents=contents(bytes_contents=[b"", b"\xff\0"]))
        request, _ = infer_request(message(inputs=[given]))
        assert request.inputs[0].data == join_bytes_elements([b"", b"\xff\0"])

    @pytest.mark.parametrize("datatype", [t.value for t in DataType])
    def test_raw(self, datatype: str) -> None:
        request, _ = infer_request(message(inputs=[tensor(datatype=datatype)], raw_input_contents=[b"whatever"]))
        assert request.inputs == [Tensor("I", DataType[datatype], (2,), b"whatever")]

    def test_raw_in_the_order_of_the_inputs(self) -> None:
        inputs = [tensor("B"), tensor("A", shape=())]
        request, _ = infer_request(message(inputs=inputs, raw_input_contents=[b"b", b"a"]))
        assert [(t.name, t.shape, t.data) for t in request.inputs] == [("B", (2,), b"b"), ("A", (), b"a")]

    @pytest.mark.parametrize("datatype", [t.value for t in DataType])
    def test_an_empty_tensor_needs_no_contents(self, datatype: str) -> None:
        request, _ = infer_request(message(inputs=[tensor(datatype=datatype, shape=(2, 0))]))
        assert request.inputs[0].data == b""

    @pytest.mark.parametrize("datatype", [t.value for t in DataType])
    def test_neither(self, datatype: str) -> None:
        error = refusal(message(inputs=[tensor(datatype=datatype)]))
        assert isinstance(error, InvalidArgument)
        assert error.message == "unable to find data for input tensor 'I' for model 'm' in request."

    def test_raw_for_some_only(self) -> None:
        error = refusal(message(inputs=[tensor("A"), tensor("B")], raw_input_contents=[b"a"]))
        assert error.message == "unable to find data for input tensor 'B' for model 'm' in request."

    def test_raw_for_more_than_there_are(self) -> None:
        request, _ = infer_request(message(inputs=[tensor("A")], raw_input_contents=[b"a", b"b"]))
        assert [bytes(given.data) for given in request.inputs] == [b"a"]

    def test_both(self) -> None:
        given = tensor(contents=contents(int_contents=[1, 2]))
        assert refusal(message(inputs=[given], raw_input_contents=[b"a"])).message == (
            "contents field must not be specified when using raw_input_contents for 'I' for model 'm'"
        )

    @pytest.mark.parametrize(
        ("datatype", "field", "value", "named"),
        [
            ("INT32", "bool_contents", True, "BOOL"), ("INT64", "int_contents", 1, "INT32"),
            ("INT32", "int64_contents", 1, "INT64"), ("INT8", "uint_contents", 1, "UINT32"),
            ("UINT32", "uint64_contents", 1, "UINT64"), ("FP64", "fp32_contents", 1.0, "FP32"),
            ("FP16", "fp32_contents", 1.0, "FP32"), ("BF16", "fp64_contents", 1.0, "FP64"),
            ("FP32", "bytes_contents", b"", "BYTES"), ("BYTES", "int_contents", 1, "INT32"),
        ],
    )  # fmt: skip
    def test_contents_in_the_wrong_field(self, datatype: str, field: str, value: Any, named: str) -> None:
        error = refusal(message(inputs=[tensor(datatype=datatype, contents=contents(**{field: [value]}))]))
        assert error.message == (
            f"unexpected explicit tensor data for input tensor 'I' for model 'm' of type '{named}', expected datatype "
            f"'{datatype}'"
        )

    def test_a_second_field_beside_the_right_one(self) -> None:
        given = tensor(contents=contents(int_contents=[1, 2], fp32_contents=[1.0]))
        assert "for model 'm', binary data was already supplied." in refusal(message(inputs=[given])).message
        given = tensor("I", "FP32", contents=contents(int_contents=[1, 2], fp32_contents=[1.0]))
        assert "of type 'INT32', expected datatype 'FP32'" in refusal(message(inputs=[given])).message

    def test_shared_memory(self) -> None:
        def region(offset: int, size: int) -> Any:
            given = {"shared_memory_offset": {"int64_param": offset}, "shared_memory_byte_size": {"int64_param": size}}
            return parameters(**REGION, **given)

        request, _ = infer_request(
            message(
                inputs=[
                    tensor("A", parameters=region(8, 16)), tensor("B"), tensor("C", parameters=region(-1, -(2**63))),
                ],
                outputs=[
                    pb.ModelInferRequest.InferRequestedOutputTensor(name="O", parameters=parameters(**SIZED)),
                    pb.ModelInferRequest.InferRequestedOutputTensor(name="P"),
                ],
                raw_input_contents=[b"12345678"],
            )
        )  # fmt: skip
        assert [bytes(tensor.data) for tensor in request.inputs] == [b"", b"12345678", b""]
        assert request.outputs == ("O", "P")
        # negative numbers are read as Triton reads them: they are beyond every region
        read = {0: RegionPart("r", 8, 16), 2: RegionPart("r", 2**64 - 1, 2**63)}
        assert request.regions == RegionUse(read, {"O": RegionPart("r", 0, 4)})

    def test_shared_memory_and_other_data(self) -> None:
        given = tensor(parameters=parameters(**SIZED), contents=contents(int_contents=[1, 2]))
        assert refusal(message(inputs=[given])).message == (
            "unexpected 'content' provided when using shared memory for input tensor 'I' for model 'm'"
        )
        surplus = message(inputs=[tensor(parameters=parameters(**SIZED))], raw_input_contents=[b"1"])
        request, _ = infer_request(surplus)
        assert (bytes(request.inputs[0].data), list((request.regions or RegionUse({}, {})).inputs)) == (b"", [0])

    @pytest.mark.parametrize(("values", "text"), WRONG_REGIONS)
    def test_wrong_words_about_shared_memory(self, values: dict[str, Any], text: str) -> None:
        output = pb.ModelInferRequest.InferRequestedOutputTensor(name="I", parameters=parameters(**values))
        for wrong in (message(inputs=[tensor(parameters=parameters(**values))]), message(outputs=[output])):
            error = refusal(wrong)
            assert (type(error), error.message) == (InvalidArgument, text)

    def test_an_unknown_datatype(self) -> None:
        assert refusal(message(inputs=[tensor(datatype="FP8")])).message.startswith("invalid datatype 'FP8'")

    def test_hostile_shapes(self) -> None:
        assert refusal(message(inputs=[tensor(shape=(1,) * 65)])).message == (
            "invalid shape for input 'I': 65 dimensions, at most 64 are supported"
        )
        for shape in ((-1,), (2**62, 4)):  # without data; with data, admission judges them
            assert refusal(message(inputs=[tensor(shape=shape)])).message == (
                "unable to find data for input tensor 'I' for model 'm' in request."
            )


class TestParameters:
    def test_all_that_have_a_place(self) -> None:
        request, classes = infer_request(
            message(
                id="r",
                parameters=parameters(
                    sequence_id={"int64_param": 5}, sequence_start={"bool_param": True},
                    sequence_end={"bool_param": True}, priority={"uint64_param": 2**64 - 1},
                    timeout={"int64_param": 7}, charonia_deadline_us={"int64_param": 9},
                    triton_enable_empty_final_response={"bool_param": True},
                    binary_data_output={"bool_param": True}, headers={"string_param": "h"},
                    a={"int64_param": -1}, b={"bool_param": False}, c={"string_param": ""}, d={"double_param": 0.5},
                ),
            ),
            3,
        )  # fmt: skip
        own = {"binary_data_output": True, "headers": "h", "a": -1, "b": False, "c": "", "d": 0.5}
        assert request == InferenceRequest("m", 3, [], "r", (), own, 2**64 - 1, 7, 9000, 5, True, True)
        assert not classes
        assert type(request.parameters["b"]) is bool

    @pytest.mark.parametrize(
        ("value", "expected"), [({"uint64_param": 2**63}, 2**63), ({"string_param": "s"}, "s"), ({"int64_param": 0}, 0)]
    )
    def test_sequence_ids(self, value: dict[str, Any], expected: int | str) -> None:
        assert infer_request(message(parameters=parameters(sequence_id=value)))[0].sequence_id == expected

    @pytest.mark.parametrize(("value", "expected"), [(True, {"charonia_receipt": True}), (False, {})])
    def test_receipts(self, value: bool, expected: dict[str, bool]) -> None:
        request, _ = infer_request(message(parameters=parameters(charonia_receipt={"bool_param": value})))
        assert request.parameters == expected

    def test_times_out_of_range(self) -> None:
        given = parameters(timeout={"int64_param": -1}, charonia_deadline_us={"int64_param": 2**63 - 1})
        request, _ = infer_request(message(parameters=given))
        assert (request.timeout_us, request.deadline_ns) == (0, 2**63 - 1)

    @pytest.mark.parametrize(
        ("key", "value", "text"),
        [
            ("sequence_id", {"double_param": 1.0},
             "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."),
            ("sequence_id", {},
             "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."),
            ("sequence_start", {"int64_param": 1},
             "invalid value type for 'sequence_start' parameter, expected bool_param."),
            ("sequence_end", {"string_param": "true"},
             "invalid value type for 'sequence_end' parameter, expected bool_param."),
            ("priority", {"bool_param": True},
             "invalid value type for 'priority' parameter, expected int64_param or uint64_param."),
            ("priority", {"int64_param": -1}, "invalid value for 'priority', expected value >= 0."),
            ("timeout", {"uint64_param": 1}, "invalid value type for 'timeout' parameter, expected int64_param."),
            ("charonia_deadline_us", {"string_param": "1"},
             "invalid value type for 'charonia_deadline_us' parameter, expected int64_param."),
            ("charonia_deadline_us", {"int64_param": -1}, "'charonia_deadline_us' must be a whole number of 0 or more"),
            ("triton_enable_empty_final_response", {"int64_param": 1},
             "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param."),
            ("charonia_receipt", {"string_param": "true"},
             "invalid value type for 'charonia_receipt' parameter, expected bool_param."),
            ("own", {"uint64_param": 1},
             "invalid value type for 'own' parameter, expected int64_param, bool_param, or string_param."),
            ("own", {}, "invalid value type for 'own' parameter, expected int64_param, bool_param, or string_param."),
            ("triton_own", {"int64_param": 1},
             "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
             "with 'triton_' are allowed: triton_enable_empty_final_response"),
        ],
    )  # fmt: skip
    def test_refusals(self, key: str, value: dict[str, Any], text: str) -> None:
        error = refusal(message(parameters=parameters(**{key: value})))
        assert (type(error), error.message) == (InvalidArgument, text)

    def test_an_id_that_no_record_can_carry(self) -> None:
        assert refusal(message(id="x" * (MAX_CLIENT_ID_BYTES + 1))).message.startswith("request id of ")


class TestOutputs:
    @staticmethod
    def output(name: str, **values: Any) -> Any:
        return pb.ModelInferRequest.InferRequestedOutputTensor(name=name, parameters=parameters(**values))

    def test_names_in_order_and_classes(self) -> None:
        request, classes = infer_request(
            message(
                outputs=[
                    self.output("B", classification={"int64_param": 3}),
                    self.output("A", binary_data={"string_param": ""}),
                    self.output("C"),
                ]
            )
        )  # fmt: skip
        assert request.outputs == ("B", "A", "C")
        assert classes == {"B": 3}

    @pytest.mark.parametrize(
        ("values", "error", "text"),
        [
            ({"classification": {"string_param": "1"}}, InvalidArgument,
             "invalid value type for 'classification' parameter, expected int64_param"),
            *(({"classification": {"int64_param": count}}, InvalidArgument,
               "invalid value for 'classification' parameter, expected >= 0") for count in (-1, 0)),
            (REGION, InvalidArgument,
             "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'A'"),
            ({**SIZED, "classification": {"int64_param": 1}}, InvalidArgument,
             "output can't set both 'shared_memory_region' and 'classification'"),
        ],
    )  # fmt: skip
    def test_refusals(self, values: dict[str, Any], error: type[CharoniaError], text: str) -> None:
        found = refusal(message(outputs=[self.output("A", **values)]))
        assert (type(found), found.message) == (error, text)


class TestReplies:
    def reply(self, served: Any, *outputs: Tensor, classes: dict[str, int] | None = None, **members: Any) -> Any:
        encoder = ResponseEncoder()
        response = InferenceResponse("simple", 1, list(outputs), **members)
        first = encoder.encode(response, classes or {}, served("simple"))
        assert encoder.encode(response, classes or {}, served("simple")) == first  # from memory
        return pb.ModelInferResponse.FromString(first)

    def test_one_raw_entry_per_output(self, served: Callable[[str], Any]) -> None:
        outputs = [
            Tensor("A", DataType.FP32, (1, 2), b"12345678"), Tensor("B", DataType.BYTES, (0,), b""),
            Tensor("C", DataType.UINT8, (300,), memoryview(b"x" * 300)),
        ]  # fmt: skip
        found = self.reply(served, *outputs, id="r" * 200)
        written = pb.ModelInferResponse.InferOutputTensor
        assert found == pb.ModelInferResponse(
            model_name="simple", model_version="1", id="r" * 200,
            outputs=[
                written(name="A", datatype="FP32", shape=[1, 2]), written(name="B", datatype="BYTES", shape=[0]),
                written(name="C", datatype="UINT8", shape=[300]),
            ],
            raw_output_contents=[b"12345678", b"", b"x" * 300],
        )  # fmt: skip
        assert not any(output.HasField("contents") for output in found.outputs)

    def test_parameters_by_their_type(self, served: Callable[[str], Any]) -> None:
        given = {"a": True, "b": -5, "c": 0.5, "d": "x", "e": 2**64 - 1}
        found = self.reply(served, parameters=given)
        kinds = {key: value.WhichOneof("parameter_choice") for key, value in found.parameters.items()}
        assert kinds == {
            "a": "bool_param", "b": "int64_param", "c": "double_param", "d": "string_param", "e": "uint64_param",
        }  # fmt: skip
        assert {key: getattr(found.parameters[key], kind) for key, kind in kinds.items()} == given

    def test_parameters_are_not_remembered(self, served: Callable[[str], Any]) -> None:
        encoder = ResponseEncoder()
        for given in ({"a": 1}, {}, {"a": 2}):
            data = encoder.encode(InferenceResponse("m", 1, [], parameters=dict(given)), {}, served("simple"))
            found = pb.ModelInferResponse.FromString(data).parameters
            assert {key: value.int64_param for key, value in found.items()} == given

    def test_classification(self, served: Callable[[str], Any], handler: Any) -> None:
        handler.labels = {"A": ["cat"]}
        outputs = [Tensor.of("A", np.array([[3.0, 1.0]], np.float32)), Tensor("B", DataType.UINT8, (1,), b"b")]
        found = self.reply(served, *outputs, classes={"A": 1})
        assert (found.outputs[0].datatype, list(found.outputs[0].shape)) == ("BYTES", [1, 1])
        assert list(found.raw_output_contents) == [join_bytes_elements([b"3.000000:0:cat"]), b"b"]

    def test_a_classification_that_cannot_be(self, served: Callable[[str], Any]) -> None:
        output = Tensor("A", DataType.BYTES, (1,), join_bytes_elements([b"x"]))
        with pytest.raises(InvalidArgument, match="class result not available for output due to unsupported type"):
            ResponseEncoder().encode(InferenceResponse("simple", 1, [output]), {"A": 1}, served("simple"))


def test_a_stream_answer_is_the_reply_that_is_final() -> None:
    reply = pb.ModelInferResponse(model_name="m", id="r", raw_output_contents=[b"x" * 500])
    reply.parameters["own"].bool_param = True
    found = pb.ModelStreamInferResponse.FromString(stream_answer(reply.SerializeToString()))
    reply.parameters["triton_final_response"].bool_param = True
    assert found == pb.ModelStreamInferResponse(infer_response=reply)


def test_a_stream_error_names_its_request() -> None:
    request = pb.ModelInferRequest(model_name="m", model_version="2", id="r")
    found = pb.ModelStreamInferResponse.FromString(stream_error(InternalError("went wrong"), request))
    assert found == pb.ModelStreamInferResponse(
        error_message="went wrong",
        infer_response=pb.ModelInferResponse(
            model_name="m", model_version="2", id="r", parameters=parameters(triton_final_response={"bool_param": True})
        ),
    )
