"""Journal entries of earlier releases are read for ever: one committed file of hexadecimal text per kind and layout.

A file holds the entry's fields, names and values in turn, as msgpack. Layout 0 had a field for each part of a fact.
"""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from charonia.facts.jobs import JobState
from charonia.facts.journal import (
    FIELD,
    FIELD_MASK,
    JournalFact,
    pack_accepted,
    pack_batched,
    pack_ended,
    pack_started,
    read_facts,
)

HERE = Path(__file__).parent / "journal"
GROUP = tuple(b"0123456789abcde" + bytes([last]) for last in (0, 1, 255))
JOB = bytes(range(16))
IDS = (*GROUP, JOB)
WHERE = ("e-1", "owner-7-1")
STATES = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)
STARTED = JournalFact("started", IDS, (1, 1, 1, 2), (), *WHERE)

WRITTEN: dict[str, list[bytes]] = {
    "v1-accepted": [FIELD, pack_accepted(IDS)],
    "v1-batched": [FIELD, pack_batched(IDS, 1, *WHERE)],
    "v1-batched-in-part": [FIELD, pack_batched(IDS, 1, *WHERE), FIELD_MASK, b"1011"],
    "v1-started": [FIELD, pack_started(IDS, [1, 1, 1, 2], *WHERE)],
    "v1-ended": [FIELD, pack_ended(IDS, [1, 1, 1, 2], b"sfcx")],
    "v1-ended-alike": [FIELD, pack_ended(IDS, [1, 1, 1, 1], b"ssss")],
    "v1-ended-in-part": [FIELD, pack_ended(IDS, [1, 1, 1, 2], b"ssss"), FIELD_MASK, b"0101"],
    "v1-ended-and-started": [FIELD, pack_ended(IDS, [1, 1, 1, 2], b"ssss", WHERE), FIELD_MASK, b"0101"],
}

READ: dict[str, list[JournalFact]] = {
    "v0-accepted": [JournalFact("accepted", IDS)],
    "v0-batched": [JournalFact("batched", IDS, (1, 1, 1, 2), (), *WHERE)],
    "v0-started": [JournalFact("started", IDS, (1, 1, 1, 1), (), *WHERE)],
    "v0-ended": [JournalFact("ended", IDS[:2] + IDS[3:], (0, 0, 0), (STATES[0], STATES[1], STATES[3]))],
    "v1-accepted": [JournalFact("accepted", IDS)],
    "v1-batched": [JournalFact("batched", IDS, (1,) * 4, (), *WHERE)],
    "v1-batched-in-part": [JournalFact("batched", (IDS[0], *IDS[2:]), (1,) * 3, (), *WHERE)],
    "v1-started": [STARTED],
    "v1-ended": [JournalFact("ended", IDS, (0,) * 4, STATES)],
    "v1-ended-alike": [JournalFact("ended", IDS, (0,) * 4, (JobState.SUCCEEDED,) * 4)],
    "v1-ended-in-part": [JournalFact("ended", (IDS[1], IDS[3]), (0, 0), (JobState.SUCCEEDED,) * 2)],
    "v1-ended-and-started": [STARTED, JournalFact("ended", (IDS[1], IDS[3]), (0, 0), (JobState.SUCCEEDED,) * 2)],
}


def kept(name: str) -> list[bytes]:
    fields: list[bytes] = msgpack.unpackb(bytes.fromhex((HERE / f"{name}.hex").read_text()))
    return fields


@pytest.mark.parametrize("name", sorted(READ))
def test_an_entry_is_read(name: str) -> None:
    assert read_facts(kept(name)) == READ[name]


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_this_release_still_writes_them(name: str) -> None:
    """A difference here is a new layout: give it a version of its own and new files."""
    assert kept(name) == WRITTEN[name]


def test_every_file_is_read() -> None:
    assert {path.stem for path in HERE.glob("*.hex")} == set(READ)
    assert set(WRITTEN) == {name for name in READ if name.startswith("v1")}
