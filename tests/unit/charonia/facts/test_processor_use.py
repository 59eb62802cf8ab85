"""What executors say of their processors, as journals and trace files have it."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

from charonia.errors import InvalidRecord
from charonia.facts.processor_use import ProcessorUse, use_in, use_of

USE = ProcessorUse("host-1", 1.5, 4321, 2_000_000_000, 1_500_000_000, 700_000_000, 300_000_000, 400_000_000, 17)


def test_it_is_read_as_it_was_written_and_more_at_the_end_is_left_unread() -> None:
    assert use_of(list(USE.packed())) == USE
    assert use_in(USE.text()) == USE
    assert use_of([*USE.packed(), "of a later release"]) == USE
    assert use_in(f"{USE.text()} 8") == USE


@pytest.mark.parametrize(
    "packed",
    [
        [], astuple(USE)[:-1], [1, *astuple(USE)[1:]], ["h", 0.0, *astuple(USE)[2:]], ["h", "2", *astuple(USE)[2:]],
        [*astuple(USE)[:-1], -1], [*astuple(USE)[:-1], None],
    ],
)  # fmt: skip
def test_what_is_none_is_refused(packed: list[Any]) -> None:
    with pytest.raises(InvalidRecord, match="no use of processors"):
        use_of(packed)
    with pytest.raises(InvalidRecord, match="no use of processors"):
        use_in(" ".join(map(str, packed[1:])))
