"""Locks say who holds them, and only a living process holds one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from charonia.errors import StartupError
from charonia.eventlog.embedded.holder import (
    SERVE,
    hold,
    hold_state_directory,
    hold_within,
    holder_of,
    in_words,
    is_held,
)


def test_a_second_one_learns_who_holds_it(tmp_path: Path) -> None:
    lock = hold_state_directory(tmp_path / "state", SERVE)
    about = holder_of(tmp_path / "state" / "lock")
    assert (about["pid"], about["command"]) == (os.getpid(), SERVE)
    assert is_held(tmp_path / "state" / "lock")
    here = rf"'{tmp_path}/state' is used by another charonia serve \(pid {os.getpid()}, since 20.*Z\); give this one"
    with pytest.raises(StartupError, match=here):
        hold_state_directory(tmp_path / "state", SERVE)
    with pytest.raises(StartupError, match=r"is used by charonia serve \(pid \d+, since .*\); stop that first"):
        hold_state_directory(tmp_path / "state", "charonia state export")
    assert holder_of(tmp_path / "state" / "lock") == about, "who was refused has written nothing"
    os.close(lock)
    assert not is_held(tmp_path / "state" / "lock")
    os.close(hold_state_directory(tmp_path / "state", SERVE))


def test_the_lock_of_an_older_release_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    assert holder_of(tmp_path / "lock") == {}
    assert in_words({}) == SERVE


def test_another_host_is_named() -> None:
    assert in_words({"pid": 1, "command": "x", "host": "elsewhere"}) == "x (pid 1, on host elsewhere)"


def test_patience_ends(tmp_path: Path) -> None:
    lock = hold(tmp_path / "lock", "one")
    assert lock is not None
    assert hold_within(tmp_path / "lock", "two", 0.01) is None
    os.close(lock)
    again = hold_within(tmp_path / "lock", "two", 0.01)
    assert again is not None
    os.close(again)


def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot be used: "):
        hold_state_directory(tmp_path / "file", SERVE)
