"""A client's memory on the GPU, passed to a server by its handle: into a model and out of it (H50).

`machine.metrics` uses it on a GPU; `tests/e2e/test_client_shm.py` runs it over a driver library without one.
"""

from __future__ import annotations

import base64
import ctypes
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_size_t, c_uint64, c_void_p

import numpy as np

from charonia.cuda.cuda_library import Calls, CudaLibrary
from charonia.datatypes import DataType

from .serving import Array

_HANDLE_BYTES = 64
_CALLS: Calls = {
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuCtxSynchronize": (),
}


def through_regions(url: str, model: str, names: tuple[str, str], array: Array, device_id: int = 0) -> Array:
    """The answer of a model whose input and output, both like `array`, lie on a GPU in memory of this process.

    Raises `CudaError` for what the driver refuses, `urllib.error.HTTPError` for what the server does.
    """
    library = CudaLibrary(_CALLS)
    with ExitStack() as stack:
        addresses = []
        for region in names:
            address = stack.enter_context(_memory(library, device_id, array.nbytes))
            handle = _handle(library, device_id, address)
            stack.enter_context(_registered(url, region, handle, device_id, array.nbytes))
            addresses.append(address)
        given, found = np.ascontiguousarray(array), np.empty_like(array)
        with library.current(device_id):
            library.call("cuMemcpyHtoD_v2", addresses[0], given.ctypes.data, given.nbytes)
            library.call("cuCtxSynchronize")  # the server reads it with a context of its own
        tensors = [{"name": name, "parameters": _in(name, array.nbytes)} for name in names]
        tensors[0] |= {"shape": list(array.shape), "datatype": DataType.of_numpy(array.dtype).name}
        _post(f"{url}/v2/models/{model}/infer", {"inputs": tensors[:1], "outputs": tensors[1:]})
        with library.current(device_id):
            library.call("cuMemcpyDtoH_v2", found.ctypes.data, addresses[1], found.nbytes)
        return found


def _in(region: str, size_bytes: int) -> dict[str, object]:
    return {"shared_memory_region": region, "shared_memory_byte_size": size_bytes}


@contextmanager
def _memory(library: CudaLibrary, device_id: int, size_bytes: int) -> Iterator[int]:
    """The address of memory on the GPU, for the length of a block."""
    address = c_uint64()
    with library.current(device_id):
        library.call("cuMemAlloc_v2", byref(address), size_bytes)
    try:
        yield address.value
    finally:
        with library.current(device_id):
            library.call_quietly("cuMemFree_v2", address)


def _handle(library: CudaLibrary, device_id: int, address: int) -> bytes:
    """What another process opens the memory with."""
    handle = ctypes.create_string_buffer(_HANDLE_BYTES)
    with library.current(device_id):
        library.call("cuIpcGetMemHandle", handle, address)
    return handle.raw


@contextmanager
def _registered(url: str, region: str, handle: bytes, device_id: int, size_bytes: int) -> Iterator[None]:
    path = f"{url}/v2/cudasharedmemory/region/{region}"
    raw = {"b64": base64.b64encode(handle).decode()}
    _post(f"{path}/register", {"raw_handle": raw, "device_id": device_id, "byte_size": size_bytes})
    try:
        yield
    finally:
        _post(f"{path}/unregister", {})


def _post(url: str, body: object) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=60):
        pass
