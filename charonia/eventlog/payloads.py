"""Large tensors out of band: in memory that the processes of one machine share, otherwise as blobs in the log.

A process owns `<directory>/<its incarnation>/`. Between processes that both know slots a payload lies in a reused slot
of its owner's directory (`payload_slots`, docs/adr/0017). Otherwise it is a new file, written whole before anything
names it, so that a reader never sees half of one; readers map it and never write. A file belongs to the process that
waits for it and is removed when its request is answered; a reader's mapping outlives that. Directories of processes
that have ended are swept. That two processes share the directory is proven by reading a token there, never by host
name; that one of them reads slots, by a file beside the token. Payloads in slots and in files are both `FILE`
references in a record, so that batchers of any version carry them.

Files carry only work that need not survive the machine: what durable work needs is in the log itself. Plain files on a
memory file system and not `multiprocessing.shared_memory`, which deletes a segment when any process that used it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
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
from charonia.tensors import Buffer, copy_into
from charonia.wire import BLOB, FILE, Reference

from .payload_slots import SlotPool, SlotReader

_log = logging.getLogger(__name__)

BY_REFERENCE_BYTES = 32 * 1024
"""Smaller payloads travel in the record: a file costs more than copying them."""

REGIONS = "regions"
"""Not the directory of a process: there gateways keep which memory of clients is registered (`gateway.regions`)."""
_TOKEN = "token"
_SOCKET = "replies"
_LONGEST_SOCKET_PATH = 100
"""Bytes; the system takes 107."""
_SLOTS = "slots"
"""A file beside the token: this process reads payloads in slots."""
_MARK_END = "_"
"""Ends the mark of a log at the beginning of a file's name, which has no such sign otherwise."""
_LEFT_AGE_S = 86_400.0
"""A file of another log that is older was left by a log that is no more: a request hardly needs an answer so late."""
_WRITE_AT_ONCE = 64 * 1024 * 1024
_MOST_KNOWN = 4096


def total_size(buffers: Sequence[Buffer]) -> int:
    return sum(len(buffer) for buffer in buffers)


