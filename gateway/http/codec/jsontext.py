"""JSON text to values: what is nested too deep cut off, NaN and Infinity taken, failures in Triton's words. Pure.

orjson reads nearly everything; what it refuses goes to a tolerant reader that either accepts the bare tokens of T5 or
says what is wrong and where (E4). When a key occurs twice, the last one counts.
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

MOST_DEPTH = 128
"""How deep JSON is read: deeper than `data` of a tensor may be nested (E8, `jsondata`), and no parser's limit."""

# Possessive, and an unterminated string runs to the end, so that hostile text costs linear time.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_JSON_SPACE = " \t\n\r"

# The tolerant reader's complaint, up to its position, and what Triton's parser says of the same text.
_COMPLAINTS = {
    "Expecting property name enclosed in double quotes": "Missing a name for object member.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Extra data": "The document root must not be followed by other values.",
    "Unterminated string starting at": "Missing a closing quotation mark in string.",
    "Invalid control character at": "Invalid encoding in string.",
    "Invalid \\escape": "Invalid escape character in string.",
    "Invalid \\uXXXX escape": "Incorrect hex digit after \\u escape in string.",
}
_TOO_BIG = "Number too big to be stored in double."


def parse_json(text: Buffer) -> Any:
    """The value of JSON text. What is nested deeper than `MOST_DEPTH` reads as 0. Raises `InternalError` (E4)."""
    return _parse(_cut_deep(text))


def _parse(text: Buffer) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _parse_tolerant(bytes(text))


def _cut_deep(text: Buffer) -> Buffer:
    """JSON text with 0 in the place of each array and object below `MOST_DEPTH`. Linear, whatever the text."""
    data = bytes(text)
    if data.count(b"[") + data.count(b"{") <= MOST_DEPTH:
        return text
    brackets = np.frombuffer(_STRING.sub(b"", data).translate(None, _NOT_BRACKETS), dtype=np.uint8)
    # bit 1 is set in "[" and "{" and clear in "]" and "}"
    steps = (brackets & 2).astype(np.int8) - 1
    if steps.cumsum(dtype=np.int32).max(initial=0) <= MOST_DEPTH:
        return text
    outside = np.frombuffer(_STRING.sub(lambda found: b" " * len(found[0]), data), dtype=np.uint8)
    opens, closes = (outside == ord("[")) | (outside == ord("{")), (outside == ord("]")) | (outside == ord("}"))
    depths = (opens.astype(np.int8) - closes).cumsum(dtype=np.int32)
    first = opens & (depths == MOST_DEPTH + 1)
    deep = (depths > MOST_DEPTH) | (closes & (depths == MOST_DEPTH))
    cut = np.frombuffer(data, dtype=np.uint8).copy()
    cut[first] = ord("0")
    return bytes(cut[first | ~deep])


class Members(dict[str, Any]):
    """An object whose keys may occur more than once: `pairs` has them all, in order."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def parse_members(text: Buffer) -> Any:
    """As `parse_json`, with `Members` for objects."""
    shallow = _cut_deep(text)
    _parse(shallow)  # for its complaints
    return json.loads(bytes(shallow), object_pairs_hook=Members, parse_int=_integer, parse_float=_finite)


def quote(text: str) -> bytes:
    """A JSON string literal, in UTF-8."""
    return orjson.dumps(text)


def parse_failure(complaint: str, offset: int) -> InternalError:
    """E4's error for text that is no JSON; `offset` counts bytes."""
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
        raise parse_failure(_complaint(error), len(text[: error.pos].encode())) from None
    except OverflowError:
        raise parse_failure(_TOO_BIG, 0) from None
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise parse_failure("The surrogate pair in string is invalid.", _surrogate_offset(text)) from None
    return value


def _complaint(error: json.JSONDecodeError) -> str:
    if error.msg == "Expecting ',' delimiter":
        # The same complaint stands for both containers: the innermost one still open tells which.
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
                        else "Missing a comma or } after an object member."
                    )
                closed -= 1
    return _COMPLAINTS.get(error.msg, "Invalid value.")


def _surrogate_offset(text: str) -> int:
    found = _SURROGATE_ESCAPE.search(text)
    return len(text[: found.start()].encode()) if found else 0


def _integer(literal: str) -> int | float:
    # past 64 bits a JSON number is a double, as it is for orjson; int() of thousands of digits would be refused
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
