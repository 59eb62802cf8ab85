"""The settings of tracing: what changes are taken, what they leave, how they are told (N2, H44, G15)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.errors import CharoniaError, InvalidArgument, Unsupported
from charonia.traces.contexts import TENSORS, TIMESTAMPS
from charonia.traces.trace_settings import (
    OPENTELEMETRY,
    TraceOptions,
    TraceSettings,
    applied,
    changed,
    read_change,
    reply,
)


def test_a_change_is_read() -> None:
    wanted = {"trace_level": ["TENSORS", "TIMESTAMPS"], "trace_rate": ["5"], "trace_count": [], "log_frequency": None}
    assert read_change({**wanted, "trace_mode": ["triton"]}) == {
        "level": TIMESTAMPS | TENSORS,
        "rate": 5,
        "count": None,
        "log_frequency": None,
    }
    assert read_change({"trace_level": ["OFF"], "trace_count": ["-1"]}) == {"level": 0, "count": -1}
    assert read_change({}) == {}


@pytest.mark.parametrize(
    ("wanted", "kind", "text"),
    [
        ({"trace_file": ["x"]}, Unsupported, "trace file location can not be updated through network protocol"),
        ({"trace_file": None}, Unsupported, "trace file location can not be updated through network protocol"),
        ({"trace_level": ["OFF", "TENSORS"]}, InvalidArgument, "Expect only one trace level 'OFF' is specified"),
        ({"trace_level": ["MANY"]}, InvalidArgument, "Unable to parse 'trace_level', got: MANY"),
        ({"trace_rate": ["x"]}, InvalidArgument, "Unable to parse 'trace_rate', got: x"),
        (
            {"trace_rate": ["-1"]},
            InvalidArgument,
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: -1",
        ),
        (
            {"log_frequency": ["99999999999"]},
            InvalidArgument,
            "Unable to parse 'log_frequency', value is out of range [ 0, 4294967295 ], got: 99999999999",
        ),
        ({"trace_count": ["-2"]}, InvalidArgument, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        (
            {"trace_count": ["2147483648"]},
            InvalidArgument,
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 2147483648",
        ),
        ({"trace_rate": ["1", "2"]}, InvalidArgument, "expect only 1 value for 'trace_rate'"),
        ({"trace_rate": ["9" * 5000]}, InvalidArgument, "Unable to parse 'trace_rate', got: " + "9" * 64),
    ],
)
def test_what_is_wrong_is_said_in_these_words(wanted: dict[str, list[str]], kind: type, text: str) -> None:
    with pytest.raises(CharoniaError) as caught:
        read_change({"trace_level": ["TIMESTAMPS"], **wanted})
    assert (type(caught.value), caught.value.message) == (kind, text)


FIELDS = st.dictionaries(st.sampled_from(["level", "rate", "count", "log_frequency"]), st.none() | st.integers(0, 3))


@given(st.lists(FIELDS, max_size=6))
def test_a_field_is_what_was_last_said_of_it(changes: list[dict[str, int | None]]) -> None:
    said: dict[str, int] = {}
    last: dict[str, int | None] = {}
    for change in changes:
        said = changed(said, change)
        last |= change
    assert said == {field: value for field, value in last.items() if value is not None}
    settings = applied(TraceSettings(), said)
    assert settings.rate == said.get("rate", 1000)


def test_what_a_newer_release_says_is_passed_over() -> None:
    assert applied(TraceSettings(rate=7), {"rate": 8, "shade": 3}) == TraceSettings(rate=8)


def test_the_full_setting() -> None:
    settings = TraceSettings(TIMESTAMPS | TENSORS, 2, 3, 4)
    assert reply(TraceOptions(file="f"), settings) == {
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_rate": ["2"],
        "trace_count": ["3"],
        "log_frequency": ["4"],
        "trace_file": ["f"],
        "trace_mode": ["triton"],
    }
    told = reply(TraceOptions(mode=OPENTELEMETRY, resource=(("a", "1"), ("b", "2"))), TraceSettings())
    assert told == {
        "trace_level": ["OFF"],
        "trace_rate": ["1000"],
        "trace_count": ["-1"],
        "trace_mode": ["opentelemetry"],
        "bsp_max_export_batch_size": ["512"],
        "bsp_max_queue_size": ["2048"],
        "bsp_schedule_delay": ["5000"],
        "url": ["http://localhost:4318/v1/traces"],
        "resource": ["a=1,b=2"],
    }
