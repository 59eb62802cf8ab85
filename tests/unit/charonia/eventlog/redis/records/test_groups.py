"""How ids become groups and what a group's value says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.eventlog.redis.records.groups import attempt_in, grouped, lasts_in, value_of

P, Q = b"p" * 15, b"q" * 15


def test_ids_that_follow_one_another_keep_their_order() -> None:
    groups = grouped([P + b"\0", P + b"\1", Q + b"\7"])
    assert (groups.names, groups.lasts, groups.order) == ([P, Q], [b"\0\1", b"\7"], None)
    assert grouped([]).names == []


def test_a_group_that_is_torn_apart_is_named_once() -> None:
    ids = [P + b"\0", Q + b"\0", P + b"\1"]
    groups = grouped(ids)
    assert (groups.names, groups.lasts) == ([P, Q], [b"\0\1", b"\0"])
    assert groups.order == [0, 2, 1]


@given(st.lists(st.tuples(st.sampled_from([P, Q, b"r" * 15]), st.integers(0, 255)), unique=True, max_size=40))
def test_groups_hold_every_id_once_and_know_where_it_was(members: list[tuple[bytes, int]]) -> None:
    ids = [name + bytes([last]) for name, last in members]
    groups = grouped(ids)
    assert len(set(groups.names)) == len(groups.names)
    listed = [name + bytes([last]) for name, lasts in zip(groups.names, groups.lasts, strict=True) for last in lasts]
    assert listed == [ids[place] for place in groups.order or range(len(ids))]
    assert sorted(listed) == sorted(ids)


@pytest.mark.parametrize(
    ("lasts", "sizes", "tenant", "value"),
    [
        (b"\0", [7], b"", b"\x80:7"),
        (b"\0\1\2", [5, 5, 5], b"", b"\x80\x80\x80:15"),
        (b"\0\1", [5, 6], b"", b"\x80\x80:11,5,6"),
        (b":", [7], b"", b"\x80;:7"),
        (b"\1\0", [1, 1], b"acme", b"\x80\x80;\1\x002:acme"),
    ],
)
def test_values_are_as_the_scripts_read_them(lasts: bytes, sizes: list[int], tenant: bytes, value: bytes) -> None:
    assert value_of(lasts, sizes, tenant) == value


@pytest.mark.parametrize(
    ("value", "last", "attempt"),
    [
        (None, 0, -1),
        (b"\x80:7", 0, 0),
        (b"\x80:7", 1, -1),
        (b"\x83.\xff:15", 0, 3),
        (b"\x83.\xff:15", 1, -1),
        (b"\x83.\xff:15", 2, 127),
        (b"\x81;:7", ord(":"), 1),
        (b"\x81;:7", ord("7"), -1),
        (b"\x81\x82;;:7,3,4:t", ord(";"), 1),
        (b"\x81\x82;;:7,3,4:t", ord(":"), 2),
        (b"..;\0\1" + b"2", 1, -1),
    ],
)
def test_attempts_are_found_by_the_last_byte(value: bytes | None, last: int, attempt: int) -> None:
    assert attempt_in(value, last) == attempt


@pytest.mark.parametrize(
    ("value", "lasts"),
    [
        (b"\x80:7", b"\0"),
        (b"\x83.\xff:15", b"\0\2"),
        (b"\x81;:7", b":"),
        (b"\x81.\x82;;:\x37" + b"7,3,4:t", b";7"),
    ],
)
def test_who_is_unsettled_is_told_by_the_last_bytes(value: bytes, lasts: bytes) -> None:
    assert lasts_in(value) == lasts
