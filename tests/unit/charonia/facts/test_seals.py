"""Seals as bytes: what is refused, and what a link covers."""

from __future__ import annotations

import msgpack
import pytest

from charonia.errors import InvalidRecord
from charonia.facts.seals import FIELD_SEAL, SegmentDigest, in_order, make_seal, origin, read_seal

HASH = bytes(32)


def digest(*entries: tuple[bytes, list[bytes]]) -> bytes:
    segment = SegmentDigest()
    for entry_id, fields in entries:
        segment.add(entry_id, fields)
    return segment.digest


def test_entries_that_read_alike_when_joined_have_different_digests() -> None:
    alike = [
        [(b"1-0", [b"f", b"ab"])],
        [(b"1-0", [b"fa", b"b"])],
        [(b"1-0", [b"f", b"ab", b"", b""])],
        [(b"1-0f", [b"", b"ab"])],
        [(b"1-0", [b"f", b"a"]), (b"b", [b"", b""])],
    ]
    assert len({digest(*entries) for entries in alike}) == len(alike)


def test_a_link_covers_model_id_and_bytes() -> None:
    segment = SegmentDigest()
    segment.add(b"5-0", [b"f", b"x"])
    seal, packed = make_seal("m", None, segment, 7)
    assert (seal.number, seal.first, seal.last, seal.count, seal.previous) == (1, b"5-0", b"5-0", 1, origin("m"))
    extended = msgpack.packb([*msgpack.unpackb(packed), "of a later release"])
    links = {
        seal.link,
        read_seal("n", b"5-0", [FIELD_SEAL, packed]).link,
        read_seal("m", b"5-1", [FIELD_SEAL, packed]).link,
        read_seal("m", b"5-0", [FIELD_SEAL, extended]).link,
    }
    assert len(links) == 4
    assert make_seal("m", seal, segment, 7)[0].previous == seal.link


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"\xc1",
        msgpack.packb({}),
        msgpack.packb([1, 1, b"1-0", 1, 0, HASH]),
        msgpack.packb([2, 1, b"1-0", 1, 0, HASH, HASH]),
        msgpack.packb([1, 0, b"1-0", 1, 0, HASH, HASH]),
        msgpack.packb([1, True, b"1-0", 1, 0, HASH, HASH]),
        msgpack.packb([1, 1, "1-0", 1, 0, HASH, HASH]),
        msgpack.packb([1, 1, b"1", 1, 0, HASH, HASH]),
        msgpack.packb([1, 1, b"1-0", 1, 0, HASH, HASH[1:]]),
    ],
)
def test_what_is_no_seal_is_refused(told: bytes) -> None:
    with pytest.raises(InvalidRecord, match="no seal"):
        read_seal("m", b"1-0", [FIELD_SEAL, told])
    with pytest.raises(InvalidRecord, match="no seal"):
        read_seal("m", b"1-0", [b"f", told])


def test_ids_are_ordered_as_numbers() -> None:
    assert in_order(b"10-2") > in_order(b"9-10") > in_order(b"9-9")
