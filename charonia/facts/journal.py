"""The facts of a model's journal as entries of `j:{m}`, and entries as facts again (ADR 0004). Pure.

An entry has one field, `f`, because the log server pays for each. Its value is msgpack, and more at its end is left
unread:

    accepted  [0, ids]
    batched   [1, ids, attempts, executor, batch id]
    started   [2, ids, attempts, executor, batch id]
    ended     [3, ids, attempts, outcomes], and when it also says that all of them had started there, executor, batch id

About once a second the last two have a value more, what the executor then says of its processors
(`charonia.facts.processor_use`).

`ids` are groups: how many less one, the 15 bytes they have in common, the last byte of each. `attempts` is one number
for all or a list, `outcomes` one byte for all or one for each (`charonia.facts.jobs.OUTCOME_CODES`). A second field,
`w`, has "1" for each request that was ended (or batched) by it and "0" for who was not, when not all were.

Earlier releases wrote a field for each: `k` kind, `i` ids joined, `a` attempts in decimal, `x` executor, `b` batch id,
`o` outcomes, `w`. That is read for ever (tests/golden).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgpack

from charonia.errors import InvalidRecord
from charonia.tensors import Buffer

from .jobs import OUTCOME_CODES, JobState
from .processor_use import Packed, ProcessorUse, use_of

FIELD = b"f"
FIELD_MASK = b"w"
ID_BYTES = 16

_KINDS = ("accepted", "batched", "started", "ended")
_ACCEPTED, _BATCHED, _STARTED, _ENDED = range(4)
_MAX_ATTEMPTS = 10_000
_MAX_OF_GROUP = 256
_STATE_OF_CODE = {code[0]: state for state, code in OUTCOME_CODES.items()}
NOT_JOURNALLED = ord("-")
"""The outcome of a request without journal, among those of requests that are settled together."""
_TOLD = ord("1")

Ran = tuple[str, str] | tuple[str, str, Packed]
"""The executor and the batch that requests had started in, and what the executor then said of its processors."""


@dataclass(frozen=True, slots=True)
class JournalFact:
    """What an entry says of requests that it is about. `outcomes` only with `ended`, `use` only with `started`."""

    kind: str
    ids: tuple[bytes, ...]
    attempts: tuple[int, ...] = ()
    outcomes: tuple[JobState, ...] = ()
    executor: str = ""
    batch_id: str = ""
    use: ProcessorUse | None = None


def pack_accepted(ids: Sequence[bytes]) -> bytes:
    packed: bytes = msgpack.packb((_ACCEPTED, pack_ids(ids)))
    return packed


def pack_batched(ids: Sequence[bytes], attempt: int, executor: str, batch_id: str) -> bytes:
    packed: bytes = msgpack.packb((_BATCHED, pack_ids(ids), attempt, executor, batch_id))
    return packed


def pack_started(
    ids: Sequence[bytes], attempts: Sequence[int], executor: str, batch_id: str, use: Packed | None = None
) -> bytes:
    more = () if use is None else (use,)
    packed: bytes = msgpack.packb((_STARTED, pack_ids(ids), _numbers(attempts), executor, batch_id, *more))
    return packed


def pack_ended(ids: Sequence[bytes], attempts: Sequence[int], outcomes: bytes, ran: Ran | None = None) -> bytes:
    """`ran`: where all of them had started, if no `started` has said so."""
    alike = outcomes[:1] if outcomes.count(outcomes[:1]) == len(outcomes) else outcomes
    packed: bytes = msgpack.packb((_ENDED, pack_ids(ids), _numbers(attempts), alike, *(ran or ())))
    return packed


def pack_ids(ids: Sequence[bytes]) -> bytes:
    """Ids in their order. Raises ValueError for one that has not 16 bytes."""
    first = ids[0][:-1]
    tails = bytes([one[-1] for one in ids])
    if len(first) != ID_BYTES - 1 or any(len(one) != ID_BYTES for one in ids):
        raise ValueError("a journal knows requests by ids of 16 bytes")
    if len(ids) <= _MAX_OF_GROUP and all(one.startswith(first) for one in ids):  # most entries and batches
        return b"%c%b%b" % (len(ids) - 1, first, tails)
    parts: list[bytes] = []
    at = 0
    for name, members in groupby(ids, key=lambda one: one[:-1]):
        count = len(list(members))
        for start in range(at, at + count, _MAX_OF_GROUP):
            lasts = tails[start : min(start + _MAX_OF_GROUP, at + count)]
            parts.append(b"%c%b%b" % (len(lasts) - 1, name, lasts))
        at += count
    return b"".join(parts)


def read_facts(fields: Sequence[Buffer]) -> list[JournalFact]:
    """The facts of an entry, in order, without what it says it did not win; none of kinds of a newer release.

    Raises `InvalidRecord` for fields that are none.
    """
    values = {bytes(fields[at]): bytes(fields[at + 1]) for at in range(0, len(fields) - 1, 2)}
    try:
        if FIELD not in values:
            return _read_fields(values)
        kind, *about = msgpack.unpackb(values[FIELD])
        return _read_packed(kind, about, values.get(FIELD_MASK))
    except InvalidRecord:
        raise
    except Exception as error:  # msgpack, and whatever a stranger's types lead to
        raise InvalidRecord(f"no journal fact: {error!r}") from None


def _read_packed(kind: int, about: list[Any], mask: bytes | None) -> list[JournalFact]:
    if not 0 <= kind < len(_KINDS):
        return []
    ids = _unpack_ids(about[0])
    if kind == _ACCEPTED:
        return [JournalFact(_KINDS[kind], ids)]
    attempts = about[1] if isinstance(about[1], list) else [about[1]] * len(ids)
    if kind != _ENDED:
        where = about[2:] if kind == _STARTED else about[2:4]
        return [_kept(_ran_fact(_KINDS[kind], ids, _checked(attempts, len(ids)), where), mask)]
    outcomes = about[2] * len(ids) if len(about[2]) == 1 else about[2]
    found = []
    if len(about) > 4:
        found.append(_ran_fact(_KINDS[_STARTED], ids, _checked(attempts, len(ids)), about[3:]))
    found.append(_kept(JournalFact(_KINDS[kind], ids, (0,) * len(ids)), mask, outcomes))
    return found


def _ran_fact(kind: str, ids: tuple[bytes, ...], attempts: tuple[int, ...], ran: list[Any]) -> JournalFact:
    """`ran` is the executor, the batch, and perhaps the use of processors."""
    return JournalFact(kind, ids, attempts, (), ran[0], ran[1], use_of(ran[2]) if len(ran) > 2 else None)


def _read_fields(values: dict[bytes, bytes]) -> list[JournalFact]:
    """An entry as earlier releases wrote it."""
    kind = values[b"k"].decode()
    if kind not in _KINDS:
        return []
    joined = values[b"i"]
    count = len(joined) // ID_BYTES
    if not count or len(joined) % ID_BYTES:
        raise InvalidRecord(f"{len(joined)} bytes are no request ids")
    ids = tuple(joined[ID_BYTES * at : ID_BYTES * (at + 1)] for at in range(count))
    if kind == "accepted":
        return [JournalFact(kind, ids)]
    attempts: tuple[int, ...] = (0,) * count
    if kind != "ended":
        given = [int(part) for part in values.get(b"a", b"").split(b",")]
        attempts = _checked(given * count if len(given) == 1 else given, count)
    fact = JournalFact(kind, ids, attempts, (), values.get(b"x", b"").decode(), values.get(b"b", b"").decode())
    return [_kept(fact, values.get(FIELD_MASK), values[b"o"] if kind == "ended" else None)]


def _kept(fact: JournalFact, mask: bytes | None, outcomes: bytes | None = None) -> JournalFact:
    """The fact of those it is true of."""
    count = len(fact.ids)
    if (mask is not None and len(mask) != count) or (outcomes is not None and len(outcomes) != count):
        raise InvalidRecord(f"{count} ids, the outcomes {outcomes!r} and the mask {mask!r}")
    kept: Sequence[int] = range(count)
    if mask is not None:
        kept = [at for at in kept if mask[at] == _TOLD]
    if outcomes is not None:
        kept = [at for at in kept if outcomes[at] != NOT_JOURNALLED]
    return JournalFact(
        fact.kind,
        tuple(fact.ids[at] for at in kept),
        tuple(fact.attempts[at] for at in kept),
        tuple(_STATE_OF_CODE[outcomes[at]] for at in kept) if outcomes is not None else (),
        fact.executor,
        fact.batch_id,
        fact.use,
    )


def _unpack_ids(packed: bytes) -> tuple[bytes, ...]:
    if not isinstance(packed, bytes):  # numbers below 0 in a list would never end
        raise InvalidRecord(f"{type(packed).__name__} is no request ids")
    found: list[bytes] = []
    at = 0
    while at < len(packed):
        end = at + ID_BYTES + packed[at] + 1
        name, lasts = packed[at + 1 : at + ID_BYTES], packed[at + ID_BYTES : end]
        if len(lasts) <= packed[at]:
            raise InvalidRecord(f"{len(packed)} bytes are no request ids")
        found += [name + bytes((last,)) for last in lasts]
        at = end
    if not found:
        raise InvalidRecord("a journal fact about nobody")
    return tuple(found)


def _numbers(attempts: Sequence[int]) -> int | Sequence[int]:
    """One number when all are equal."""
    return attempts[0] if attempts.count(attempts[0]) == len(attempts) else list(attempts)


def _checked(attempts: Sequence[int], count: int) -> tuple[int, ...]:
    if len(attempts) != count or not all(0 <= number <= _MAX_ATTEMPTS for number in attempts):
        raise InvalidRecord(f"{count} ids and the attempts {str(attempts)[:80]}")
    return tuple(attempts)
