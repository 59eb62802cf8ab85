"""One GPU as an instance sees it: a stream of its own for copies, device memory, and pinned memory of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia.backend import Array, DeviceLost
from charonia.cuda.cuda_library import CudaError
from charonia.cuda.cuda_stream import CudaDevice, CudaStream, DeviceMemory
from charonia.cuda.dlpack_capsules import Described
from charonia.cuda.lost_contexts import is_lost
from charonia.cuda.pinned_memory import PinnedMemory, PinnedPool
from charonia.datatypes import DataType
from charonia.errors import InternalError

from .device_arrays import DeviceArray, Lease
from .recycled_blocks import RecycledBlocks

Bytes = npt.NDArray[np.uint8]


class DeviceLink:
    """Used in the instance's thread, with the device's context current but for `close`. Raises `CudaError`s."""

    def __init__(self, device: CudaDevice, pool: PinnedPool, *, pins_inputs: bool, pins_outputs: bool) -> None:
        """`pins_inputs`, `pins_outputs`: whether copies there and back may go through pinned memory."""
        self.device = device
        self._pool = pool
        self._pins_inputs = pins_inputs
        self._pins_outputs = pins_outputs
        with device.current():
            self._copies = CudaStream(device)
        self._memory = RecycledBlocks[DeviceMemory](lambda size: DeviceMemory(device, size), device.current)
        self._pinned = RecycledBlocks[PinnedMemory](lambda size: pool.allocate(device, size), device.current)
        self._registered: dict[int, PinnedMemory] = {}
        """By the address of memory of others."""

    @property
    def stream(self) -> int:
        """The handle of the stream of its copies."""
        return self._copies.handle

    def pinned(self, size_bytes: int) -> Bytes | None:
        """Pinned bytes, used again when nothing refers to them; None where the pool has no more."""
        block = self._pinned.take(size_bytes)
        if block is None:
            return None
        whole = block.array
        self._pinned.lend(block, whole)
        return whole[:size_bytes]

    def staged(self, array: Array) -> Array:
        """The array in C order and in pinned memory, if it can be; itself where it is that."""
        if self._pool.covers(array) and array.flags.c_contiguous:
            return array
        memory = self.pinned(array.nbytes) if array.nbytes and self._pins_inputs else None
        if memory is None:
            return np.ascontiguousarray(array)
        staged: Array = memory.view(array.dtype).reshape(array.shape)
        staged[...] = array
        return staged

    def send(self, arrays: Mapping[str, Array]) -> dict[str, DeviceArray]:
        """Begin to copy staged arrays to the GPU. They must stay as they are until `wait`."""
        sent: dict[str, DeviceArray] = {}
        for name, array in arrays.items():
            memory = self._memory.take(array.nbytes)
            assert memory is not None
            lease = Lease(memory)
            self._memory.lend(memory, lease)
            if array.nbytes:
                self._copies.to_device(memory.address, _raw(array))
            datatype = DataType.of_numpy(array.dtype)
            sent[name] = DeviceArray(lease, self.device, self._copies, datatype, array.shape)
        self._copies.mark()
        return sent

    def fetch(self, outputs: Mapping[str, Described]) -> dict[str, Array]:
        """Begin to copy arrays of this GPU to the host. They have their bytes after `wait`."""
        found: dict[str, Array] = {}
        for name, one in outputs.items():
            if not one.span_bytes:
                found[name] = np.empty(one.shape, one.datatype.numpy)
                continue
            # with its gaps, if it has some: one copy
            memory = self.pinned(one.span_bytes) if self._pins_outputs else None
            if memory is None:
                memory = np.empty(one.span_bytes, np.uint8)
            self._copies.to_host(memory, one.address)
            found[name] = one.over(memory.ctypes.data, memory)
        return found

    def wait(self) -> None:
        """Wait for the copies, and for the work that they were told to wait for."""
        self._copies.wait()

    def drain(self) -> None:
        """After a failure: wait for all work on the GPU, which may read memory that is about to be used again."""
        self.device.drain()

    def register(self, address: int, size_bytes: int) -> None:
        """Pin memory of others from an address on, a page's begin: more of it than before, or nothing new to do.

        It has to stay mapped, with the same pages, until `close`.
        """
        before = self._registered.get(address)
        if before is not None and before.size_bytes >= size_bytes:
            return
        if before is not None:
            before.free()
            del self._registered[address]
        block = self._pool.allocate(self.device, size_bytes, address)
        if block is not None:
            self._registered[address] = block

    def close(self) -> None:
        """Release all. What is used still is freed with its last reference."""
        with contextlib.suppress(CudaError), self.device.current():
            self._copies.close()
            for block in self._registered.values():
                block.free()
            self._registered.clear()
            self._memory.close()
            self._pinned.close()


@contextlib.contextmanager
def on(link: DeviceLink, model: str) -> Iterator[None]:
    """With the context of a GPU. Raises `InternalError` for what the driver refuses, `DeviceLost` if it is the last."""
    try:
        with link.device.current():
            yield
    except CudaError as error:
        if is_lost(error):
            raise DeviceLost(f"model '{model}' has lost GPU {link.device.device_id}: {error}") from None
        raise InternalError(f"model '{model}' on GPU {link.device.device_id}: {error}") from None


def _raw(array: Any) -> Bytes:
    raw: Bytes = array.reshape(-1).view(np.uint8)
    return raw
