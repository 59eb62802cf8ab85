"""Reused slots of shared memory for large tensors (docs/adr/0017). Those of models' processes are others:
`executors/backends/python/protocol/shared_slots.py`.

A slot is a file of its owner's payload directory that stays mapped, in the owner and in its readers, from use to use: a
payload costs one copy into warm pages, where a file of its own costs its creation, new pages and its removal.

Each use of a slot has a generation. The name of a payload has slot, generation and offset (`charonia.wire.records`);
the header of the slot holds the generation of its current use. A reader holds a shared lock (`flock`) on the slot from
before it compares generations until the last view of the bytes is gone. The owner reuses a slot under an exclusive
lock, and raises the generation first. So a reader sees the bytes of the use it was sent to, or is told that they are
gone; it never sees a later use, however late it comes: a fenced attempt, a duplicate, an executor that lost a takeover.
The kernel drops the locks of a process that dies.

Views decide how long a use lasts: it ends when the last view of it in the owner's process is gone and the owner waits
for no reader. A payload that was given to one reader (`give`) ends when that reader has written the generation into
the header (`SlotReader.read(..., takes=True)`), or is gone, or has not done so for long; in the last case the file is
removed instead of reused.
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import logging
import mmap
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from charonia.clock import monotonic_ns
from charonia.errors import InvalidRecord
from charonia.offload.reclaimed import ReclaimedMap
from charonia.tensors import Buffer
from charonia.wire import slot_file, slot_name, slot_place

_log = logging.getLogger(__name__)

MAX_SLOTS = 192
"""Slots of one owner; each costs two file descriptors in the owner and two or three in each of its readers."""

MAX_POOL_BYTES = 1 << 30
"""Slots of one owner together, unless a quarter of the file system's free space is less."""

MAX_SLOT_BYTES = 64 * 1024 * 1024
"""Larger payloads travel in files of their own: reuse would hold too much memory for too few requests."""

IDLE_S = 30.0
"""A slot that was not used for so long is removed."""

UNTAKEN_S = 120.0
"""A payload that its reader has not taken for so long is removed, not reused. A reader that stalls for longer has lost
its lease, and its callers were answered."""

_HEADER_BYTES = 4096
_MAGIC = 0x31544F4C53414843  # "CHASLOT1"
_WORD_MAGIC, _WORD_GENERATION, _WORD_TAKEN, _WORD_USED = range(4)
"""The header's words: what the file is; the generation of its use; that of the use its reader was done with last;
whether its owner has a use for it now, for those that check the directory from outside."""
_ALIGNMENT = 64
_MIN_CAPACITY_BYTES = 32 * 1024
_POPULATED_BYTES = 4 * 1024 * 1024
"""Slots up to here get their pages when they are mapped; of larger ones that would stall the event loop. For the same
reason larger ones are made in threads."""


class _Lease(np.ndarray):
    """The bytes of one use. Every view of them keeps it alive; its end releases `held`."""

    held: _Held | None = None

    def __del__(self) -> None:
        held = self.held
        if held is not None:
            held.release()


class _Held:
    """What the end of a lease releases. `release` may run in any thread and within any other call: it takes no lock."""

    __slots__ = ()

    def release(self) -> None:
        raise NotImplementedError


def _used(slot: _Slot, size_bytes: int, skew: int) -> memoryview:
    """Mark a slot as used; returns the bytes of its payload."""
    slot.words[_WORD_USED] = 1
    return _lease(slot.map, _HEADER_BYTES + -skew % _ALIGNMENT, size_bytes, slot)


def _lease(source: mmap.mmap, offset: int, size_bytes: int, held: _Held) -> memoryview:
    array: Any = np.ndarray.__new__(_Lease, (size_bytes,), np.uint8, buffer=source, offset=offset)
    array.held = held
    return memoryview(array)


