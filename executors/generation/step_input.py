"""Makes the arrays of a step for the decoder, in memory that is used again for each step. Pure."""

from __future__ import annotations

import numpy as np

from .engine import Ids, StepInput
from .scheduled_request import ScheduledRequest
from .step_scheduler import StepPlan


class StepBuilder:
    """For steps of at most `max_tokens` tokens, of `max_rows` requests, with blocks of `block_tokens`."""

    def __init__(self, max_tokens: int, max_rows: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._tokens, self._positions, self._adapters = (np.empty(max_tokens, np.int32) for _ in range(3))
        self._past = np.empty(max_rows, np.int32)
        self._sampled = np.empty(max_rows + max_tokens, np.int32)
        self._begins = np.arange(max_rows + 1, dtype=np.int32)
        self._block_begins = np.zeros(max_rows + 1, np.int32)
        self._counting = np.arange(max_tokens, dtype=np.int32)

    def build(self, plan: StepPlan) -> StepInput:
        """The arrays of a plan that is not complete yet: decodes first, then chunks. Rows of `sampled` are in order."""
        decodes, chunks, size = plan.decodes, plan.chunks, self._block_tokens
        at = rows = sampled = len(decodes)
        tokens, positions, past, begins = self._tokens, self._positions, self._past, self._begins
        tokens[:at] = [one.answer[-1] for one in decodes]
        past[:at] = [one.computed for one in decodes]
        positions[:at] = past[:at]
        self._adapters[:at] = [one.adapter_slot for one in decodes]
        begins[: at + 1] = self._counting[: at + 1] if at < len(self._counting) else np.arange(at + 1)
        self._sampled[:at] = begins[:at]
        tables = [_table(one)[: one.computed // size + 1] for one in decodes]
        scored: list[Ids] = []
        for one, count in chunks:
            end, computed = at + count, one.computed
            tokens[at:end] = one.tokens(computed, computed + count)
            np.add(self._counting[:count], computed, out=positions[at:end])
            self._adapters[at:end] = one.adapter_slot
            past[rows] = computed
            if computed + count == one.length:
                self._sampled[sampled] = end - 1
                sampled += 1
            tables.append(_table(one)[: -(-(computed + count) // size)])
            rows += 1
            if one.scored is not None:
                first, last = one.to_score(count)
                scored.append(np.arange(at + first - computed, at + last - computed, dtype=np.int32))
            begins[rows] = at = end
        for places in scored:
            self._sampled[sampled : sampled + len(places)] = places
            sampled += len(places)
        np.cumsum([len(table) for table in tables], out=self._block_begins[1 : rows + 1])
        return StepInput(
            tokens[:at],
            positions[:at],
            past[:rows],
            begins[: rows + 1],
            np.concatenate(tables),
            self._block_begins[: rows + 1],
            self._sampled[:sampled],
            self._adapters[:at],
        )


def _table(one: ScheduledRequest) -> Ids:
    if one.table is None:
        one.table = np.array(one.blocks, np.int32)
    return one.table
