"""The heads of HTTP/1.1 responses, as bytes. Pure."""

from __future__ import annotations

from http import HTTPStatus

from .error_replies import Headers

_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}


def status_line(status: int) -> bytes:
    """The first line of a response."""
    return _LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def response_head(headers: Headers, size_bytes: int, status: int = 200) -> bytes:
    """Status line and headers of a response with a body of this size."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"%b%bcontent-length: %d\r\n\r\n" % (_LINES[status], lines, size_bytes)
