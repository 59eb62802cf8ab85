"""What every call of the gRPC front reads of its context and its message."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from charonia.errors import InternalError

Context = Any  # grpc.aio.ServicerContext, generic in types that generic handlers do not have


def parse(kind: Any, data: bytes) -> Any:
    """The message in `data`. Raises `InternalError`, the code of gRPC's own servers for it, as for JSON (E4)."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InternalError(f"failed to parse the {kind.DESCRIPTOR.name} message") from None


def metadata_of(context: Context) -> list[tuple[str, str | bytes]]:
    return list(context.invocation_metadata() or ())


def headers_of(context: Context) -> list[tuple[bytes, bytes]]:
    return [
        (name.encode("latin-1", "replace"), value if isinstance(value, bytes) else value.encode())
        for name, value in metadata_of(context)
    ]
