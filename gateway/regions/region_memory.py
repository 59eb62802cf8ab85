"""The bytes of an open system region (H49).

They are read and written through the region's descriptor (`preadv`, `pwrite`), not through a mapping: if the client has
made the object smaller, a read is short and this request fails. Accessing such a page of a mapping would raise SIGBUS
and end the process with all its requests.
"""

from __future__ import annotations

import contextlib
import os

from charonia.errors import InternalError, InvalidArgument
from charonia.tensors import Buffer

from .region_store import Region


class RegionMemory:
    """One open region. Its descriptor is closed with the last request that uses it."""

    __slots__ = ("__weakref__", "_descriptor", "region")

    def __init__(self, region: Region, descriptor: int) -> None:
        self.region = region
        self._descriptor = descriptor

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def read(self, offset: int, into: memoryview | bytearray) -> None:
        """Fill `into` from `offset` of the region. Raises `InvalidArgument` if the object has become smaller."""
        view, at, done = memoryview(into), self.region.offset + offset, 0
        while done < len(view):
            try:
                size = os.preadv(self._descriptor, [view[done:]], at + done)
            except OSError as error:
                raise self._failed("read", error) from None
            if not size:
                raise self._too_small()
            done += size

    def write(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset` of the region. Raises `InvalidArgument` if the object has become smaller."""
        view, at, done = memoryview(data).cast("B"), self.region.offset + offset, 0
        try:
            # a write past the end would enlarge the client's object again
            if os.fstat(self._descriptor).st_size < at + len(view):
                raise self._too_small()
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], at + done)
        except OSError as error:  # for example no space for pages that were never written
            raise self._failed("written", error) from None

    def _too_small(self) -> InvalidArgument:
        return InvalidArgument(f"shared memory region '{self.region.name}' is smaller than it was registered")

    def _failed(self, what: str, error: OSError) -> InternalError:
        return InternalError(f"shared memory region '{self.region.name}' cannot be {what}: {error.strerror}")
