from __future__ import annotations

import math

import pytest

from charonia.errors import InternalError, InvalidArgument
from gateway.http.codec.jsontext import MAX_DEPTH, check_depth, parse_control, parse_json


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"x{", "Invalid value. at 0"),
        (b"", "The document is empty. at 0"),
        (b" \n", "The document is empty. at 2"),
        (b"{} x", "The document root must not be followed by other values. at 3"),
        (b"{1:2}", "Missing a name for object member. at 1"),
        (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
        (b'{"a":1 "b":2}', "Missing a comma or } after an object member. at 7"),
        (b'{"a":[1 2]}', "Missing a comma or ] after an array element. at 8"),
        (b'{"a":[[1],[2] 3]}', "Missing a comma or ] after an array element. at 14"),
        (b'["abc', "Missing a closing quotation mark in string. at 1"),
        (b'["\\q"]', "Invalid escape character in string. at 2"),
        (b'["\\uZZZZ"]', "Incorrect hex digit after \\u escape in string."),
        (b'["\\ud800"]', "The surrogate pair in string is invalid. at 2"),
        (b'["\xff"]', "Invalid encoding in string. at 2"),
        ('{"ü" 1}'.encode(), "Missing a colon after a name of object member. at 6"),
        (b"[1e999]", "Number too big to be stored in double. at 0"),
    ],
)
def test_text_that_is_no_json_is_an_internal_error_with_place(text: bytes, complaint: str) -> None:
    with pytest.raises(InternalError) as caught:
        parse_json(text)
    assert caught.value.message.startswith(f"failed to parse the request JSON buffer: {complaint}")


def test_bare_tokens_are_taken() -> None:
    value = parse_json(b'{"d":[NaN,Infinity,-Infinity,1]}')["d"]
    assert math.isnan(value[0])
    assert value[1:] == [math.inf, -math.inf, 1]


@pytest.mark.parametrize("text", [b"[99999999999999999999]", b"[NaN,99999999999999999999]"])
def test_integers_past_64_bits_are_doubles_on_both_ways(text: bytes) -> None:
    assert parse_json(text)[-1] == 1e20
    assert isinstance(parse_json(text)[-1], float)


def test_a_good_surrogate_pair_passes_the_tolerant_reader() -> None:
    assert parse_json(b'["\\ud83d\\ude00",NaN]')[0] == "\U0001f600"


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_is_bounded_before_parsing(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    check_depth(opening * MAX_DEPTH + closing * MAX_DEPTH)
    with pytest.raises(InvalidArgument, match=r"JSON nesting depth exceeds maximum allowed limit \(100\)"):
        parse_json(opening * (MAX_DEPTH + 1) + closing * (MAX_DEPTH + 1))
    with pytest.raises(InvalidArgument):
        parse_json(opening * 100_000)


def test_control_requests_may_nest_as_deep_as_they_like() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    text = b'{"a": ' + deep + b', "b": ' + deep + b', "c\\"[": true}'
    value = parse_control(text)
    assert value['c"['] is True
    for _ in range(MAX_DEPTH - 1):
        (value["a"],) = value["a"]
    assert value["a"] == 0
    assert parse_control(b"[" * 99 + b"[1,[2],{}]" + b"]" * 99) == parse_json(b"[" * 99 + b"[1,0,0]" + b"]" * 99)
    with pytest.raises(InternalError):
        parse_control(b"[" * 100_000)


@pytest.mark.parametrize(
    "text",
    [
        b'["' + b"[" * 500 + b'"]',
        b'["\\"' + b"[" * 500 + b'"]',
        b'["\\\\",' + b'"' + b"{" * 500 + b'"]',
        b"[" + b"[]," * 500 + b"[]]",
    ],
)
def test_only_true_nesting_counts(text: bytes) -> None:
    parse_json(text)


@pytest.mark.parametrize("text", [b'"' + b'\\"' * 200_000, b'"' * 200_001 + b"[" * 101, b"\\" * 100_000 + b"[" * 200])
def test_hostile_strings_cost_linear_time(text: bytes) -> None:
    # a quadratic scan of these would run for minutes
    with pytest.raises((InvalidArgument, InternalError)):
        parse_json(text)
