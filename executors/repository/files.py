"""Walks model directories, and checks that paths stay inside them.

`__pycache__`, hidden entries and editors' backup files are not part of a model (R1): importing a python model must not
look like a change of it.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A regular file below a directory. `relative` has forward slashes; links are followed."""

    relative: str
    path: Path
    size_bytes: int
    modified_ns: int
    inode: int


def entry_of(path: Path) -> FileEntry:
    """Return the entry of a single file. Raises `OSError`."""
    found = path.stat()
    return FileEntry(path.name, path, found.st_size, found.st_mtime_ns, found.st_ino)


def read_file(path: Path, max_bytes: int = sys.maxsize) -> bytes:
    """Return the content of a regular file. Raises `OSError`, also for a pipe or device, which may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        mode = found.st_mode
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes >> 20} MiB", str(path))
        if not stat.S_ISREG(mode):
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(number, os.strerror(number) if number == errno.EISDIR else "no regular file", str(path))
        return file.read()


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name.endswith("~") or name == "__pycache__"


def walk(directory: Path, *, skip_top: frozenset[str] = frozenset()) -> list[FileEntry]:
    """Return all files below `directory`, sorted by relative path. `skip_top` names top-level entries to leave out.

    Files that vanish meanwhile are left out. A directory that is linked several times is entered once.
    """
    found = list(_walk(directory, "", skip_top, set()))
    found.sort(key=lambda entry: entry.relative)
    return found


def _walk(directory: Path, prefix: str, skip: frozenset[str], entered: set[tuple[int, int]]) -> Iterator[FileEntry]:
    try:
        status = directory.stat()
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    identity = (status.st_dev, status.st_ino)
    if identity in entered:
        return
    entered.add(identity)
    for entry in entries:
        if is_hidden(entry.name) or entry.name in skip:
            continue
        relative = prefix + entry.name
        if entry.is_dir():
            yield from _walk(Path(entry.path), relative + "/", frozenset(), entered)
            continue
        try:
            found = entry.stat()
        except FileNotFoundError:  # removed meanwhile, or a dangling link
            continue
        if entry.is_file():
            yield FileEntry(relative, Path(entry.path), found.st_size, found.st_mtime_ns, found.st_ino)


def contained(directory: Path, relative: str) -> Path | None:
    """Return the real path of `relative` below `directory`, or None when it is outside after resolving links (C6)."""
    root = Path(os.path.realpath(directory))
    if "\0" in relative:
        return None
    path = Path(os.path.realpath(root / relative))
    return path if path != root and path.is_relative_to(root) else None