class PayloadDirectory:
    """One process's part in the shared directory; `directory` "" turns it off. `token` proves that it is shared."""

    def __init__(self, directory: str, incarnation: str) -> None:
        self._root = Path(directory) if directory else None
        self._incarnation = incarnation
        self.token = ""
        self._proven: dict[str, tuple[str, bool]] = {}
        self._slots: SlotPool | None = None
        self._reader: SlotReader | None = None
        self._read_slots: dict[str, bool] = {}
        self._lock = -1
        """The token file, locked while this process lives: no server of another log takes its directory for a rest."""
        self._log_mark = ""

    def belongs_to(self, epoch: str) -> None:
        """Name the log, so that files for a model of it are told from those for a model of another log of that name."""
        self._log_mark = hashlib.blake2b(epoch.encode(), digest_size=8).hexdigest() + _MARK_END

    def open(self, *, standing: bool = False) -> None:
        """Make this process's directory. One that cannot be made is off, with a word in the log.

        A `standing` one is not this process's alone: it may be there already, and what is in it stays. What is sent
        to it outlives this process and must not lie in slots, which do not.
        """
        if self._root is None:
            return
        try:
            own = self._root / self._incarnation
            own.mkdir(parents=True, mode=0o700, exist_ok=standing)
            self._reader = SlotReader(self._root)
            if not standing:
                self._slots = SlotPool(own)
                (own / _SLOTS).write_text("1")
            token = secrets.token_hex(16)
            (own / _TOKEN).write_text(token)
            if not standing:
                self._hold(own)
        except OSError as error:
            _log.warning("payloads travel in the log: directory '%s' cannot be used: %s", self._root, error.strerror)
            self._root = self._slots = self._reader = None
            return
        self.token = token

    def renew(self) -> None:
        """Make this process's directory again if others removed it, because they presumed the process dead. What lay in
        its slots can be read by those alone that have mapped it.
        """
        if self._root is None or self._slots is None or not self.token:
            return
        own = self._root / self._incarnation
        if (own / _TOKEN).exists():
            return
        self._slots.drop_all()
        try:
            own.mkdir(parents=True, mode=0o700, exist_ok=True)
            (own / _SLOTS).write_text("1")
            (own / _TOKEN).write_text(self.token)  # the last one: it says that the directory is whole
            self._hold(own)
        except OSError as error:
            _log.warning("payloads travel in the log: directory '%s' cannot be made again: %s", own, error.strerror)

    def _hold(self, own: Path) -> None:
        self._release()
        self._lock = os.open(own / _TOKEN, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def close(self) -> None:
        """Remove this process's directory and what is in it, except answers that their readers have not taken yet.

        Those are swept with the directories of processes that are no more.
        """
        if self._root is None:
            return
        if self._reader is not None:
            self._reader.close()
        self._release()
        self.token = ""
        own = self._root / self._incarnation
        kept = set(self._slots.close()) if self._slots is not None else set()
        if not kept:
            shutil.rmtree(own, ignore_errors=True)
            return
        with contextlib.suppress(OSError):
            for entry in own.iterdir():
                if entry not in kept:
                    entry.unlink()

    def tidy(self) -> None:
        """Give memory back that was not used for a while, and see to the directory; call it every few seconds."""
        self.renew()
        if self._slots is not None:
            self._slots.tidy()
        if self._reader is not None:
            self._reader.tidy()

    @property
    def slots(self) -> SlotPool | None:
        """This process's slots; None where it has no directory."""
        return self._slots

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

    def reads_slots(self, incarnation: str) -> bool:
        """Whether a process that shares this directory reads payloads in slots."""
        known = self._read_slots.get(incarnation)
        if known is None:
            known = False
            if self._slots is not None and self._root is not None:
                known = (self._root / incarnation / _SLOTS).exists()
            if len(self._read_slots) >= _MOST_KNOWN:
                self._read_slots.clear()
            self._read_slots[incarnation] = known
        return known

    def lend(self, buffers: Sequence[Buffer]) -> Reference | None:
        """Put these bytes, joined, into a slot for any number of readers, until `remove`. None: there is no room.

        One buffer that lies in a slot of this process already stays where it is.
        """
        found = self._in_slot(buffers)
        if found is None or self._slots is None:
            return None
        name, view = found
        self._slots.keep(name, view)
        return Reference(FILE, f"{self._incarnation}/{name}", len(view))

    def give(self, buffers: Sequence[Buffer], reader: str) -> Reference | None:
        """As `lend`, for one reader that will `take` them. None also when that one reads no slots."""
        if not self.reads_slots(reader):
            return None
        found = self._in_slot(buffers)
        if found is None or self._slots is None:
            return None
        name, view = found
        self._slots.give(name, view, reader)
        return Reference(FILE, f"{self._incarnation}/{name}", len(view))

    def take_back(self, reference: Reference) -> None:
        """End a payload that was given, or written for another process, and that its reader was never sent to."""
        if reference.is_in_slot and self._slots is not None:
            self._slots.take_back(reference.name.partition("/")[2])
        else:
            self.remove(reference)

    def is_there(self, buffers: Sequence[Buffer]) -> bool:
        """Whether `lend` has nothing to copy: the bytes lie in a slot already."""
        slots = self._slots
        return slots is not None and len(buffers) == 1 and slots.name_of(buffers[0]) is not None

    def _in_slot(self, buffers: Sequence[Buffer]) -> tuple[str, memoryview] | None:
        slots = self._slots
        if slots is None:
            return None
        if len(buffers) == 1 and isinstance(whole := buffers[0], memoryview) and (name := slots.name_of(whole)):
            return name, whole
        view = slots.lend(total_size(buffers))
        if view is None:
            return None
        at = 0
        for buffer in buffers:
            end = at + len(buffer)
            copy_into(view[at:end], buffer)
            at = end
        name = slots.name_of(view)
        return None if name is None else (name, view)

    def file_name(self, name: str, owner: str = "") -> str:
        """What a reference names a file that was written with this `name`."""
        return f"{owner or self._incarnation}/{self._log_mark}{name}"

    def write(self, buffers: Sequence[Buffer], owner: str = "", name: str = "") -> Reference | None:
        """Put these bytes, joined, into a new file of `owner` (an incarnation; "" for this process).

        A `name` given replaces what was called so. None when that cannot be done (no directory, owner gone, no space):
        then they travel in the record.
        """
        if self._root is None:
            return None
        file = name
        name = self.file_name(file or secrets.token_hex(12), owner)
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

    def read(self, reference: Reference, *, takes: bool = False) -> memoryview:
        """The bytes of a payload, which stay when it is removed. Raises `InvalidRecord`.

        `takes` one that was given to this process: its owner may use its memory once the last view of it is gone.
        """
        if self._root is None or reference.kind != FILE:
            raise InvalidRecord("payload lies in a directory this process does not have")
        if reference.size_bytes == 0:
            return memoryview(b"")
        if reference.is_in_slot:
            if self._reader is None:
                raise InvalidRecord("payload lies in a slot, and this process reads none yet")
            return self._reader.read(reference.name, reference.size_bytes, takes=takes)
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
        """End a payload that this process owns, or a file that it was sent."""
        if reference.is_in_slot:
            if self._slots is not None and reference.name.startswith(self._incarnation + "/"):
                self._slots.drop(reference.name.partition("/")[2])
        elif self._root is not None and reference.kind == FILE:
            with contextlib.suppress(OSError):
                (self._root / reference.name).unlink()

    def forget(self, kept: Container[str], min_age_s: float) -> int:
        """Remove this directory's files that are older and whose names are not among those `kept`; how many.

        Files that were written for another log stay for a day: a model of another server may have this one's name.
        """
        count = 0
        if self._root is None:
            return count
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._root / self._incarnation):
                name = f"{self._incarnation}/{entry.name}"
                others = _MARK_END in entry.name and not (self._log_mark and entry.name.startswith(self._log_mark))
                with contextlib.suppress(OSError):
                    old = time.time() - entry.stat().st_mtime >= (_LEFT_AGE_S if others else min_age_s)
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
                    if (
                        entry.name not in (self._incarnation, REGIONS)
                        and time.time() - entry.stat().st_mtime >= min_age_s
                    ):
                        found.append(entry.name)
        return found

    def sweep(self, gone: Iterable[str]) -> None:
        """Remove the directories of processes that are no more as far as the log knows, but not those of living ones:
        servers of other logs may use this directory, too.
        """
        if self._root is not None:
            for incarnation in gone:
                if not _is_held(self._root / incarnation):
                    shutil.rmtree(self._root / incarnation, ignore_errors=True)


def _is_held(own: Path) -> bool:
    """Whether a living process has this directory."""
    try:
        descriptor = os.open(own / _TOKEN, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def new_blob(size_bytes: int, *, durable: bool = False) -> Reference:
    """A reference to a blob that was not written yet: of work at the level `memory`, unless `durable`.

    The blobs of such work may be kept on a server of their own (`charonia.eventlog.redis.blob_server`).
    """
    return Reference(BLOB, ("" if durable else keys.PASSING) + secrets.token_hex(16), size_bytes)
