"""Unpacks an archived python environment (P18), with limits, and never outside its directory.

Links are made last, so that nothing is written through one. Their targets are not restricted: the `python` of a virtual
environment is a link to the machine's interpreter.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from charonia.errors import CharoniaError, InvalidArgument

_CHUNK_BYTES = 1 << 20
_MODE = 0o755


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of an unpacked archive."""

    files: int = 1_000_000
    size_bytes: int = 64 << 30


def unpack(archive: Path, into: Path, bounds: Bounds | None = None) -> None:
    """Unpack a tar archive, compressed or not, into a new directory. Blocks.

    Raises `InvalidArgument`, and leaves nothing, for an archive that cannot be read, is too large, or has members
    outside. Raises `OSError` when the disk is full.
    """
    bounds = bounds or Bounds()
    into.mkdir(parents=True)
    try:
        with tarfile.open(archive, "r|*") as tar:
            links = _write_files(archive, tar, into, bounds)
        for name, target in links:
            path = _place(archive, into, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_symlink() and not path.exists():
                path.symlink_to(target)
    except (tarfile.TarError, EOFError, ValueError) as error:
        shutil.rmtree(into, ignore_errors=True)
        raise InvalidArgument(f"'{archive}' is not a readable archive: {error}") from None
    except (CharoniaError, OSError):
        shutil.rmtree(into, ignore_errors=True)
        raise


def _write_files(archive: Path, tar: tarfile.TarFile, into: Path, bounds: Bounds) -> list[tuple[str, str]]:
    """Write directories, files and hard links; return the symbolic links to make."""
    links: list[tuple[str, str]] = []
    size_bytes = 0
    for count, member in enumerate(_members(archive, tar), start=1):
        size_bytes += member.size
        if count > bounds.files or size_bytes > bounds.size_bytes:
            raise InvalidArgument(
                f"'{archive}' is too large to be unpacked: at most {bounds.files} files of {bounds.size_bytes} bytes "
                "in all"
            )
        if member.issym():
            links.append((member.name, member.linkname))
            continue
        path = _place(archive, into, member.name)
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if member.islnk():
            os.link(_place(archive, into, member.linkname), path)
            continue
        source = tar.extractfile(member)
        if source is None:
            raise InvalidArgument(f"'{archive}' holds '{member.name}' without content")
        with source, path.open("xb") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)
        path.chmod(member.mode & _MODE | 0o600)
    return links


def _members(archive: Path, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()) or member.issparse():
            raise InvalidArgument(f"'{archive}' holds '{member.name}', which is no file, directory or link")
        yield member


def _place(archive: Path, into: Path, name: str) -> Path:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\0" in name:
        raise InvalidArgument(f"'{archive}' holds '{name}', which is outside of it")
    return into / parts
