"""Mapped memory whose pages are given back to the system in a thread.

To unmap 64 MB takes 15 ms, most of it to free the pages, and what drops the last view of a payload is often an event
loop. `mmap.close` lets go of the interpreter's lock, the end of an `mmap` without it does not.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from queue import SimpleQueue

_MIN_BYTES = 1 << 20
"""Less is freed in 0.2 ms: handing it over costs as much."""

_dropped: SimpleQueue[mmap.mmap] = SimpleQueue()
"""`put` may interrupt itself, as `__del__` may."""
_lock = threading.Lock()
_started = False


class ReclaimedMap(mmap.mmap):
    """As `mmap`; a large one is unmapped in a thread once nothing refers to it."""

    def __new__(cls, descriptor: int, size_bytes: int, *, flags: int = mmap.MAP_SHARED, prot: int) -> ReclaimedMap:
        """Raises as `mmap` does."""
        if size_bytes >= _MIN_BYTES and not _started:
            with contextlib.suppress(RuntimeError):  # no thread can be had: each map is unmapped where it ends
                _start()
        return super().__new__(cls, descriptor, size_bytes, flags=flags, prot=prot)

    def __del__(self) -> None:
        if _started and not self.closed and len(self) >= _MIN_BYTES:
            _dropped.put(self)


def _start() -> None:
    global _started
    with _lock:
        if not _started:
            threading.Thread(target=_reclaim, name="charonia-reclaim", daemon=True).start()
            _started = True


def _reclaim() -> None:
    while True:
        dropped = _dropped.get()
        # its views end in the same garbage collection, which gave up the lock in between: the last of them unmaps it
        with contextlib.suppress(BufferError):
            dropped.close()
        del dropped  # else the next one is waited for with its memory
