"""The bytes of a system region that is open (H49).

They are read and written through the region's descriptor (`preadv`, `pwrite`), never through a mapping: when a client
has made its object smaller, a read comes back short and is an error of this request. To touch such a page of a mapping
would be SIGBUS, the end of this process and of everybody's requests.
"""

from __future__ import annotations

import contextlib
import os

from charonia.errors import InternalError, InvalidArgument
from charonia.tensors import Buffer

from .region_store import Region


class RegionMemory:
    """One open region. The descriptor is closed with the last request that uses it."""

    __slots__ = ("__weakref__", "_descriptor", "region")

    def __init__(self, region: Region, descriptor: int) -> None:
        self.region = region
        self._descriptor = descriptor

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def read(self, offset: int, into: memoryview | bytearray) -> None:
        """Fill `into` from `offset` of the region. Raises `InvalidArgument` when the object has become smaller."""
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
        """Put `data` at `offset` of the region. Raises `InvalidArgument` when the object has become smaller."""
        view, at, done = memoryview(data).cast("B"), self.region.offset + offset, 0
        try:
            # a write past the end would make the client's object larger again
            if os.fstat(self._descriptor).st_size < at + len(view):
                raise self._too_small()
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], at + done)
        except OSError as error:  # no space for pages that were never written, for one
            raise self._failed("written", error) from None

    def _too_small(self) -> InvalidArgument:
        return InvalidArgument(f"shared memory region '{self.region.name}' is smaller than it was registered")

    def _failed(self, what: str, error: OSError) -> InternalError:
        return InternalError(f"shared memory region '{self.region.name}' cannot be {what}: {error.strerror}")
