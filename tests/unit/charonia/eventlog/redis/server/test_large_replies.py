"""Replies read with and without large bulk strings kept from hiredis are the same, however their bytes arrive."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from typing import Any

import hiredis
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from charonia.eventlog.redis.server.large_replies import INCOMPLETE, ReplyReader

MIN_DIGITS = 2
"""Bulk strings of 10 bytes are large here."""

FRAGMENTS = [b"\r\n", b"\n", b"$", b"$12\r\n", b"\n$12\r\n", b"\r\n$25\r\n", b"*1\r\n", b"#t\r\n", b"x", b"\0" * 12]
STRINGS = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map(b"".join)
LINES = st.sampled_from([b"", b"OK", b"$12", b"$1234567", b"WRONG $10"])
ITEMS = st.one_of(
    STRINGS.map(lambda value: b"$%d\r\n%s\r\n" % (len(value), value)),
    st.integers(-(10**12), 10**12).map(lambda value: b":%d\r\n" % value),
    LINES.map(lambda text: b"+" + text + b"\r\n"),
    LINES.map(lambda text: b"-" + text + b"\r\n"),
    st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"*0\r\n"]),
)
REPLIES = st.recursive(
    ITEMS,
    lambda inner: st.lists(inner, max_size=5).map(lambda of: b"*%d\r\n%s" % (len(of), b"".join(of))),
    max_leaves=9,
)
STREAMS = st.lists(REPLIES, min_size=1, max_size=4).map(b"".join)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    ends = [*sorted({at for at in cuts if 0 < at < len(stream)}), len(stream)]
    return [stream[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def comparable(reply: Any) -> Any:
    if isinstance(reply, list):
        return [comparable(one) for one in reply]
    return (type(reply), str(reply)) if isinstance(reply, Exception) else (type(reply), reply)


def plainly(pieces: Iterable[bytes]) -> list[Any]:
    parser = hiredis.Reader(notEnoughData=INCOMPLETE)
    found: list[Any] = []
    try:
        for piece in pieces:
            parser.feed(piece)
            while (reply := parser.gets()) is not INCOMPLETE:
                found.append(comparable(reply))
    except hiredis.ProtocolError:
        found.append("refused")
    return found


def by_pieces(pieces: Iterable[bytes], reader: ReplyReader, *, always: bool = False) -> list[Any]:
    """As the transport reads them; `always` without its way for small replies."""
    found: list[Any] = []
    try:
        for piece in pieces:
            if not always and reader.is_small(piece):
                reader.feed(piece)
                while (reply := reader.gets()) is not INCOMPLETE:
                    found.append(comparable(reply))
            else:
                found += map(comparable, reader.replies(piece))
    except hiredis.ProtocolError:
        found.append("refused")
    return found


@given(stream=STREAMS, cuts=CUTS, always=st.booleans())
@example(stream=b"$12\r\n" + bytes(12) + b"\r\n", cuts=[1, 2, 3, 4, 5, 16, 17, 18], always=False)
@example(stream=b"+$12\r\n:1\r\n", cuts=[1], always=True)
@example(stream=b"*2\r\n$12\r\n" + bytes(12) + b"\r\n:1\r\n", cuts=[4, 23], always=False)
def test_any_replies_in_any_pieces(stream: bytes, cuts: list[int], always: bool) -> None:
    pieces = cut(stream, cuts)
    assert by_pieces(pieces, ReplyReader(MIN_DIGITS), always=always) == plainly([stream])


@given(stream=STREAMS, cuts=CUTS, at=st.integers(0, 400), byte=st.sampled_from(b"+-:$*0123456789\r\nx"))
def test_what_is_no_protocol_is_refused_as_by_hiredis(stream: bytes, cuts: list[int], at: int, byte: int) -> None:
    wrong = bytearray(stream)
    wrong[at % len(wrong)] = byte
    assert by_pieces(cut(bytes(wrong), cuts), ReplyReader(MIN_DIGITS)) == plainly([bytes(wrong)])


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def in_pieces(stream: bytes, size: int) -> list[bytes]:
    return [stream[at : at + size] for at in range(0, len(stream), size)]


def test_several_large_records_of_several_replies() -> None:
    values = [bytes([at]) * (1_000_000 + at) for at in range(4)]
    entries = [b"*2\r\n%s*4\r\n%s%s%s%s" % tuple(map(bulk, (b"1-1", b"h", b"", b"r", value))) for value in values]
    stream = b"*1\r\n*2\r\n%s*2\r\n%s%s" % (bulk(b"stream"), *entries[:2]) + b":1\r\n" + b"".join(map(bulk, values[2:]))
    stream = b"-WRONG\r\n" + stream + b"+OK\r\n"
    found = by_pieces(in_pieces(stream, 65_536), ReplyReader())
    assert found == plainly([stream])


def test_a_large_one_is_held_once() -> None:
    size, piece = 8_000_000, bytes(65_536)
    reader = ReplyReader()
    tracemalloc.start()
    try:
        assert list(reader.replies(b"*1\r\n$%d\r\n" % size)) == []
        for _ in range(size // len(piece)):
            assert list(reader.replies(piece)) == []
        ((found,),) = reader.replies(piece[: size % len(piece)] + b"\r\n")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == bytes(size)
    assert peak < size + 1_000_000  # hiredis's own memory is not counted; a copy by it would be


@pytest.mark.parametrize("header", [b"\n$1234567\r\n", b"\r\n$12345678901\r\n"])
def test_strings_full_of_headers(header: bytes) -> None:
    stream = b":1\r\n" + bulk(header * 90_000) * 2 + bulk(header * 3)
    pieces = in_pieces(stream, 262_144)
    assert by_pieces(pieces, ReplyReader()) == plainly([stream])
