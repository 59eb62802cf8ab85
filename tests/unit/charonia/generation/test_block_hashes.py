"""Equal names mean an equal text from its beginning, of one adapter and salt."""

from __future__ import annotations

import numpy as np

from charonia.generation.block_hashes import block_hashes, next_hash, root_hash


def names(text: list[int], adapter: str = "", salt: bytes = b"") -> list[int]:
    return block_hashes(np.array(text, np.int32), 4, root_hash(adapter, salt))


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
