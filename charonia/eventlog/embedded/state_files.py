"""What the files in a state directory say of themselves: who wrote them, in which format, and how much there is.

The server's own files are the truth; `server.json` beside them remembers the program that used them last. State of
releases that wrote no such record is read by its files alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia.errors import StartupError

APPEND_DIRECTORY = "appendonlydir"
RECORD = "server.json"
STOPPED = "server.stopped"
WEBHOOK_SECRET = "webhook-secret"
"""What webhooks are signed with without a configured file of secrets: receivers know it, so it moves with the state."""

_MANIFEST = "appendonly.aof.manifest"
_SIGNATURE = re.compile(rb"REDIS\d{4}|VALKEY\d{3}")
_SAVED_BY = re.compile(rb"(redis|valkey)-ver([\x01-\x3f])")
_HEAD_BYTES = 256


@dataclass(frozen=True, slots=True)
class Writer:
    """The program that wrote a state: its name and version as it says them, and where it was; "" when not known."""

    name: str
    version: str
    path: str = ""

    @property
    def text(self) -> str:
        return f"{self.name} {self.version}"


class StateFiles:
    """The server's files in one state directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.append_directory = directory / APPEND_DIRECTORY

    @property
    def exist(self) -> bool:
        """Whether there is a state to be read."""
        return (self.append_directory / _MANIFEST).is_file()

    @property
    def last(self) -> Path | None:
        """The file that the server appends to."""
        named = self._named("i") or self._named("b")
        return self.append_directory / named[-1] if named else None

    @property
    def format(self) -> str:
        """The format of the snapshot that appended writes follow, as that says: `REDIS0010`, `VALKEY080`; or ""."""
        found = _SIGNATURE.match(self._head())
        return found[0].decode() if found is not None else ""

    @property
    def saved_by(self) -> Writer | None:
        """The program that wrote that snapshot."""
        head = self._head()
        found = _SAVED_BY.search(head)
        if found is None:
            return None
        version = head[found.end() : found.end() + found[2][0]].decode(errors="replace")
        return Writer(found[1].decode().capitalize(), version)

    @property
    def writer(self) -> Writer | None:
        """The program that used the state last, by the record, else by the files."""
        found = self.record
        if not {"program", "version", "path"} <= found.keys():
            return self.saved_by
        return Writer(str(found["program"]), str(found["version"]), str(found["path"]))

    @property
    def record(self) -> dict[str, Any]:
        """What was remembered, empty where nothing can be read."""
        return read_object(self.directory / RECORD)

    def remember(self, writer: Writer) -> None:
        """Record the program that uses the state from now on. Raises `StartupError`."""
        about = {"program": writer.name, "version": writer.version, "path": writer.path, "format": self.format}
        found = self.record
        if {name: found.get(name) for name in about} == about:
            return
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_whole(self.directory / RECORD, json.dumps({**about, "since": since}, indent=1).encode() + b"\n")

    @property
    def size_bytes(self) -> int:
        try:
            return sum(path.stat().st_size for path in self.append_directory.iterdir())
        except OSError:
            return 0

    # -- orderly ends -------------------------------------------------------------------------------------------------

    def stopped(self) -> None:
        """Note that the server has ended in order: what it wrote ends with a whole write."""
        last = self.last
        if last is not None:
            with contextlib.suppress(OSError):
                (self.directory / STOPPED).write_text(json.dumps([last.name, last.stat().st_size]))

    def stopped_in_order(self) -> bool:
        """Whether the files are as an orderly end left them."""
        last = self.last
        try:
            found = json.loads((self.directory / STOPPED).read_text())
            return last is not None and found == [last.name, last.stat().st_size]
        except (OSError, ValueError):
            return False

    # -- parts --------------------------------------------------------------------------------------------------------

    def _named(self, kind: str) -> list[str]:
        """The files of a kind in the manifest, in order: `b` the snapshot, `i` what was appended after it."""
        try:
            text = (self.append_directory / _MANIFEST).read_text(errors="replace")
        except OSError:
            return []
        return re.findall(rf"^file (\S+) seq \d+ type {kind}\b", text, re.MULTILINE)

    def _head(self) -> bytes:
        for name in self._named("b")[-1:]:
            with contextlib.suppress(OSError), (self.append_directory / name).open("rb") as file:
                return file.read(_HEAD_BYTES)
        return b""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads, whole or not at all. Raises `StartupError`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StartupError(f"'{path}' cannot be written: {error.strerror}") from None
