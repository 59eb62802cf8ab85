"""The health messages keep their published bytes and collide with nobody's registration of the same names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from protos import health

# A second registration of the health package in the default pool, under the file name other packages use.
OTHER_REGISTRATION = """
from google.protobuf import descriptor_pb2, descriptor_pool
f = descriptor_pb2.FileDescriptorProto(name="grpc_health/v1/health.proto", package="grpc.health.v1", syntax="proto3")
f.message_type.add(name="HealthCheckRequest"); f.message_type.add(name="HealthCheckResponse")
descriptor_pool.Default().AddSerializedFile(f.SerializeToString())
"""


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (health.ServingStatus.UNKNOWN, b""),
        (health.ServingStatus.SERVING, b"\x08\x01"),
        (health.ServingStatus.NOT_SERVING, b"\x08\x02"),
        (health.ServingStatus.SERVICE_UNKNOWN, b"\x08\x03"),
    ],
)
def test_response_bytes(status: health.ServingStatus, data: bytes) -> None:
    assert health.serialize_response(status) == data
    assert health.parse_response(data) is status


@pytest.mark.parametrize(("service", "data"), [("", b""), ("abc", b"\x0a\x03abc")])
def test_request_bytes(service: str, data: bytes) -> None:
    assert health.serialize_request(service) == data
    assert health.parse_request(data) == service


def test_unknown_fields_of_a_newer_peer_are_skipped() -> None:
    assert health.parse_request(b"\x0a\x01a\x10\x05") == "a"


@pytest.mark.parametrize("data", [b"\x0a\x05a", b"\xff"])
def test_malformed_bytes_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="malformed"):
        health.parse_request(data)
    with pytest.raises(ValueError, match="malformed"):
        health.parse_response(data)


def test_loads_beside_another_health_package() -> None:
    program = OTHER_REGISTRATION + "import protos.health\nprint(protos.health.parse_request(b'\\x0a\\x01a'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "a"), done.stderr
