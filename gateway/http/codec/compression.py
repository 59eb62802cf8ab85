"""Content encodings of infer bodies: gzip, deflate (zlib format) and identity (H18). Pure.

The size is bounded while decompressing, so that a decompression bomb never becomes a large buffer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from charonia.errors import InvalidArgument
from charonia.tensors import Buffer

from .error_replies import HttpRefusal

IDENTITY = "identity"
GZIP = "gzip"
DEFLATE = "deflate"

_WINDOW_BITS = {GZIP: 31, DEFLATE: 15}
_LEVEL = 1
"""Tensors compress little better at higher levels and the time is the caller's latency."""

_STEP_BYTES = 1 << 20
"""Output of one decompression step."""
_PIECE_BYTES = 1 << 18
"""Input of one decompression step: zlib copies the unused rest with every step."""


def content_encoding(value: bytes) -> str:
    """The encoding of a request body. Raises a 501 `HttpRefusal` for one that is not supported."""
    word = value.decode("latin-1").strip().lower()
    if word in ("", IDENTITY):
        return IDENTITY
    if word in _WINDOW_BITS:
        return word
    raise HttpRefusal(501, "Unsupported compression type", headers=[(b"accept-encoding", b"gzip, deflate")])


def choose_encoding(accept: bytes) -> str:
    """The encoding of the response by the request's Accept-Encoding: highest q wins, then the order of the header."""
    best, best_quality = IDENTITY, 0.0
    wildcard: float | None = None
    qualities: dict[str, float] = {}
    for part in accept.decode("latin-1").lower().split(","):
        word, _, parameters = part.partition(";")
        quality = _quality(parameters)
        word = word.strip()
        if word == "*":
            wildcard = quality
        elif word:
            qualities.setdefault(word, quality)
    if wildcard is not None:
        for word in (GZIP, DEFLATE):
            qualities.setdefault(word, wildcard)
    for word, quality in qualities.items():
        if word in _WINDOW_BITS and quality > best_quality:
            best, best_quality = word, quality
    # identity is always acceptable here, but is preferred only when the header names it
    return IDENTITY if qualities.get(IDENTITY, 0.0) > best_quality else best


def decompress(encoding: str, body: bytes | memoryview, limit_bytes: int) -> bytes:
    """The decompressed body. Raises `InvalidArgument` for a broken stream, a 413 `HttpRefusal` past the limit."""
    parts: list[bytes] = []
    total = 0
    decoder = zlib.decompressobj(_WINDOW_BITS[encoding])
    for at in range(0, len(body), _PIECE_BYTES):
        rest: bytes | memoryview = memoryview(body)[at : at + _PIECE_BYTES]
        part = b""
        while rest or len(part) == _STEP_BYTES:
            if decoder.eof and rest:
                if encoding == DEFLATE:
                    text = "failed to decompress the request body: data after the end of the compressed stream"
                    raise InvalidArgument(text)
                decoder = zlib.decompressobj(_WINDOW_BITS[encoding])
            try:
                part = decoder.decompress(rest, min(_STEP_BYTES, limit_bytes - total + 1))
            except zlib.error as error:
                raise InvalidArgument(f"failed to decompress the request body: {error}") from None
            total += len(part)
            if total > limit_bytes:
                raise HttpRefusal(413, decompressed_too_large(limit_bytes))
            parts.append(part)
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    if body and not decoder.eof:
        raise InvalidArgument("failed to decompress the request body: the compressed data is truncated")
    return b"".join(parts)


def compress(encoding: str, parts: Iterable[Buffer]) -> bytes:
    """The parts of a body, joined, in `encoding`."""
    encoder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return b"".join([*map(encoder.compress, parts), encoder.flush()])


def decompressed_too_large(limit_bytes: int) -> str:
    return (
        f"decompressed request exceeds the maximum allowed input size of {limit_bytes} bytes. Use "
        "--http-max-input-size to increase the limit."
    )


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                return 0.0
            return quality if 0.0 <= quality <= 1.0 else 0.0
    return 1.0
