"""The two formats of log lines, and whose lines they are."""

from __future__ import annotations

import logging

import pytest

from charonia.log_lines import LineFormatter, change_format, current_format


def line(name: str) -> str:
    record = logging.LogRecord("gateway.app", logging.ERROR, "", 0, "it %s", ("broke",), None)
    record.created, record.msecs, record.process = 86_400.25, 250, 17
    return LineFormatter(name).format(record)


def test_iso_times_are_utc() -> None:
    assert line("ISO8601") == "1970-01-02T00:00:00Z E 17 gateway.app] it broke"


def test_the_default_begins_with_the_level() -> None:
    assert line("default").startswith("E19")
    assert line("default").endswith(",250 17 gateway.app] it broke")


def test_the_handlers_of_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = logging.NullHandler(), logging.NullHandler()
    theirs.setFormatter(formatter := logging.Formatter("%(message)s"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [theirs])
    change_format("ISO8601")
    assert current_format() == "default"
    ours.setFormatter(LineFormatter())
    monkeypatch.setattr(logging.getLogger(), "handlers", [theirs, ours])
    change_format("ISO8601")
    assert current_format() == "ISO8601"
    assert theirs.formatter is formatter
