"""Neutral errors as gRPC status codes and details (E1, E3). Pure."""

from __future__ import annotations

from enum import IntEnum

from charonia.errors import CharoniaError, ErrorCode, ResourceExhausted


class Status(IntEnum):
    """The status codes of gRPC (its page "Status codes and their use")."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


STATUS = {
    ErrorCode.UNKNOWN: Status.UNKNOWN,
    ErrorCode.INTERNAL: Status.INTERNAL,
    ErrorCode.NOT_FOUND: Status.NOT_FOUND,
    ErrorCode.INVALID_ARG: Status.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: Status.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: Status.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    ErrorCode.CANCELLED: Status.CANCELLED,
    ErrorCode.RESOURCE_EXHAUSTED: Status.RESOURCE_EXHAUSTED,
    ErrorCode.DEADLINE_EXCEEDED: Status.DEADLINE_EXCEEDED,
    ErrorCode.UNAUTHENTICATED: Status.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED: Status.PERMISSION_DENIED,
    ErrorCode.KEY_REUSED: Status.FAILED_PRECONDITION,
}
"""Every neutral code has a status; the message is sent unchanged (E3)."""

INTERNAL = "internal server error"
"""Text of an unexpected failure; its cause is only logged."""

_MAX_DETAILS_BYTES = 6144
"""Details travel percent-encoded in the trailers, a receipt (at most 1.5 KB) beside them; clients refuse trailers of
more than 8 KiB."""


RETRY_AFTER = "retry-after-ms"
"""Trailing metadata of a refusal that may succeed when repeated later."""

RECEIPT = "charonia-receipt"
"""Trailing metadata of a failed request that asked what it has used."""

Refusal = tuple[Status, str, tuple[tuple[str, str], ...]]
"""Status, details and trailing metadata."""


def refusal(error: CharoniaError) -> Refusal:
    trailers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, ResourceExhausted):
        trailers = ((RETRY_AFTER, str(error.retry_after_s * 1000)),)
    if error.receipt:
        trailers += ((RECEIPT, error.receipt),)
    return STATUS[error.code], details(error.message), trailers


def details(message: str) -> str:
    """The message, cut to what fits the trailers: it may quote long names of a client."""
    if len(message) * 12 <= _MAX_DETAILS_BYTES:
        return message
    size = 0
    for at, character in enumerate(message):
        plain = " " <= character <= "~" and character != "%"
        size += 1 if plain else 3 * len(character.encode("utf-8", "replace"))
        if size > _MAX_DETAILS_BYTES:
            return message[:at] + "..."
    return message