def _private(size_bytes: int, skew: int) -> memoryview:
    """Memory of this process alone whose byte at `skew` is aligned."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    size = size_bytes + _ALIGNMENT
    start = -skew % _ALIGNMENT
    return memoryview(ReclaimedMap(-1, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))[start:][:size_bytes]


def _capacity_for(size_bytes: int) -> int:
    """The size class of a payload, four of them to each power of two; 0: it travels without a slot."""
    if size_bytes <= 0 or size_bytes + _ALIGNMENT > MAX_SLOT_BYTES:
        return 0
    size = max(size_bytes + _ALIGNMENT, _MIN_CAPACITY_BYTES)
    step = 1 << (size.bit_length() - 3)
    return -(-size // step) * step


def _mapped(descriptor: int, size_bytes: int, *, writable: bool) -> mmap.mmap:
    flags = mmap.MAP_SHARED
    if size_bytes <= _POPULATED_BYTES:
        flags |= getattr(mmap, "MAP_POPULATE", 0)
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    return ReclaimedMap(descriptor, size_bytes, flags=flags, prot=protection)


# -- the owner --------------------------------------------------------------------------------------------------------


class _Slot(_Held):
    """One slot as its owner holds it."""

    __slots__ = ("capacity", "descriptor", "freed_ns", "generation", "map", "number", "path", "returned", "words")

    def __init__(self, path: Path, number: int, capacity: int, returned: deque[_Slot]) -> None:
        """Raises `OSError` when there is no room for it."""
        self.path = path
        self.number = number
        self.capacity = capacity
        self.returned = returned
        self.generation = 1
        self.freed_ns = 0
        size = _HEADER_BYTES + capacity
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self.descriptor, 0, size)  # a full memory file system is an error here, a signal later
            self.map = _mapped(self.descriptor, size, writable=True)
        except (OSError, ValueError) as error:
            self.discard()
            raise OSError(f"no room for {size} bytes: {error}") from None
        self.words = memoryview(self.map)[:_ALIGNMENT].cast("Q")
        self.words[_WORD_GENERATION] = 1
        self.words[_WORD_MAGIC] = _MAGIC

    def release(self) -> None:
        self.words[_WORD_USED] = 0
        self.returned.append(self)

    def renew(self) -> bool:
        """Make ready for the next use: a late reader finds another generation. False while one reads."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self.generation += 1
        self.words[_WORD_GENERATION] = self.generation
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return True

    def discard(self) -> None:
        """Remove the file. Views of it keep its memory."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(slots=True, frozen=True)
class _Given:
    """A payload that one reader is to take."""

    view: memoryview
    slot: _Slot
    reader: str
    since_ns: int


class SlotPool:
    """The slots of one owner, in its directory. Any thread may ask for them."""

    def __init__(self, directory: Path, *, max_bytes: int = 0, max_slots: int = MAX_SLOTS) -> None:
        self._directory = directory
        self._max_slots = max_slots
        if not max_bytes:
            space = os.statvfs(directory)
            max_bytes = min(MAX_POOL_BYTES, space.f_bavail * space.f_frsize // 4)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._number = 0
        self._dropped = 0
        """Slots up to this number are not used again."""
        self._slots = 0
        self._free: dict[int, list[_Slot]] = {}
        self._preparing: set[int] = set()
        """The size classes of which a thread makes a slot."""
        self._returned: deque[_Slot] = deque()
        self._read: list[_Slot] = []
        """Slots that their owner has no more use for, and that are still being read."""
        self._kept: dict[str, memoryview] = {}
        self._given: dict[str, _Given] = {}
        self.size_bytes = 0
        """Of all slots there are."""

    @property
    def outstanding(self) -> int:
        """Payloads that are kept for readers."""
        return len(self._kept) + len(self._given)

    def lend(self, size_bytes: int, *, skew: int = 0) -> memoryview | None:
        """A slot's bytes to write a payload into; the byte at `skew` is aligned. None: there is no room.

        It is the payload's as long as a view of it is alive, or it is kept or given. A large slot that has to be made
        takes up to 30 ms: in an event loop use `receive`.
        """
        capacity = _capacity_for(size_bytes)
        if not capacity:
            return None
        with self._lock:
            slot = self._take(capacity)
            number = self._reserve(capacity) if slot is None else 0
        if number:
            slot = self._make(number, capacity)
        return None if slot is None else _used(slot, size_bytes, skew)

    def receive(self, size_bytes: int, *, skew: int = 0) -> memoryview | None:
        """Like `lend`, but the caller's thread never makes a large slot. Without a free one it returns private memory,
        whose payload is copied into a slot later, and a thread makes a slot for the next payload of this size.
        """
        capacity = _capacity_for(size_bytes)
        if capacity <= _POPULATED_BYTES:
            return self.lend(size_bytes, skew=skew)
        with self._lock:
            slot = self._take(capacity)
            number = 0
            if slot is None and capacity not in self._preparing and (number := self._reserve(capacity)):
                self._preparing.add(capacity)
            is_coming = capacity in self._preparing
        if slot is not None:
            return _used(slot, size_bytes, skew)
        try:
            if number:
                # `Thread.start` would wait until it runs, which on busy processors takes some milliseconds
                _thread.start_new_thread(self._prepare, (number, capacity))
            return _private(size_bytes, skew) if is_coming else None
        except RuntimeError:  # no thread can be had
            self._unreserve(capacity)
            self._preparing.discard(capacity)
        except OSError:
            pass
        return None

    def name_of(self, buffer: Buffer) -> str | None:
        """The name of what these bytes are, when they lie in a slot of this pool."""
        lease: Any = buffer.obj if isinstance(buffer, memoryview) else None
        if type(lease) is not _Lease or not isinstance(lease.held, _Slot):
            return None
        slot = lease.held
        if slot.returned is not self._returned or slot.number <= self._dropped:
            return None
        offset = _address(buffer) - _address(slot.words)
        return slot_name(slot.path.name, slot.generation, offset)

    def keep(self, name: str, view: memoryview) -> None:
        """Hold a payload for its readers until `drop`."""
        self._kept[name] = view

    def drop(self, name: str) -> None:
        """A payload's readers are done, or what they do is of no interest any more."""
        self._kept.pop(name, None)

    def give(self, name: str, view: memoryview, reader: str) -> None:
        """Hold a payload until `reader` (an incarnation) has taken it."""
        lease: Any = view.obj
        slot = lease.held
        with self._lock:
            self._given[name] = _Given(view, slot, reader, monotonic_ns())

    def take_back(self, name: str) -> None:
        """End a payload that was given and that its reader was never sent to."""
        with self._lock:
            self._given.pop(name, None)

    def tidy(self) -> None:
        """Remove slots that were not used for a while, and payloads whose readers are gone or take too long."""
        now_ns = monotonic_ns()
        with self._lock:
            self._collect()
            for name, given in list(self._given.items()):
                if not (self._directory.parent / given.reader).is_dir():
                    del self._given[name]
                elif now_ns - given.since_ns > UNTAKEN_S * 1e9:
                    del self._given[name]
                    self._forget(given.slot)
                    _log.warning("a payload for %s was not taken in %.0f s and is removed", given.reader, UNTAKEN_S)
            for slots in self._free.values():
                old = [slot for slot in slots if now_ns - slot.freed_ns > IDLE_S * 1e9]
                for slot in old:
                    slots.remove(slot)
                    self._forget(slot)

    def drop_all(self) -> None:
        """Use no present slot again: its file was removed, and no new reader can find it. Each is released with
        the last view of it.
        """
        with self._lock:
            self._dropped = self._number
            self._collect()
            for slots in self._free.values():
                for slot in slots:
                    self._forget(slot)
            self._free.clear()

    def close(self) -> list[Path]:
        """Remove all slots but those whose readers have yet to take what is in them; their files."""
        with self._lock:
            self._collect()
            kept = [given.slot.path for given in self._given.values()]
            self._given.clear()
            self._kept.clear()
            for slots in self._free.values():
                for slot in slots:
                    self._forget(slot)
            self._free.clear()
            self._max_slots = 0
        return kept

    # -- outside the lock, which a loop may wait for ----------------------------------------------------------------

    def _make(self, number: int, capacity: int) -> _Slot | None:
        """The slot that was reserved."""
        try:
            return _Slot(self._directory / slot_file(number), number, capacity, self._returned)
        except OSError as error:
            self._unreserve(capacity)
            _log.warning("large tensors travel without slots: %s", error)
            return None

    def _unreserve(self, capacity: int) -> None:
        with self._lock:
            self._slots -= 1
            self.size_bytes -= capacity

    def _prepare(self, number: int, capacity: int) -> None:
        """Make a reserved slot and add it to the free ones. Runs in a thread of its own."""
        slot = self._make(number, capacity)
        with self._lock:
            self._preparing.discard(capacity)
            if slot is None:
                return
            if self._max_slots and slot.number > self._dropped:
                slot.freed_ns = monotonic_ns()
                self._free.setdefault(capacity, []).append(slot)
            else:
                self._forget(slot)

    # -- within the lock ----------------------------------------------------------------------------------------------

    def _take(self, capacity: int) -> _Slot | None:
        """A free slot."""
        if not self._free.get(capacity):  # each look at a slot that may be read is a system call
            self._collect()
        slots = self._free.get(capacity)
        return slots.pop() if slots else None

    def _reserve(self, capacity: int) -> int:
        """The number of a slot to be made, which is counted from now on; 0: there is no room for it."""
        while self._slots >= self._max_slots or self.size_bytes + capacity > self._max_bytes:
            oldest = min((s for slots in self._free.values() for s in slots), key=lambda s: s.freed_ns, default=None)
            if oldest is None:
                return 0
            self._free[oldest.capacity].remove(oldest)
            self._forget(oldest)
        self._number += 1
        self._slots += 1
        self.size_bytes += capacity
        return self._number

    def _collect(self) -> None:
        """Find the slots whose use has ended."""
        if self._given:
            for name, given in list(self._given.items()):
                if given.slot.words[_WORD_TAKEN] == given.slot.generation:
                    del self._given[name]
                    del given
        ended, self._read = self._read, []
        while self._returned:
            ended.append(self._returned.popleft())
        for slot in ended:
            if slot.descriptor < 0:
                continue
            if slot.number <= self._dropped:
                self._forget(slot)
            elif not slot.renew():
                self._read.append(slot)
            else:
                slot.freed_ns = monotonic_ns()
                self._free.setdefault(slot.capacity, []).append(slot)

    def _forget(self, slot: _Slot) -> None:
        self._slots -= 1
        self.size_bytes -= slot.capacity
        slot.discard()


