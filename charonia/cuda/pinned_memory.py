"""Memory of the host that GPUs copy from and to by themselves, bounded for the whole process.

What is pinned cannot be paged out, so all models of a process share one pool of the size that
`--pinned-memory-pool-byte-size` says. Without capacity, or where the driver refuses, callers use ordinary memory.
"""

from __future__ import annotations

import logging
import threading
from ctypes import byref, c_ubyte, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from .cuda_library import CudaError
from .cuda_stream import CudaDevice, CudaDevices

_log = logging.getLogger(__name__)

_PORTABLE = 1
"""Pinned for all GPUs of the process."""


class PinnedMemory:
    """A block of a pool: memory that the driver allocated (`array` has it), or that was there and is pinned now."""

    def __init__(self, pool: PinnedPool, device: CudaDevice, size_bytes: int, at: int = 0) -> None:
        """The device's context is current. `at` is the address of memory that is there. Raises `CudaError`."""
        self.size_bytes = size_bytes
        self._pool = pool
        self._library = device.library
        self._is_ours = not at
        self._at = c_void_p(at or None)
        if at:
            self._library.call("cuMemHostRegister_v2", self._at, size_bytes, _PORTABLE)
        else:
            self._library.call("cuMemHostAlloc", byref(self._at), max(1, size_bytes), _PORTABLE)

    @property
    def address(self) -> int:
        return self._at.value or 0

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Its bytes: a new array with each call, which does not keep the block."""
        raw: Any = (c_ubyte * self.size_bytes).from_address(self.address)
        return np.frombuffer(raw, np.uint8)

    def free(self) -> None:
        """Nothing may use its bytes any more. The context is current. A second call does nothing."""
        if self._at.value:
            self._library.call_quietly("cuMemFreeHost" if self._is_ours else "cuMemHostUnregister", self._at)
            self._pool.left(self)
            self._at = c_void_p()


class PinnedPool:
    """Counts the pinned memory of a process. Blocks are allocated when they are asked for, and freed by their users."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self.refused = 0
        """How often there was no capacity, or the driver refused."""
        # blocks are freed by finalizers, too, which run in the middle of anything
        self._lock = threading.RLock()
        self._ranges: tuple[tuple[int, int], ...] = ()
        """Where its blocks begin and end."""

    def allocate(self, device: CudaDevice, size_bytes: int, at: int = 0) -> PinnedMemory | None:
        """A block of new memory, or of the memory `at` an address, which is pinned; None to use ordinary memory.

        The device's context is current.
        """
        with self._lock:
            reason = "it is used up"
            if self.used_bytes + size_bytes <= self.size_bytes:
                try:
                    block = PinnedMemory(self, device, size_bytes, at)
                except CudaError as error:
                    reason = f"the driver refuses: {error}"
                else:
                    self.used_bytes += size_bytes
                    self._ranges = (*self._ranges, (block.address, block.address + size_bytes))
                    return block
            self.refused += 1
            if self.refused == 1:
                _log.warning(
                    "no pinned memory for %d bytes, %d of %d are used (--pinned-memory-pool-byte-size): %s. Copies to "
                    "GPUs are slower without it; this is logged once",
                    *(size_bytes, self.used_bytes, self.size_bytes, reason),
                )
            return None

    def left(self, block: PinnedMemory) -> None:
        """A block is no longer pinned."""
        with self._lock:
            self.used_bytes -= block.size_bytes
            self._ranges = tuple(one for one in self._ranges if one[0] != block.address)

    def covers(self, array: npt.NDArray[Any]) -> bool:
        """Whether a contiguous array lies in pinned memory of this pool."""
        begin = array.ctypes.data
        end = begin + array.nbytes
        return any(first <= begin and end <= last for first, last in self._ranges)


_pools: dict[CudaDevices, PinnedPool] = {}
_sharing = threading.Lock()


def shared_pool(devices: CudaDevices, size_bytes: int) -> PinnedPool:
    """The pool of this process. Its first user decides the size."""
    with _sharing:
        return _pools.setdefault(devices, PinnedPool(size_bytes))
