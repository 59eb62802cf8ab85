"""Exact steps: each token becomes a sequence of its own, with the blocks that it sees."""

from __future__ import annotations

import numpy as np

from executors.backends.llm.decoder import one_by_one
from executors.generation.engine import StepInput


def step(**lists: list[int]) -> StepInput:
    return StepInput(**{name: np.array(values, np.int32) for name, values in lists.items()})


def test_tokens_become_sequences() -> None:
    """A chunk over a border of blocks, and a decode; the last two tokens fill the step."""
    given = step(
        tokens=[5, 6, 7, 9],
        positions=[31, 32, 33, 64],
        past_lengths=[31, 64],
        begins=[0, 3, 4],
        blocks=[10, 11, 20, 21, 22],
        block_begins=[0, 2, 5],
        sampled=[2, 3],
        adapters=[1, 1, 1, -1],
    )
    made = one_by_one(given, 6, 99)
    assert made.tokens.tolist() == [5, 6, 7, 9, 0, 0]
    assert made.past_lengths.tolist() == made.positions.tolist() == [31, 32, 33, 64, 0, 0]
    assert made.begins.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert made.blocks.tolist() == [10, 10, 11, 10, 11, 20, 21, 22, 99, 99]
    assert made.block_begins.tolist() == [0, 1, 3, 5, 8, 9, 10]
    assert made.sampled.tolist() == [2, 3]
    assert made.adapters.tolist() == [1, 1, 1, -1, -1, -1]
    assert all(array.dtype == np.int32 for array in (made.blocks, made.block_begins, made.past_lengths, made.begins))


def test_decodes_stay_as_they_are() -> None:
    names = ("tokens", "positions", "past_lengths", "blocks", "sampled", "adapters")
    lists = {name: [0, 1] for name in names}
    given = step(**lists, begins=[0, 1, 2], block_begins=[0, 1, 2])
    assert one_by_one(given, 2, 9) is given
