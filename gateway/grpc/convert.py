"""Converts `ModelInferRequest` and `ModelInferResponse` to and from neutral values (G4-G7, G18-G20).

Pure but for the clock, by which `RequestReader` makes a call's time-out a deadline.

Raw tensors stay bytes of the message. A reply is assembled from bytes: the part that replies with equal outputs share
is serialised once, then the request's id and the raw outputs are appended as fields (protobuf defines that as a merge).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from charonia.catalog.served import ServedVersion
from charonia.clock import wall_ns
from charonia.datatypes import CONTENTS_FIELDS, DataType
from charonia.errors import CharoniaError, InternalError, InvalidArgument
from charonia.inference import (
    LATEST_VERSION,
    MAX_DEADLINE_NS,
    NO_DEADLINE,
    RECEIPT,
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RegionPart,
    RegionUse,
    check_dimensions,
    check_parameter_name,
    check_request_id,
)
from charonia.tensors import MAX_ELEMENTS, Buffer, Tensor, join_bytes_elements
from gateway.access.restrictions import HeaderForwarding
from gateway.requests.classification import classified
from gateway.requests.preferences import PARAMETERS as DELIVERY_PARAMETERS
from protos import grpc_service_pb2 as pb

from .calling import Context, LargeReply, Reply, headers_of

EMPTY_FINAL = "triton_enable_empty_final_response"

# field of InferTensorContents -> (the type messages name it by, NumPy dtype the values are read as)
_FIELDS: dict[str, tuple[str, Any]] = {
    "bool_contents": ("BOOL", np.bool_),
    "int_contents": ("INT32", np.int32),
    "int64_contents": ("INT64", np.int64),
    "uint_contents": ("UINT32", np.uint32),
    "uint64_contents": ("UINT64", np.uint64),
    "fp32_contents": ("FP32", np.float32),
    "fp64_contents": ("FP64", np.float64),
    "bytes_contents": ("BYTES", None),
}
TAG_ID = b"\x1a"  # field 3, length-delimited
TAG_RAW_OUTPUT = b"\x32"  # field 6, length-delimited
TAG_INFER_RESPONSE = b"\x12"  # field 2 of ModelStreamInferResponse, length-delimited
_FINAL, _NOT_FINAL = (
    pb.ModelInferResponse(parameters={"triton_final_response": pb.InferParameter(bool_param=final)}).SerializeToString()
    for final in (True, False)
)
_SIGNATURES_REMEMBERED = 1024
_UNSIGNED = 2**64
_UNCOPIED_BYTES = 65_536
"""Up to this size copying a tensor costs less than sending it by itself."""

Classes = dict[str, int]


def parse(kind: Any, data: bytes | memoryview) -> Any:
    """The message in `data`. Raises `InternalError`, the code of gRPC's own servers for it (E4)."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InternalError(f"failed to parse the {kind.DESCRIPTOR.name} message") from None


def infer_request(
    message: pb.ModelInferRequest, version: int = LATEST_VERSION, raw: Sequence[Buffer] = ()
) -> tuple[InferenceRequest, Classes]:
    """The request, and the number of classes wanted of each output. Raises the error of the first mistake (G18, G20).

    `raw` are the message's raw tensors if `envelope` has split them off. As in Triton, those that no input takes are
    ignored: some clients send an empty one for each input in shared memory.
    """
    raw = raw or message.raw_input_contents
    model = message.model_name
    tensors: list[Tensor] = []
    read: dict[int, RegionPart] = {}
    position = 0
    for at, item in enumerate(message.inputs):
        shape = tuple(item.shape)
        check_dimensions(item.name, len(shape))
        part = _region_part(item) if item.parameters else None
        datatype = DataType.of(item.datatype)
        data: Buffer
        if part is not None:
            if item.HasField("contents"):
                raise InvalidArgument(
                    f"unexpected 'content' provided when using shared memory for input tensor '{item.name}' for model "
                    f"'{model}'"
                )
            read[at] = part
            data = b""
        elif raw:
            if item.HasField("contents"):
                raise InvalidArgument(
                    f"contents field must not be specified when using raw_input_contents for '{item.name}' for model "
                    f"'{model}'"
                )
            if position >= len(raw):
                raise InvalidArgument(
                    f"unable to find data for input tensor '{item.name}' for model '{model}' in request."
                )
            data = raw[position]
            position += 1
        else:
            data = _typed(item, datatype, shape, model)
        tensors.append(Tensor(item.name, datatype, shape, data))
    request = InferenceRequest(model, version, tensors, id=message.id)
    if message.id:
        check_request_id(message.id)
    if message.parameters:
        _parameters(request, message.parameters)
    classes: Classes = {}
    written: dict[str, RegionPart] = {}
    if message.outputs:
        request.outputs = _outputs(message, classes, written)
    if read or written:
        request.regions = RegionUse(read, written)
    return request, classes


