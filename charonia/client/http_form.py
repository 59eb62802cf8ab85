"""Requests as HTTP calls and HTTP answers as results: JSON with the binary extension, jobs, events. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from charonia.datatypes import DataType
from charonia.errors import (
    CANCELLED,
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
    Unavailable,
    UnknownError,
    Unsupported,
)
from charonia.tensors import Tensor

from .procedures import Exchange
from .results import (
    FINAL,
    OVER,
    ConnectionLost,
    Incomprehensible,
    Inference,
    JobEvent,
    JobStatus,
    Refused,
    Result,
    SharedArray,
    checked,
    packed,
    region_parameters,
    shared_tensor,
)

T = TypeVar("T")

_HEADER_LENGTH = "inference-header-content-length"
_MAX_ERROR_CHARACTERS = 400
_LONGEST_S = 86_400.0
_NO_BYTES = memoryview(b"")
_NO_TARGETS: Mapping[str, SharedArray] = MappingProxyType({})

_RECEIPT = "charonia_receipt"
_ERRORS: dict[int, type[CharoniaError]] = {
    400: InvalidArgument,
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
    408: DeadlineExceeded,
    409: AlreadyExists,
    413: InvalidArgument,
    422: KeyReused,
    429: ResourceExhausted,
    499: Cancelled,
    500: InternalError,
    501: Unsupported,
    502: ConnectionLost,
    503: Unavailable,
    504: DeadlineExceeded,
}
"""What a status stands for: the other way round of `gateway.http.codec.error_replies`, and what proxies answer."""


@dataclass(frozen=True, slots=True)
class HttpCall:
    """`path` is quoted, its query with it. Header names are in lower case."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class ServerSent(Protocol):
    """One server-sent event, as httpx2 reads it."""

    @property
    def event(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def id(self) -> str: ...


class HttpForm:
    """The requests of one client. `binary` is whether its server takes the binary extension."""

    always_binary = False
    beats = True

    def __init__(self) -> None:
        self.binary = True

    # -- questions that change nothing ---------------------------------------------------------------------------------

    def live(self) -> Exchange[bool]:
        return Exchange(HttpCall("GET", "/v2/health/live"), _is_ok)

    def ready(self, model: str, version: str) -> Exchange[bool]:
        path = f"{_model(model, version)}/ready" if model else "/v2/health/ready"
        return Exchange(HttpCall("GET", path), _is_ok)

    def metadata(self, model: str, version: str) -> Exchange[dict[str, Any]]:
        return Exchange(HttpCall("GET", _model(model, version) if model else "/v2"), _read_object)

    def config(self, model: str, version: str) -> Exchange[dict[str, Any]]:
        return Exchange(HttpCall("GET", f"{_model(model, version)}/config"), _read_object)

    def index(self) -> Exchange[list[dict[str, Any]]]:
        return Exchange(HttpCall("POST", "/v2/repository/index", b"{}"), _read_list)

    def statistics(self, model: str, version: str) -> Exchange[list[dict[str, Any]]]:
        def read(answer: HttpAnswer) -> list[dict[str, Any]]:
            return list(_member(_read_object(answer), "model_stats", list))

        return Exchange(HttpCall("GET", f"{_model(model, version) if model else '/v2/models'}/stats"), read)

    def register(self, region: str, key: str, size_bytes: int) -> Exchange[object]:
        body = json.dumps({"key": key, "offset": 0, "byte_size": size_bytes}).encode()
        return Exchange(HttpCall("POST", f"/v2/systemsharedmemory/region/{region}/register", body), _successful)

    def unregister(self, region: str) -> Exchange[object]:
        return Exchange(HttpCall("POST", f"/v2/systemsharedmemory/region/{region}/unregister"), _successful)

    def probe(self, job_id: str) -> Exchange[object]:
        return Exchange(HttpCall("GET", _job(job_id)), _successful)

    # -- inference -----------------------------------------------------------------------------------------------------

    def infer(self, inference: Inference, left_s: float | None) -> Exchange[Result]:
        return Exchange(self._inference(inference, left_s, {}), lambda answer: read_result(answer, inference.targets))

    def submit(self, inference: Inference, left_s: float | None) -> Exchange[JobStatus]:
        def read(answer: HttpAnswer) -> JobStatus:
            if _successful(answer).status != 202:
                raise Incomprehensible("a job was asked for, and the answer is no receipt")
            return _read_status(answer)

        return Exchange(self._inference(inference, left_s, {"prefer": "respond-async"}), read)

    def stream(self, inference: Inference, left_s: float | None) -> Exchange[Result | None]:
        raise Unsupported(
            "this server has no streams over HTTP that carry tensors: make the client with its gRPC address, grpc://HOST:PORT"
        )

    def _inference(self, inference: Inference, left_s: float | None, headers: dict[str, str]) -> HttpCall:
        text, tensors = write_inference(inference, binary=self.binary)
        if self.binary:
            headers |= {_HEADER_LENGTH: str(len(text)), "content-type": "application/octet-stream"}
        else:
            headers |= {"content-type": "application/json"}
        if inference.key:
            headers["idempotency-key"] = inference.key
        if left_s is not None:
            headers["charonia-timeout-ms"] = str(max(1, int(left_s * 1000)))
        path = f"{_model(inference.model, inference.version)}/infer"
        return HttpCall("POST", path, b"".join((text, *tensors)), headers)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Exchange[JobStatus]:
        return Exchange(HttpCall("GET", _job(job_id)), _read_status)

    def cancel(self, job_id: str) -> Exchange[JobStatus]:
        return Exchange(HttpCall("DELETE", _job(job_id)), _read_status)

    def results(self, job_id: str, wait_s: float) -> Exchange[JobStatus | list[Result]]:
        def read(answer: HttpAnswer) -> JobStatus | list[Result]:
            if answer.status == 202:
                return _read_status(answer)
            if _HEADER_LENGTH not in answer.headers and isinstance(responses := _read_json(answer), list):
                return [_read_response(response) for response in responses]
            return [read_result(answer)]

        return Exchange(HttpCall("GET", f"{_job(job_id)}/result?wait={wait_s:.3f}&binary=true"), read)

    def events(self, job_id: str, place: str) -> Exchange[JobEvent | None]:
        headers = {"accept": "text/event-stream"} | ({"last-event-id": place} if place else {})
        return Exchange(HttpCall("GET", f"{_job(job_id)}/events", b"", headers), read_event)

    responses = events


# -- requests ----------------------------------------------------------------------------------------------------------


def write_inference(inference: Inference, *, binary: bool) -> tuple[bytes, list[Any]]:
    """The JSON part of an infer request and the tensors that follow it, none where they are in the JSON part.

    Raises `InvalidArgument` for a tensor that JSON cannot carry.
    """
    document: dict[str, Any] = {}
    if inference.request_id:
        document["id"] = inference.request_id
    parameters = dict(inference.parameters)
    if inference.priority:
        parameters["priority"] = inference.priority
    if binary and not inference.outputs:
        parameters["binary_data_output"] = True
    if parameters:
        document["parameters"] = parameters
    places, targets = inference.places, inference.targets
    document["inputs"] = [_write_input(tensor, binary, places.get(tensor.name)) for tensor in inference.inputs]
    if inference.outputs:
        document["outputs"] = [
            _write_output(name, classes, binary, targets.get(name)) for name, classes in inference.outputs.items()
        ]
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=True).encode(
        "utf-8", "surrogatepass"
    )
    return text, [tensor.data for tensor in inference.inputs if tensor.name not in places] if binary else []


