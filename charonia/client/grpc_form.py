"""Requests as gRPC messages and messages as results; jobs by the parameters of `ModelInfer` (docs/jobs.md). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from google.protobuf.json_format import MessageToDict

from charonia.datatypes import CONTENTS_FIELDS, DataType
from charonia.errors import (
    AlreadyExists,
    Cancelled,
    CharoniaError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KeyReused,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    StreamInterrupted,
    Unauthenticated,
    UnknownError,
    Unsupported,
)
from charonia.tensors import Tensor
from protos import grpc_service_pb2 as pb

from .procedures import MAX_WAIT_S, Exchange
from .results import (
    EMPTY_FINAL,
    FINAL,
    ConnectionLost,
    Incomprehensible,
    Inference,
    JobEvent,
    JobStatus,
    NotConnected,
    ParameterValue,
    Refused,
    Result,
    SharedArray,
    checked,
    packed,
    region_parameters,
    shared_tensor,
)

_SERVICE = "/inference.GRPCInferenceService/"
_JOB_ID, _WAIT, _CANCEL = "charonia_job_id", "charonia_wait_s", "charonia_cancel"
_ATTEMPT, _INDEX, _AFTER_INDEX = "charonia_attempt", "charonia_index", "charonia_after_index"
_STATE = "charonia_job_state"
_EMPTY_RESPONSE = "charonia_empty_response"
_NEVER_CONNECTED = "failed to connect to all addresses"
"""How gRPC's core begins the details of a call for which no connection could be made."""
_NO_TARGETS: Mapping[str, SharedArray] = MappingProxyType({})
_UNAVAILABLE, _RESOURCE_EXHAUSTED = 14, 8

_RECEIPT = "charonia_receipt"
_ERRORS: dict[int, type[CharoniaError]] = {
    1: Cancelled,
    3: InvalidArgument,
    4: DeadlineExceeded,
    5: NotFound,
    6: AlreadyExists,
    7: PermissionDenied,
    9: KeyReused,
    12: Unsupported,
    13: InternalError,
    16: Unauthenticated,
}
"""The other way round of `gateway.grpc.statuses`."""


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """`method` is its full name, `answer` the class of the answer's message."""

    method: str
    message: Any
    answer: Any
    metadata: tuple[tuple[str, str], ...] = field(default=())


