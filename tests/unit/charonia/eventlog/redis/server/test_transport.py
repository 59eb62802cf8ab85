"""Commands as bytes: both packers write the same protocol, large arguments are not copied.

Replies read with and without large bulk strings kept from hiredis are the same, however their bytes arrive.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterable
from typing import Any

import hiredis
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from charonia.eventlog.redis.server.transport import (
    INCOMPLETE,
    UNCOPIED_BYTES,
    Refused,
    ReplyReader,
    Wire,
    pack,
    pack_pieces,
)

COMMANDS = [
    ("PING",),
    ("SET", b"k", b""),
    (b"XADD", "ü", 17, -3, b"\r\n$1\r\n\x00", memoryview(b"view"), memoryview(b"")),
    ("X", *[b"%d" % number for number in range(3000)]),
    ("SET", b"k", bytes(UNCOPIED_BYTES), b"tail", bytes(UNCOPIED_BYTES - 1)),
]


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_both_packers_agree(command: tuple[bytes | str | int, ...]) -> None:
    assert b"".join(pack_pieces(command)) == pack(command) == hiredis.pack_command(command)


def test_a_bytearray_is_packed_like_bytes() -> None:
    assert pack(("SET", bytearray(b"abc"))) == pack(("SET", b"abc"))


def test_a_large_argument_is_handed_on_uncopied() -> None:
    large = bytes(UNCOPIED_BYTES)
    pieces = pack_pieces((b"SET", b"k", large, b"EX", 1))
    assert pieces[1] is large
    assert len(pieces) == 3


def test_a_view_of_wider_items_counts_its_bytes() -> None:
    wide = memoryview(bytes(UNCOPIED_BYTES * 2)).cast("I")
    assert b"$%d\r\n" % (UNCOPIED_BYTES * 2) in b"".join(pack_pieces((b"SET", b"k", wide)))


async def test_large_replies_are_matched_like_small_ones() -> None:
    wire = Wire("a server", lambda wire, error: None)
    small, large, batch = wire.call((pack(("GET", "a")),)), wire.call((pack(("GET", "b")),)), asyncio.Future[Any]()
    wire.batch((pack(("GET", "c")),) * 2, 2, batch.set_result)
    wrong = wire.call((pack(("GET", "d")),))
    values = [bytes([at]) * 300_000 for at in range(3)]
    stream = b":1\r\n" + b"".join(b"$300000\r\n%s\r\n" % value for value in values) + b"-WRONG it is\r\n"
    for at in range(0, len(stream), 65_536):
        wire.data_received(stream[at : at + 65_536])
    assert (await small, await large, await batch) == (1, values[0], values[1:])
    with pytest.raises(Refused, match="WRONG it is"):
        await wrong


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
