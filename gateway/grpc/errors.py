"""Neutral errors as gRPC status codes and details (E1, E3). Pure but for the enum it maps to."""

from __future__ import annotations

import grpc

from charonia.errors import CharoniaError, ErrorCode, ResourceExhausted

STATUS = {
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.KEY_REUSED: grpc.StatusCode.FAILED_PRECONDITION,
}
"""Every neutral code has a status; the message is sent as it is (E3)."""

INTERNAL = "internal server error"
"""Of a failure that is ours: what it was is in the log, not on the wire."""

_MAX_DETAILS_BYTES = 6144
"""Details travel in the trailers, percent-encoded; clients refuse trailers of more than 8 KiB for that alone."""


RETRY_AFTER = "retry-after-ms"
"""Trailing metadata of a refusal that is over soon."""

Refusal = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
"""Status, details and trailing metadata: the arguments of a context's `abort`."""


def refusal(error: CharoniaError) -> Refusal:
    trailers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, ResourceExhausted):
        trailers = ((RETRY_AFTER, str(error.retry_after_s * 1000)),)
    return STATUS[error.code], details(error.message), trailers


def details(message: str) -> str:
    """The message, cut where it would not fit the trailers: a name that a client sent may be of any length."""
    if len(message) * 12 <= _MAX_DETAILS_BYTES:
        return message
    size = 0
    for at, character in enumerate(message):
        plain = " " <= character <= "~" and character != "%"
        size += 1 if plain else 3 * len(character.encode("utf-8", "replace"))
        if size > _MAX_DETAILS_BYTES:
            return message[:at] + "..."
    return message
