"""Values of the control endpoints as JSON-ready objects, and their request bodies (H4-H7, H40-H42, H44-H51). Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from charonia.errors import InternalError, InvalidArgument, Unavailable
from charonia.log_lines import FORMATS
from charonia.releases.route_rule import RouteRule
from charonia.releases.route_rule import document as rule_document
from gateway.handler import (
    RESPONSE_DURATIONS,
    Duration,
    ModelIndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
)
from gateway.regions.region_store import HANDLE_BYTES, Region
from gateway.reports.log_settings import TYPES

from .jsondata import NOT_BOOLEAN, NOT_STRING, NOT_UNSIGNED
from .jsontext import parse_json

_FILE_PREFIX = "file:"
_NO_SUCH: dict[type, str] = {bool: NOT_BOOLEAN, int: NOT_UNSIGNED, str: NOT_STRING}


def server_metadata(metadata: ServerMetadata) -> dict[str, Any]:
    """The server's metadata (H4)."""
    return {"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)}


def model_metadata(metadata: ModelMetadata) -> dict[str, Any]:
    """A model's metadata (H5)."""
    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": [_tensor(t) for t in metadata.inputs],
        "outputs": [_tensor(t) for t in metadata.outputs],
    }


def model_statistics(statistics: list[ModelStatistics]) -> dict[str, Any]:
    """Statistics of model versions (H7, X1)."""
    return {"model_stats": [_statistics(s) for s in statistics]}


def repository_index(entries: list[ModelIndexEntry]) -> list[dict[str, str]]:
    """H40: a model that was never loaded has only a name; what is empty is left out."""
    rows = ({"name": e.name, "version": e.version, "state": e.state, "reason": e.reason} for e in entries)
    return [{field: text for field, text in row.items() if text} for row in rows]


def read_index_request(body: bytes) -> bool:
    """`ready` of an index request, False for an empty body. Raises `InvalidArgument` for a value that is no boolean."""
    document = _optional_object(body)
    ready = document.get("ready", False)
    if not isinstance(ready, bool):
        raise InvalidArgument("Invalid value for 'ready': expected a boolean")
    return ready


def read_load_request(body: bytes) -> tuple[str | None, dict[str, bytes]]:
    """`config` and the files ("<version>/<path>" to content) of a load request (H41, R25).

    Raises `InternalError` for an unknown key or ill-typed value, `InvalidArgument` for text that is no base64.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in _parameters(body).items():
        if not isinstance(value, str):
            raise InternalError(NOT_STRING)
        if key != "config" and not key.startswith(_FILE_PREFIX):
            raise InternalError("unexpected error on creating Triton parameter")
        if key == "config":
            config = value
            continue
        try:
            files[key.removeprefix(_FILE_PREFIX)] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidArgument(f"load parameter '{key}' is not valid base64") from None
    return config, files


def read_unload_request(body: bytes) -> bool:
    """`unload_dependents` of an unload request (H42). Raises `InternalError` for a value that is no boolean."""
    parameters = _optional_object(body).get("parameters")
    value = parameters.get("unload_dependents", False) if isinstance(parameters, dict) else False
    if not isinstance(value, bool):
        raise InternalError(f"Unable to parse 'unload_dependents': {NOT_BOOLEAN}")
    return value


def read_log_settings(body: bytes) -> dict[str, Any]:
    """The settings to change (H45). Unknown keys, nulls, and a document that is no object are ignored.

    Raises `InternalError` (E4) for an empty body and a value of the wrong type, `Unavailable` for an unknown format.
    """
    document = parse_json(body)
    wanted: dict[str, Any] = {}
    for key, value in document.items() if isinstance(document, dict) else ():
        expected = TYPES.get(key)
        if expected is None or value is None:
            continue
        # the exact type: a boolean is an integer to Python only. log_file is refused whatever it holds
        if key != "log_file" and (type(value) is not expected or (isinstance(value, int) and value < 0)):
            raise InternalError(_NO_SUCH[expected])
        if key == "log_format" and value not in FORMATS:
            raise Unavailable(f"invalid argument for --log_format, got: {value}")
        wanted[key] = value
    return wanted


def read_trace_settings(body: bytes) -> dict[str, list[str] | None]:
    """The settings to change (H44), values as text; None to reset. An empty list changes nothing, as in Triton.

    Raises `InternalError` (E4) for an empty body and for other types.
    """
    document = parse_json(body)
    wanted: dict[str, list[str] | None] = {}
    for key, value in document.items() if isinstance(document, dict) else ():
        values = value if isinstance(value, list) else [value]
        if value == []:
            continue
        if value is None or key == "trace_file":
            wanted[key] = None
        elif all(isinstance(one, (str, int)) and not isinstance(one, bool) for one in values):
            wanted[key] = [str(one) for one in values]
        else:
            raise InternalError(NOT_STRING)
    return wanted


def read_route(body: bytes) -> dict[str, Any]:
    """The fields of a routing rule to change. Raises `InvalidArgument` for a body that is no object."""
    document = parse_json(body) if body else {}
    if not isinstance(document, dict):
        raise InvalidArgument("a routing rule must be a JSON object")
    return document


def route(model: str, rule: RouteRule | None) -> dict[str, Any]:
    """The routing rule of a model; null without one."""
    return {"model": model, "rule": None if rule is None else rule_document(rule)}


def trace_settings(settings: dict[str, list[str]]) -> dict[str, Any]:
    """H44's reply."""
    return {name: values if name == "trace_level" else values[0] for name, values in settings.items()}


