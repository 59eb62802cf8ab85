"""Neutral errors as HTTP responses: status, headers and JSON body (interface items E1, E2). Pure."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from charonia.errors import CharoniaError, ErrorCode, ResourceExhausted
from charonia.inference import RECEIPT

Headers = list[tuple[bytes, bytes]]

STATUS: dict[ErrorCode, int] = {
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.KEY_REUSED: 422,
}
"""E1; the last five are Charonia's own codes."""

JSON_CONTENT_TYPE = (b"content-type", b"application/json")
TEXT_CONTENT_TYPE = (b"content-type", b"text/plain")

NOT_FOUND_BODY = b'{"error":"Not Found"}'
METHOD_NOT_ALLOWED_BODY = b'{"error":"Method Not Allowed"}'
INTERNAL = "internal server error"
INTERNAL_BODY = b'{"error":"internal server error"}'

RECEIPT_HEADER = b"charonia-receipt"
"""What a failed request has used, where it asked for that."""
CHALLENGE = (b"www-authenticate", b'Bearer realm="charonia"')


class HttpRefusal(Exception):
    """A refusal with an HTTP status that no neutral code has, such as 413. `close` ends the connection after it."""

    def __init__(self, status: int, message: str, *, headers: Headers | None = None, close: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or []
        self.close = close


def error_body(message: str) -> bytes:
    """`{"error":"<message>"}` (E2), lone surrogates replaced."""
    return _body(message, {})


def error_event(error: CharoniaError) -> bytes:
    """The body of an error within a stream of events, with its receipt, as an event has no headers."""
    return _body(error.message, {RECEIPT: error.receipt} if error.receipt else {})


def _body(message: str, more: Mapping[str, str]) -> bytes:
    try:
        return orjson.dumps({"error": message, **more})
    except TypeError:
        return orjson.dumps({"error": message.encode("utf-8", "replace").decode(), **more})


def render_error(error: CharoniaError | HttpRefusal) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error reply."""
    if isinstance(error, HttpRefusal):
        status, extra = error.status, list(error.headers)
        if error.close:
            extra.append((b"connection", b"close"))
    else:
        status = STATUS[error.code]
        extra = []
        if isinstance(error, ResourceExhausted):
            extra.append((b"retry-after", b"%d" % error.retry_after_s))
        elif status == 401:
            extra.append(CHALLENGE)
        if error.receipt:
            extra.append((RECEIPT_HEADER, error.receipt.encode()))
    return status, [JSON_CONTENT_TYPE, *extra], error_body(error.message)
