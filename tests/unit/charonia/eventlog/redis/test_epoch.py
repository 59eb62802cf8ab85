"""Which answers of a server mean that it lost what this process wrote."""

from __future__ import annotations

from charonia.eventlog.redis.epoch import Epoch, new_epoch

ABOUT = [b"length", 3, b"max-deleted-entry-id", b"0-0"]


def test_a_log_that_has_what_was_written_keeps_its_name() -> None:
    epoch = Epoch()
    epoch.answered([[], Exception("no such key")])
    assert epoch.name(b"e") == "e", "nothing was written, nothing can be missing"
    epoch.wrote(b"5-0")
    assert epoch.questions() == [("XRANGE", b"ctl", b"5-0", b"5-0", "COUNT", 1), ("XINFO", "STREAM", b"ctl")]
    epoch.answered([[[b"5-0", [b"e", b"fact"]]], ABOUT])
    assert epoch.name(b"e") == "e"


def test_each_loss_gives_another_name_once() -> None:
    epoch = Epoch()
    epoch.wrote(b"5-0")
    epoch.answered([[], ABOUT])
    first = epoch.name(b"e")
    epoch.answered([[], ABOUT])
    assert first == epoch.name(b"e") != "e"
    epoch.wrote(b"6-0")
    epoch.answered([[], Exception("no such key")])
    assert epoch.name(b"e") not in ("e", first)


def test_what_may_have_been_deleted_as_needless_proves_nothing() -> None:
    epoch = Epoch()
    epoch.wrote(b"5-0")
    epoch.answered([[], [b"length", 3, b"max-deleted-entry-id", b"5-0"]])
    assert epoch.name(b"e") == "e"
    epoch.wrote(b"6-1")
    epoch.answered([[], [b"length", 3, b"max-deleted-entry-id", b"6-0"]])
    assert epoch.name(b"e") != "e"


def test_a_server_that_holds_other_slots_says_nothing() -> None:
    epoch = Epoch()
    epoch.wrote(b"5-0")
    epoch.answered([Exception("MOVED 11148 localhost:1"), Exception("MOVED 11148 localhost:1")])
    assert epoch.name(b"e") == "e"


def test_names_are_not_drawn_twice() -> None:
    assert len({new_epoch() for _ in range(1000)}) == 1000
