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


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("m\nE1122 00:00:00,000 1 gateway.app] forged", "m\n  E1122 00:00:00,000 1 gateway.app] forged"),
        ("m\r\nforged", "m\\r\n  forged"),
        ("\x1b[2Jm\x07\x9b1m", "\\x1b[2Jm\\x07\\x9b1m"),
        ("m\u2028forged", "m\\u2028forged"),
        (
            "two\n\twords: \N{LATIN SMALL LETTER U WITH DIAERESIS}",
            "two\n\twords: \N{LATIN SMALL LETTER U WITH DIAERESIS}",
        ),
    ],
)
def test_what_clients_write_is_no_line_of_its_own(name: str, written: str) -> None:
    """H25."""
    record = logging.LogRecord("gateway.app", logging.ERROR, "", 0, "no model %s", (name,), None)
    assert LineFormatter().format(record).endswith(f"] no model {written}")
