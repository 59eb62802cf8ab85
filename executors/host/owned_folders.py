"""Temporary folders of a process, which another process of Charonia removes when their owner was killed.

An owner holds a lock (`flock`) on each of its folders; the kernel releases it when the owner ends in any way, also in
another container. A number of a process would not do: it may be another process's by then.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

PREFIX = "charonia-owned-"
"""Of these folders alone: folders of earlier releases (`charonia-model-`) have no lock, and may be in use."""

_locks: dict[Path, int] = {}
"""The folders of this process, each with the descriptor that holds its lock."""

_MAKER = os.getpid()
"""The process that owns the folders. A fork of it has a copy of the table, and removes none of them at its end."""


def make() -> Path:
    """Make an empty folder that only this user may read. Raises `OSError`."""
    return owned(lambda: Path(tempfile.mkdtemp(prefix=PREFIX)))


def owned(make: Callable[[], Path]) -> Path:
    """Own the folder that `make` makes; called again when another process has removed that one. Raises `OSError`."""
    while True:
        folder = make()
        # before it is locked, another process may find it, and remove it
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks: nothing there is removed by others
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(folder, descriptor):
            _locks[folder] = descriptor
            return folder
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a folder that this process owns, with all that is in it. A second call does nothing. Several threads may
    remove one folder at the same time.
    """
    if folder in _locks:
        shutil.rmtree(folder, ignore_errors=True)
        descriptor = _locks.pop(folder, None)  # not before: who ends this process removes what is in the table
        if descriptor is not None:
            os.close(descriptor)


def remove_abandoned(place: Path | None = None, prefix: str = PREFIX) -> list[Path]:
    """Remove the folders whose owners are gone, and return them. `place` is the temporary directory by default."""
    found = []
    for folder in (place or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # of another user, or just removed
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(folder, descriptor):  # removed, and perhaps made again by an owner
                continue
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                found.append(folder)
        except OSError:  # in use, or a file system without locks
            pass
        finally:
            os.close(descriptor)
    return found


@atexit.register
def remove_rest() -> None:
    """At the end of this process: what is still in use then, such as the files of a model that was loaded."""
    if os.getpid() == _MAKER:
        for folder in list(_locks):
            remove(folder)


def _is_at(folder: Path, descriptor: int) -> bool:
    """Whether the opened folder is still in its place."""
    try:
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
