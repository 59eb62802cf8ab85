from __future__ import annotations

from executors.host.output import KEPT_LINES, MAX_LINE_BYTES, OutputLines


def test_lines_are_whole_and_prefixed_however_they_arrive() -> None:
    written: list[str] = []
    lines = OutputLines("[i] ", written.append)
    for piece in (b"on", b"e\ntwo\nth", b"ree"):
        lines.feed(piece)
    assert written == ["[i] one\n[i] two\n"]
    lines.end()
    assert written[1:] == ["[i] three\n"]
    assert lines.last_lines() == "one\ntwo\nthree"


def test_only_the_last_lines_are_kept() -> None:
    lines = OutputLines("", lambda text: None)
    lines.feed(b"".join(b"%d\n" % number for number in range(KEPT_LINES + 10)))
    assert lines.last_lines().split("\n") == [str(number) for number in range(10, KEPT_LINES + 10)]


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    written: list[str] = []
    lines = OutputLines("", written.append)
    for _ in range(10):
        lines.feed(b"x" * MAX_LINE_BYTES)
    assert [len(text) for text in written] == [MAX_LINE_BYTES + 1] * 9


def test_bytes_that_are_no_text_are_shown() -> None:
    lines = OutputLines("", lambda text: None)
    lines.feed(b"\xff\n")
    assert lines.last_lines() == "\\xff"
