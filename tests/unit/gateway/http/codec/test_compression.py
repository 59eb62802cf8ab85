from __future__ import annotations

import gzip
import zlib
from random import Random

import pytest

from charonia.errors import InvalidArgument
from gateway.http.codec.compression import choose_encoding, compress, content_encoding, decompress
from gateway.http.codec.error_replies import HttpRefusal


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
    assert decompress(encoding, packed, len(body)) == body
    assert decompress(encoding, memoryview(packed), len(body)) == body


def test_members_of_any_size_follow_one_another() -> None:
    bodies = [Random(size).randbytes(size) for size in (1, 300_000, 0, 262_144, 7)]
    assert decompress("gzip", b"".join(map(gzip.compress, bodies)), 600_000) == b"".join(bodies)


def test_deflate_is_the_zlib_format_and_gzip_the_usual_one() -> None:
    assert zlib.decompress(compress("deflate", [b"abc"])) == b"abc"
    assert gzip.decompress(compress("gzip", [b"abc"])) == b"abc"
    assert decompress("gzip", gzip.compress(b"ab") + gzip.compress(b"c"), 3) == b"abc"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_stops_at_the_limit(encoding: str) -> None:
    with pytest.raises(HttpRefusal) as caught:
        decompress(encoding, compress(encoding, [b"\0" * 50_000_000]), 1_000_000)
    assert caught.value.status == 413
    assert decompress(encoding, compress(encoding, [b"\0" * 1_000_000]), 1_000_000) == b"\0" * 1_000_000


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("damage", [lambda b: b"not compressed", lambda b: b[:-3], lambda b: b[:5], lambda b: b + b"x"])
def test_broken_streams_are_invalid_arguments(encoding: str, damage: object) -> None:
    assert callable(damage)
    with pytest.raises(InvalidArgument, match="failed to decompress the request body"):
        decompress(encoding, damage(compress(encoding, [b"abcdef" * 100])), 10_000)
