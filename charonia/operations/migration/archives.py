"""Reads untrusted archives within bounds: no name outside the directory, no links, and bounded sizes."""

from __future__ import annotations

import bz2
import gzip
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from charonia.errors import InvalidArgument

MAX_FILES = 10_000
MAX_BYTES = 32 << 30
_ALWAYS_BYTES = 1 << 30
_MAX_RATIO = 100
"""Weights compress less: a file of more than `_ALWAYS_BYTES` and this many times its packed size is a bomb."""
_CHUNK_BYTES = 1 << 20
_MAX_READ_BYTES = 4 << 20
"""Headers of a tar archive are far smaller; `tarfile` reads them whole."""
_OPENERS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}


def read_archive(path: Path, target: Path, max_bytes: int = MAX_BYTES) -> list[str]:
    """Unpack a zip or gzipped tar archive below an empty directory; return the files' relative names.

    Raises `InvalidArgument` for a damaged archive, names that lead outside, links, devices and too much.
    """
    names: list[str] = []
    try:
        left = max_bytes = min(max_bytes, max(_ALWAYS_BYTES, _MAX_RATIO * path.stat().st_size))
        for name, file in _members(path):
            relative = _inside(name)
            place = target / relative
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as out:
                while chunk := file.read(_CHUNK_BYTES):
                    left -= len(chunk)
                    if left < 0:
                        raise InvalidArgument(f"'{path.name}' unpacks to more than {max_bytes} bytes")
                    out.write(chunk)
            names.append(str(relative))
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise InvalidArgument(f"'{path.name}' is no archive that can be read: {why}") from None
    except OSError as error:
        raise InvalidArgument(f"'{path.name}' cannot be unpacked: {error}") from None
    except Exception as error:  # zlib.error and lzma.LZMAError have no common base
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"'{path.name}' is damaged: {error}") from None
    return names


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for number, info in enumerate(archive.infolist()):
                _check_count(path, number)
                mode = info.external_attr >> 16
                if stat.S_ISLNK(mode):
                    raise InvalidArgument(f"'{path.name}' has the link '{info.filename[:200]}'")
                if not info.is_dir():
                    with archive.open(info) as file:
                        yield info.filename, file
        return
    with path.open("rb") as file:
        opener = _OPENERS.get(file.read(2), Path.open)
    unpacking = opener(path, "rb")
    bounded: Any = _Bounded(path, unpacking)
    with unpacking, tarfile.open(fileobj=bounded, mode="r:") as tar:
        for number, member in enumerate(tar):
            _check_count(path, number)
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise InvalidArgument(f"'{path.name}' has '{member.name[:200]}', which is no plain file")
            yield member.name, content


class _Bounded:
    """The file of a tar archive for `tarfile`, which would allocate whatever size a header declares."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > _MAX_READ_BYTES:
            raise InvalidArgument(f"'{self._path.name}' has a header of {size} bytes")
        return self._file.read(size)


def _check_count(path: Path, number: int) -> None:
    if number >= MAX_FILES:
        raise InvalidArgument(f"'{path.name}' has more than {MAX_FILES} files and directories")


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or "\\" in name
        or "\0" in name
        or not path.parts
        or ":" in path.parts[0]
    ):
        raise InvalidArgument(f"the archive has the name '{name[:200]}', which leads outside")
    return path
