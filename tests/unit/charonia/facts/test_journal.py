"""Facts of the journal as entries and back; what is none is refused, whatever it is."""

from __future__ import annotations

import random

import msgpack
import pytest

from charonia.errors import InvalidRecord
from charonia.facts.jobs import JobState
from charonia.facts.journal import (
    FIELD,
    FIELD_MASK,
    JournalFact,
    pack_accepted,
    pack_batched,
    pack_ended,
    pack_ids,
    pack_started,
    read_facts,
)
from charonia.facts.processor_use import ProcessorUse

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))
ENTRY = [b"e" * 15 + bytes([last]) for last in range(20)]
WHERE = ("executor-1", "batch-1")


def test_each_kind_is_read_as_it_was_packed() -> None:
    ids = (*ENTRY, A, C)
    count = len(ids)
    assert read_facts([FIELD, pack_accepted(ids)]) == [JournalFact("accepted", ids)]
    assert read_facts([FIELD, pack_batched(ids, 3, *WHERE)]) == [JournalFact("batched", ids, (3,) * count, (), *WHERE)]
    attempts = tuple(range(1, count + 1))
    assert read_facts([FIELD, pack_started(ids, attempts, *WHERE)]) == [
        JournalFact("started", ids, attempts, (), *WHERE)
    ]
    assert read_facts([FIELD, pack_ended([A, B], [2**31 - 1] * 2, b"sx")]) == [
        JournalFact("ended", (A, B), (0, 0), (JobState.SUCCEEDED, JobState.EXPIRED))
    ]


def test_where_requests_ran_may_come_with_what_the_processors_did() -> None:
    use = ProcessorUse("host", 2.0, 7, 1, 2, 3, 4, 5, 6)
    started = JournalFact("started", (A,), (1,), (), *WHERE, use)
    assert read_facts([FIELD, pack_started([A], [1], *WHERE, use.packed())]) == [started]
    assert read_facts([FIELD, pack_ended([A], [1], b"s", (*WHERE, use.packed()))]) == [
        started,
        JournalFact("ended", (A,), (0,), (JobState.SUCCEEDED,)),
    ]
    with pytest.raises(InvalidRecord):
        read_facts([FIELD, msgpack.packb((2, pack_ids([A]), 1, *WHERE, ["host", 2.0]))])


def test_an_entry_of_one_group_is_short() -> None:
    assert len(pack_accepted(ENTRY)) < 16 + 2 * len(ENTRY)
    assert len(pack_ended(ENTRY, [1] * len(ENTRY), b"s" * len(ENTRY))) < 16 + 2 * len(ENTRY) + 4


def test_an_end_that_tells_the_beginning_is_two_facts_and_the_mask_is_of_the_end() -> None:
    fields = [FIELD, pack_ended([A, B, C], [1, 2, 2], b"fff", WHERE)]
    started = JournalFact("started", (A, B, C), (1, 2, 2), (), *WHERE)
    assert read_facts(fields) == [started, JournalFact("ended", (A, B, C), (0,) * 3, (JobState.FAILED,) * 3)]
    assert read_facts([*fields, FIELD_MASK, b"010"]) == [started, JournalFact("ended", (B,), (0,), (JobState.FAILED,))]


def test_a_mask_takes_away_who_was_not_batched() -> None:
    fields = [FIELD, pack_batched([A, B, C], 1, *WHERE), FIELD_MASK, b"101"]
    assert read_facts(fields) == [JournalFact("batched", (A, C), (1, 1), (), *WHERE)]


@pytest.mark.parametrize("seed", range(20))
def test_any_ids_come_back_in_their_order(seed: int) -> None:
    choice = random.Random(seed)
    names = [choice.randbytes(15) for _ in range(choice.randrange(1, 5))]
    ids = [choice.choice(names) + choice.randbytes(1) for _ in range(choice.randrange(1, 700))]
    if choice.random() < 0.5:
        ids.sort()
    assert read_facts([FIELD, pack_accepted(ids)]) == [JournalFact("accepted", tuple(ids))]


@pytest.mark.parametrize("ids", [[b"short"], [A, b"short"], [A + b"x"], [b"x" * 17, A]])
def test_ids_of_another_length_are_not_packed(ids: list[bytes]) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        pack_ids(ids)


def test_what_a_later_release_adds_is_left_unread() -> None:
    assert read_facts([FIELD, msgpack.packb([0, pack_ids([A]), "more"]), b"z", b"?"]) == [JournalFact("accepted", (A,))]
    assert read_facts([FIELD, msgpack.packb([9, {}])]) == []


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        b"\x00",
        b"\x90",
        b"\x91\x00",
        msgpack.packb(["accepted", pack_ids([A])]),
        msgpack.packb([0, b""]),
        msgpack.packb([0, "text"]),
        msgpack.packb([0, [-17] * 9]),
        msgpack.packb([0, pack_ids([A])[:-1]]),
        msgpack.packb([0, pack_ids([A]) + b"\x00"]),
        msgpack.packb([1, pack_ids([A])]),
        msgpack.packb([1, pack_ids([A]), -1, "x", "b"]),
        msgpack.packb([1, pack_ids([A]), 10**6, "x", "b"]),
        msgpack.packb([2, pack_ids([A, B]), [1], "x", "b"]),
        msgpack.packb([2, pack_ids([A, B]), ["1", "2"], "x", "b"]),
        msgpack.packb([3, pack_ids([A]), 1]),
        msgpack.packb([3, pack_ids([A, B, C]), 1, b"ss"]),
        msgpack.packb([3, pack_ids([A]), 1, b"?"]),
        msgpack.packb([3, pack_ids([A]), None, b"s", "x", "b"]),
        msgpack.packb([0, pack_ids([A])]) + b"\x00",
    ],
)
def test_what_is_no_fact_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRecord):
        read_facts([FIELD, value])


def test_a_mask_that_does_not_fit_is_refused() -> None:
    for fields in ([FIELD, pack_batched([A, B], 1, *WHERE)], [FIELD, pack_ended([A, B], [1, 1], b"ss")]):
        with pytest.raises(InvalidRecord):
            read_facts([*fields, FIELD_MASK, b"1"])
