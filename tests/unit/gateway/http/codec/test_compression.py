from __future__ import annotations

import gzip
import zlib
from random import Random

import pytest

from charonia.errors import InvalidArgument
from gateway.http.codec.compression import choose_encoding, compress, content_encoding, refusal_of
from gateway.http.codec.error_replies import HttpRefusal
from gateway.requests.decompression import AFTER_END, TOO_LARGE, TRUNCATED, DecompressionFault, inflated


@pytest.mark.parametrize(("value", "encoding"), [(b"gzip", "gzip"), (b" GZip ", "gzip"), (b"Deflate", "deflate"),
                                                 (b"identity", "identity"), (b"", "identity")])  # fmt: skip
def test_known_encodings(value: bytes, encoding: str) -> None:
    assert content_encoding(value) == encoding


@pytest.mark.parametrize("value", [b"br", b"gzip, gzip", b"x-gzip", b"\xff"])
def test_others_are_refused_with_what_would_do(value: bytes) -> None:
    with pytest.raises(HttpRefusal) as caught:
        content_encoding(value)
    assert (caught.value.status, caught.value.message) == (501, "Unsupported compression type")
    assert caught.value.headers == [(b"accept-encoding", b"gzip, deflate")]


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (b"gzip", "gzip"), (b"deflate", "deflate"), (b"gzip, deflate", "gzip"), (b"deflate, gzip", "deflate"),
        (b"gzip;q=0.2, deflate;q=0.8", "deflate"), (b"gzip;q=0", "identity"), (b"br", "identity"), (b"", "identity"),
        (b"*", "gzip"), (b"*;q=0", "identity"), (b"identity, gzip;q=0.5", "identity"), (b"gzip;q=0, *", "deflate"),
        (b"identity;q=0.1, gzip;q=0.5", "gzip"), (b"gzip;q=abc", "identity"), (b"gzip;q=7", "identity"),
        (b";;,,q=1", "identity"), (b"GZIP", "gzip"),
    ],
)  # fmt: skip
def test_the_best_acceptable_encoding_is_chosen(accept: bytes, chosen: str) -> None:
    assert choose_encoding(accept) == chosen


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("body", [bytes(range(256)) * 5000, bytes(3 << 20), Random(1).randbytes(1 << 20), b""])
def test_round_trip(encoding: str, body: bytes) -> None:
    packed = compress(encoding, [body[:10], memoryview(body)[10:]])
    assert inflated(encoding, packed, len(body), several=False) == body
    assert inflated(encoding, memoryview(packed), len(body), several=False) == body


def test_deflate_is_the_zlib_format_and_gzip_the_usual_one() -> None:
    assert zlib.decompress(compress("deflate", [b"abc"])) == b"abc"
    assert gzip.decompress(compress("gzip", [b"abc"])) == b"abc"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (AFTER_END, "data after the end of the compressed stream"),
        (TRUNCATED, "the compressed data is truncated"),
        ("a text of zlib", "a text of zlib"),
    ],
)
def test_broken_streams_are_invalid_arguments(fault: str, text: str) -> None:
    refusal = refusal_of(DecompressionFault(fault), 1)
    assert isinstance(refusal, InvalidArgument)
    assert str(refusal) == f"failed to decompress the request body: {text}"


def test_what_is_too_large_is_refused_with_413() -> None:
    refusal = refusal_of(DecompressionFault(TOO_LARGE), 1_000_000)
    assert isinstance(refusal, HttpRefusal)
    assert (refusal.status, "1000000 bytes" in refusal.message) == (413, True)
