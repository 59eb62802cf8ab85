"""Ids of the requests of an entry, which share a group, and reports of traced jobs that no caller waits for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from charonia import keys
from charonia.calls.entry_packer import (
    MAX_IN_GROUP,
    EntryIds,
    Ids,
    inputs_of,
    replies_of,
    replies_to,
    reported_response,
    reports_to_gateways,
)
from charonia.eventlog import port
from charonia.tensors import Tensor
from charonia.traces.contexts import TIMESTAMPS, Context
from charonia.traces.reports import Report, tensors_of
from charonia.wire import (
    FILE,
    Reference,
    RequestRecord,
    pack_request,
    pack_response,
    records_of,
    report_response,
    request_meta,
    unpack_request,
    unpack_response,
)

X = Tensor.of("x", np.ones((1, 2), np.float32))
META = request_meta(3, "abc", [X], (), {})


def test_ids_of_one_entry_differ_in_their_last_byte_alone() -> None:
    ids = EntryIds(Ids().next)
    entries = []
    for count in (3, 1, 4):
        entries.append([ids.next(16) for _ in range(count)])
        ids.turn()
    assert [[one[15] for one in entry] for entry in entries] == [[0, 1, 2], [0], [0, 1, 2, 3]]
    assert [len({one[:15] for one in entry}) for entry in entries] == [1, 1, 1]
    assert len({entry[0][:15] for entry in entries}) == 3
    assert all(len(one) == 16 for entry in entries for one in entry)


def test_a_full_entry_begins_the_next_one() -> None:
    ids = EntryIds(Ids().next)
    drawn = [ids.next(4) for _ in range(10)]
    assert [one[15] for one in drawn] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert len({one[:15] for one in drawn}) == 3
    assert len({ids.next(1)[:15] for _ in range(5)}) == 5


def test_a_group_is_never_larger_than_the_scripts_look_at_as_a_whole() -> None:
    ids = EntryIds(Ids().next)
    drawn = [ids.next(1000) for _ in range(3 * MAX_IN_GROUP)]
    assert len(set(drawn)) == len(drawn)
    assert len({one[:15] for one in drawn}) == 3


def record(number: int, report_to: str | None, endpoint: bytes = b"") -> RequestRecord:
    trace = Context(TIMESTAMPS, bytes(16), bytes([number]) * 8, report_to=report_to) if report_to is not None else None
    packed = pack_request(
        bytes([number]) * 16, endpoint, b"q", META, [X.data], rows=1, signature=1, level=0, accepted_ns=100, trace=trace
    )
    return unpack_request(packed)


def test_they_go_to_the_gateway_that_traces() -> None:
    records = [
        record(1, "g-1"),
        record(2, "g-2", endpoint=b"g-2"),  # answered anyhow
        record(3, ""),
        record(4, None),
        record(5, "g-1"),
    ]
    answers = [pack_response(one.id, "m", 3, [X], {}) for one in records]
    assert reports_to_gateways(zip(records, answers, strict=True)) == []
    reported = [
        report_response(answer, Report(bytes([number]) * 8, "m", 3, "q", ()))
        for number, answer in enumerate(answers, start=1)
    ]
    (reply,) = reports_to_gateways(zip(records, reported, strict=True))
    assert reply.stream == keys.replies("g-1")
    told = [unpack_response(one) for one in records_of(list(reply.fields))]
    assert [(one.id, one.model, one.version, one.outputs) for one in told] == [
        (records[0].id, "m", 3, []), (records[4].id, "m", 3, []),
    ]  # fmt: skip
    assert [one.report and one.report.span_id for one in told] == [b"\1" * 8, b"\5" * 8]


def test_inputs_that_are_not_here_are_none() -> None:
    assert inputs_of(record(1, None)) == [X]
    packed = pack_request(
        bytes(16), b"", b"", META, (), rows=1, signature=1, level=0, accepted_ns=1, reference=Reference(FILE, "g/1", 8)
    )
    elsewhere = unpack_request(packed)
    assert inputs_of(elsewhere) == []
    elsewhere.data = memoryview(X.data)
    assert inputs_of(elsewhere) == [X]


def test_answers_that_the_log_would_not_take_as_one_entry_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", 20)
    answers = [b"a" * 10, b"b" * 10, b"c" * 5, b"d" * 10, b"e" * 5, b"f"]
    found = [list(records_of(reply.fields)) for reply in replies_of(("g", one) for one in answers)]
    assert found == [answers[:2], answers[2:5], answers[5:]]
    assert [list(records_of(reply.fields)) for reply in replies_to("g", answers[:2])] == [answers[:2]]
    assert len(replies_to("g", [b"a"] * 20)) == 1
    assert [list(records_of(reply.fields)) for reply in replies_to("g", [b"a" * 21])] == [[b"a" * 21]]


def test_a_report_that_the_log_would_not_take_has_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = pack_response(bytes(16), "m", 3, [X], {})
    report = Report(b"spanspan", "m", 3, "q", (), tensors=tensors_of("INPUT", [X]))
    report = replace(report, children=(report,))
    assert unpack_response(reported_response(answer, report)).report == report
    monkeypatch.setattr(port, "MAX_STRING_BYTES", len(report_response(answer, report)) - 1)
    found = unpack_response(reported_response(answer, report))
    assert found.report == replace(report, tensors=(), children=())
    assert [tensor.data for tensor in found.outputs] == [X.data]
    # an answer that is stored out of band does not count, and its report is as long as any other
    monkeypatch.setattr(port, "MAX_RECORD_BYTES", len(answer) - len(X.data))
    assert unpack_response(reported_response(answer, report)).report == report
