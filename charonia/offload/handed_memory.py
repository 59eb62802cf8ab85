"""Memory of this process that a worker maps once it is filled: `handover` hands it over without a copy.

It is a file without a name, mapped here for as long as a view of it is left, and takes memory as it is written.
"""

from __future__ import annotations

import mmap
import os

from .reclaimed import ReclaimedMap

_MOST = 64
"""At a time: each has two of this process's file descriptors."""
_MOST_BYTES = 1 << 30

_open: set[int] = set()
"""The descriptors of all files."""


class _File:
    """A file without a name; it is closed when nothing refers to it."""

    def __init__(self, size_bytes: int) -> None:
        """Raises `OSError` where there is none to be had."""
        self.descriptor = os.memfd_create("charonia-body", os.MFD_CLOEXEC)
        _open.add(self.descriptor)
        os.truncate(self.descriptor, size_bytes)

    def __del__(self) -> None:
        if (descriptor := getattr(self, "descriptor", -1)) >= 0:
            _open.discard(descriptor)
            os.close(descriptor)


class _HandedMap(ReclaimedMap):
    """A mapped file."""

    file: _File


def handed_memory(size_bytes: int) -> memoryview | None:
    """Memory for so many bytes, all zero; None where there is none, or as much as there may be."""
    if len(_open) >= _MOST or not 0 < size_bytes <= _MOST_BYTES:
        return None
    try:
        file = _File(size_bytes)
        made = _HandedMap(file.descriptor, size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return None
    made.file = file
    return memoryview(made)


def file_of(view: memoryview) -> int | None:
    """The descriptor of the file that these bytes are, from its first to its last; None for other bytes."""
    whole = view.obj
    if isinstance(whole, _HandedMap) and len(view) == len(whole):
        return whole.file.descriptor
    return None
