"""The board: shared memory in which a model process keeps its custom metrics, for its executor to read (P16).

Both map one file in memory: an increment is a store, a scrape does not disturb the process, and the values outlive it.
Records follow one another, each with its values as doubles:

    board    magic u32 | end of the records u32
    record   size u32 | live u32 | kind u16 | values u16 | meta bytes u32 | values f64... | meta        sizes times of 8

    counter    value
    gauge      set value | when it was set, in ns of the monotonic clock, 0 for never | added since
    histogram  count in each bucket, the last one +Inf, not cumulative... | sum

The meta is msgpack: [family, description, labels, bucket bounds]. `custom_metrics` merges the series; models use
`api.metrics`.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import struct
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

COUNTER, GAUGE, HISTOGRAM = 0, 1, 2

SIZE_BYTES = 1 << 20
"""Enough for some thousand series. Pages that are never written take no memory."""

_MAGIC = 0xC4A6
_BOARD = struct.Struct("<II")
_RECORD = struct.Struct("<IIHHI")
_MAX_VALUES = 1000

_FAMILY = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = ("charonia_", "nv_inference_", "nv_cache_", "nv_model_load_", "nv_cpu_", "nv_gpu_", "nv_pinned_memory_")


class BoardFull(Exception):
    """The board has no space for another series."""


def create() -> int:
    """Create an empty board; return its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("charonia-metrics")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, SIZE_BYTES)
    return descriptor


class Slot:
    """The writable values of one series."""

    def __init__(self, record: memoryview, values: int) -> None:
        self.record = record
        self.values = record[_RECORD.size : _RECORD.size + 8 * values].cast("d")

    def set_live(self, live: bool) -> None:
        self.record[4:8] = struct.pack("<I", live)


class BoardWriter:
    """Writes a board, in the model process. Without a descriptor (-1) the board is private memory."""

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, SIZE_BYTES))
        self._end = _BOARD.size
        self._free: dict[int, list[memoryview]] = {}
        # a metric may be garbage-collected, and dropped, while another one is being made
        self._lock = threading.RLock()
        _BOARD.pack_into(self._memory, 0, _MAGIC, self._end)

    def add(self, kind: int, values: int, meta: Any) -> Slot:
        """Add a series with `values` values, all 0. Raises `BoardFull`."""
        packed = msgpack.packb(meta)
        size = -(-(_RECORD.size + 8 * values + len(packed)) // 8) * 8
        with self._lock:
            free = self._free.get(size)
            if free:
                record = free.pop()
            elif self._end + size <= len(self._memory) and values <= _MAX_VALUES:
                record = self._memory[self._end : self._end + size]
                self._end += size
            else:
                raise BoardFull(f"there is no room for another series, {SIZE_BYTES} bytes are used")
            record[:] = bytes(size)
            _RECORD.pack_into(record, 0, size, 0, kind, values, len(packed))
            record[_RECORD.size + 8 * values :][: len(packed)] = packed
            slot = Slot(record, values)
            slot.set_live(True)
            # last: a reader that sees the new end finds the record before it complete
            _BOARD.pack_into(self._memory, 0, _MAGIC, self._end)
        return slot

    def drop(self, slot: Slot) -> None:
        """Remove a series; its space is reused."""
        with self._lock:
            slot.set_live(False)
            self._free.setdefault(len(slot.record), []).append(slot.record)


@dataclass(frozen=True, slots=True)
class Series:
    """One series that was read from a board."""

    kind: int
    family: str
    description: str
    labels: tuple[tuple[str, str], ...]
    bounds: tuple[float, ...]
    values: tuple[float, ...]


def read(descriptor: int, owned: str = "") -> list[Series]:
    """Return the live series of a board. Malformed records are left out: the process may write anything there.

    `owned` as in `names_are_valid`.
    """
    try:
        with mmap.mmap(descriptor, SIZE_BYTES, prot=mmap.PROT_READ) as memory:
            magic, end = _BOARD.unpack_from(memory)
            data = memory[: min(end, SIZE_BYTES)] if magic == _MAGIC else b""
    except (OSError, ValueError):  # the file was truncated
        return []
    return list(_series(data, owned))


def _series(data: bytes, owned: str) -> Iterator[Series]:
    at = _BOARD.size
    while at + _RECORD.size <= len(data):
        size, live, kind, count, meta_bytes = _RECORD.unpack_from(data, at)
        meta_at = at + _RECORD.size + 8 * count
        if size < _RECORD.size or size % 8 or at + size > len(data) or meta_at + meta_bytes > at + size:
            return
        if live == 1:
            known = _described(kind, count, data[meta_at : meta_at + meta_bytes], owned)
            if known is not None:
                values = struct.unpack_from(f"={count}d", data, at + _RECORD.size)
                yield Series(known.kind, known.family, known.description, known.labels, known.bounds, values)
        at += size


@functools.lru_cache(maxsize=1 << 14)
def _described(kind: int, count: int, meta: bytes, owned: str) -> Series | None:
    """Decode a series without its values, cached because only the values change; None for a malformed one."""
    try:
        family, description, labels, bounds = msgpack.unpackb(meta)
        series = Series(
            kind,
            str(family),
            str(description),
            tuple(sorted((str(name), str(value)) for name, value in labels.items())),
            tuple(float(bound) for bound in bounds),
            (),
        )
    except Exception:  # malformed
        return None
    expected = {COUNTER: 1, GAUGE: 3, HISTOGRAM: len(series.bounds) + 2}.get(kind)
    is_valid = names_are_valid(series.family, [name for name, _ in series.labels], owned)
    return series if expected == count and is_valid else None


def names_are_valid(family: str, labels: Iterable[str], owned: str = "") -> bool:
    """Whether the names are valid in Prometheus and not reserved for the server.

    Families that begin with `owned` are not reserved: those of a backend that ships with the server.
    """
    return (
        _FAMILY.fullmatch(family) is not None
        and (not family.startswith(_RESERVED) or (owned != "" and family.startswith(owned)))
        and all(_LABEL.fullmatch(label) and not label.startswith("__") and label != "le" for label in labels)
    )
