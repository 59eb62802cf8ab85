"""Whatever a bucket's objects are called, their copies lie in the copy's directory, and are what was listed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore

from executors.repository.model_repository import ModelRepository
from executors.repository.remote.copies import Copies, is_safe
from executors.repository.remote.root import RemoteRoot
from executors.repository.remote.store import RemoteError

segments = st.sampled_from(
    ["m", "1", "2", "..", ".", "", "a", "model.py", "config.pbtxt", ".x", "\0", "\\", "é", " ", "\r", "a" * 300]
)
names = st.one_of(
    st.lists(segments, min_size=1, max_size=5).map("/".join),
    st.text(st.characters(exclude_categories=()), min_size=1, max_size=12),
    st.text("m/.1\0", min_size=1, max_size=8),
)


@given(st.dictionaries(names, st.binary(max_size=9), max_size=8))
def test_nothing_leaves_the_copy(content: dict[str, bytes]) -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        store = MemoryStore(content)

        def open_remote(url: str, config_name: str | None) -> RemoteRoot:
            return RemoteRoot(url, store, Copies(directory / "copies", url, stay=False), config_name)

        repository = ModelRepository(["s3://b"], open_remote=open_remote)
        (copies,) = (directory / "copies").iterdir()
        for name in repository.scan():
            found = repository.find(name)
            assert found is not None
            if found.config is None:
                continue
            try:
                path = found.with_files(found.versions).path
            except RemoteError:  # a name is both a file's and a directory's
                continue
            made = {f"{name}/{file.relative_to(path)}": file.read_bytes() for file in path.rglob("*") if file.is_file()}
            wanted = {key: data for key, data in content.items() if key.startswith(f"{name}/") and is_safe(key)}
            assert made == wanted
            assert path.is_relative_to(copies)
        assert list(directory.iterdir()) == [directory / "copies"]
        assert list((directory / "copies").iterdir()) == [copies]
        repository.close()
    finally:
        shutil.rmtree(directory)
