"""The log's record of a sequence: what is written is read, and what is not one is refused."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from charonia.errors import InvalidRecord
from charonia.facts.sequence_states import SequenceAbout, SequenceState, sequence_key
from charonia.tensors import Tensor

RUN = bytes(range(16))
ABOUT = SequenceAbout(b"1:n", RUN, 1, "hash", "e-1", 2, 3, 4, 5, 6)
STATE = SequenceState(RUN, 5, (Tensor.of("h", np.ones((2, 3), np.float32)), Tensor.of("s", np.array([b"a"], object))))


def test_records_come_back() -> None:
    assert SequenceAbout.unpack(ABOUT.key, ABOUT.pack()) == ABOUT
    assert ABOUT.pack().startswith(RUN), "the log compares runs"
    found = SequenceState.unpack(STATE.pack())
    assert (found.run, found.step) == (RUN, 5)
    assert [(t.name, t.shape, bytes(t.data)) for t in found.tensors] == [
        (t.name, t.shape, bytes(t.data)) for t in STATE.tensors
    ]


@pytest.mark.parametrize(
    "data",
    [b"", RUN, b"x" * 40, RUN + msgpack.packb([9, 1, "h", "e", 1, 2, 3, 4, 5]), RUN + msgpack.packb([1, 1, 7, "e", 1])],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRecord):
        SequenceAbout.unpack(b"k", data)
    with pytest.raises(InvalidRecord):
        SequenceState.unpack(data)


def test_versions_have_sequences_of_their_own() -> None:
    assert sequence_key(1, b"n") != sequence_key(2, b"n")
