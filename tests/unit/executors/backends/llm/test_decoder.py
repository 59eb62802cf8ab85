"""Exact steps: each token becomes a sequence of its own, with the blocks that it sees."""

from __future__ import annotations

import numpy as np

from executors.backends.llm.decoder import in_passes, multiplies_bytes, one_by_one
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


def test_long_steps_are_cut_into_passes() -> None:
    """Two sequences of three tokens in passes of four; one place is sampled five times."""
    given = step(
        tokens=[1, 2, 3, 4, 5, 6],
        positions=[30, 31, 32, 62, 63, 64],
        past_lengths=[30, 62],
        begins=[0, 3, 6],
        blocks=[10, 11, 20, 21, 22],
        block_begins=[0, 2, 5],
        sampled=[5, 2, 2, 2, 2, 2],
        adapters=[0, 0, 0, -1, -1, -1],
    )
    first, again, second = in_passes(one_by_one(given, 0, 99), 4)
    made, rows = first
    assert (made.tokens.tolist(), made.past_lengths.tolist()) == ([1, 2, 3, 4], [30, 31, 32, 62])
    assert (made.blocks.tolist(), made.block_begins.tolist()) == ([10, 10, 10, 11, 20, 21], [0, 1, 2, 4, 6])
    assert (made.sampled.tolist(), rows.tolist(), made.adapters.tolist()) == ([2] * 4, [1, 2, 3, 4], [0, 0, 0, -1])
    assert (again[0].tokens.tolist(), again[0].sampled.tolist(), again[1].tolist()) == ([1, 2, 3, 4], [2], [5])
    made, rows = second
    assert (made.tokens.tolist(), made.blocks.tolist()) == ([5, 6], [20, 21, 20, 21, 22])
    assert (made.begins.tolist(), made.block_begins.tolist()) == ([0, 1, 2], [0, 2, 5])
    assert (made.sampled.tolist(), rows.tolist()) == ([1], [0])


def test_processors_that_multiply_bytes() -> None:
    assert multiplies_bytes("flags : fma avx512f avx512_vnni")
    assert multiplies_bytes("flags : avx2 avx_vnni")
    assert not multiplies_bytes("flags : fma avx f16c avx2")
    assert not multiplies_bytes("")
