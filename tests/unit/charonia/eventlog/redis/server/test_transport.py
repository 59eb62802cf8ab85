"""Commands as bytes: both packers write the same protocol, large arguments are not copied. Replies of any size."""

from __future__ import annotations

import asyncio
from typing import Any

import hiredis
import pytest

from charonia.eventlog.redis.server.transport import UNCOPIED_BYTES, Refused, Wire, pack, pack_pieces

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
