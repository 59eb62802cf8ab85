from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from charonia.errors import InternalError, InvalidArgument
from gateway.http.codec.jsontext import MAX_DEPTH, parse_json, parse_members


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"x{", "Invalid value. at 0"),
        (b"", "The document is empty. at 0"),
        (b" \n", "The document is empty. at 2"),
        (b"{} x", "The document root must not be followed by other values. at 3"),
        (b"{1:2}", "Missing a name for object member. at 1"),
        (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
        (b'{"a":1 "b":2}', "Missing a comma or '}' after an object member. at 7"),
        (b'{"a":[1 2]}', "Missing a comma or ] after an array element. at 8"),
        (b'{"a":[[1],[2] 3]}', "Missing a comma or ] after an array element. at 14"),
        (b'["abc', "Missing a closing quotation mark in string. at 5"),
        (b'["a\nb"]', "Invalid escape character in string. at 3"),
        (b"tru", "Invalid value. at 3"),
        (b'{"a":tru}', "Invalid value. at 8"),
        (b'{"a":-}', "Invalid value. at 6"),
        (b"[NaN,nul]", "Invalid value. at 8"),
        (b'["\\q"]', "Invalid escape character in string. at 2"),
        (b'["\\uZZZZ"]', "Incorrect hex digit after \\u escape in string. at 2"),
        (b'["\\ud800"]', "The surrogate pair in string is invalid. at 2"),
        (b'["\xff"]', "Invalid encoding in string. at 2"),
        ('{"ü" 1}'.encode(), "Missing a colon after a name of object member. at 6"),
        (b"[1e999]", "Number too big to be stored in double. at 1"),
        (b'{"1e999":[1,2e999]}', "Number too big to be stored in double. at 12"),
    ],
)
def test_text_that_is_no_json_is_an_internal_error_with_place(text: bytes, complaint: str) -> None:
    with pytest.raises(InternalError) as caught:
        parse_json(text)
    assert caught.value.message.startswith(f"failed to parse the request JSON buffer: {complaint}")


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a":[NaN]}').keys() == {"a"}


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


@pytest.mark.parametrize("parse", [parse_json, parse_members])
def test_text_may_nest_as_deep_as_it_likes(parse: Callable[[bytes], Any]) -> None:
    deep, closed = b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    value = parse(b'{"a": ' + deep + b', "b": ' + closed + b', "c\\"[": true}')
    assert value['c"['] is True
    for _ in range(MAX_DEPTH - 1):
        (value["a"],) = value["a"]
        value["b"] = value["b"]["a"]
    assert (value["a"], value["b"]) == (0, 0)
    around, after = b"[" * (MAX_DEPTH - 1), b"]" * (MAX_DEPTH - 1)
    assert parse(around + b"[1,[2],{}]" + after) == parse(around + b"[1,0,0]" + after)
    with pytest.raises(InternalError):
        parse(b"[" * 100_000)


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


def test_one_byte_order_mark_is_no_part_of_the_text() -> None:
    mark = b"\xef\xbb\xbf"
    assert parse_json(mark + b'{"a": 1}') == {"a": 1}
    with pytest.raises(InternalError, match="failed to parse the request JSON buffer"):
        parse_json(mark * 100_000 + b"{}")
