"""Reads what a GGUF file says of its model: keys and values before the tensors. No tensor is read.

The format: the magic "GGUF", a version, the numbers of tensors and of keys, then each key, its type and its value.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from charonia.errors import InvalidArgument

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_KEYS = 1 << 16
_MOST_BYTES = 256 << 20
"""What keys and values may take: vocabularies of 256,000 tokens have 10 MB."""


def read_metadata(path: Path) -> dict[str, Any]:
    """The values by key: numbers, texts (UTF-8) and lists of them. Raises `InvalidArgument` for a malformed file."""
    try:
        with path.open("rb") as file:
            return _Reader(file, path).metadata()
    except OSError as error:
        raise InvalidArgument(f"cannot read '{path}': {error.strerror}") from None


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._left = min(_MOST_BYTES, os.fstat(file.fileno()).st_size)

    def metadata(self) -> dict[str, Any]:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise self._malformed("it does not begin with 'GGUF'")
        (version,) = self._numbers("I", 1)
        if version not in _VERSIONS:
            raise self._malformed(f"version {version} is not known")
        _, keys = self._numbers("Q", 2)
        if keys > _MOST_KEYS:
            raise self._malformed(f"it has {keys} keys")
        return {self._text(): self._value(self._numbers("I", 1)[0]) for _ in range(keys)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._numbers(self._code(kind), 1)[0]
        element, count = struct.unpack("<IQ", self._take(12))
        if element == _STRING:
            if count * 8 > self._left:
                raise self._malformed("an array is longer than the file")
            return [self._text() for _ in range(count)]
        return list(self._numbers(self._code(element), count))

    def _code(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._malformed(f"a value has the type {kind}")
        return _NUMBERS[kind]

    def _text(self) -> str:
        (size,) = self._numbers("Q", 1)
        return self._take(size).decode(errors="replace")

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        data = self._take(count * struct.calcsize(code))
        return struct.unpack(f"<{count}{code}", data)

    def _take(self, size: int) -> bytes:
        self._left -= size
        data = self._file.read(size) if self._left >= 0 else b""
        if len(data) < size:
            raise self._malformed("it ends too early")
        return data

    def _malformed(self, reason: str) -> InvalidArgument:
        return InvalidArgument(f"'{self._path}' is no GGUF file that can be read: {reason}")