def _address(buffer: Any) -> int:
    address: int = np.asarray(buffer).__array_interface__["data"][0]
    return address


# -- its readers ------------------------------------------------------------------------------------------------------


class _Mapping:
    """A slot of another process, mapped here."""

    __slots__ = ("descriptors", "dropped", "map", "path", "size_bytes", "taken", "words")

    def __init__(self, path: Path, *, takes: bool) -> None:
        """Raises `OSError` or `ValueError` for what is no slot."""
        self.path = path
        self.dropped = False
        descriptor = self.open(writable=takes)
        try:
            self.size_bytes = os.fstat(descriptor).st_size
            self.map = _mapped(descriptor, self.size_bytes, writable=False)
            self.words = memoryview(self.map)[:_ALIGNMENT].cast("Q")
            if self.size_bytes <= _HEADER_BYTES or self.words[_WORD_MAGIC] != _MAGIC:
                raise ValueError("it is no slot")
            self.taken: memoryview | None = None
            if takes:
                self.taken = memoryview(mmap.mmap(descriptor, _HEADER_BYTES))[:_ALIGNMENT].cast("Q")
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptors = [descriptor]
        """Those that hold no lock now. Each view has one of its own: locks belong to what was opened."""

    def open(self, *, writable: bool = False) -> int:
        mode = os.O_RDWR if writable else os.O_RDONLY
        return os.open(self.path, mode | os.O_CLOEXEC | os.O_NOFOLLOW)

    def descriptor(self) -> int:
        """One that holds no lock. Raises `OSError`."""
        try:
            return self.descriptors.pop()
        except IndexError:
            return self.open()

    def give_back(self, descriptor: int) -> None:
        self.descriptors.append(descriptor)
        if self.dropped:
            self.close()

    def close(self) -> None:
        self.dropped = True
        with contextlib.suppress(IndexError, OSError):
            while True:
                os.close(self.descriptors.pop())


