"""Where a server keeps what is no state: sockets, and large tensors in memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
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
    state.path.mkdir()
    sockets = short_directory(state.path)
    try:
        (sockets / "server.sock").touch()
        in_memory = Path(state.memory_directory())
        assert in_memory.parent == sockets.parent
        state.remove_memory()
        assert not in_memory.exists()
        assert (sockets / "server.sock").exists()
    finally:
        shutil.rmtree(sockets)


def test_servers_with_one_path_of_their_states_have_sockets_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in two containers that share the temporary directory: the end of one removed the sockets of the other."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    state = tmp_path / "state"
    state.mkdir()
    first = short_directory(state)
    assert short_directory(state) == first
    state.rename(tmp_path / "elsewhere")
    state.mkdir()
    assert short_directory(state) != first


KEEPS_ONE = """
import sys
from charonia.composition.state_directory import StateDirectory
folder = StateDirectory(sys.argv[1]).memory_directory()
open(folder + "/large", "w").close()
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="large tensors are not kept in memory here")
def test_what_killed_servers_left_in_memory_goes_and_that_of_others_stays(tmp_path: Path) -> None:
    killed, running = (
        subprocess.Popen(
            [sys.executable, "-c", KEEPS_ONE, str(tmp_path / name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in ("killed", "running")
    )  # fmt: skip
    state = StateDirectory(str(tmp_path / "another"))
    try:
        assert killed.stdout is not None
        assert running.stdout is not None
        left, used = (Path(of.stdout.readline().strip()) for of in (killed, running))
        killed.kill()
        killed.communicate()
        assert (left / "large").exists()
        own = Path(state.memory_directory())
        assert not left.exists()
        assert (used / "large").exists()
        assert own.is_dir()
    finally:
        state.remove_memory()
        for process in (killed, running):
            process.kill()
            process.communicate()
        shutil.rmtree(used)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="large tensors are not kept in memory here")
def test_servers_of_two_containers_with_one_path_share_no_memory(tmp_path: Path) -> None:
    """Their paths of the state are the same text and different directories, and `/dev/shm` may be one for both."""
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPS_ONE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    state = StateDirectory(str(tmp_path))
    try:
        assert process.stdout is not None
        used = Path(process.stdout.readline().strip())
        own = Path(state.memory_directory())
        assert own != used
        assert (used / "large").exists()
    finally:
        state.remove_memory()
        process.kill()
        process.communicate()
        shutil.rmtree(used)
