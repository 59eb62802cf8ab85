"""Equal names mean an equal text from its beginning, of one adapter and salt."""

from __future__ import annotations

import numpy as np

from charonia.generation.block_hashes import next_hash, root_hash


def names(text: list[int], adapter: str = "", salt: bytes = b"") -> list[int]:
    """The names of its full blocks of four tokens."""
    tokens, found = np.array(text, np.int32), [root_hash(adapter, salt)]
    for begin in range(0, len(text) - 3, 4):
        found.append(next_hash(found[-1], tokens[begin : begin + 4]))
    return found[1:]


def test_full_blocks_have_names_of_64_bits() -> None:
    found = names(list(range(11)))
    assert len(found) == 2
    assert all(0 <= name < 1 << 64 for name in found)
    assert found[1] == next_hash(found[0], np.array([4, 5, 6, 7], np.int32))


def test_a_name_depends_on_all_that_came_before() -> None:
    first, second = names([1, 2, 3, 4, 5, 6, 7, 8]), names([9, 2, 3, 4, 5, 6, 7, 8])
    assert not set(first) & set(second)
    assert names([1, 2, 3, 4, 9, 9, 9, 9])[0] == first[0]


def test_adapters_and_salts_have_names_of_their_own() -> None:
    text = [1, 2, 3, 4]
    long = b"x" * 70
    found = [
        names(text),
        names(text, "a"),
        names(text, salt=b"a"),
        names(text, salt=long),
        names(text, salt=long + b"y"),
    ]
    assert len({tuple(one) for one in found}) == 5


def test_names_are_the_same_in_every_release() -> None:
    assert names([1, 2, 3, 4], "a", b"m") == [15078047626560923765]
