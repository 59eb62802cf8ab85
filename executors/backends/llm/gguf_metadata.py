"""Reads what a GGUF file says of its model: the keys and values before the tensors, and where the tensors lie.

The format: the magic "GGUF", a version, the numbers of tensors and of keys; each key, its type and its value; each
tensor's name, dimensions (the innermost first), type and offset; then, at the next multiple of the alignment, the data.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from charonia.errors import InvalidArgument

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
_MOST_BYTES = 256 << 20
"""What keys and values may take: vocabularies of 256,000 tokens have 10 MB."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` has the innermost dimension last; `kind` is the format's number of its type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def read_metadata(path: Path) -> dict[str, Any]:
    """The values by key: numbers, texts (UTF-8) and lists of them. Raises `InvalidArgument` for a malformed file."""
    try:
        with path.open("rb") as file:
            return _Reader(file, path).metadata()[0]
    except OSError as error:
        raise InvalidArgument(f"cannot read '{path}': {error.strerror}") from None


def read_tensors(path: Path) -> list[GgufTensor]:
    """The tensors of a file, in its order, with offsets from the begin of the file. Raises as `read_metadata` does."""
    try:
        with path.open("rb") as file:
            reader = _Reader(file, path)
            metadata, count = reader.metadata()
            return reader.tensors(count, metadata.get(_ALIGNMENT, 32))
    except OSError as error:
        raise InvalidArgument(f"cannot read '{path}': {error.strerror}") from None


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._left = min(_MOST_BYTES, os.fstat(file.fileno()).st_size)

    def metadata(self) -> tuple[dict[str, Any], int]:
        """The values by key, and how many tensors there are."""
        if self._take(len(_MAGIC)) != _MAGIC:
            raise self._malformed("it does not begin with 'GGUF'")
        (version,) = self._numbers("I", 1)
        if version not in _VERSIONS:
            raise self._malformed(f"version {version} is not known")
        tensors, keys = self._numbers("Q", 2)
        if keys > _MOST_KEYS or tensors > _MOST_TENSORS:
            raise self._malformed(f"it has {keys} keys and {tensors} tensors")
        return {self._text(): self._value(self._numbers("I", 1)[0]) for _ in range(keys)}, tensors

    def tensors(self, count: int, alignment: Any) -> list[GgufTensor]:
        """To be called after `metadata`."""
        found = []
        for _ in range(count):
            name, (dimensions,) = self._text(), self._numbers("I", 1)
            if dimensions > _MOST_DIMENSIONS:
                raise self._malformed(f"a tensor has {dimensions} dimensions")
            shape = self._numbers("Q", dimensions)
            kind, offset = struct.unpack("<IQ", self._take(12))
            found.append(GgufTensor(name, shape[::-1], kind, offset))
        if not isinstance(alignment, int) or alignment < 1:
            raise self._malformed(f"its alignment is {alignment!r}")
        begin = -(-self._file.tell() // alignment) * alignment
        return [GgufTensor(one.name, one.shape, one.kind, begin + one.offset) for one in found]

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
