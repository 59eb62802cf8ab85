"""Content encodings of infer bodies: gzip, deflate (zlib format) and identity (H18). Pure.

`gateway.requests.decompression` decompresses within a bound; this module knows the headers and the texts of refusals.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from charonia.errors import InvalidArgument
from charonia.tensors import Buffer
from gateway.requests.decompression import (
    AFTER_END,
    DEFLATE,
    GZIP,
    TOO_LARGE,
    TRUNCATED,
    WINDOW_BITS,
    DecompressionFault,
)

from .error_replies import HttpRefusal

IDENTITY = "identity"

_LEVEL = 1
"""Tensors compress little better at higher levels and the time is the caller's latency."""

_FAULTS = {
    AFTER_END: "data after the end of the compressed stream",
    TRUNCATED: "the compressed data is truncated",
}


def content_encoding(value: bytes) -> str:
    """The encoding of a request body. Raises a 501 `HttpRefusal` for one that is not supported."""
    word = value.decode("latin-1").strip().lower()
    if word in ("", IDENTITY):
        return IDENTITY
    if word in WINDOW_BITS:
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
        if word in WINDOW_BITS and quality > best_quality:
            best, best_quality = word, quality
    # identity is always acceptable here, but is preferred only when the header names it
    return IDENTITY if qualities.get(IDENTITY, 0.0) > best_quality else best


def refusal_of(error: DecompressionFault, limit_bytes: int) -> InvalidArgument | HttpRefusal:
    """What a body that cannot be decompressed is refused with: a 413 past the limit, otherwise `InvalidArgument`."""
    if error.fault == TOO_LARGE:
        return HttpRefusal(413, decompressed_too_large(limit_bytes))
    text = _FAULTS.get(error.fault, error.fault)
    return InvalidArgument(f"failed to decompress the request body: {text}")


def compress(encoding: str, parts: Iterable[Buffer]) -> bytes:
    """The parts of a body, joined, in `encoding`."""
    encoder = zlib.compressobj(_LEVEL, zlib.DEFLATED, WINDOW_BITS[encoding])
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
