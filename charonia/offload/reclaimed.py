"""Mapped memory whose pages are given back to the system in a thread.

To unmap 64 MB takes 15 ms, most of it to free the pages, and what drops the last view of a payload is often an event
loop. `mmap.close` lets go of the interpreter's lock, the end of an `mmap` without it does not.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from queue import SimpleQueue

from .time_slices import name_bulk

_MIN_BYTES = 1 << 20
"""Less is freed in 0.2 ms: handing it over costs as much."""

_dropped: SimpleQueue[mmap.mmap] = SimpleQueue()
"""`put` may interrupt itself, as `__del__` may."""
_lock = threading.Lock()
_started = False
_in_place = False


def unmap_where_it_ends() -> None:
    """From now on no thread is started: this process has no event loop that would wait, and a thread beside its work
    would take a second processor.
    """
    global _in_place
    _in_place = True


class ReclaimedMap(mmap.mmap):
    """As `mmap`; a large one is unmapped in a thread once nothing refers to it."""

    def __new__(cls, descriptor: int, size_bytes: int, *, flags: int = mmap.MAP_SHARED, prot: int) -> ReclaimedMap:
        """Raises as `mmap` does."""
        if size_bytes >= _MIN_BYTES and not (_started or _in_place):
            with contextlib.suppress(RuntimeError):  # no thread can be had: each map is unmapped where it ends
                _start()
        return super().__new__(cls, descriptor, size_bytes, flags=flags, prot=prot)

    def __del__(self) -> None:
        if _started and not self.closed and len(self) >= _MIN_BYTES:
            _dropped.put(self)


def _anonymous(size_bytes: int) -> ReclaimedMap:
    flags, access = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    return ReclaimedMap(-1, size_bytes, flags=flags, prot=access)


class ReclaimedBytes:
    """Bytes that are put together, as in a `bytearray`; large ones lie in a `ReclaimedMap`."""

    __slots__ = ("_map", "_most_bytes", "_size", "_small")

    def __init__(self, most_bytes: int = 0) -> None:
        """`most_bytes` is what is expected, 0 if that is not known. It takes memory as it comes, not before."""
        self._most_bytes = most_bytes
        self._small = bytearray()
        self._map: ReclaimedMap | None = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, part: bytes) -> None:
        """Add some. Raises `BufferError` after `view`, `OSError` where there is no memory."""
        end = self._size + len(part)
        if self._map is None and end < _MIN_BYTES:
            self._small += part
        else:
            if self._map is None:
                try:
                    self._map = _anonymous(max(self._most_bytes, 2 * end))
                except OSError:  # the system promises no more than it has
                    self._map = _anonymous(2 * end)
                self._map[: self._size] = bytes(self._small)
                self._small = bytearray()
            elif end > len(self._map):
                self._map.resize(end + end // 2)  # the pages move, their content is not copied
            self._map[self._size : end] = part
        self._size = end

    def view(self) -> memoryview:
        """All of them."""
        return memoryview(self._small if self._map is None else self._map)[: self._size]


def _start() -> None:
    global _started
    with _lock:
        if not _started:
            threading.Thread(target=_reclaim, name="charonia-reclaim", daemon=True).start()
            _started = True


def _reclaim() -> None:
    name_bulk()
    while True:
        dropped = _dropped.get()
        # its views end in the same garbage collection, which gave up the lock in between: the last of them unmaps it
        with contextlib.suppress(BufferError):
            dropped.close()
        del dropped  # else the next one is waited for with its memory
