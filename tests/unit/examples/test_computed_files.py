"""Files that a build script computes are kept by what they were computed from."""

from __future__ import annotations

from pathlib import Path

import pytest
from computed_files import computed


def test_files_are_computed_once_for_each_set_of_sources(tmp_path: Path) -> None:
    calls = []

    def compute() -> dict[str, bytes]:
        calls.append(1)
        return {"weights": b"%d" % len(calls), "trees": b"same"}

    first = computed("m", [b"script", "1.0"], compute, tmp_path)
    again = computed("m", [b"script", "1.0"], compute, tmp_path)
    assert {name: file.make(b"") for name, file in first.items()} == {"weights": b"1", "trees": b"same"}
    assert {name: file.sha256 for name, file in again.items()} == {name: file.sha256 for name, file in first.items()}
    other = computed("m", [b"script1", ".0"], compute, tmp_path)  # the same bytes, parted otherwise
    assert other["weights"].make(b"") == b"2"
    assert other["weights"].sha256 != first["weights"].sha256


def test_a_computation_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def compute() -> dict[str, bytes]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        computed("m", [b"script"], compute, tmp_path)
    assert computed("m", [b"script"], lambda: {"weights": b"1"}, tmp_path)["weights"].make(b"") == b"1"
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["lock", "m"]