class CountedTensors(list[Buffer]):
    """Raw tensors of a message whose BYTES elements are counted already."""

    def __init__(self, tensors: Iterable[Buffer], elements: dict[str, str]) -> None:
        super().__init__(tensors)
        self.elements = elements
        """The faults found, as `InferenceRequest.elements`."""


class RequestReader:
    """Makes requests of messages and of what their calls say. Where there are `routes`, these may need headers."""

    def __init__(self, forwarding: HeaderForwarding, routes: Sized) -> None:
        self._forwarding = forwarding
        self._routes = routes

    def read(
        self, message: pb.ModelInferRequest, served: ServedVersion, context: Context, raw: Sequence[Buffer] = ()
    ) -> tuple[InferenceRequest, Classes, int]:
        """The request, the classes wanted of it, and the deadline of its call (wall clock, ns; 0 for none)."""
        # the version as requested: a retry with an idempotency key is the same request after a newer version was loaded
        version = LATEST_VERSION if not message.model_version else served.version
        request, classes = infer_request(message, version, raw)
        request.served = served
        if self._routes:
            request.headers = headers_of(context)
        if isinstance(raw, CountedTensors):
            request.elements = raw.elements
        if self._forwarding.any:
            self._forwarding.forward(headers_of(context), request.parameters)
        remaining_s = context.time_remaining()
        deadline_ns = 0 if remaining_s is None else min(wall_ns() + int(remaining_s * 1e9), MAX_DEADLINE_NS)
        return request, classes, deadline_ns


def _region_part(item: Any) -> RegionPart | None:
    """The part of shared memory that holds a tensor, by its parameters (H49); None if it is not in shared memory.

    Negative numbers become unsigned 64-bit numbers, which are out of bounds.
    """
    parameters = item.parameters
    if "shared_memory_region" in parameters:
        region = _tensor_parameter(item, "shared_memory_region", "string_param")
        offset = _tensor_parameter(item, "shared_memory_offset", "int64_param") or 0
        size = _tensor_parameter(item, "shared_memory_byte_size", "int64_param")
        if size is None:
            raise InvalidArgument(
                "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
                f"'{item.name}'"
            )
        return RegionPart(region, offset % _UNSIGNED, size % _UNSIGNED)
    for key in ("shared_memory_offset", "shared_memory_byte_size"):
        if key in parameters:
            raise InvalidArgument(
                f"'{key}' can not be specified without 'shared_memory_region' parameter for tensor '{item.name}'"
            )
    return None


def _tensor_parameter(item: Any, key: str, expected: str) -> Any:
    if key not in item.parameters:
        return None
    parameter = item.parameters[key]
    if parameter.WhichOneof("parameter_choice") != expected:
        raise InvalidArgument(
            f"invalid value type for '{key}' parameter for tensor '{item.name}', expected {expected}."
        )
    return getattr(parameter, expected)


