"""Values of the control calls as messages, and their requests (G3, G9-G12, G15, G16). Pure."""

from __future__ import annotations

from typing import Any

from charonia.errors import InvalidArgument, Unsupported
from charonia.log_lines import FORMATS
from gateway.handler import (
    RESPONSE_DURATIONS,
    Duration,
    ModelIndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
)
from gateway.reports.log_settings import TYPES, LogSwitches
from protos import grpc_service_pb2 as pb


def server_metadata(metadata: ServerMetadata) -> pb.ServerMetadataResponse:
    """The server's metadata as a message (G3)."""
    return pb.ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)


def model_metadata(metadata: ModelMetadata) -> pb.ModelMetadataResponse:
    """A model's metadata as a message (G3); shapes as in H5."""
    message = pb.ModelMetadataResponse(name=metadata.name, versions=metadata.versions, platform=metadata.platform)
    for target, tensors in ((message.inputs, metadata.inputs), (message.outputs, metadata.outputs)):
        for tensor in tensors:
            target.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return message


def model_statistics(statistics: list[ModelStatistics]) -> pb.ModelStatisticsResponse:
    """Statistics of model versions as a message (G10, X1)."""
    message = pb.ModelStatisticsResponse()
    for one in statistics:
        target = message.model_stats.add(
            name=one.name,
            version=one.version,
            last_inference=one.last_inference_ms,
            inference_count=one.inference_count,
            execution_count=one.execution_count,
        )
        for field in (
            "success",
            "fail",
            "queue",
            "compute_input",
            "compute_infer",
            "compute_output",
            "cache_hit",
            "cache_miss",
        ):
            _duration(getattr(target.inference_stats, field), getattr(one, field))
        for place, response in one.responses.items():
            for field in RESPONSE_DURATIONS:
                _duration(getattr(target.response_stats[place], field), getattr(response, field))
        for batch in one.batches:
            row = target.batch_stats.add(batch_size=batch.batch_size)
            _duration(row.compute_input, batch.compute_input)
            _duration(row.compute_infer, batch.compute_infer)
            _duration(row.compute_output, batch.compute_output)
        for memory in one.memory:
            target.memory_usage.add(type=memory.kind, id=memory.device_id, byte_size=memory.size_bytes)
    return message


def _duration(target: Any, duration: Duration) -> None:
    # set even if zero: clients read the nested message
    target.count = duration.count
    target.ns = duration.ns
    target.SetInParent()


def repository_index(entries: list[ModelIndexEntry]) -> pb.RepositoryIndexResponse:
    """The repository index as a message (G11, H40)."""
    message = pb.RepositoryIndexResponse()
    for entry in entries:
        message.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
    return message


def check_repository(name: str) -> None:
    """Raises `Unsupported` for a request that names a repository."""
    if name:
        raise Unsupported("'repository_name' specification is not supported")


def read_load(message: pb.RepositoryModelLoadRequest) -> tuple[str | None, dict[str, bytes]]:
    """`config` and the files of a load request (G12). Raises `InvalidArgument`."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if key == "config":
            if kind != "string_param":
                raise InvalidArgument("invalid value type for load parameter 'config', expected string_param.")
            config = parameter.string_param
        elif key.startswith("file:"):
            if kind != "bytes_param":
                raise InvalidArgument(f"invalid value type for load parameter '{key}', expected bytes_param.")
            files[key.removeprefix("file:")] = parameter.bytes_param
        else:
            raise InvalidArgument(f"unrecognized load parameter '{key}'.")
    return config, files


def read_unload(message: pb.RepositoryModelUnloadRequest) -> bool:
    """`unload_dependents` of an unload request (G12). Raises `InvalidArgument`."""
    dependents = False
    for key, parameter in message.parameters.items():
        if key != "unload_dependents":
            raise InvalidArgument(f"unrecognized unload parameter '{key}'.")
        if parameter.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidArgument("invalid value type for 'unload_dependents' parameter, expected bool_param.")
        dependents = parameter.bool_param
    return dependents


_LOG_PARAMETERS = {bool: ("bool_param", "boolean"), int: ("uint32_param", "int32"), str: ("string_param", "string")}


def read_log_settings(message: pb.LogSettingsRequest) -> dict[str, Any]:
    """The settings to change (G16). Raises `InvalidArgument` for a wrong value."""
    wanted: dict[str, Any] = {}
    for key, setting in message.settings.items():
        expected = TYPES.get(key)
        if expected is None:
            continue
        if key == "log_file":  # refused whatever its value
            wanted[key] = ""
            continue
        field, word = _LOG_PARAMETERS[expected]
        if setting.WhichOneof("parameter_choice") != field:
            raise InvalidArgument(f"expect {word} for '{key}'")
        wanted[key] = getattr(setting, field)
        if key == "log_format" and wanted[key] not in FORMATS:
            raise InvalidArgument(f"invalid argument for log_format, got: {wanted[key]}")
    return wanted


def trace_settings(settings: dict[str, list[str]]) -> pb.TraceSettingResponse:
    """The full trace setting as a message (G15)."""
    message = pb.TraceSettingResponse()
    for name, values in settings.items():
        message.settings[name].value.extend(values)
    return message


def log_settings(switches: LogSwitches) -> pb.LogSettingsResponse:
    """The full log settings as a message (G16)."""
    message = pb.LogSettingsResponse()
    for key, value in switches.reply().items():
        setattr(message.settings[key], _LOG_PARAMETERS[TYPES[key]][0], value)
    return message
