"""The facts of a journal as rows of an export: one for each request that a fact is about. Pure.

    time      when the log took the entry: UTC, to the millisecond
    model     the model
    entry     the id of the journal entry; several rows may have the same
    kind      accepted, batched, started or ended
    request   the request's id, 32 hex digits
    attempt   of batched and started: which attempt, from 1; otherwise null
    outcome   of ended: succeeded, failed, cancelled or expired; otherwise null
    executor  of batched and started: the executor; otherwise null
    batch     of batched and started: the id of the batch; otherwise null

These names are promised. Later releases may add columns at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from charonia.facts.journal import read_facts
from charonia.facts.seals import in_order
from charonia.tensors import Buffer


class Row(NamedTuple):
    """One fact about one request. The names are those of the columns; `time` is milliseconds since the epoch."""

    time: int
    model: str
    entry: str
    kind: str
    request: str
    attempt: int | None
    outcome: str | None
    executor: str | None
    batch: str | None


def rows_of(model: str, entry_id: bytes, fields: Sequence[Buffer]) -> Iterator[Row]:
    """The rows of an entry, none of kinds of a newer release. Raises `InvalidRecord` for one that holds no fact."""
    time_ms, entry = in_order(entry_id)[0], entry_id.decode()
    for fact in read_facts(fields):
        ran = fact.kind in ("batched", "started")
        executor, batch = (fact.executor or None, fact.batch_id or None) if ran else (None, None)
        for at, request_id in enumerate(fact.ids):
            attempt = fact.attempts[at] if ran else None
            outcome = fact.outcomes[at].value if fact.outcomes else None
            yield Row(time_ms, model, entry, fact.kind, request_id.hex(), attempt, outcome, executor, batch)