def _typed(item: Any, datatype: DataType, shape: tuple[int, ...], model: str) -> bytes:
    """The raw encoding of typed contents (G5, G18); values out of the type's range wrap."""
    field = CONTENTS_FIELDS.get(datatype, "")
    contents = item.contents
    supplied = False
    for name, (type_name, _) in _FIELDS.items():
        if not len(getattr(contents, name)):
            continue
        if name != field or supplied:
            why = (
                ", binary data was already supplied."
                if supplied
                else f" of type '{type_name}', expected datatype '{datatype.value}'"
            )
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{item.name}' for model '{model}'{why}"
            )
        supplied = True
    values = getattr(contents, field) if field else ()
    if not len(values):
        if 0 in shape:
            return b""
        raise InvalidArgument(f"unable to find data for input tensor '{item.name}' for model '{model}' in request.")
    if datatype is DataType.BYTES:
        return join_bytes_elements(values)
    array = np.array(values, dtype=_FIELDS[field][1])
    return array.astype(datatype.numpy, copy=False).tobytes()


def _parameters(request: InferenceRequest, parameters: Any) -> None:
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        value = getattr(parameter, kind) if kind else None
        match key:
            case "sequence_id":
                if kind not in ("int64_param", "uint64_param", "string_param"):
                    raise InvalidArgument(
                        "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."
                    )
                request.sequence_id = value  # type: ignore[assignment]
            case "sequence_start":
                request.sequence_start = _typed_parameter(key, kind, value, "bool_param")
            case "sequence_end":
                request.sequence_end = _typed_parameter(key, kind, value, "bool_param")
            case "priority":
                if kind not in ("int64_param", "uint64_param"):
                    raise InvalidArgument(
                        "invalid value type for 'priority' parameter, expected int64_param or uint64_param."
                    )
                if value < 0:  # type: ignore[operator]
                    raise InvalidArgument("invalid value for 'priority', expected value >= 0.")
                request.priority = value  # type: ignore[assignment]
            case "timeout":
                request.timeout_us = max(0, _typed_parameter(key, kind, value, "int64_param"))
            case "charonia_deadline_us":
                micros = _typed_parameter(key, kind, value, "int64_param")
                if micros < 0:
                    raise InvalidArgument(NO_DEADLINE)
                request.deadline_ns = min(micros * 1000, MAX_DEADLINE_NS)
            case _ if key in DELIVERY_PARAMETERS:
                continue  # `job_calls` reads them
            case _ if key == EMPTY_FINAL:
                _typed_parameter(key, kind, value, "bool_param")
            case _ if key == RECEIPT:
                if _typed_parameter(key, kind, value, "bool_param"):
                    request.parameters[key] = True
            case _ if key.startswith("triton_"):
                raise InvalidArgument(
                    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                    f"starting with 'triton_' are allowed: {EMPTY_FINAL}"
                )
            case _:
                check_parameter_name(key)
                if kind not in ("int64_param", "bool_param", "string_param", "double_param"):
                    raise InvalidArgument(
                        f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param."
                    )
                request.parameters[key] = value  # type: ignore[assignment]


def _typed_parameter(key: str, kind: str | None, value: Any, expected: str) -> Any:
    if kind != expected:
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {expected}.")
    return value


def _outputs(message: pb.ModelInferRequest, classes: Classes, written: dict[str, RegionPart]) -> tuple[str, ...]:
    """The requested outputs. Adds the classes wanted of outputs to `classes`, and their shared memory to `written`."""
    names: list[str] = []
    for item in message.outputs:
        names.append(item.name)
        parameters = item.parameters
        if not parameters:
            continue
        part = _region_part(item)
        if "classification" in parameters:
            parameter = parameters["classification"]
            kind = parameter.WhichOneof("parameter_choice")
            if kind != "int64_param":
                raise InvalidArgument("invalid value type for 'classification' parameter, expected int64_param")
            if parameter.int64_param <= 0:  # 0 as well, whatever the text says
                raise InvalidArgument("invalid value for 'classification' parameter, expected >= 0")
            classes[item.name] = parameter.int64_param
        if part is not None:
            if "classification" in parameters:
                raise InvalidArgument("output can't set both 'shared_memory_region' and 'classification'")
            written[item.name] = part
    return tuple(names)