def read_system_region(body: bytes) -> tuple[str, int, int]:
    """Key, offset and size of a registration (H47). Raises `InvalidArgument` and `InternalError` (E4)."""
    document = parse_json(body) if body else {}
    members = document if isinstance(document, dict) else {}
    if "key" not in members:
        raise InvalidArgument("Shared memory register request has no 'key' field")
    key, offset = members["key"], members.get("offset", 0)
    if not isinstance(key, str):
        raise InternalError(NOT_STRING)
    if type(offset) is not int or not 0 <= offset < 2**64:
        raise InternalError(NOT_UNSIGNED)
    if "byte_size" not in members:
        raise InvalidArgument("Shared memory register request has no 'byte_size' field")
    size = members["byte_size"]
    if type(size) is not int or not 0 <= size < 2**64:
        raise InternalError(NOT_UNSIGNED)
    return key, offset, size


def read_cuda_region(body: bytes) -> tuple[bytes, int, int]:
    """Handle, device and size of a registration (H50). Raises `InvalidArgument` and `InternalError` (E4)."""
    document = parse_json(body) if body else {}
    members = document if isinstance(document, dict) else {}
    if "raw_handle" not in members:
        raise InvalidArgument("Shared memory register request has no 'raw_handle' field")
    text = _member(members["raw_handle"], "b64")
    if not isinstance(text, str):
        raise InternalError(NOT_STRING)
    numbers = [_member(members, name) for name in ("byte_size", "device_id")]
    for number in numbers:
        if type(number) is not int or not 0 <= number < 2**64:
            raise InternalError(NOT_UNSIGNED)
    try:
        handle = base64.b64decode(text, validate=True)
        if len(handle) != HANDLE_BYTES:
            raise ValueError
    except ValueError:
        raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t") from None
    return handle, numbers[1], numbers[0]


def region_list(regions: list[Region]) -> list[dict[str, Any]]:
    """Registered regions (H46)."""
    return [
        {"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.size_bytes}
        if r.kind == "system"
        else {"name": r.name, "device_id": r.device_id, "byte_size": r.size_bytes}
        for r in regions
    ]


def _member(members: Any, name: str) -> Any:
    if not isinstance(members, dict) or name not in members:
        raise InternalError(f"attempt to access non-existing object member '{name}'")
    return members[name]


def _parameters(body: bytes) -> dict[str, Any]:
    parameters = _optional_object(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise InternalError("attempt to get members for non-object")
    return parameters


def _optional_object(body: bytes) -> dict[str, Any]:
    """The body as an object; one of another type has no members, as for Triton. Raises `InternalError` for no JSON."""
    document = parse_json(body) if body else {}
    return document if isinstance(document, dict) else {}


def _tensor(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _statistics(s: ModelStatistics) -> dict[str, Any]:
    return {
        "name": s.name,
        "version": s.version,
        "last_inference": s.last_inference_ms,
        "inference_count": s.inference_count,
        "execution_count": s.execution_count,
        "inference_stats": {
            "success": _duration(s.success),
            "fail": _duration(s.fail),
            "queue": _duration(s.queue),
            "compute_input": _duration(s.compute_input),
            "compute_infer": _duration(s.compute_infer),
            "compute_output": _duration(s.compute_output),
            "cache_hit": _duration(s.cache_hit),
            "cache_miss": _duration(s.cache_miss),
        },
        "response_stats": {
            place: {name: _duration(getattr(one, name)) for name in RESPONSE_DURATIONS}
            for place, one in s.responses.items()
        },
        "batch_stats": [
            {
                "batch_size": b.batch_size,
                "compute_input": _duration(b.compute_input),
                "compute_infer": _duration(b.compute_infer),
                "compute_output": _duration(b.compute_output),
            }
            for b in s.batches
        ],
        "memory_usage": [{"type": m.kind, "id": m.device_id, "byte_size": m.size_bytes} for m in s.memory],
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
