"""Bytes of the standard gRPC health service (`grpc.health.v1.Health`), for the generic handlers of `gateway.grpc`.

The messages are described in a descriptor pool of their own: a health package installed beside us registers
the same names under another file name, and two such files in the default pool refuse to load. What is healthy is the
gateway's to say (interface item G17).
"""

from __future__ import annotations

from enum import IntEnum

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

SERVICE_NAME = "grpc.health.v1.Health"


class ServingStatus(IntEnum):
    """`HealthCheckResponse.ServingStatus` by its published numbers."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


def parse_request(data: bytes) -> str:
    """Serialised `HealthCheckRequest` to the service it asks about ("" for the server). Raises `ValueError`."""
    request = _REQUEST()
    try:
        request.ParseFromString(data)
    except DecodeError as error:
        raise ValueError("malformed health check request") from error
    return str(request.service)  # type: ignore[attr-defined]


def serialize_request(service: str) -> bytes:
    """The serialised `HealthCheckRequest` that asks about `service`."""
    return _REQUEST(service=service).SerializeToString()


def parse_response(data: bytes) -> ServingStatus:
    """Serialised `HealthCheckResponse` to its status. Raises `ValueError`, also for a number this version lacks."""
    response = _RESPONSE()
    try:
        response.ParseFromString(data)
    except DecodeError as error:
        raise ValueError("malformed health check response") from error
    return ServingStatus(response.status)  # type: ignore[attr-defined]


def serialize_response(status: ServingStatus) -> bytes:
    """The serialised `HealthCheckResponse` that carries `status`."""
    return _RESPONSE(status=int(status)).SerializeToString()


def _file() -> descriptor_pb2.FileDescriptorProto:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="health.proto", package="grpc.health.v1", syntax="proto3")
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    response = file.message_type.add(name="HealthCheckResponse")
    values = response.enum_type.add(name="ServingStatus")
    for status in ServingStatus:
        values.value.add(name=status.name, number=int(status))
    response.field.add(
        name="status",
        number=1,
        type=field.TYPE_ENUM,
        label=field.LABEL_OPTIONAL,
        type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus",
    )
    service = file.service.add(name="Health")
    for name in ("Check", "Watch"):
        service.method.add(
            name=name,
            input_type=".grpc.health.v1.HealthCheckRequest",
            output_type=".grpc.health.v1.HealthCheckResponse",
            server_streaming=name == "Watch",
        )
    return file


POOL = descriptor_pool.DescriptorPool()
"""Describes the service and its messages."""
POOL.Add(_file())
_REQUEST = message_factory.GetMessageClass(POOL.FindMessageTypeByName("grpc.health.v1.HealthCheckRequest"))
_RESPONSE = message_factory.GetMessageClass(POOL.FindMessageTypeByName("grpc.health.v1.HealthCheckResponse"))
