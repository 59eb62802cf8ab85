"""The certificates that the options of gRPC's TLS name, checked and read (G30)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from charonia.errors import StartupError
from charonia.options.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Certificates:
    """The contents of PEM files; `root` is empty where no client is asked for one."""

    key: bytes
    certificate: bytes
    root: bytes


def certificates(settings: GatewaySettings) -> Certificates:
    """Raises `StartupError` for one that is missing or cannot be read."""
    if not settings.grpc_server_key or not settings.grpc_server_cert:
        raise StartupError("--grpc-use-ssl needs --grpc-server-key and --grpc-server-cert")
    if settings.grpc_use_ssl_mutual and not settings.grpc_root_cert:
        raise StartupError("--grpc-use-ssl-mutual needs --grpc-root-cert, which says whose clients are let in")
    return Certificates(
        _read("grpc-server-key", settings.grpc_server_key),
        _read("grpc-server-cert", settings.grpc_server_cert),
        _read("grpc-root-cert", settings.grpc_root_cert) if settings.grpc_root_cert else b"",
    )


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"--{option}: '{path}' cannot be read: {error.strerror}") from None
