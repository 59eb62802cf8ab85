"""Which answers of a server mean that it lost what this process wrote."""

from __future__ import annotations

from charonia.eventlog.redis.epoch import Epoch, new_epoch


def test_a_log_that_has_what_was_written_keeps_its_name() -> None:
    epoch = Epoch()
    epoch.answered([[]])
    assert epoch.name(b"e") == "e", "nothing was written, nothing can be missing"
    epoch.wrote(b"5-0")
    assert epoch.questions() == [("XRANGE", b"ctl", b"5-0", b"5-0")]
    epoch.answered([[[b"5-0", [b"e", b"fact"]]]])
    assert epoch.name(b"e") == "e"


def test_each_loss_gives_another_name_once() -> None:
    epoch = Epoch()
    epoch.wrote(b"5-0")
    epoch.answered([[]])
    first = epoch.name(b"e")
    epoch.answered([[]])
    assert first == epoch.name(b"e") != "e"
    epoch.wrote(b"6-0")
    epoch.answered([[]])
    assert epoch.name(b"e") not in ("e", first)


def test_names_are_not_drawn_twice() -> None:
    assert len({new_epoch() for _ in range(1000)}) == 1000
