"""What a run has measured, in a file that the next run of the same models, options and machine goes on from.

A line is a JSON record: it is whole once its line end is there, so a run that is killed loses the measurement that was
under way and no other. Records of other keys stay in the file and are not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from charonia.errors import InvalidArgument

_HASHED_BYTES = 16 << 20
"""Larger files count by size and time of change: reading weights of gigabytes would take longer than starting."""
CONFIG, TRIAL, TURN = "config", "trial", "turn"
_KINDS = (CONFIG, TRIAL, TURN)


class Checkpoint:
    """The records of one key: `find` the last one of a kind and name, `add` another."""

    def __init__(self, path: Path, key: str) -> None:
        """Raises `InvalidArgument` when the file cannot be read, or is no checkpoint."""
        self._path, self._key = path, key
        self._records: dict[tuple[str, str], dict[str, Any]] = {}
        self.others = 0
        """Records of other models, options or machines."""
        for record in _records(path):
            if record["key"] == key:
                self._records[record["kind"], record["name"]] = record["found"]
            else:
                self.others += record["kind"] == TRIAL

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        return self._records.get((kind, name))

    def number(self, kind: str) -> int:
        """How many records of a kind there are."""
        return sum(found == kind for found, _ in self._records)

    def add(self, kind: str, name: str, found: dict[str, Any]) -> None:
        """Keeps a record, on the disk when this returns. Raises `InvalidArgument` when it cannot be written."""
        line = json.dumps({"key": self._key, "kind": kind, "name": name, "found": found}) + "\n"
        try:
            with self._path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # of a run that was killed while it wrote
                        line = "\n" + line
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InvalidArgument(f"'{self._path}' cannot be written: {error.strerror}") from None
        self._records[kind, name] = found


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be read: {error.strerror}") from None
    whole = 0
    for line in lines:
        try:
            record = json.loads(line)
            if record["kind"] in _KINDS and isinstance(record["found"], dict):
                yield {
                    "key": str(record["key"]),
                    "kind": record["kind"],
                    "name": str(record["name"]),
                    "found": record["found"],
                }
                whole += 1
        except (ValueError, KeyError, TypeError):
            continue
    if not whole and any(line.strip() for line in lines[:-1]):
        raise InvalidArgument(f"'{path}' is no checkpoint of charonia tune")


def key_of(sources: Sequence[tuple[str, Path]], measured: Sequence[str]) -> str:
    """The key of runs whose measurements stand for each other: of the models' files, of the words that say how is
    `measured`, of this release and of the machine."""
    digest = hashlib.blake2b(digest_size=16)
    for model, source in sources:
        try:
            paths = sorted(_files_below(source, frozenset()))
        except OSError as error:
            raise InvalidArgument(f"'{error.filename}' cannot be read: {error.strerror}") from None
        for path in paths:
            digest.update(json.dumps([model, str(path.relative_to(source)), file_mark(path)]).encode())
    digest.update(json.dumps([list(measured), version("charonia"), _machine()]).encode())
    return digest.hexdigest()


def _files_below(directory: Path, above: frozenset[str]) -> Iterator[Path]:
    """Files in a directory and below, also through links, as copies of models have them; no circle of links."""
    real = os.path.realpath(directory)
    if real in above:
        return
    for path in directory.iterdir():
        if path.is_dir():
            yield from _files_below(path, above | {real})
        elif path.is_file():
            yield path


def file_mark(path: Path) -> str:
    """A text that changes with the file. Raises `InvalidArgument` for one that cannot be read."""
    try:
        status = path.stat()
        if status.st_size > _HASHED_BYTES:
            return f"{status.st_size} {status.st_mtime_ns}"
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be read: {error.strerror}") from None


def _machine() -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
    return [platform.node(), platform.machine(), platform.processor(), str(cores), str(pages)]
