"""Where a server keeps what is no state: sockets, and large tensors in memory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from charonia.composition.state_directory import StateDirectory
from charonia.eventlog.embedded import short_directory


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="large tensors are not kept in memory here")
def test_sockets_stay_where_temporary_files_are_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server removes what it finds in the directory of its large tensors, when it starts and when it ends."""
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    state = StateDirectory(str(tmp_path / "state"))
    sockets = short_directory(state.path)
    try:
        (sockets / "server.sock").touch()
        in_memory = Path(state.memory_directory())
        assert in_memory.parent == sockets.parent
        shutil.rmtree(in_memory)
        assert (sockets / "server.sock").exists()
    finally:
        shutil.rmtree(sockets)
