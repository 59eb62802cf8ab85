"""Temporary folders go with their owner, however it ends; the owners that are killed are processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from executors.host import owned_folders

MAKES_ONE = """
import sys
from executors.host import owned_folders
folder = owned_folders.make()
(folder / "content").write_text("of its owner")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are, here and in processes that a test starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folders_of_a_killed_owner_are_removed_and_those_of_others_stay(place: Path) -> None:
    mine = owned_folders.make()
    earlier = place / "charonia-model-abcdefgh"
    earlier.mkdir()
    (process, theirs), (killed, abandoned) = owner(), owner()
    try:
        assert theirs.parent == abandoned.parent == place
        assert owned_folders.remove_abandoned() == []
        killed.kill()
        killed.communicate()
        assert (abandoned / "content").exists()
        assert owned_folders.remove_abandoned() == [abandoned]
        assert sorted(place.iterdir()) == sorted([mine, theirs, earlier])
    finally:
        process.kill()
        process.communicate()
    owned_folders.remove(mine)
    owned_folders.remove(mine)
    assert owned_folders.remove_abandoned() == [theirs]
    assert list(place.iterdir()) == [earlier]


def test_an_owner_that_ends_in_order_removes_its_folders_and_no_fork_of_it_does(place: Path) -> None:
    forks = "\nimport os\nif os.fork() == 0:\n    sys.exit()\nos.wait()\nprint(folder.exists())"
    done = subprocess.run(
        [sys.executable, "-c", MAKES_ONE + forks], input="", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[1] == "True"
    assert not list(place.iterdir())


def test_a_link_with_such_a_name_leads_to_nothing(place: Path) -> None:
    kept = place / "kept"
    kept.mkdir()
    (place / f"{owned_folders.PREFIX}link").symlink_to(kept)
    assert owned_folders.remove_abandoned() == []
    assert kept.is_dir()


def test_the_end_of_a_process_removes_what_a_thread_has_begun_to_remove(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    rmtree = shutil.rmtree

    def interrupted(folder: Path, *, ignore_errors: bool) -> None:
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        begun.set()
        ended.wait(60)
        rmtree(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    thread = threading.Thread(target=owned_folders.remove, args=(owned_folders.make(),))
    thread.start()
    assert begun.wait(60)
    owned_folders.remove_rest()
    left = list(place.iterdir())
    ended.set()
    thread.join()
    assert left == []


@pytest.mark.parametrize("opened", [False, True])
def test_a_folder_that_is_removed_before_its_lock_is_made_again(
    opened: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Path] = []
    real = os.open

    def removed_at_once(path: Path, flags: int) -> int:
        monkeypatch.setattr(os, "open", real)
        descriptor = real(path, flags) if opened else -1
        found.extend(owned_folders.remove_abandoned())
        assert found == [path]
        return descriptor if opened else real(path, flags)

    monkeypatch.setattr(os, "open", removed_at_once)
    folder = owned_folders.make()
    assert folder not in found
    assert list(place.iterdir()) == [folder]
    owned_folders.remove(folder)
    assert not list(place.iterdir())


def test_a_folder_that_its_owner_makes_again_meanwhile_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock that a removal gets then is of the folder that was there before."""
    abandoned = place / f"{owned_folders.PREFIX}same-name"
    abandoned.mkdir()
    lock = owned_folders.fcntl.flock

    def made_again(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(owned_folders.fcntl, "flock", lock)
        abandoned.rmdir()
        assert owned_folders.owned(lambda: (abandoned.mkdir(), abandoned)[1]) == abandoned
        lock(descriptor, operation)

    monkeypatch.setattr(owned_folders.fcntl, "flock", made_again)
    assert owned_folders.remove_abandoned() == []
    assert abandoned.exists()
    owned_folders.remove(abandoned)
