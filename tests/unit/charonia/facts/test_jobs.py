"""The note that a job's outcome was given to a caller."""

from __future__ import annotations

import msgpack
import pytest

from charonia.errors import InvalidRecord
from charonia.facts.jobs import DeliveryNote

NOTE = DeliveryNote(1_795_453_756_166_000, "gateway-host-1-abc")


def test_a_note_reads_as_it_was_written_also_with_more_at_its_end() -> None:
    assert DeliveryNote.unpack(NOTE.pack()) == NOTE
    assert DeliveryNote.unpack(msgpack.packb([*msgpack.unpackb(NOTE.pack()), "of a later release"])) == NOTE


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb(["soon", "g"]), msgpack.packb(7)])
def test_another_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRecord, match="delivery"):
        DeliveryNote.unpack(data)
