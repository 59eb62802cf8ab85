"""The functions of NVIDIA's driver library for memory of other processes (H50).

The first registration of such memory opens the library. Calls block as long as the driver does, with the interpreter
lock released; `cuda_memory` runs them in its thread.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np

from charonia.cuda.cuda_library import Calls, CudaError, CudaLibrary
from charonia.tensors import Buffer

from .region_store import HANDLE_BYTES

_ENABLE_PEER_ACCESS = 1
"""The only flag for opening memory; Triton passes it too."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


_CALLS: Calls = {
    "cuCtxSynchronize": (),
    "cuIpcOpenMemHandle_v2": (c_void_p, _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
}


class CudaDriver(CudaLibrary):
    """The library's calls for memory of other processes."""

    def __init__(self) -> None:
        """Raises `CudaError` without the library, or without a usable device."""
        super().__init__(_CALLS)

    def open(self, handle: bytes, device_id: int) -> tuple[int, int]:
        """The address and size of another process's memory. Raises `CudaError`."""
        if not 0 <= device_id < self.devices:
            raise CudaError("invalid device ordinal")
        address, base, size = c_uint64(), c_uint64(), c_size_t()
        with self.current(device_id):
            self.call("cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS)
            try:
                self.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
            except CudaError:
                self.call_quietly("cuIpcCloseMemHandle", address)
                raise
        return address.value, size.value - (address.value - base.value)

    def close(self, address: int, device_id: int) -> None:
        """Close another process's memory. Raises `CudaError`."""
        with self.current(device_id):
            self.call("cuIpcCloseMemHandle", address)

    def read(self, address: int, device_id: int, into: memoryview | bytearray) -> None:
        """Copy device memory into `into`. Raises `CudaError`."""
        target = np.frombuffer(into, np.uint8)
        with self.current(device_id):
            self.call("cuMemcpyDtoH_v2", target.ctypes.data, address, target.nbytes)

    def write(self, address: int, device_id: int, data: Buffer) -> None:
        """Copy `data` to the device; returns once it is there. Raises `CudaError`."""
        source = np.frombuffer(data, np.uint8)
        with self.current(device_id):
            self.call("cuMemcpyHtoD_v2", address, source.ctypes.data, source.nbytes)
            self.call("cuCtxSynchronize")  # until then the bytes may be in the driver's staging memory