class GrpcForm:
    """The requests of one client."""

    always_binary = True
    beats = False
    binary = True

    # -- questions that change nothing ---------------------------------------------------------------------------------

    def live(self) -> Exchange[bool]:
        call = GrpcCall(f"{_SERVICE}ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse)
        return Exchange(call, lambda answer: bool(answer.live))

    def ready(self, model: str, version: str) -> Exchange[bool]:
        call = GrpcCall(f"{_SERVICE}ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)
        if model:
            message = pb.ModelReadyRequest(name=model, version=version)
            call = GrpcCall(f"{_SERVICE}ModelReady", message, pb.ModelReadyResponse)
        return Exchange(call, lambda answer: bool(answer.ready))

    def metadata(self, model: str, version: str) -> Exchange[dict[str, Any]]:
        call = GrpcCall(f"{_SERVICE}ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)
        if model:
            message = pb.ModelMetadataRequest(name=model, version=version)
            call = GrpcCall(f"{_SERVICE}ModelMetadata", message, pb.ModelMetadataResponse)
        return Exchange(call, plain)

    def config(self, model: str, version: str) -> Exchange[dict[str, Any]]:
        message = pb.ModelConfigRequest(name=model, version=version)
        call = GrpcCall(f"{_SERVICE}ModelConfig", message, pb.ModelConfigResponse)
        return Exchange(call, lambda answer: MessageToDict(answer.config, preserving_proto_field_name=True))

    def index(self) -> Exchange[list[dict[str, Any]]]:
        call = GrpcCall(f"{_SERVICE}RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return Exchange(call, lambda answer: [plain(model) for model in answer.models])

    def statistics(self, model: str, version: str) -> Exchange[list[dict[str, Any]]]:
        message = pb.ModelStatisticsRequest(name=model, version=version)
        call = GrpcCall(f"{_SERVICE}ModelStatistics", message, pb.ModelStatisticsResponse)
        return Exchange(call, lambda answer: [plain(model) for model in answer.model_stats])

    def register(self, region: str, key: str, size_bytes: int) -> Exchange[object]:
        message = pb.SystemSharedMemoryRegisterRequest(name=region, key=key, byte_size=size_bytes)
        call = GrpcCall(f"{_SERVICE}SystemSharedMemoryRegister", message, pb.SystemSharedMemoryRegisterResponse)
        return Exchange(call, _same)

    def unregister(self, region: str) -> Exchange[object]:
        message = pb.SystemSharedMemoryUnregisterRequest(name=region)
        call = GrpcCall(f"{_SERVICE}SystemSharedMemoryUnregister", message, pb.SystemSharedMemoryUnregisterResponse)
        return Exchange(call, _same)

    def probe(self, job_id: str) -> Exchange[object]:
        return Exchange(_infer_call(_about_job(job_id)), lambda answer: answer)

    # -- inference -----------------------------------------------------------------------------------------------------

    def infer(self, inference: Inference, left_s: float | None) -> Exchange[Result]:
        metadata = (("idempotency-key", inference.key),) if inference.key else ()
        return Exchange(
            _infer_call(write_inference(inference), metadata), lambda answer: read_result(answer, inference.targets)
        )

    def submit(self, inference: Inference, left_s: float | None) -> Exchange[JobStatus]:
        """A call's own deadline does not bind a job that is answered later, so its time is said in metadata."""
        metadata = [("prefer", "respond-async"), ("idempotency-key", inference.key)]
        if left_s is not None:
            metadata.append(("charonia-timeout-ms", str(max(1, int(left_s * 1000)))))
        return Exchange(_infer_call(write_inference(inference), metadata), _read_status)

    def stream(self, inference: Inference, left_s: float | None) -> Exchange[Result | None]:
        """All that comes is shown: the server sends the flag alone only where the request asks for it (G24)."""
        return Exchange(
            _stream_call(write_inference(inference)), lambda answer: read_result(_streamed(answer), inference.targets)
        )

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Exchange[JobStatus]:
        raise Unsupported("the state of a job is shown over HTTP only: make the client with the server's HTTP address")

    def cancel(self, job_id: str) -> Exchange[JobStatus]:
        message = _about_job(job_id)
        message.parameters[_CANCEL].bool_param = True
        return Exchange(_infer_call(message), _read_status)

    def results(self, job_id: str, wait_s: float) -> Exchange[JobStatus | list[Result]]:
        def read(answer: Any) -> JobStatus | list[Result]:
            return _read_status(answer) if _STATE in answer.parameters else [read_result(answer)]

        return Exchange(_infer_call(_about_job(job_id, wait_s)), read)

    def events(self, job_id: str, place: str) -> Exchange[JobEvent | None]:
        raise Unsupported("the events of a job are sent over HTTP only: make the client with the server's HTTP address")

    def responses(self, job_id: str, place: str) -> Exchange[JobEvent | None]:
        """Those behind `place`, the index of the last one seen. The job of a model that answers once is fetched."""

        def read(answer: Any) -> JobEvent | None:
            response = _streamed(answer)
            if _STATE in response.parameters:
                return JobEvent(place, "waiting")
            result = read_result(response)
            index = result.place[1] if result.place else 0
            final = result.parameters.get(FINAL) is True
            is_flag = final and not (result.tensors or _EMPTY_RESPONSE in result.parameters)
            return JobEvent(str(index), "response", response=None if is_flag else result, final=final)

        message = _about_job(job_id, MAX_WAIT_S)
        message.parameters[EMPTY_FINAL].bool_param = True
        if place:
            message.parameters[_AFTER_INDEX].int64_param = int(place)
        return Exchange(_stream_call(message), read)


# -- requests ----------------------------------------------------------------------------------------------------------


def write_inference(inference: Inference) -> Any:
    """The message of an inference, tensors in raw form."""
    message = pb.ModelInferRequest(model_name=inference.model, model_version=inference.version, id=inference.request_id)
    for name, value in inference.parameters.items():
        _set(message.parameters[name], value)
    if inference.priority:
        message.parameters["priority"].uint64_param = inference.priority
    for tensor in inference.inputs:
        described = message.inputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
        if tensor.name in inference.places:
            _place(described, inference.places[tensor.name])
        else:
            message.raw_input_contents.append(bytes(tensor.data))
    for name, classes in inference.outputs.items():
        output = message.outputs.add(name=name)
        if classes:
            output.parameters["classification"].int64_param = classes
        if name in inference.targets:
            _place(output, inference.targets[name])
    return message


def _place(described: Any, place: SharedArray) -> None:
    for name, value in region_parameters(place).items():
        _set(described.parameters[name], value)


def _set(parameter: Any, value: ParameterValue) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    elif value < 2**63:
        parameter.int64_param = value
    else:
        parameter.uint64_param = value


def _about_job(job_id: str, wait_s: float | None = None) -> Any:
    message = pb.ModelInferRequest()
    message.parameters[_JOB_ID].string_param = job_id
    if wait_s is not None:
        message.parameters[_WAIT].double_param = wait_s
    return message


def _infer_call(message: Any, metadata: Iterable[tuple[str, str]] = ()) -> GrpcCall:
    return GrpcCall(f"{_SERVICE}ModelInfer", message, pb.ModelInferResponse, tuple(metadata))


def _stream_call(message: Any) -> GrpcCall:
    """Errors come in-band. Triton would end the stream with the first one's status if asked to (`triton_grpc_error`),
    and its 2.51 crashes when the model then answers again."""
    return GrpcCall(f"{_SERVICE}ModelStreamInfer", message, pb.ModelStreamInferResponse)


# -- answers -----------------------------------------------------------------------------------------------------------


def error_of(status: int, details: str, trailers: Mapping[str, str]) -> CharoniaError:
    """The error of a call that ended with a status."""
    error = _error_of(status, details, trailers)
    error.receipt = trailers.get("charonia-receipt", "")
    return error


def _error_of(status: int, details: str, trailers: Mapping[str, str]) -> CharoniaError:
    retry_after_s = int(trailers["retry-after-ms"]) / 1000 if trailers.get("retry-after-ms", "").isdigit() else None
    if status == _UNAVAILABLE:
        if details.startswith(StreamInterrupted.PREFIX):
            return StreamInterrupted(details)
        if details.startswith(_NEVER_CONNECTED):
            return NotConnected(details)
        return ConnectionLost(details) if retry_after_s is None else Refused(details, retry_after_s)
    if status == _RESOURCE_EXHAUSTED:
        exhausted = ResourceExhausted(details)
        exhausted.retry_after_s = 0 if retry_after_s is None else max(1, round(retry_after_s))
        return exhausted
    return _ERRORS.get(status, UnknownError)(details)


def read_result(response: Any, targets: Mapping[str, SharedArray] = _NO_TARGETS) -> Result:
    """The result of a `ModelInferResponse`, with outputs that were sent to `targets`. Raises `Incomprehensible`."""
    raw = response.raw_output_contents
    if len(raw) not in (0, len(response.outputs)):
        raise Incomprehensible(f"the answer has {len(response.outputs)} outputs and the bytes of {len(raw)}")
    tensors = []
    for number, output in enumerate(response.outputs):
        try:
            datatype = DataType.of(output.datatype)
        except InvalidArgument as error:
            raise Incomprehensible(f"output '{output.name}': {error}") from None
        shape = tuple(output.shape)
        if output.name in targets:
            tensors.append(shared_tensor(output.name, datatype, shape, targets[output.name]))
        else:
            tensors.append(Tensor(output.name, datatype, shape, raw[number] if len(raw) else _raw(output, datatype)))
    parameters = {name: _value(parameter) for name, parameter in response.parameters.items()}
    try:
        place = (int(parameters[_ATTEMPT]), int(parameters[_INDEX])) if _INDEX in parameters else None
    except (KeyError, ValueError, OverflowError):
        raise Incomprehensible(f"the answer has the parameters {parameters}") from None
    return Result(response.model_name, response.model_version, response.id, checked(tensors), parameters, place)


def _raw(output: Any, datatype: DataType) -> Any:
    """The raw bytes of typed contents, which other servers answer with."""
    name = CONTENTS_FIELDS.get(datatype)
    return packed(output.name, datatype, list(getattr(output.contents, name)) if name else [])


def _value(parameter: Any) -> ParameterValue:
    kind = parameter.WhichOneof("parameter_choice")
    value: ParameterValue = getattr(parameter, kind) if kind else ""
    return value


def _streamed(answer: Any) -> Any:
    if answer.error_message:
        error = UnknownError(answer.error_message)
        parameters = answer.infer_response.parameters
        error.receipt = parameters[_RECEIPT].string_param if _RECEIPT in parameters else ""
        raise error
    return answer.infer_response


def _read_status(response: Any) -> JobStatus:
    parameters = {name: _value(parameter) for name, parameter in response.parameters.items()}
    if _JOB_ID not in parameters or _STATE not in parameters:
        raise Incomprehensible("a job was asked for, and the answer is none")
    words = {name.removeprefix("charonia_"): value for name, value in parameters.items()}
    words |= {"id": words.pop("job_id"), "state": words.pop("job_state"), "model_name": response.model_name}
    return JobStatus(str(words["id"]), str(words["state"]), words)


def plain(message: Any) -> dict[str, Any]:
    """A message as its JSON form has it over HTTP, 64-bit numbers as numbers."""
    found: dict[str, Any] = {}
    for described in message.DESCRIPTOR.fields:
        value = getattr(message, described.name)
        convert: Callable[[Any], Any] = plain if described.message_type else _same
        if described.message_type and described.message_type.GetOptions().map_entry:
            is_message = described.message_type.fields_by_name["value"].message_type
            found[described.name] = {key: plain(item) if is_message else item for key, item in value.items()}
        elif described.is_repeated:
            found[described.name] = [convert(item) for item in value]
        else:
            found[described.name] = convert(value)
    return found


def _same(value: Any) -> Any:
    return value
