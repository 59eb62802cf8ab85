"""The bodies of the HTTP interface as JSON Schema (draft 2020-12), by name. Pure.

Objects whose keys the server chooses are closed; requests are open, as the interface ignores unknown keys. The
configuration's schema comes from its protobuf messages, which say what `charonia.models.config_forms` may write.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from charonia.catalog.catalog import LOADING, READY, UNAVAILABLE, UNLOADING
from charonia.datatypes import DataType
from charonia.facts.jobs import JobState
from charonia.log_lines import FORMATS
from gateway.handler import RESPONSE_DURATIONS
from protos import model_config_pb2

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
MAYBE_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
MAYBE_SECONDS: Schema = {"type": ["number", "null"], "minimum": 0}
VALUE: Schema = {"type": ["string", "number", "boolean"]}
"""A parameter of a request or of a response."""


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema, about: str = "") -> Schema:
    return {"type": "array", "items": items} | ({"description": about} if about else {})


def members(required: dict[str, Schema], optional: dict[str, Schema] | None = None, about: str = "") -> Schema:
    """An object of a response: these keys and no others."""
    return opened(required, optional, about) | {"additionalProperties": False}


def opened(required: dict[str, Schema], optional: dict[str, Schema] | None = None, about: str = "") -> Schema:
    """An object that may have further keys."""
    schema: Schema = {"type": "object", "properties": {**required, **(optional or {})}}
    return schema | ({"required": list(required)} if required else {}) | ({"description": about} if about else {})


def settings(optional: dict[str, Schema], about: str) -> Schema:
    return opened({}, {name: {"anyOf": [one, {"type": "null"}]} for name, one in optional.items()}, about)


def all_schemas() -> dict[str, Schema]:
    """Every schema by its name in the document."""
    return _inference() | _generation() | _control() | _jobs() | _config_schemas()


def _inference() -> dict[str, Schema]:
    datatype = {"type": "string", "enum": [one.value for one in DataType]}
    shape = array(COUNT)
    place = {
        "shared_memory_region": TEXT | {"description": "a registered region that holds the tensor"},
        "shared_memory_offset": COUNT,
        "shared_memory_byte_size": COUNT,
    }
    return {
        "Error": members({"error": TEXT}),
        "Parameters": {"type": "object", "additionalProperties": VALUE},
        "TensorData": array(
            {"anyOf": [VALUE, {"type": "null"}, ref("TensorData")]},
            "the elements, flat in row-major order or nested; numbers that are not finite are written NaN and Infinity",
        ),
        "InferInput": opened(
            {"name": TEXT, "datatype": datatype, "shape": shape},
            {
                "data": ref("TensorData"),
                "parameters": opened(
                    {}, {"binary_data_size": COUNT | {"description": "bytes that follow the JSON part"}, **place}
                ),
            },
            "exactly one of data, binary_data_size and shared_memory_region says where its elements are",
        ),
        "InferOutput": opened(
            {"name": TEXT},
            {
                "parameters": opened(
                    {},
                    {
                        "binary_data": FLAG,
                        "classification": COUNT | {"description": "the best so many as <value>:<index>[:<label>]"},
                        **place,
                    },
                )
            },
        ),
        "InferRequest": opened(
            {"inputs": array(ref("InferInput"))},
            {
                "id": TEXT,
                "parameters": opened(
                    {},
                    {
                        "sequence_id": {"type": ["integer", "string"]},
                        "sequence_start": FLAG,
                        "sequence_end": FLAG,
                        "priority": COUNT,
                        "timeout": COUNT | {"description": "microseconds in the queue"},
                        "binary_data_output": FLAG,
                        "charonia_deadline_us": COUNT | {"description": "Unix time by which an answer is of use"},
                        "charonia_receipt": FLAG | {"description": "the answer says what the request has used"},
                    },
                    "parameters with a meaning; any other goes to the model",
                ),
                "outputs": array(ref("InferOutput"), "all outputs of the model, where it is left out"),
            },
        ),
        "InferResponse": members(
            {
                "model_name": TEXT,
                "model_version": TEXT,
                "outputs": array(
                    members(
                        {"name": TEXT, "datatype": datatype, "shape": shape},
                        {"data": ref("TensorData"), "parameters": ref("Parameters")},
                    )
                ),
            },
            {"id": TEXT, "parameters": ref("Parameters")},
        ),
    }


def _generation() -> dict[str, Schema]:
    return {
        "GenerateRequest": opened(
            {},
            {"id": TEXT, "parameters": {"type": "object"}},
            "keys that name an input are its elements, one value or a flat list; others are parameters",
        ),
        "GenerateResponse": opened(
            {"model_name": TEXT, "model_version": TEXT}, {"id": TEXT}, "each output by its name; one element is no list"
        ),
        "GenerateEvent": members(
            {"data": TEXT | {"contentMediaType": "application/json", "contentSchema": ref("Generated")}},
            {"event": {"const": "message"}},
            "one server-sent event",
        ),
        "Generated": {"anyOf": [ref("GenerateResponse"), ref("Error")]},
    }


def _control() -> dict[str, Schema]:
    tensor = members({"name": TEXT, "datatype": TEXT, "shape": array({"type": "integer", "minimum": -1})})
    duration = ref("Duration")
    parts = ("compute_input", "compute_infer", "compute_output")
    inference = ("success", "fail", "queue", *parts, "cache_hit", "cache_miss")
    logging = {
        "log_file": TEXT,
        "log_info": FLAG,
        "log_warning": FLAG,
        "log_error": FLAG,
        "log_verbose_level": COUNT,
        "log_format": {"type": "string", "enum": list(FORMATS)},
    }
    number = {"type": ["string", "integer"]}
    tracing = {"trace_level": array(TEXT), "trace_rate": TEXT, "trace_count": TEXT, "log_frequency": TEXT}
    amount = {"type": "number"}
    gate = {
        "rollback": FLAG,
        "window_s": amount,
        "min_requests": COUNT,
        "max_error_percent": amount,
        "max_latency_ratio": amount,
        "latency_slack_ms": amount,
        "steps": array(amount, "shares in percent, growing"),
    }
    route = {
        "present": COUNT,
        "candidate": COUNT | {"description": "0 for none"},
        "share": amount | {"description": "percent of the requests that name no version"},
        "headers": {"type": "object", "additionalProperties": TEXT},
        "tenants": array(TEXT),
        "sticky": TEXT | {"description": "correlation-id, or the name of a header"},
        "shadow": COUNT | {"description": "a version that gets copies, 0 for none"},
        "tolerances": {"type": "object", "additionalProperties": amount},
    }
    decision = members({"at_us": COUNT, "by": TEXT, "what": TEXT, "reason": TEXT})
    region = {"name": TEXT, "key": TEXT, "offset": COUNT, "byte_size": COUNT}
    return {
        "ServerMetadata": members({"name": TEXT, "version": TEXT, "extensions": array(TEXT)}),
        "ModelMetadata": members(
            {"name": TEXT, "versions": array(TEXT), "platform": TEXT, "inputs": array(tensor), "outputs": array(tensor)}
        ),
        "Duration": members({"count": COUNT, "ns": COUNT}),
        "ModelStatistics": members({"model_stats": array(ref("VersionStatistics"))}),
        "VersionStatistics": members(
            {
                "name": TEXT,
                "version": TEXT,
                "last_inference": COUNT | {"description": "milliseconds since the epoch, 0 for never"},
                "inference_count": COUNT,
                "execution_count": COUNT,
                "inference_stats": members(dict.fromkeys(inference, duration)),
                "response_stats": {
                    "type": "object",
                    "additionalProperties": members(dict.fromkeys(RESPONSE_DURATIONS, duration)),
                },
                "batch_stats": array(members({"batch_size": COUNT, **dict.fromkeys(parts, duration)})),
                "memory_usage": array(members({"type": TEXT, "id": COUNT, "byte_size": COUNT})),
            }
        ),
        "IndexRequest": opened({}, {"ready": FLAG | {"description": "only models that are ready"}}),
        "RepositoryIndex": array(
            members(
                {"name": TEXT},
                {
                    "version": TEXT,
                    "state": {"type": "string", "enum": [READY, LOADING, UNLOADING, UNAVAILABLE]},
                    "reason": TEXT,
                },
            ),
            "a model that was never loaded has only a name; without a version where none could be chosen",
        ),
        "LoadRequest": opened(
            {},
            {
                "parameters": {
                    "type": "object",
                    "properties": {"config": TEXT | {"description": "the model configuration as JSON text"}},
                    "patternProperties": {"^file:": TEXT | {"contentEncoding": "base64"}},
                    "additionalProperties": False,
                }
            },
        ),
        "ModelRoute": members({"model": TEXT, "rule": {"anyOf": [ref("RouteRule"), {"type": "null"}]}}),
        "RouteRule": members({**route, "gate": members(gate), "stage": TEXT, "history": array(decision)}),
        "RouteChange": settings({**route, "gate": settings(gate, "what is left out stays")}, "what is left out stays"),
        "UnloadRequest": opened({}, {"parameters": opened({}, {"unload_dependents": FLAG})}),
        "LogSettings": members(logging),
        "LogChange": settings(logging, "the settings to change, all or none of them"),
        "TraceSettings": members({**tracing, "trace_file": TEXT, "trace_mode": TEXT}, about="numbers are text"),
        "TraceChange": settings(
            {"trace_level": {"anyOf": [TEXT, array(TEXT)]}}
            | {name: number for name in tracing if name != "trace_level"},
            "null resets a setting",
        ),
        "SystemRegions": array(members(region)),
        "SystemRegionRequest": opened({"key": TEXT, "byte_size": COUNT}, {"offset": COUNT}),
        "CudaRegions": array(members({"name": TEXT, "device_id": COUNT, "byte_size": COUNT})),
        "CudaRegionRequest": opened(
            {"raw_handle": opened({"b64": TEXT}), "device_id": COUNT, "byte_size": COUNT},
        ),
    }


def _jobs() -> dict[str, Schema]:
    state = {"type": "string", "enum": list(JobState)}
    times = {"accepted_us": COUNT, "ended_us": MAYBE_COUNT}
    spans = {"batched_us": MAYBE_COUNT, "queue_s": MAYBE_SECONDS, "execute_s": MAYBE_SECONDS}
    summary: dict[str, Schema] = {
        "id": TEXT,
        "state": state,
        "location": TEXT,
        "model_name": TEXT,
        "model_version": TEXT,
        "request_id": TEXT,
        "attempts": COUNT,
        "timings": members(times),
        "durability": TEXT,
        "tenant": TEXT,
        "has_result": FLAG,
        "expires_us": MAYBE_COUNT,
    }
    queue = {"position": COUNT, "queue_length": COUNT, "eta_s": MAYBE_SECONDS}
    whole = summary | {"timings": members(times | spans)} | queue | {"wait_reason": TEXT, "error": TEXT}
    event = {"number": COUNT, "event": TEXT, "time_us": COUNT, "after_s": NUMBER, "detail": {"type": "object"}}
    webhook = {"webhook": {"type": "object"}}
    return {
        "AcceptedJob": members({"id": TEXT, "state": state, "location": TEXT, "durability": TEXT, **queue}),
        "JobSummary": members(summary, webhook, "times are microseconds since the epoch"),
        "Job": members(whole, webhook, "times are microseconds since the epoch"),
        "JobPage": members({"jobs": array(ref("JobSummary")), "next": {"type": ["string", "null"]}}),
        "JobTimeline": members({**whole, "events": array(members(event))}, webhook),
        "JobResult": {
            "anyOf": [ref("InferResponse"), array({"anyOf": [ref("InferResponse"), ref("Error")]})],
            "description": "a list where the model answered another number of times than once",
        },
        "JobEvent": members(
            {"data": TEXT | {"contentMediaType": "application/json"}, "event": TEXT},
            {"id": TEXT, "retry": COUNT},
            "one server-sent event, named as in the timeline, or `response` with a response of the model",
        ),
        "CancelledJobs": members({"cancelled": COUNT}),
    }


# -- the configuration, from its messages ------------------------------------------------------------------------------

_FLOAT: Schema = {"anyOf": [NUMBER, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
_SCALARS: dict[int, Schema] = {
    FieldDescriptor.CPPTYPE_BOOL: FLAG,
    FieldDescriptor.CPPTYPE_STRING: TEXT,
    FieldDescriptor.CPPTYPE_FLOAT: _FLOAT,
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOAT,
}


def _config_schemas() -> dict[str, Schema]:
    """The configuration (H6) and the messages in it."""
    found: dict[str, Schema] = {}
    open_ends: list[Any] = [model_config_pb2.ModelConfig.DESCRIPTOR]
    while open_ends:
        message = open_ends.pop()
        name = _name(message)
        if name in found:
            continue
        found[name] = {"type": "object", "additionalProperties": False, "properties": {}}
        for field in message.fields:
            found[name]["properties"][field.name] = _field(field)
            kind = field.message_type
            if kind is not None:
                value = kind.fields_by_name["value"].message_type if kind.GetOptions().map_entry else kind
                open_ends += [value] if value is not None else []
    return found


def _name(message: Any) -> str:  # of either of protobuf's two implementations
    return str(message.full_name).removeprefix(message.file.package + ".")


def _field(field: Any) -> Schema:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _field(kind.fields_by_name["value"])}
    one: Schema
    if kind is not None:
        one = ref(_name(kind))
    elif field.enum_type is not None:
        one = {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    else:
        one = _SCALARS.get(field.cpp_type, {"type": "integer"})
    return array(one) if field.is_repeated else one
