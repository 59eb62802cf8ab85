"""Memory, streams, events and graphs of a GPU, through NVIDIA's driver library.

Every call but those that find the device needs its context: `with device.current()`. Addresses and handles are plain
integers, as TensorRT and DLPack take them. `pinned_memory` has the memory of the host that a GPU copies from by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy.typing as npt

from . import cuda_library
from .cuda_library import Calls, CudaLibrary

Array = npt.NDArray[Any]

_CALLS: Calls = {
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuCtxGetStreamPriorityRange": (c_void_p, c_void_p),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (c_void_p, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuStreamCreateWithPriority": (c_void_p, c_uint, c_int),
    "cuCtxSynchronize": (),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuGraphInstantiateWithFlags": (c_void_p, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
}
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""The driver's numbers of these attributes of a device."""
_NON_BLOCKING_STREAM = 1
"""It does not wait for the default stream, which other threads use."""
_CAPTURE_OF_THIS_THREAD = 1
"""What other threads ask of the driver meanwhile does not end the capture."""
_EVENT_BLOCKS, _EVENT_WITHOUT_TIME = 1, 2


class CudaDevices(CudaLibrary):
    """The GPUs of this process."""

    def __init__(self) -> None:
        """Raises `CudaError` without a driver or a device."""
        super().__init__(_CALLS)

    @staticmethod
    def shared() -> CudaDevices:
        """Those that all parts of the process use, so that each GPU's context is retained once. Raises `CudaError`."""
        with _sharing:
            found = _shared.get(cuda_library.LIBRARY)
            if found is None:
                found = _shared[cuda_library.LIBRARY] = CudaDevices()
            return found


_shared: dict[str, CudaDevices] = {}
"""By the library's file: tests have others."""
_sharing = threading.Lock()


class CudaDevice:
    """One GPU."""

    def __init__(self, devices: CudaDevices, device_id: int) -> None:
        self.library = devices
        self.device_id = device_id

    def current(self) -> AbstractContextManager[None]:
        """Make its context the thread's. Raises `CudaError`."""
        return self.library.current(self.device_id)

    def capability(self) -> str:
        """The compute capability, as "8.6"."""
        device = self.library.device(self.device_id)
        parts = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            value = c_int()
            self.library.call("cuDeviceGetAttribute", byref(value), attribute, device)
            parts.append(str(value.value))
        return ".".join(parts)

    def drain(self) -> None:
        """Wait for all work of this process on the GPU, whatever became of it."""
        self.library.call_quietly("cuCtxSynchronize")


class DeviceMemory:
    """A block of a GPU's memory. A block of no bytes has an address, too, as TensorRT wants one."""

    def __init__(self, device: CudaDevice, size_bytes: int) -> None:
        self._library = device.library
        self.size_bytes = size_bytes
        address = c_uint64()
        self._library.call("cuMemAlloc_v2", byref(address), max(1, size_bytes))
        self.address = address.value

    def free(self) -> None:
        """A second call does nothing."""
        if self.address:
            self._library.call_quietly("cuMemFree_v2", self.address)
            self.address = 0


class CudaStream:
    """A stream with an event that marks the end of its work. `busy` waits for it by asking again and again."""

    def __init__(self, device: CudaDevice, *, priority: int = 0, busy: bool = False) -> None:
        """`priority` above 0 goes before other streams, below 0 after them."""
        self._library = device.library
        self._stream, self._event = c_void_p(), c_void_p()
        self._call("cuStreamCreateWithPriority", byref(self._stream), _NON_BLOCKING_STREAM, self._level(priority))
        flags = _EVENT_WITHOUT_TIME if busy else _EVENT_WITHOUT_TIME | _EVENT_BLOCKS
        self._call("cuEventCreate", byref(self._event), flags)

    @property
    def handle(self) -> int:
        """The number that TensorRT knows it by."""
        return self._stream.value or 0

    def to_device(self, address: int, array: Array) -> None:
        """Copy a contiguous array, which must stay as it is until `wait`."""
        self._call("cuMemcpyHtoDAsync_v2", address, array.ctypes.data, array.nbytes, self._stream)

    def to_host(self, array: Array, address: int) -> None:
        """Copy into a contiguous array, which has the bytes after `wait`."""
        self._call("cuMemcpyDtoHAsync_v2", array.ctypes.data, address, array.nbytes, self._stream)

    def wait(self) -> None:
        """Wait for all work. Raises `CudaError` for what failed in it."""
        self._call("cuEventRecord", self._event, self._stream)
        self._call("cuEventSynchronize", self._event)

    def mark(self) -> None:
        """Note the end of the work so far, for `precede`."""
        self._call("cuEventRecord", self._event, self._stream)

    def precede(self, handle: int) -> None:
        """Let another stream, of any library, go on only after the work before the last `mark`."""
        self._call("cuStreamWaitEvent", handle, self._event, 0)

    def drain(self) -> None:
        """Wait for all work, whatever became of it."""
        self._library.call_quietly("cuStreamSynchronize", self._stream)

    @contextlib.contextmanager
    def capture(self) -> Iterator[CapturedGraph]:
        """Record the work of the block, in this thread, instead of doing it."""
        graph = CapturedGraph(self._library)
        self._call("cuStreamBeginCapture_v2", self._stream, _CAPTURE_OF_THIS_THREAD)
        recorded = c_void_p()
        try:
            yield graph
        except BaseException:
            self._library.call_quietly("cuStreamEndCapture", self._stream, byref(recorded))
            raise
        self._call("cuStreamEndCapture", self._stream, byref(recorded))
        graph.instantiate(recorded)

    def launch(self, graph: CapturedGraph) -> None:
        """Do what a graph recorded."""
        self._call("cuGraphLaunch", graph.handle, self._stream)

    def close(self) -> None:
        """Wait for all work, and give stream and event up. A second call does nothing."""
        if self._stream.value:
            self.drain()
            self._library.call_quietly("cuEventDestroy_v2", self._event)
            self._library.call_quietly("cuStreamDestroy_v2", self._stream)
            self._stream, self._event = c_void_p(), c_void_p()

    def _level(self, priority: int) -> int:
        """The driver's number: smaller is more urgent."""
        least, greatest = c_int(), c_int()
        self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        return greatest.value if priority > 0 else least.value if priority < 0 else 0

    def _call(self, name: str, *arguments: Any) -> None:
        self._library.call(name, *arguments)


class CapturedGraph:
    """Work that a stream recorded."""

    def __init__(self, library: CudaDevices) -> None:
        self._library = library
        self.handle = c_void_p()

    def instantiate(self, recorded: c_void_p) -> None:
        """Make it ready to launch."""
        try:
            self._library.call("cuGraphInstantiateWithFlags", byref(self.handle), recorded, 0)
        finally:
            self._library.call_quietly("cuGraphDestroy", recorded)

    def free(self) -> None:
        """A second call does nothing."""
        if self.handle.value:
            self._library.call_quietly("cuGraphExecDestroy", self.handle)
            self.handle = c_void_p()
