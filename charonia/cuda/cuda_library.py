"""NVIDIA's driver library through ctypes: no package is needed, and nothing is loaded until something asks for a GPU.

`gateway.regions` opens memory of other processes with it, `executors.backends.tensorrt` runs models. Each names the
calls that it makes. A call needs the device's primary context: `current` makes it current in the calling thread and
takes it away again, so that any thread may call.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"

Calls = Mapping[str, tuple[Any, ...]]
"""The types of a function's arguments, by its name. Every function returns a status."""

_CALLS: Calls = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuGetErrorString": (c_int, c_void_p),
}


class CudaError(Exception):
    """The driver refused a call; the text is its own, and so is `status`: 0 where no call was made."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class CudaLibrary:
    """The library, and the contexts of the devices that were asked for: they stay until the process ends."""

    def __init__(self, calls: Calls) -> None:
        """Raises `CudaError` where there is no library, one without these calls, or no device that it can use."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
            for name, types in {**_CALLS, **calls}.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, c_int
        except (OSError, AttributeError) as error:
            raise CudaError(str(error)) from None
        self.call("cuInit", 0)
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        self.devices = count.value
        if not self.devices:
            raise CudaError("no device")
        # finalizers of blocks ask for a context, too, in the middle of anything
        self._lock = threading.RLock()
        self._contexts: dict[int, c_void_p] = {}

    def device(self, device_id: int) -> int:
        """The driver's own number of a device. Raises `CudaError`."""
        device = c_int()
        self.call("cuDeviceGet", byref(device), device_id)
        return device.value

    @contextlib.contextmanager
    def current(self, device_id: int) -> Iterator[None]:
        """Make the device's primary context current in this thread. Raises `CudaError`."""
        with self._lock:
            context = self._contexts.get(device_id)
            if context is None:
                context = c_void_p()
                self.call("cuDevicePrimaryCtxRetain", byref(context), self.device(device_id))
                self._contexts[device_id] = context
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call_quietly("cuCtxPopCurrent_v2", byref(c_void_p()))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises `CudaError` with the driver's text unless it succeeds."""
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorString(status, byref(text))
            raise CudaError((text.value or b"").decode(errors="replace") or f"error {status}", status)

    def call_quietly(self, name: str, *arguments: Any) -> None:
        """Call a function that gives something up; what the driver says does not matter."""
        getattr(self._library, name)(*arguments)
