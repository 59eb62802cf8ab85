from __future__ import annotations

import json

import pytest

from charonia.errors import CharoniaError, ErrorCode
from gateway.http.codec.error_replies import STATUS, HttpRefusal, error_body, render_error


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("UNKNOWN", 400), ("INTERNAL", 500), ("NOT_FOUND", 404), ("INVALID_ARG", 400), ("UNAVAILABLE", 503),
        ("UNSUPPORTED", 501), ("ALREADY_EXISTS", 400), ("CANCELLED", 400), ("RESOURCE_EXHAUSTED", 429),
        ("DEADLINE_EXCEEDED", 504), ("UNAUTHENTICATED", 401), ("PERMISSION_DENIED", 403),
    ],
)  # fmt: skip
def test_every_code_has_the_status_of_e1(code: str, status: int) -> None:
    rendered, headers, body = render_error(CharoniaError.of(ErrorCode[code], "why"))
    assert rendered == status
    assert (b"content-type", b"application/json") in headers
    assert json.loads(body) == {"error": "why"}


def test_no_code_lacks_a_status() -> None:
    assert set(STATUS) == set(ErrorCode)


def test_a_full_queue_says_when_to_come_back() -> None:
    _, headers, _ = render_error(CharoniaError.of(ErrorCode.RESOURCE_EXHAUSTED, "full"))
    assert (b"retry-after", b"1") in headers


@pytest.mark.parametrize("message", ['quotes " and \\', "line\nbreak", "\x00\x1b[31m", "ünïcode", "lone \ud800"])
def test_any_message_is_valid_json(message: str) -> None:
    decoded = json.loads(error_body(message))
    assert decoded == {"error": message.encode("utf-8", "replace").decode()}


def test_a_refusal_may_end_the_connection() -> None:
    status, headers, _ = render_error(HttpRefusal(413, "too much", close=True))
    assert status == 413
    assert (b"connection", b"close") in headers