class ResponseEncoder:
    """Writes replies; one per front, with its cache of the parts that replies with equal outputs share."""

    def __init__(self) -> None:
        self._shared: dict[Any, bytes] = {}

    def encode(self, response: InferenceResponse, classes: Classes, served: ServedVersion | None) -> bytes:
        """A serialised `ModelInferResponse` (G7, G19). Raises H19's errors for outputs without classes."""
        return b"".join(self._parts(response, classes, served))

    def reply(self, response: InferenceResponse, classes: Classes, served: ServedVersion) -> Reply:
        """As `encode`, without copying large tensors."""
        parts = self._parts(response, classes, served)
        if max(map(len, parts)) < _UNCOPIED_BYTES:
            return b"".join(parts)
        return LargeReply(parts)

    def _parts(self, response: InferenceResponse, classes: Classes, served: ServedVersion | None) -> list[Buffer]:
        outputs = response.outputs
        if classes and served is not None:
            outputs = classified(outputs, classes, served.interface.batching, served.labels)
        shared = self.shared(response, outputs)
        parts: list[Buffer] = [shared]
        if response.id:
            text = response.id.encode()
            parts += (TAG_ID, varint(len(text)), text)
        for tensor in outputs:
            parts += (TAG_RAW_OUTPUT, varint(len(tensor.data)), tensor.data)
        return parts

    def shared(self, response: InferenceResponse, outputs: list[Tensor]) -> bytes:
        """The first part of a reply: all of it but the id and the raw outputs, which follow in this order."""
        key = (response.model, response.version, tuple([(t.name, t.datatype.number, t.shape) for t in outputs]))
        found = self._shared.get(key) if not response.parameters else None
        if found is None:
            found = _message(response, outputs).SerializeToString()
            if not response.parameters:
                if len(self._shared) >= _SIGNATURES_REMEMBERED:
                    self._shared.clear()
                self._shared[key] = found
        return found


def stream_answer(reply: Reply, *, final: bool = True) -> Reply:
    """A serialised `ModelStreamInferResponse` of a serialised reply; `final` if it is its request's last (G8, G24)."""
    flag = _FINAL if final else _NOT_FINAL
    before = TAG_INFER_RESPONSE + varint(len(reply) + len(flag))
    if isinstance(reply, bytes):
        return b"".join((before, reply, flag))
    return LargeReply((before, *reply.parts, flag))


def flag_reply(request: pb.ModelInferRequest) -> bytes:
    """The serialised reply that only says that there are no more responses; its version is as requested (G24)."""
    reply = pb.ModelInferResponse(id=request.id, model_name=request.model_name, model_version=request.model_version)
    return reply.SerializeToString()


def stream_error(error: CharoniaError, request: pb.ModelInferRequest, *, final: bool = True) -> bytes:
    """A serialised in-band error, with id and model of its request; `final` if no more responses follow (G22, G24)."""
    answer = pb.ModelStreamInferResponse(error_message=error.message)
    answer.infer_response.id = request.id
    answer.infer_response.model_name = request.model_name
    answer.infer_response.model_version = request.model_version
    answer.infer_response.parameters["triton_final_response"].bool_param = final
    if error.receipt:
        answer.infer_response.parameters[RECEIPT].string_param = error.receipt
    return answer.SerializeToString()


def _message(response: InferenceResponse, outputs: list[Tensor]) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse(model_name=response.model, model_version=str(response.version))
    write_parameters(message.parameters, response.parameters)
    for tensor in outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
    return message


def write_parameters(target: Any, parameters: Parameters) -> None:
    """Write response parameters by their type (H23)."""
    for key, value in parameters.items():
        if isinstance(value, bool):
            target[key].bool_param = value
        elif isinstance(value, int) and value > MAX_ELEMENTS:
            target[key].uint64_param = value
        elif isinstance(value, int):
            target[key].int64_param = value
        elif isinstance(value, float):
            target[key].double_param = value
        else:
            target[key].string_param = value


def varint(number: int) -> bytes:
    """A number as protobuf's varint."""
    if number < 128:
        return _SMALL[number]
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


_SMALL = [bytes([number]) for number in range(128)]
