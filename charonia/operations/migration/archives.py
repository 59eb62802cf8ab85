"""Reads archives of unknown origin within bounds: no name leads outside, no link, and sizes are counted."""

from __future__ import annotations

import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from charonia.errors import InvalidArgument

MAX_FILES = 10_000
MAX_BYTES = 32 << 30
_CHUNK_BYTES = 1 << 20


def read_archive(path: Path, target: Path, max_bytes: int = MAX_BYTES) -> list[str]:
    """Unpack a zip or gzipped tar archive below an empty directory; return the files' relative names.

    Raises `InvalidArgument` for a damaged archive, names that lead outside, links, devices and too much.
    """
    names: list[str] = []
    left = max_bytes
    try:
        for name, file in _members(path):
            relative = _inside(name)
            if len(names) >= MAX_FILES:
                raise InvalidArgument(f"'{path.name}' has more than {MAX_FILES} files")
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
            for info in archive.infolist():
                mode = info.external_attr >> 16
                if stat.S_ISLNK(mode):
                    raise InvalidArgument(f"'{path.name}' has the link '{info.filename[:200]}'")
                if not info.is_dir():
                    with archive.open(info) as file:
                        yield info.filename, file
        return
    with tarfile.open(path, "r:*") as tar:
        for member in tar:
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise InvalidArgument(f"'{path.name}' has '{member.name[:200]}', which is no plain file")
            yield member.name, content


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
