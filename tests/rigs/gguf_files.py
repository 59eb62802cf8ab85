"""Writes small GGUF files: keys and values of any kind, and tensors of raw bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALIGNMENT = 32
Tensor = tuple[tuple[int, ...], int, bytes]
"""Shape with the innermost dimension last, the format's number of the type, and the data."""


def write_gguf(path: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A file with these values; whole numbers are uint32, lists have elements of one kind."""
    tensors = tensors or {}
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, value in values.items():
        kind, content = _value(value)
        data += _text(key) + struct.pack("<I", kind) + content
    body = b""
    for name, (shape, kind, content) in tensors.items():
        data += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        data += struct.pack("<IQ", kind, len(body))
        body += content + bytes(-len(content) % ALIGNMENT)
    path.write_bytes(data + bytes(-len(data) % ALIGNMENT) + body)
    return path


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _text(value)
    kind = _value(value[0])[0]
    return 9, struct.pack("<IQ", kind, len(value)) + b"".join(_value(one)[1] for one in value)
