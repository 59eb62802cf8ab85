"""What a checkpoint keeps, and what it takes as its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from charonia.errors import InvalidArgument
from charonia.tuner.checkpoint import TRIAL, TURN, Checkpoint, key_of


def test_records_are_there_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.jsonl"
    first = Checkpoint(path, "a")
    first.add(TRIAL, "x", {"rate": 1})
    first.add(TURN, "x", {"rate": 2})
    Checkpoint(path, "b").add(TRIAL, "x", {"rate": 3})
    again = Checkpoint(path, "a")
    assert (again.find(TRIAL, "x"), again.find(TURN, "x"), again.find(TRIAL, "y")) == ({"rate": 1}, {"rate": 2}, None)
    assert (again.others, Checkpoint(path, "c").others) == (1, 2)


@pytest.mark.parametrize("left", range(1, 60, 7))
def test_a_line_that_was_cut_off_costs_one_record(tmp_path: Path, left: int) -> None:
    path = tmp_path / "checkpoint.jsonl"
    kept = Checkpoint(path, "a")
    kept.add(TRIAL, "x", {"rate": 1})
    size = path.stat().st_size
    kept.add(TRIAL, "y", {"rate": 2})
    with path.open("r+b") as file:
        file.truncate(size + left)
    after = Checkpoint(path, "a")
    assert (after.find(TRIAL, "x"), after.find(TRIAL, "y")) == ({"rate": 1}, None)
    after.add(TRIAL, "z", {"rate": 3})
    assert Checkpoint(path, "a").find(TRIAL, "z") == {"rate": 3}


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("one\ntwo\n")
    with pytest.raises(InvalidArgument, match="no checkpoint"):
        Checkpoint(path, "a")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Checkpoint(tmp_path, "a")
    with pytest.raises(InvalidArgument, match="cannot be written"):
        Checkpoint(tmp_path / "nowhere" / "file", "a").add(TRIAL, "x", {})


def test_the_key_is_of_files_and_words(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    file = tmp_path / "1" / "model.onnx"
    file.write_bytes(b"one")
    before = key_of([("m", tmp_path)], ["-b", "1"])
    assert before == key_of([("m", tmp_path)], ["-b", "1"])
    assert before != key_of([("m", tmp_path)], ["-b", "2"])
    assert before != key_of([("n", tmp_path)], ["-b", "1"])
    file.write_bytes(b"two")
    assert before != key_of([("m", tmp_path)], ["-b", "1"])


def test_the_key_is_of_files_behind_links(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "1").symlink_to(tmp_path / "weights")
    (tmp_path / "weights" / "circle").symlink_to(tmp_path / "model")
    (tmp_path / "weights" / "model.onnx").write_bytes(b"one")
    before = key_of([("m", tmp_path / "model")], [])
    (tmp_path / "weights" / "model.onnx").write_bytes(b"two")
    assert key_of([("m", tmp_path / "model")], []) != before