class _Reading(_Held):
    __slots__ = ("_descriptor", "_mapping", "_taken")

    def __init__(self, mapping: _Mapping, descriptor: int, taken: int) -> None:
        self._mapping = mapping
        self._descriptor = descriptor
        self._taken = taken

    def release(self) -> None:
        mapping = self._mapping
        if self._taken and mapping.taken is not None:
            mapping.taken[_WORD_TAKEN] = self._taken
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        mapping.give_back(self._descriptor)


class SlotReader:
    """The slots of other processes that this one has read, mapped. `root` holds the directories of all owners."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._mappings: dict[tuple[str, bool], _Mapping] = {}

    def read(self, name: str, size_bytes: int, *, takes: bool = False) -> memoryview:
        """The bytes of a payload, by its name with its owner's. Raises `InvalidRecord` when they are gone.

        Its slot is not reused before the last view of them is gone. With `takes` the payload was given to this process,
        and its owner is told when the last view is gone.
        """
        file, generation, offset = slot_place(name)
        mapping = self._mappings.get((file, takes))
        if mapping is None:
            try:
                mapping = _Mapping(self._root / file, takes=takes)
            except (OSError, ValueError) as error:
                raise InvalidRecord(f"payload cannot be read: {error}") from None
            self._mappings[file, takes] = mapping
        try:
            descriptor = mapping.descriptor()
        except OSError as error:
            raise InvalidRecord(f"payload cannot be read: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # its owner makes it ready for the next
            mapping.give_back(descriptor)
            raise InvalidRecord("payload is gone: its slot is used for another") from None
        words = mapping.words
        is_current = words[_WORD_GENERATION] == generation and words[_WORD_TAKEN] != generation
        if not is_current or not _HEADER_BYTES <= offset <= mapping.size_bytes - size_bytes:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            mapping.give_back(descriptor)
            raise InvalidRecord(
                "payload is longer than its slot" if is_current else "payload is gone: its slot is used for another"
            )
        return _lease(mapping.map, offset, size_bytes, _Reading(mapping, descriptor, generation if takes else 0))

    def tidy(self) -> None:
        """Let go of slots that their owners have removed."""
        for key, mapping in list(self._mappings.items()):
            if not mapping.path.exists():
                del self._mappings[key]
                mapping.close()

    def close(self) -> None:
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()
