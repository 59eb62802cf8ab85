"""Parses JSON as Triton does: accepts NaN and Infinity, cuts deep nesting off, and fails with Triton's texts. Pure.

orjson reads nearly all documents. What it refuses goes to a tolerant parser that either accepts the bare tokens of T5
or reports the fault and its offset (E4). If a key occurs twice, the last one counts.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import orjson

from charonia.errors import InternalError
from charonia.tensors import Buffer

MAX_DEPTH = 128
"""How deep JSON is read: deeper than `data` of a tensor may be nested (E8, `jsondata`), below every parser's limit."""

# possessive, with unterminated strings running to the end, so that hostile text costs linear time
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_JSON_SPACE = " \t\n\r"

# messages of Python's JSON parser, and Triton's for the same text
_COMPLAINTS = {
    "Expecting property name enclosed in double quotes": "Missing a name for object member.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Extra data": "The document root must not be followed by other values.",
    "Unterminated string starting at": "Missing a closing quotation mark in string.",
    "Invalid control character at": "Invalid escape character in string.",
    "Invalid \\escape": "Invalid escape character in string.",
    "Invalid \\uXXXX escape": "Incorrect hex digit after \\u escape in string.",
}
_COUNTED_BYTES = 1 << 20
_TOO_BIG = "Number too big to be stored in double."
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def parse_json(text: Buffer) -> Any:
    """The value of JSON text. Values nested deeper than `MAX_DEPTH` read as 0. Raises `InternalError` (E4)."""
    return _parse(_cut_deep(text))


def _parse(text: Buffer) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    data = bytes(text)
    if not data.startswith(_BYTE_ORDER_MARK):
        return _parse_tolerant(data)
    data = data[len(_BYTE_ORDER_MARK) :]  # one mark: a second one is no JSON
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return _parse_tolerant(data)


def _cut_deep(text: Buffer) -> Buffer:
    """JSON text with each array and object below `MAX_DEPTH` replaced by 0, in linear time."""
    if _opened(text) <= MAX_DEPTH:
        return text
    data = bytes(text)
    brackets = np.frombuffer(_STRING.sub(b"", data).translate(None, _NOT_BRACKETS), dtype=np.uint8)
    # bit 1 is set in "[" and "{" and clear in "]" and "}"
    steps = (brackets & 2).astype(np.int8) - 1
    if steps.cumsum(dtype=np.int32).max(initial=0) <= MAX_DEPTH:
        return text
    outside = np.frombuffer(_STRING.sub(lambda found: b" " * len(found[0]), data), dtype=np.uint8)
    opens, closes = (outside == ord("[")) | (outside == ord("{")), (outside == ord("]")) | (outside == ord("}"))
    depths = (opens.astype(np.int8) - closes).cumsum(dtype=np.int32)
    first = opens & (depths == MAX_DEPTH + 1)
    deep = (depths > MAX_DEPTH) | (closes & (depths == MAX_DEPTH))
    cut = np.frombuffer(data, dtype=np.uint8).copy()
    cut[first] = ord("0")
    return bytes(cut[first | ~deep])


def _opened(text: Buffer) -> int:
    """How many brackets open in it, at least as many as matter. Copies little at a time."""
    view, count = memoryview(text), 0
    for at in range(0, len(view), _COUNTED_BYTES):
        part = bytes(view[at : at + _COUNTED_BYTES])
        count += part.count(b"[") + part.count(b"{")
        if count > MAX_DEPTH:
            break
    return count


class Members(dict[str, Any]):
    """An object whose keys may occur more than once: `pairs` has all of them, in order."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def parse_members(text: Buffer) -> Any:
    """As `parse_json`, with `Members` for objects."""
    shallow = _cut_deep(text)
    _parse(shallow)  # raises for broken text
    return json.loads(bytes(shallow), object_pairs_hook=Members, parse_int=_integer, parse_float=_finite)


def quote(text: str) -> bytes:
    """A JSON string literal, in UTF-8."""
    return orjson.dumps(text)


def parse_failure(complaint: str, offset: int) -> InternalError:
    """E4's error for broken JSON; `offset` counts bytes."""
    return InternalError(f"failed to parse the request JSON buffer: {complaint} at {offset}")


def _parse_tolerant(data: bytes) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise parse_failure("Invalid encoding in string.", error.start) from None
    if not text.strip(_JSON_SPACE):
        raise parse_failure("The document is empty.", len(data))
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise parse_failure(_complaint(error), len(text[: _position(error)].encode())) from None
    except OverflowError:
        raise parse_failure(_TOO_BIG, _offset_of_too_big(data)) from None
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise parse_failure("The surrogate pair in string is invalid.", _surrogate_offset(text)) from None
    return value


def _position(error: json.JSONDecodeError) -> int:
    """Where Triton's parser would have noticed the fault that Python's reports, in characters."""
    if error.msg == "Unterminated string starting at":
        return len(error.doc)
    if error.msg == "Invalid \\uXXXX escape":
        return error.pos - 1
    if error.msg == "Expecting value":  # behind the part of a word, or the sign, that is right
        return error.pos + max(_common(error.doc[error.pos :][: len(word)], word) for word in _WORDS)
    return error.pos


def _common(text: str, word: str) -> int:
    """How many characters at the beginning of `text` are those of `word`."""
    return next((at for at, pair in enumerate(zip(text, word, strict=False)) if pair[0] != pair[1]), len(text))


def _offset_of_too_big(data: bytes) -> int:
    outside = _STRING.sub(lambda found: b" " * len(found[0]), data)
    return next((found.start() for found in _NUMBER.finditer(outside) if math.isinf(float(found[0]))), 0)


def _complaint(error: json.JSONDecodeError) -> str:
    if error.msg == "Expecting ',' delimiter":
        # Python has one message for both containers: find the innermost one still open
        outside = _STRING.sub(b"", error.doc[: error.pos].encode())
        closed = 0
        for byte in reversed(outside):
            if byte in b"]}":
                closed += 1
            elif byte in b"[{":
                if closed == 0:
                    return (
                        "Missing a comma or ] after an array element."
                        if byte == ord("[")
                        else "Missing a comma or '}' after an object member."
                    )
                closed -= 1
    return _COMPLAINTS.get(error.msg, "Invalid value.")


def _surrogate_offset(text: str) -> int:
    found = _SURROGATE_ESCAPE.search(text)
    return len(text[: found.start()].encode()) if found else 0


def _integer(literal: str) -> int | float:
    # past 64 bits a number is a double, as in orjson; `int` refuses thousands of digits
    if len(literal) <= 20:
        value = int(literal)
        if -(2**63) <= value < 2**64:
            return value
    return _finite(literal)


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise OverflowError
    return value
