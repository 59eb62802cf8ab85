"""Seals of earlier releases are verified for ever: their bytes, digests and links as hexadecimal text.

A file holds id, bytes, digest of the entries and link of a seal, a line each.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.facts.seals import FIELD_SEAL, Seal, SegmentDigest, make_seal, read_seal

HERE = Path(__file__).parent / "seals"
MODEL = "ns/größe {1}"
ENTRIES = (
    (b"1763900000000-0", [b"f", b"\x92\x00\xc4\x11" + bytes(17)]),
    (b"1763900000000-1", [b"f", b"", b"w", b"101"]),
    (b"1763900000001-0", [b"f", memoryview(b"\xff" * 300)]),
)


def made() -> dict[str, tuple[Seal, bytes]]:
    first = SegmentDigest()
    for entry_id, fields in ENTRIES[:2]:
        first.add(entry_id, fields)
    second = SegmentDigest()
    second.add(*ENTRIES[2])
    one = make_seal(MODEL, None, first, 1_763_900_030_000)
    return {"v1-first": one, "v1-second": make_seal(MODEL, one[0], second, 1_763_900_060_000)}


@pytest.mark.parametrize("name", ["v1-first", "v1-second"])
def test_the_bytes_of_seals_stay(name: str) -> None:
    seal, packed = made()[name]
    seal_id, kept, digest, link = (HERE / f"{name}.hex").read_text().split()
    assert (seal.last.hex(), packed.hex(), seal.digest.hex(), seal.link.hex()) == (seal_id, kept, digest, link)
    assert read_seal(MODEL, bytes.fromhex(seal_id), [FIELD_SEAL, bytes.fromhex(kept)]) == seal


def test_there_is_nothing_else() -> None:
    assert sorted(path.stem for path in HERE.iterdir()) == sorted(made())
