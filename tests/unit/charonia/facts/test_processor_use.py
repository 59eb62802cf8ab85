"""What executors say of their processors, as journals and trace files have it."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import msgpack
import pytest

from charonia.errors import InvalidRecord
from charonia.facts.processor_use import BATCHER_APART, ProcessorUse, use_in, use_of

USE = ProcessorUse(
    "host-1", 1.5, 4321, 2_000_000_000, 1_500_000_000, 700_000_000, 300_000_000, 400_000_000, 17,
    2**63 - 1, BATCHER_APART,
)  # fmt: skip
FIELDS_OF_FORMER_RELEASES = 9


def test_it_is_read_as_it_was_written_and_more_at_the_end_is_left_unread() -> None:
    assert use_of(list(USE.packed())) == USE
    assert use_in(USE.text()) == USE
    assert use_of([*USE.packed(), "of a later release"]) == USE
    assert use_in(f"{USE.text()} 8") == USE


def test_earlier_releases_named_neither_machine_nor_batcher_and_read_what_does() -> None:
    former = astuple(USE)[:FIELDS_OF_FORMER_RELEASES]
    assert use_of(former) == use_in(" ".join(map(str, former))) == replace(USE, shared=0, batcher=0)
    assert use_of([*former, USE.shared]) == replace(USE, batcher=0)
    # they take the first nine values of a text whose rest is whole numbers, and of what msgpack can hold
    assert all(word.isdecimal() for word in USE.text().split()[FIELDS_OF_FORMER_RELEASES:])
    assert use_of(msgpack.unpackb(msgpack.packb(USE.packed()))) == USE


@pytest.mark.parametrize(
    "packed",
    [
        [], astuple(USE)[:8], [1, *astuple(USE)[1:]], ["h", 0.0, *astuple(USE)[2:]], ["h", "2", *astuple(USE)[2:]],
        [*astuple(USE)[:-1], -1], [*astuple(USE)[:-1], None],
    ],
)  # fmt: skip
def test_what_is_none_is_refused(packed: list[Any]) -> None:
    with pytest.raises(InvalidRecord, match="no use of processors"):
        use_of(packed)


@pytest.mark.parametrize(
    "text", ["", "h", "h 2", "h 2 1 2 3 4 5 6", "h 0 1 2 3 4 5 6 7", "h two 1 2 3 4 5 6 7", "h 2 1 2 3 4 5 6 -7"]
)
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRecord, match="no use of processors"):
        use_in(text)
