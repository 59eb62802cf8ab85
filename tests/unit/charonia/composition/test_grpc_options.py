"""What serves gRPC, and how its connections are kept, from option values."""

from __future__ import annotations

import pytest
from grpc_fronts import FRONTS

from charonia.errors import StartupError
from charonia.options.role_settings import gateway_settings
from charonia.options.values import parse
from gateway.grpc.native.codec.limits import KeepAlive


def grpc_front(*flags: str, environment: dict[str, str] | None = None) -> str:
    return gateway_settings(parse("gateway", flags, environment or {}, {})).grpc_front


def test_the_native_front_is_the_default_and_there_is_another() -> None:
    assert grpc_front() == "native"
    for name in FRONTS:
        assert grpc_front(f"--grpc-front={name}") == name
        assert grpc_front(environment={"CHARONIA_GRPC_FRONT": name}) == name


@pytest.mark.parametrize("name", ["", "Native", "grpc", "native "])
def test_a_front_that_there_is_not(name: str) -> None:
    with pytest.raises(StartupError) as caught:
        grpc_front(f"--grpc-front={name}")
    assert str(caught.value) == f"--grpc-front must be native or grpcio, got '{name}'"


def test_keeping_connections() -> None:
    def keep_alive(*flags: str) -> KeepAlive:
        return KeepAlive.of(gateway_settings(parse("gateway", flags, {}, {})).grpc_keepalive)

    assert keep_alive() == KeepAlive()
    assert keep_alive(
        "--grpc-keepalive-time=1500", "--grpc-keepalive-timeout=250", "--grpc-keepalive-permit-without-calls=true",
        "--grpc-http2-max-pings-without-data=0", "--grpc-http2-min-recv-ping-interval-without-data=10",
        "--grpc-http2-max-ping-strikes=5", "--grpc-max-connection-age=60000", "--grpc-max-connection-age-grace=2000",
    ) == KeepAlive(1.5, 0.25, True, 0, 0.01, 5, 60.0, 2.0)  # fmt: skip
