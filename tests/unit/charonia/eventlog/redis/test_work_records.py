"""How ids become groups and what a group's value says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.eventlog.redis.stored_records import (
    _plans,
    amounts_of,
    attempt_in,
    grouped,
    lasts_in,
    statistics_of,
    value_of,
)
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_request, request_meta, unpack_request
from executors.batches.batch_results import Executed, Execution
from executors.settling.settlement import increments

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


def of_a_run(rows: int = 3, start_ns: int = 5_000_000) -> dict[str, int]:
    """What executors really add for a batch that was one execution."""
    tensor = Tensor.of("x", np.zeros((rows, 1), np.float32))
    meta = request_meta(1, "", [tensor], (), {})
    packed = pack_request(
        bytes(16), b"", b"", meta, [tensor.data], rows=rows, signature=0, level=0, accepted_ns=1_000_000
    )
    record: RequestRecord = unpack_request(packed)
    return increments([record], Executed([b""], [Execution((0,), rows, start_ns, start_ns + 90, 20, 30, 40)], []))


def test_what_an_execution_adds_is_one_field() -> None:
    added = of_a_run()
    kind, (field, packed) = amounts_of(added)

    assert (kind, field) == (b"run", b"run:3")
    assert isinstance(packed, bytes)
    assert statistics_of([b"run:3", packed]) == added
    assert list(statistics_of([b"run:3", packed])) == list(added)


def test_runs_are_added_to_what_stands_beside_them() -> None:
    three, seven = of_a_run(), of_a_run(rows=7, start_ns=9_000_000)
    raw = [b"success_ns", b"11", b"last_inference_ms", b"7", b"b3_count", b"2", b"fail_count", b"1"]
    for one in (three, seven):
        _, (field, packed) = amounts_of(one)
        assert isinstance(field, bytes)
        assert isinstance(packed, bytes)
        raw += [field, packed]
    found = statistics_of(raw)

    assert found["success_ns"] == 11 + three["success_ns"] + seven["success_ns"]
    assert found["last_inference_ms"] == 9
    assert (found["b3_count"], found["b7_count"], found["fail_count"]) == (3, 1, 1)
    assert found["inference_count"] == 10


@pytest.mark.parametrize(
    "change",
    [
        {"success_ns": 2**52 + 1},
        {"queue_ns": -1},
        {"fail_count": 1},
        {"last_other_ms": 1},
    ],
)
def test_all_else_goes_name_by_name(change: dict[str, int]) -> None:
    added = of_a_run() | change
    kind, arguments = amounts_of(added)

    sums = {name: value for name, value in added.items() if value and not name.startswith("last_")}
    latest = {name: value for name, value in added.items() if name.startswith("last_")}
    assert kind == len(sums)
    assert arguments == [*sums, *latest, *sums.values(), *latest.values()]


def test_only_the_names_of_runs_are_kept() -> None:
    kept = len(_plans)
    for number in range(50):
        names = [f"{number}{letter}" for letter in "nfrsiqabt"]
        assert amounts_of(dict.fromkeys(names, 1)) == (9, [*names, *[1] * 9])
    assert len(_plans) == kept


@pytest.mark.parametrize("rows", ["", "x", "²", "1_0"])
def test_names_that_only_look_like_a_runs_are_none(rows: str) -> None:
    added = {name.replace("b3_", f"b{rows}_"): value for name, value in of_a_run().items()}
    assert amounts_of(added)[0] != b"run"
    assert amounts_of(dict(reversed(of_a_run().items())))[0] != b"run"
