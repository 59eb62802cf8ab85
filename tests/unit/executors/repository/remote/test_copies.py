"""Copies of models on this machine: whole, shared, removed, and nobody else's (R7)."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from memory_store import MemoryStore

from charonia.errors import StartupError
from executors.repository.remote.copies import Copies
from executors.repository.remote.store import ObjectChanged, RemoteError, RemoteObject, Sink

URL = "s3://bucket/models"


def fetched(copies: Copies, store: MemoryStore, model: str = "m") -> Path:
    return copies.fetch(model, list(store.objects()), store.copy)


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_copy_is_what_was_listed_and_is_made_once(tmp_path: Path) -> None:
    content = {"config.pbtxt": b"name", "1/model.onnx": b"x" * 100, "1/deep/er/file": b"", "ü ?*[": b"odd"}
    store = MemoryStore(content)
    store.put("2/")
    copies = Copies(tmp_path, URL, stay=False)
    path = fetched(copies, store)
    assert path.name == "m"
    assert tree(path) == content
    assert (path / "2").is_dir()
    assert store.copied() == sorted(content)
    assert fetched(copies, store) == path
    assert store.copied() == []
    copies.close()
    assert list(tmp_path.iterdir()) == []


def test_only_what_changed_is_fetched_again_and_the_old_copy_stays_as_it_was(tmp_path: Path) -> None:
    store = MemoryStore({"a": b"same", "b": b"old"})
    copies = Copies(tmp_path, URL, stay=False)
    old = fetched(copies, store)
    store.copied()
    store.put("b", b"new")
    new = fetched(copies, store)
    assert store.copied() == ["b"]
    assert (tree(old), tree(new)) == ({"a": b"same", "b": b"old"}, {"a": b"same", "b": b"new"})
    assert os.path.samefile(old / "a", new / "a")
    copies.release("m", {old}, latest=True)
    assert old.exists()
    copies.release("m", (), latest=True)
    assert not old.parent.exists()
    assert tree(new) == {"a": b"same", "b": b"new"}
    copies.release("m", (), latest=False)
    assert copies.models() == set()
    copies.close()


def test_what_was_tidied_away_is_fetched_again(tmp_path: Path) -> None:
    store = MemoryStore({"a": b"1", "b": b"2"})
    copies = Copies(tmp_path, URL, stay=False)
    path = fetched(copies, store)
    store.copied()
    (path / "b").unlink()
    assert fetched(copies, store) == path
    assert tree(path) == {"a": b"1", "b": b"2"}
    assert store.copied() == ["b"]
    with (path / "b").open("a") as file:  # a model may write beside its code
        file.write("more")
    assert fetched(copies, store) == path
    assert tree(path) == {"a": b"1", "b": b"2more"}
    copies.close()


def test_a_model_of_another_name_is_left_alone(tmp_path: Path) -> None:
    copies = Copies(tmp_path, URL, stay=False)
    paths = {name: fetched(copies, MemoryStore({"a": b""}), name) for name in ("m", "m*", "*", "m[12]", "m1")}
    assert copies.models() == set(paths)
    copies.release("m*", (), latest=False)
    copies.release("m[12]", (), latest=False)
    copies.release("*", (), latest=False)
    assert copies.models() == {"m", "m1"}
    copies.close()


def test_a_broken_connection_is_tried_again_but_not_for_ever(tmp_path: Path) -> None:
    store = MemoryStore({"a": b"0123456789"})
    copies = Copies(tmp_path, URL, stay=False)
    store.breaks = {"a": 3}
    with pytest.raises(RemoteError, match="the connection broke"):
        fetched(copies, store)
    assert copies.models() == set()
    store.breaks = {"a": 2}
    assert tree(fetched(copies, store)) == {"a": b"0123456789"}
    copies.close()


@pytest.mark.parametrize(("sent", "error"), [(b"short", RemoteError), (b"longer than ten", ObjectChanged)])
def test_a_server_that_sends_something_else(tmp_path: Path, sent: bytes, error: type[RemoteError]) -> None:
    def copy(_found: RemoteObject, sink: Sink) -> None:
        sink.write(sent)

    copies = Copies(tmp_path, URL, stay=False)
    with pytest.raises(error):
        copies.fetch("m", [RemoteObject("a", 10, "s")], copy)
    assert copies.models() == set()
    copies.close()


def test_a_file_cannot_be_a_directory_too(tmp_path: Path) -> None:
    copies = Copies(tmp_path, URL, stay=False)
    with pytest.raises(RemoteError, match=r"cannot be copied to .*directory"):
        fetched(copies, MemoryStore({"a": b"1", "a/b": b"2"}))
    assert copies.models() == set()
    copies.close()


def test_more_than_there_is_room_for_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(20, 11, 9))
    store = MemoryStore({"a": b"0123456789"})
    copies = Copies(tmp_path, URL, stay=False)
    with pytest.raises(RemoteError, match=r"model 'm' of 's3://bucket/models' needs 10 bytes, '.*' has 9 free"):
        fetched(copies, store)
    assert store.copied() == []
    copies.close()


def test_a_fetch_is_broken_off(tmp_path: Path) -> None:
    begun, abandoned = threading.Event(), threading.Event()

    def copy(_found: RemoteObject, sink: Sink) -> None:
        sink.write(b"1")
        begun.set()
        assert abandoned.wait(60)
        sink.write(b"2")

    copies = Copies(tmp_path, URL, stay=False)
    errors: list[str] = []

    def fetch() -> None:
        try:
            copies.fetch("m", [RemoteObject("a", 2, "s")], copy)
        except RemoteError as error:
            errors.append(error.message)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert begun.wait(60)
    copies.abandon()
    copies.release("m", (), latest=False)  # waits for nobody
    abandoned.set()
    thread.join(60)
    assert errors == ["fetching 'a' was broken off"]
    copies.close()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_each_process_has_its_own(tmp_path: Path) -> None:
    one, other = Copies(tmp_path, URL, stay=True), Copies(tmp_path, URL, stay=True)
    third = Copies(tmp_path, "s3://bucket/others", stay=True)
    paths = [fetched(copies, MemoryStore({"a": b""})) for copies in (one, other, third)]
    assert len(set(paths)) == 3
    one.close()
    again = Copies(tmp_path, URL, stay=True)
    assert again.models() == {"m"}
    for copies in (other, third, again):
        copies.close()


def test_what_stays_is_used_by_the_next_if_it_is_whole(tmp_path: Path) -> None:
    store = MemoryStore({"a": b"1", "1/b": b"22"})
    copies = Copies(tmp_path, URL, stay=True)
    path = fetched(copies, store)
    copies.close()
    store.copied()
    # what a process that was killed leaves half done
    (path.parents[1] / "partial-x" / "m").mkdir(parents=True)
    copies = Copies(tmp_path, URL, stay=True)
    assert not (path.parents[1] / "partial-x").exists()
    assert fetched(copies, store) == path
    assert store.copied() == []
    copies.close()
    (path / "1" / "b").write_bytes(b"2")
    copies = Copies(tmp_path, URL, stay=True)
    assert tree(fetched(copies, store)) == {"a": b"1", "1/b": b"22"}
    assert store.copied() == ["1/b", "a"]
    copies.close()


def test_without_a_directory_it_is_a_part_of_the_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    copies = Copies(None, URL, stay=False)
    path = fetched(copies, MemoryStore({"a": b""}))
    (root,) = tmp_path.iterdir()
    assert path.is_relative_to(root)
    assert root.stat().st_mode & 0o777 == 0o700
    copies.close()
    shutil.rmtree(root)
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="belongs to another user"):
        Copies(None, URL, stay=False)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"cannot be used: (Not a directory|File exists)"):
        Copies(tmp_path / "file", URL, stay=True)
