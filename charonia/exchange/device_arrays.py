"""An input of a batch on a GPU: a DLPack producer, for any library that takes such arrays.

`torch.from_dlpack(array)`, `jax.dlpack.from_dlpack(array)` and `cupy.from_dlpack(array)` make arrays over its memory.
The library's stream is told to wait until the bytes are there.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from charonia.cuda.cuda_stream import CudaDevice, CudaStream, DeviceMemory
from charonia.cuda.dlpack_capsules import CUDA, capsule_of
from charonia.datatypes import DataType

_LEGACY_STREAM = 1
_NO_STREAM = -1


class Lease:
    """The use of a block of a GPU's memory: it ends with the last array, capsule or tensor over it."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, memory: DeviceMemory) -> None:
        self.address = memory.address


class DeviceArray:
    """An array in C order on a GPU. The instance may write to it; its memory is used again when nothing refers to it.

    So work on the GPU that reads it comes before the batch's outputs, in their stream, or ended before `execute` did.
    """

    __slots__ = ("_copies", "_device", "_lease", "datatype", "shape")

    def __init__(
        self, lease: Lease, device: CudaDevice, copies: CudaStream, datatype: DataType, shape: tuple[int, ...]
    ) -> None:
        """`copies` is the stream that fills it, marked after the copy."""
        self._lease = lease
        self._device = device
        self._copies = copies
        self.datatype = datatype
        self.shape = shape

    @property
    def address(self) -> int:
        """Where it begins. Who reads it by address first calls `wait_in` for its stream."""
        return self._lease.address

    @property
    def device_id(self) -> int:
        return self._device.device_id

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's type of its elements; that of `ml_dtypes` for BF16."""
        return self.datatype.numpy

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.datatype.size_bytes

    def __len__(self) -> int:
        """The first dimension. Raises `TypeError` without one, as NumPy does."""
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def wait_in(self, stream: int) -> None:
        """Let a stream, by its handle, go on only when the bytes are there. Raises `CudaError`."""
        with self._device.current():
            self._copies.precede(stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device_id

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule. `stream` is the consumer's: 1 or none for the default one, 2 for the thread's, -1 for no wait.

        Raises `BufferError` for another device and for a copy, `ValueError` for the ambiguous stream 0.
        """
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"the array is on GPU {self.device_id}")
        if copy:
            raise BufferError("the array is not copied: copy what is made of it")
        if stream == 0:
            raise ValueError("stream 0 is ambiguous in DLPack: 1 is the default stream")
        if stream != _NO_STREAM:
            self.wait_in(_LEGACY_STREAM if stream is None else stream)
        return capsule_of(self._lease, self.__dlpack_device__(), self.address, self.datatype, self.shape)