def _write_input(tensor: Tensor, binary: bool, place: SharedArray | None) -> dict[str, Any]:
    described = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype.value}
    if place is not None:
        return {**described, "parameters": region_parameters(place)}
    if binary:
        return {**described, "parameters": {"binary_data_size": len(tensor.data)}}
    elements = tensor.array().ravel().tolist()
    if tensor.datatype is DataType.BYTES:
        try:
            elements = [element.decode() for element in elements]
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"input '{tensor.name}' is not UTF-8, and the server takes no binary tensors"
            ) from None
    return {**described, "data": elements}


def _write_output(name: str, classes: int, binary: bool, target: SharedArray | None) -> dict[str, Any]:
    if target is not None:
        return {"name": name, "parameters": region_parameters(target)}
    parameters = ({"binary_data": True} if binary else {}) | ({"classification": classes} if classes else {})
    return {"name": name, **({"parameters": parameters} if parameters else {})}


def _model(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _job(job_id: str) -> str:
    return f"/v2/jobs/{quote(job_id, safe='')}"


# -- answers -----------------------------------------------------------------------------------------------------------


def read_result(answer: HttpAnswer, targets: Mapping[str, SharedArray] = _NO_TARGETS) -> Result:
    """The result of an infer answer, with outputs that were sent to `targets`. Raises its error, `Incomprehensible`."""
    _successful(answer)
    header_length = answer.headers.get(_HEADER_LENGTH)
    if header_length is None:
        return _read_response(_read_json(answer), targets=targets)
    if not re.fullmatch(r"[0-9]{1,18}", header_length) or not 0 < int(header_length) <= len(answer.body):
        raise Incomprehensible(f"the answer's {_HEADER_LENGTH} is '{header_length}', of {len(answer.body)} bytes")
    at = int(header_length)
    return _read_response(_parse(answer.body[:at]), memoryview(answer.body)[at:], targets=targets)


def read_event(event: ServerSent | HttpAnswer) -> JobEvent | None:
    """An event of a job's stream, None for what is none. An answer instead of a stream says that all were seen."""
    if isinstance(event, HttpAnswer):
        _successful(event)
        return JobEvent("", OVER)
    if not event.data:
        return None
    data = _parse(event.data)
    if not isinstance(data, dict):
        raise Incomprehensible("an event of a job is no JSON object")
    if event.event != "response":
        detail = data.get("detail")
        number, time_us = data.get("number", 0), data.get("time_us", 0)
        if type(number) is not int or type(time_us) is not int:
            raise Incomprehensible("an event of a job has no fitting 'number' and 'time_us'")
        return JobEvent(event.id, event.event, number, time_us, detail if isinstance(detail, dict) else {})
    response, final = data.get("response"), data.get("final") is True
    if isinstance(response, dict) and "error" in response:
        return JobEvent(event.id, "response", error=str(response["error"]), final=final)
    place = (data.get("attempt", 1), data.get("index", 0))
    if not all(type(number) is int for number in place):
        raise Incomprehensible(f"a response of a job has the place {place}")
    result = None
    if response is not None:
        result = _read_response(response, place=place)
        result = replace(result, parameters={**result.parameters, FINAL: final})  # as over gRPC
    return JobEvent(event.id, "response", response=result, final=final)


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> CharoniaError:
    """The error that an answer is."""
    error = _error_of(status, headers, body)
    error.receipt = headers.get("charonia-receipt", "")
    return error


def _error_of(status: int, headers: Mapping[str, str], body: bytes) -> CharoniaError:
    message = ""
    try:
        document = json.loads(body)
        message = str(document["error"]) if isinstance(document, dict) and "error" in document else ""
    except (ValueError, RecursionError):
        pass
    if not message:
        text = body[:_MAX_ERROR_CHARACTERS].decode("utf-8", "replace").strip()
        message = text or f"the server answered with status {status}"
    retry_after_s = _seconds(headers.get("retry-after", ""))
    if status == 503 and message.startswith(StreamInterrupted.PREFIX):
        return StreamInterrupted(message)
    if status == 503 and retry_after_s is not None:
        return Refused(message, retry_after_s)
    if status == 400 and message == CANCELLED:
        return Cancelled(message)
    error = _ERRORS.get(status, UnknownError)(message)
    if isinstance(error, ResourceExhausted) and retry_after_s is not None:
        error.retry_after_s = max(1, round(retry_after_s))
    return error


def _seconds(text: str) -> float | None:
    """Retry-After in seconds; its other form, a date, counts as one second."""
    if not text:
        return None
    return min(float(text), _LONGEST_S) if text.isascii() and text.isdigit() else 1.0


def _successful(answer: HttpAnswer) -> HttpAnswer:
    if not 200 <= answer.status < 300:
        raise error_of(answer.status, answer.headers, answer.body)
    return answer


def _is_ok(answer: HttpAnswer) -> bool:
    """Of health: 400 is Triton's no, 503 a proxy's; the rest is an error."""
    if answer.status in (400, 503):
        return False
    return _successful(answer).status == 200


def _read_status(answer: HttpAnswer) -> JobStatus:
    document = _read_object(answer)
    return JobStatus(_member(document, "id", str), _member(document, "state", str), document)


def _read_object(answer: HttpAnswer) -> dict[str, Any]:
    document = _read_json(answer)
    if not isinstance(document, dict):
        raise Incomprehensible("the answer is no JSON object")
    return document


def _read_list(answer: HttpAnswer) -> list[dict[str, Any]]:
    document = _read_json(answer)
    if not isinstance(document, list) or not all(isinstance(item, dict) for item in document):
        raise Incomprehensible("the answer is no JSON list of objects")
    return document


def _read_json(answer: HttpAnswer) -> Any:
    return _parse(_successful(answer).body)


def _parse(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Incomprehensible(f"the answer is no JSON: {error}") from None


def _member(document: Mapping[str, Any], name: str, kind: type[T] | Callable[..., T]) -> T:
    value = document.get(name) if isinstance(document, dict) else None
    if not isinstance(value, kind):  # type: ignore[arg-type]
        raise Incomprehensible(f"the answer has no fitting '{name}'")
    return value


def _read_response(
    document: Any,
    binary: memoryview = _NO_BYTES,
    place: tuple[int, int] | None = None,
    targets: Mapping[str, SharedArray] = _NO_TARGETS,
) -> Result:
    if isinstance(document, dict) and "error" in document:
        error = UnknownError(str(document["error"]))
        error.receipt = str(document.get(_RECEIPT, ""))
        raise error
    tensors = []
    for output in _member(document, "outputs", list):
        tensor, binary = _read_output(output, binary, targets)
        tensors.append(tensor)
    if len(binary):
        raise Incomprehensible(f"{len(binary)} bytes follow the answer's last output")
    parameters = document.get("parameters")
    return Result(
        str(document.get("model_name", "")),
        str(document.get("model_version", "")),
        str(document.get("id", "")),
        checked(tensors),
        parameters if isinstance(parameters, dict) else {},
        place,
    )


def _read_output(output: Any, binary: memoryview, targets: Mapping[str, SharedArray]) -> tuple[Tensor, memoryview]:
    """The tensor, and the bytes behind it."""
    name = _member(output, "name", str)
    shape = _member(output, "shape", list)
    if not all(type(dim) is int for dim in shape):
        raise Incomprehensible(f"output '{name}' has the shape {shape}")
    try:
        datatype = DataType.of(_member(output, "datatype", str))
    except InvalidArgument as error:
        raise Incomprehensible(f"output '{name}': {error}") from None
    found = output.get("parameters")
    parameters = found if isinstance(found, dict) else {}
    size = parameters.get("binary_data_size")
    if name in targets and size is None and "data" not in output:
        return shared_tensor(name, datatype, tuple(shape), targets[name]), binary
    if size is None:
        return Tensor(name, datatype, tuple(shape), _raw(name, datatype, _member(output, "data", list))), binary
    if type(size) is not int or not 0 <= size <= len(binary):
        raise Incomprehensible(f"output '{name}' is said to have {size} bytes, of {len(binary)} that follow")
    return Tensor(name, datatype, tuple(shape), binary[:size]), binary[size:]


def _raw(name: str, datatype: DataType, data: list[Any]) -> Any:
    """The raw bytes of a JSON array, flat or nested."""
    try:
        return packed(name, datatype, data)
    except (ValueError, TypeError, OverflowError, AttributeError, InvalidArgument) as error:
        raise Incomprehensible(f"output '{name}' cannot be read: {error}") from None
