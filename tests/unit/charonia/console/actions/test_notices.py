"""Messages of outcomes: shown once, to their viewer, and bounded."""

from __future__ import annotations

from charonia.console.actions.notices import MAX_SIGNS, Notice, Notices


def test_a_message_is_shown_once_to_its_viewer() -> None:
    notices = Notices()
    word = notices.keep("mine", Notice(True, "done"))
    assert notices.take("other", word) is None
    assert notices.take("mine", "unknown") is None
    assert notices.take("mine", word) == Notice(True, "done")
    assert notices.take("mine", word) is None


def test_messages_are_bounded() -> None:
    notices = Notices()
    words = [notices.keep("t", Notice(True, str(number))) for number in range(1001)]
    assert notices.take("t", words[0]) is None
    assert notices.take("t", words[1]) == Notice(True, "1")
    kept = notices.take("t", notices.keep("t", Notice(False, "long" * 1000, ("y" * 9000, *map(str, range(1, 30))))))
    assert kept is not None
    assert kept.details[9:] == ("9", "and 20 more")
    assert len(kept.text) == len(kept.details[0]) == MAX_SIGNS + 1
