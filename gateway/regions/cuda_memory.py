"""Regions in GPU memory: checks registrations, and copies bytes of open ones (H49, H50).

All calls run in one thread of their own: a device that hangs delays only requests that use its memory.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from charonia.cuda.cuda_library import CudaError
from charonia.errors import InternalError, InvalidArgument
from charonia.tensors import Buffer

from .cuda_driver import CudaDriver
from .region_store import HANDLE_BYTES, Region

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_REFUSED = "failed to register shared memory region{}: invalid args"


class CudaRegions:
    """The GPU regions of one gateway. Memory is open only while requests use it, so that its owner can free it."""

    def __init__(self) -> None:
        self._driver: CudaDriver | None = None
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "cuda-regions")

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run a function in the thread, after all that were submitted before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def submit(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the gateway has ended, and released all memory
            self._thread.submit(work)

    def driver(self) -> CudaDriver:
        """The library; blocks until it is loaded. Raises `CudaError`."""
        with self._lock:
            if self._driver is None:
                self._driver = CudaDriver()
            return self._driver

    async def check_driver(self, name: str) -> None:
        """Raises `InvalidArgument` without a GPU (H50)."""
        try:
            await self.run(self.driver)
        except CudaError as error:
            _log.info("no region of a GPU can be registered: %s", error)
            raise InvalidArgument(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
            ) from None

    def checked(self, name: str, handle: bytes, device_id: int, size_bytes: int) -> Region:
        """The region, checked for registration; runs in the thread. Raises `InvalidArgument` (H50)."""
        try:
            if len(handle) != HANDLE_BYTES:
                raise CudaError("invalid handle")
            address, size = self.driver().open(handle, device_id)
            self.driver().close(address, device_id)
        except CudaError as error:
            _log.error("failed to open CUDA IPC handle: %s", error)
            raise InvalidArgument(_REFUSED.format("")) from None
        if size_bytes > size:
            raise InvalidArgument(_REFUSED.format(f" '{name}'"))
        return Region(name, "cuda", size_bytes, base64.b64encode(handle).decode(), device_id=device_id)


class CudaMemory:
    """Bytes of a region, as `RegionMemory`. The first use opens the handle, the last request closes it."""

    __slots__ = ("__weakref__", "_address", "_lock", "_regions", "region")

    def __init__(self, region: Region, regions: CudaRegions) -> None:
        self.region = region
        self._regions = regions
        self._address = 0
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if self._address:
            driver, address, device_id = self._regions.driver(), self._address, self.region.device_id
            self._regions.submit(lambda: _close(driver, address, device_id))

    def read(self, offset: int, into: memoryview | bytearray) -> None:
        """Fill `into` from `offset` of the region. Raises `InternalError`, also for memory that its owner has freed."""
        try:
            self._regions.driver().read(self._opened() + offset, self.region.device_id, into)
        except CudaError as error:
            raise self._failed("read", error) from None

    def write(self, offset: int, data: Buffer) -> None:
        """Copy `data` to `offset` of the region. Raises `InternalError`."""
        try:
            self._regions.driver().write(self._opened() + offset, self.region.device_id, data)
        except CudaError as error:
            raise self._failed("written", error) from None

    def _opened(self) -> int:
        """The address of the region. Raises `CudaError`."""
        with self._lock:
            if not self._address:
                driver, device_id = self._regions.driver(), self.region.device_id
                address, size = driver.open(base64.b64decode(self.region.key), device_id)
                if size < self.region.size_bytes:
                    driver.close(address, device_id)
                    raise CudaError("the memory is smaller than it was registered")
                self._address = address
            return self._address

    def _failed(self, what: str, error: CudaError) -> InternalError:
        return InternalError(f"shared memory region '{self.region.name}' cannot be {what}: {error}")


def _close(driver: CudaDriver, address: int, device_id: int) -> None:
    with contextlib.suppress(CudaError):  # the device may be lost
        driver.close(address, device_id)
