"""Numbers as people read them, and templates that the content security policy accepts."""

from __future__ import annotations

import re

import pytest

from charonia.console.page_rendering import HERE, amount, clock, duration, ending, milliseconds, percent, short, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (7, "7"),
        (3.14159, "3.14"),
        (999.4, "999"),
        (999.9, "1k"),
        (12_345, "12.3k"),
        (5e15, "5e+03T"),
    ],
)
def test_amounts(value: float | None, text: str) -> None:
    assert amount(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0, "0"), (4.2e-5, "42 us"), (0.0123, "12.3 ms"), (0.9999, "1 s"), (150, "2.5 min"), (9000, "2.5 h")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_other_forms() -> None:
    assert (percent(0.125), percent(1.0), percent(None)) == ("12\u00a0%", "100\u00a0%", "–")
    assert (milliseconds(1.5), size(1536), size(None)) == ("1.5 ms", "1.5 KiB", "–")
    assert clock(1_700_000_000_123_456) == "2023-11-14 22:13:20.123"
    assert (short("0123456789abcdef"), ending("0123456789abcdef", 4)) == ("0123456789ab…", "…cdef")


@pytest.mark.parametrize("path", sorted((HERE / "templates").rglob("*.html")), ids=lambda path: path.name)
def test_no_template_has_a_script_or_style_of_its_own(path: object) -> None:
    text = path.read_text()  # type: ignore[attr-defined]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:|\|safe\b|https?://", text)


def test_what_is_vendored_says_its_version_and_licence() -> None:
    folders = sorted((HERE / "static" / "vendored").iterdir())
    assert [folder.name for folder in folders] == ["pico", "uplot"]
    for folder in folders:
        assert "Copyright" in (folder / "LICENSE").read_text()
        assert re.fullmatch(r"\S+ \d+\.\d+\.\d+\nsha512-\S+\n", (folder / "VERSION").read_text())
