"""The lines of a batch: read wherever they are cut, valid as a whole, written once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.openai.stored.batch_lines import (
    MAX_ERRORS,
    MAX_LINE_BYTES,
    MAX_LINES,
    LineReader,
    LineResult,
    Validation,
    seed_of,
    validated,
)

URL = "/v1/chat/completions"


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    found = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "m"}, **changes}
    return json.dumps({name: value for name, value in found.items() if value is not None}).encode()


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_lines_wherever_they_are_cut(size: int) -> None:
    content = b"one\n\ntwo\r\nthree"
    reader = LineReader()
    found = [one for at in range(0, len(content), size) for one in reader.feed(content[at : at + size])]
    assert [*found, *reader.end()] == [b"one", b"", b"two\r", b"three"]


def test_a_line_that_is_too_long() -> None:
    reader = LineReader()
    found = [one for _ in range(5) for one in reader.feed(b"x" * (MAX_LINE_BYTES // 2))]
    assert found == []
    assert [*reader.feed(b"\nshort\n")] == [None, b"short"]
    assert validated([None], URL).errors[0]["code"] == "line_too_long"


def test_a_valid_file() -> None:
    checked = Validation(URL)
    found = [checked.check(text) for text in (line("a"), b" ", line("b"))]
    checked.end()
    assert [(one.number, one.custom_id) for one in found if one is not None] == [(1, "a"), (3, "b")]
    assert (checked.lines, checked.model, checked.errors) == (2, "m", [])


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'{"body":' + b"[" * 200 + b"]" * 200 + b"}", "invalid_json_line", None),
        (line(None), "missing_required_parameter", "custom_id"),
        (line(7), "missing_required_parameter", "custom_id"),
        (line("x" * 256), "missing_required_parameter", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "invalid_url", "url"),
        (line(url=None), "invalid_url", "url"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(body={}), "missing_required_parameter", "body.model"),
        (line(body={"model": "m", "stream": True}), "invalid_request", "body.stream"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line(body={"model": "n"}), "mismatched_model", "body.model"),
    ],
)
def test_each_error_says_its_line(text: bytes, code: str, param: str | None) -> None:
    errors = validated([line("first"), b"", text], URL).errors
    assert [(error["line"], error["code"], error["param"]) for error in errors] == [(3, code, param)]


def test_bounds() -> None:
    assert validated([b"", b"  "], URL).errors[0]["code"] == "empty_file"
    assert len(validated([b"{"] * 500, URL).errors) == MAX_ERRORS
    too_many = validated((line(str(at)) for at in range(MAX_LINES + 5)), URL)
    assert [(error["line"], error["code"]) for error in too_many.errors] == [(MAX_LINES + 1, "too_many_requests")]


def test_results_as_lines() -> None:
    good = LineResult(3, "a", 200, {"x": 1}, "job")
    document = json.loads(good.line("batch_1"))
    assert document["custom_id"] == "a"
    assert document["response"] == {"status_code": 200, "request_id": "job", "body": {"x": 1}}
    assert document["error"] is None
    assert good.line("batch_1") == good.line("batch_1") != good.line("batch_2")
    bad = json.loads(LineResult(4, "b", code="batch_expired", message="too late").line("batch_1"))
    assert bad["response"] is None
    assert bad["error"] == {"code": "batch_expired", "message": "too late"}
    assert bad["id"] != document["id"]


def test_seeds_follow_from_batch_and_line() -> None:
    assert seed_of("b", 1) == seed_of("b", 1)
    assert len({seed_of("b", number) for number in range(100)}) == 100
    assert all(0 <= seed_of("b", number) < 2**31 for number in range(100))
