"""A decoder without a model: its logits come from a hash of the tokens before, which it keeps in blocks like a model.

A row's logits depend on every token before it and on the adapter, as read through the blocks of the step: a wrong
table, a block that two texts share, or a prefix that was not computed gives other logits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from charonia.errors import InvalidArgument
from executors.generation.engine import StepInput

_MIX = np.uint64(0x9E3779B97F4A7C15)
_EMPTY = np.uint64(0x2545F4914F6CDD1D)
_ROWS = 251


class StubDecoder:
    """Also counts its steps, and keeps the largest number of tokens that one had."""

    def __init__(
        self,
        *,
        vocabulary: int = 64,
        context: int = 256,
        block_tokens: int = 4,
        blocks: int = 256,
        adapter_slots: int = 0,
        seed: int = 0,
    ) -> None:
        self.vocabulary = vocabulary
        self.context = context
        self.block_tokens = block_tokens
        self.blocks = blocks
        self.adapter_slots = adapter_slots
        self.adapters: dict[int, str] = {}
        self.loads: list[tuple[int, str]] = []
        self.steps = 0
        self.max_tokens = 0
        self.closed = False
        self.before_step: Callable[[StepInput], None] = lambda step: None
        self._table = np.random.default_rng(seed).normal(0, 3, (_ROWS, vocabulary)).astype(np.float32)
        self._kept = np.zeros(blocks * block_tokens, np.uint64)

    def step(self, step: StepInput) -> npt.NDArray[np.float32]:
        self.before_step(step)
        self.steps += 1
        self.max_tokens = max(self.max_tokens, len(step.tokens))
        rows = len(step.past_lengths)
        counts = np.diff(step.begins)
        one_each = int((counts == 1).cumprod().sum())  # rows at the begin that decode: all at once
        states = np.empty(len(step.tokens), np.uint64)
        if one_each:
            past = step.past_lengths[:one_each].astype(np.int64)
            first = step.block_begins[:one_each]
            before = step.blocks[first + np.maximum(past - 1, 0) // self.block_tokens].astype(np.int64)
            states_before = self._kept[before * self.block_tokens + np.maximum(past - 1, 0) % self.block_tokens]
            states_before = np.where(past > 0, states_before, self._roots(step.adapters[:one_each]))
            new = self._next(states_before, step.tokens[:one_each])
            at = step.blocks[first + past // self.block_tokens].astype(np.int64)
            self._kept[at * self.block_tokens + past % self.block_tokens] = new
            states[:one_each] = new
        for row in range(one_each, rows):
            begin, end, past_length = int(step.begins[row]), int(step.begins[row + 1]), int(step.past_lengths[row])
            table = step.blocks[step.block_begins[row] : step.block_begins[row + 1]].astype(np.int64)
            state = self._roots(step.adapters[begin : begin + 1])[0]
            if past_length:
                state = self._kept[self._place(table, past_length - 1)]
            for offset in range(end - begin):
                assert step.positions[begin + offset] == past_length + offset
                state = self._next(np.array([state]), step.tokens[begin + offset : begin + offset + 1])[0]
                self._kept[self._place(table, past_length + offset)] = state
                states[begin + offset] = state
        return self._table[states[step.sampled] % np.uint64(_ROWS)].copy()

    def load_adapter(self, slot: int, directory: str) -> None:
        if not 0 <= slot < self.adapter_slots:
            raise ValueError(slot)
        if "broken" in directory:
            raise InvalidArgument(f"the adapter in {directory} does not fit the model")
        self.adapters[slot] = directory
        self.loads.append((slot, directory))

    def close(self) -> None:
        self.closed = True

    def _place(self, table: npt.NDArray[np.int64], position: int) -> int:
        return int(table[position // self.block_tokens]) * self.block_tokens + position % self.block_tokens

    def _roots(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        roots = np.full(len(slots), _EMPTY)
        for index, slot in enumerate(slots.tolist()):
            if slot >= 0:
                roots[index] ^= np.uint64(int.from_bytes(self.adapters[slot].encode().ljust(8)[-8:], "little"))
        return roots

    def _next(self, states: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        with np.errstate(over="ignore"):
            mixed = (states ^ (tokens.astype(np.uint64) + np.uint64(1))) * _MIX
            return mixed ^ (mixed >> np.uint64(29))
