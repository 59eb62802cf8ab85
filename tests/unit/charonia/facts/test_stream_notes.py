"""The note of a gateway's open streams: what is written is read, bounded, and anything else is refused."""

from __future__ import annotations

import msgpack
import pytest

from charonia.errors import InvalidRecord
from charonia.facts.stream_notes import MOST, StreamRow, StreamsNote

ROW = StreamRow("m", 2, "acme", "mine", 1_000_000, 1_500_000, 7)


def test_what_is_written_is_read() -> None:
    note = StreamsNote(1, 2_000_000, (ROW,))
    assert StreamsNote.unpack(note.pack()) == note


def test_a_note_is_bounded() -> None:
    long = StreamRow("m", 1, "", "x" * 10_000, 1, 0, 0)
    packed = StreamsNote(5000, 1, (long,) * 5000).pack()
    assert len(packed) < 25_000
    read = StreamsNote.unpack(packed)
    assert (read.open, len(read.rows), len(read.rows[0].client_id)) == (5000, MOST, 64)


def test_fields_of_newer_releases_are_skipped() -> None:
    row = ["m", 2, "acme", "mine", 1_000_000, 1_500_000, 7, "more"]
    assert StreamsNote.unpack(msgpack.packb([1, 2, [row], {}])) == StreamsNote(1, 2, (ROW,))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb([1, 2, [["m"]]])])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRecord, match="note of open streams"):
        StreamsNote.unpack(data)
