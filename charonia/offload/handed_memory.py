"""Memory that is a file without a name, mapped for as long as a view of it is left.

A worker maps what this process has filled, and `handover` hands it over without a copy. What a worker has made can be
sent from its file: the kernel then passes its pages on, and nothing is copied (`part_of`).
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from .reclaimed import ReclaimedMap

_MOST = 64
"""At a time: each has two of this process's file descriptors."""
_MOST_BYTES = 1 << 30

_open: set[int] = set()
"""The descriptors of all files made here."""


class _File:
    """A file without a name; it is closed when nothing refers to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        _open.discard(self.descriptor)
        os.close(self.descriptor)


class FileMap(ReclaimedMap):
    """A mapped file."""

    file: _File


def handed_memory(size_bytes: int) -> memoryview | None:
    """Memory for so many bytes, all zero; None where there is none, or as much as there may be."""
    if len(_open) >= _MOST or not 0 < size_bytes <= _MOST_BYTES:
        return None
    try:
        file = _File(os.memfd_create("charonia-body", os.MFD_CLOEXEC))
        _open.add(file.descriptor)
        os.truncate(file.descriptor, size_bytes)
        made = FileMap(file.descriptor, size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return None
    made.file = file
    return memoryview(made)


def received_memory(descriptor: int, size_bytes: int) -> memoryview:
    """A file that another process has made, to be read. Its descriptor is closed with the last view. Raises
    `OSError`.
    """
    file = _File(descriptor)
    made = FileMap(descriptor, size_bytes, prot=mmap.PROT_READ)
    made.file = file
    return memoryview(made)


def file_of(view: memoryview) -> int | None:
    """The descriptor of the file that these bytes are, from its first to its last; None for other bytes."""
    whole = view.obj
    if isinstance(whole, FileMap) and len(view) == len(whole):
        return whole.file.descriptor
    return None


def part_of(view: memoryview) -> tuple[int, int] | None:
    """The descriptor of the file that holds these bytes, and where in it they begin; None for other bytes."""
    whole = view.obj
    if not isinstance(whole, FileMap):
        return None
    first, at = (np.frombuffer(bytes_, np.uint8).ctypes.data for bytes_ in (whole, view))
    return whole.file.descriptor, at - first
