"""Large tensors beside the log: files that the processes of one machine share, else blobs (design section 2).

A process owns `<directory>/<its incarnation>/`. It writes each payload into a new file there, whole, before anything
names it, so that a reader never sees half of one; readers map it and never write. A file belongs to whoever waits for
it and is removed when its request is answered; a reader's mapping outlives that. Directories of processes that are no
more are swept. That two processes share the directory is proven by reading a token there, never by host name.

Files carry only work that need not survive the machine: what durable work needs is in the log itself. Plain files on a
memory file system and not `multiprocessing.shared_memory`, which deletes a segment when any process that used it ends.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from charonia import keys
from charonia.errors import InvalidRecord
from charonia.tensors import Buffer
from charonia.wire import BLOB, FILE, Reference

_log = logging.getLogger(__name__)

BY_REFERENCE_BYTES = 32 * 1024
"""Smaller payloads travel in the record: a file costs more than copying them."""

_TOKEN = "token"
_SOCKET = "replies"
_LONGEST_SOCKET_PATH = 100
"""Bytes; the system takes 107."""
_WRITE_AT_ONCE = 64 * 1024 * 1024


def total_size(buffers: Sequence[Buffer]) -> int:
    return sum(len(buffer) for buffer in buffers)


class PayloadDirectory:
    """One process's part in the shared directory; `directory` "" turns it off. `token` proves that it is shared."""

    def __init__(self, directory: str, incarnation: str) -> None:
        self._root = Path(directory) if directory else None
        self._incarnation = incarnation
        self.token = ""
        self._proven: dict[str, tuple[str, bool]] = {}

    def open(self, *, standing: bool = False) -> None:
        """Make this process's directory. One that cannot be made is off, with a word in the log.

        A `standing` one is not this process's alone: it may be there already, and what is in it stays.
        """
        if self._root is None:
            return
        try:
            own = self._root / self._incarnation
            own.mkdir(parents=True, mode=0o700, exist_ok=standing)
            token = secrets.token_hex(16)
            (own / _TOKEN).write_text(token)
        except OSError as error:
            _log.warning("payloads travel in the log: directory '%s' cannot be used: %s", self._root, error.strerror)
            self._root = None
            return
        self.token = token

    def close(self) -> None:
        """Remove this process's directory and what is in it."""
        if self._root is not None:
            shutil.rmtree(self._root / self._incarnation, ignore_errors=True)

    def socket_path(self, incarnation: str = "") -> str:
        """Where a process (this one by default) takes replies from others of its machine; "" where it cannot."""
        if self._root is None:
            return ""
        path = str(self._root / (incarnation or self._incarnation) / _SOCKET)
        return path if len(path.encode()) <= _LONGEST_SOCKET_PATH else ""

    def shares_with(self, incarnation: str, token: str) -> bool:
        """Whether a process that announced this token reads the same directory."""
        if self._root is None or not token:
            return False
        known = self._proven.get(incarnation)
        if known is None or known[0] != token:
            found = ""
            with contextlib.suppress(OSError):
                found = (self._root / incarnation / _TOKEN).read_text()
            known = self._proven[incarnation] = (token, secrets.compare_digest(found, token))
        return known[1]

    def write(self, buffers: Sequence[Buffer], owner: str = "", name: str = "") -> Reference | None:
        """Put these bytes, joined, into a new file of `owner` (an incarnation; "" for this process).

        A `name` given replaces what was called so. None when that cannot be done (no directory, owner gone, no space):
        then they travel in the record.
        """
        if self._root is None:
            return None
        file = name
        name = f"{owner or self._incarnation}/{file or secrets.token_hex(12)}"
        path = self._root / name
        try:
            if file:
                path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                at = 0
                while at < len(view):
                    at += os.write(descriptor, view[at : at + _WRITE_AT_ONCE])
        except OSError as error:
            _log.warning("a payload travels in the log: '%s' cannot be written: %s", path, error.strerror)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        finally:
            os.close(descriptor)
        return Reference(FILE, name, total_size(buffers))

    def read(self, reference: Reference) -> memoryview:
        """The bytes of a file, as a mapping that stays when the file is removed. Raises `InvalidRecord`."""
        if self._root is None or reference.kind != FILE:
            raise InvalidRecord("payload lies in a directory this process does not have")
        if reference.size_bytes == 0:
            return memoryview(b"")
        try:
            descriptor = os.open(self._root / reference.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise InvalidRecord(f"payload cannot be read: {error.strerror}") from None
        try:
            if os.fstat(descriptor).st_size != reference.size_bytes:
                raise InvalidRecord("payload is not of the size its record describes")
            return memoryview(mmap.mmap(descriptor, reference.size_bytes, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise InvalidRecord(f"payload cannot be mapped: {error}") from None
        finally:
            os.close(descriptor)

    def remove(self, reference: Reference) -> None:
        if self._root is not None and reference.kind == FILE:
            with contextlib.suppress(OSError):
                (self._root / reference.name).unlink()

    def forget(self, kept: Container[str], min_age_s: float) -> int:
        """Remove this directory's files that are older and whose names are not among those `kept`; how many."""
        count = 0
        if self._root is None:
            return count
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._root / self._incarnation):
                name = f"{self._incarnation}/{entry.name}"
                with contextlib.suppress(OSError):
                    old = time.time() - entry.stat().st_mtime >= min_age_s
                    if old and entry.name not in (_TOKEN, _SOCKET) and name not in kept:
                        os.unlink(entry.path)
                        count += 1
        return count

    def others(self, min_age_s: float) -> list[str]:
        """Incarnations whose directories are here and have not changed for a while, this process left out."""
        found: list[str] = []
        if self._root is None:
            return found
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._root):
                with contextlib.suppress(OSError):
                    if entry.name != self._incarnation and time.time() - entry.stat().st_mtime >= min_age_s:
                        found.append(entry.name)
        return found

    def sweep(self, gone: Iterable[str]) -> None:
        """Remove the directories of processes known to be no more."""
        if self._root is not None:
            for incarnation in gone:
                shutil.rmtree(self._root / incarnation, ignore_errors=True)


def new_blob(size_bytes: int, *, durable: bool = False) -> Reference:
    """A reference to a blob that nobody has written yet: of work at the level `memory`, unless `durable`.

    The blobs of such work may be kept on a server of their own (`charonia.eventlog.redis.blobs`).
    """
    return Reference(BLOB, ("" if durable else keys.PASSING) + secrets.token_hex(16), size_bytes)
