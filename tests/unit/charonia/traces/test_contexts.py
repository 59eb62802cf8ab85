"""Contexts of traced requests: the header of their callers, their place in a record, what is gathered for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import InvalidRecord
from charonia.traces.contexts import MOST_CHILDREN, PROPAGATED, TIMESTAMPS, Context, Parent, Traced, read_parent
from charonia.traces.reports import Report

TRACE_ID, SPAN_ID = bytes(range(1, 17)), bytes(range(17, 25))
HEADER = f"00-{TRACE_ID.hex()}-{SPAN_ID.hex()}-01"


def test_the_header_is_read() -> None:
    assert read_parent(HEADER, "a=1,b=2") == Parent(TRACE_ID, SPAN_ID, True, "a=1,b=2")
    assert read_parent(f" {HEADER[:-2]}00 ") == Parent(TRACE_ID, SPAN_ID, False)
    assert read_parent(HEADER.replace("00-", "cc-", 1) + "-more") == Parent(TRACE_ID, SPAN_ID, True)
    assert read_parent(HEADER, "a=" + "x" * 600) == Parent(TRACE_ID, SPAN_ID, True)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        HEADER[:-1],
        HEADER + "0",
        HEADER + "-more",
        "ff" + HEADER[2:],
        HEADER.replace("0102", "01O2"),
        HEADER.upper(),
        f"00-{'0' * 32}-{SPAN_ID.hex()}-01",
        f"00-{TRACE_ID.hex()}-{'0' * 16}-01",
    ],
)
def test_what_is_no_header_is_as_if_it_were_not_there(header: str) -> None:
    assert read_parent(header) is None


@given(st.text(max_size=80))
def test_any_text_is_survived(text: str) -> None:
    read_parent(text, text)


@given(st.text(max_size=40), st.text(max_size=40), st.integers(0, 7), st.binary(max_size=9))
def test_a_context_comes_back_from_anywhere_in_a_record(state: str, report_to: str, flags: int, before: bytes) -> None:
    context = Context(flags, TRACE_ID, SPAN_ID, state, report_to)
    record = before + context.pack()
    assert Context.unpack(record + b"meta", len(before)) == (context, len(record))
    for end in range(len(before), len(record)):
        with pytest.raises(InvalidRecord):
            Context.unpack(record[:end], len(before))


def test_a_child_is_of_the_same_trace_and_its_answer_is_waited_for() -> None:
    context = Context(TIMESTAMPS | PROPAGATED, TRACE_ID, SPAN_ID, "a=1", "g-1")
    child = context.child(b"childish")
    assert child == Context(TIMESTAMPS | PROPAGATED, TRACE_ID, b"childish", "a=1")
    assert child.traceparent == f"00-{TRACE_ID.hex()}-{b'childish'.hex()}-01"
    assert read_parent(child.traceparent) == Parent(TRACE_ID, b"childish", True)


def test_others_are_told_of_traces_of_opentelemetry_only() -> None:
    context = Context(TIMESTAMPS | PROPAGATED, TRACE_ID, SPAN_ID, "a=1", "g-1")
    assert context.carrier() == {"traceparent": HEADER, "tracestate": "a=1"}
    assert Context(TIMESTAMPS | PROPAGATED, TRACE_ID, SPAN_ID).carrier() == {"traceparent": HEADER}
    assert Context(TIMESTAMPS, TRACE_ID, SPAN_ID, "a=1").carrier() == {}


def test_only_its_own_report_is_taken() -> None:
    traced = Traced(Context(TIMESTAMPS, TRACE_ID, SPAN_ID))
    other, own = Report(b"another1", "m", 1, "", ()), Report(SPAN_ID, "m", 1, "", ())
    traced.took(other)
    traced.took(None)
    assert traced.report is None
    traced.took(own)
    assert traced.report is own
    for _ in range(MOST_CHILDREN + 5):
        traced.add(other)
    traced.add(None)
    assert traced.children == [other] * MOST_CHILDREN
