"""Shared memory between an executor and a model process: reusable slots for the columns of batches.

Payloads between gateway, executors and callers have slots of another form: `charonia.eventlog.payload_slots`.

It is a file in memory that belongs to one model process; both ends map it whole, but pages that were never written take
no memory. The executor copies the inputs of a batch into an input slot; the model's arrays are views of it. It also
names an output slot, into which the model process copies the outputs; the executor's outputs are views of that.

    slot     generation u64 | 56 bytes unused | columns, each at a multiple of `ALIGNMENT` from the slot's begin

A slot is reused when no view of it is left at either end. The executor counts the uses of a slot (its generation). The
model process writes a generation into the slot when it is done with it: for inputs with the last view, so that a model
may keep them as long as it likes; for outputs with the reply. When no slot is free, or the slots are too small, the
bytes are sent in frames. A process that the model forks shares its views of inputs, so those slots are never reused.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .frames import Buffer

SLOT_BYTES = 64 << 20
INPUT_SLOTS, OUTPUT_SLOTS = 2, 4
"""Two input slots serve a model that keeps its last batch's inputs; outputs stay in their slots until they are sent."""

SHARED_BYTES = 32 << 10
"""Smaller columns are sent in frames, which is cheaper than a slot."""

ALIGNMENT = 64
_HEADER = struct.Struct("<Q")
_SIZE_BYTES = SLOT_BYTES * (INPUT_SLOTS + OUTPUT_SLOTS)
_LONG_COPY_BYTES = 1 << 20
_KEPT_BYTES = 4 << 20
"""The memory that a slot keeps when a batch is much smaller than an earlier one."""


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offsets of columns with these sizes in a slot, and the end of the last one."""
    offsets, end = [], ALIGNMENT
    for size in sizes:
        offsets.append(end)
        end += size + -size % ALIGNMENT
    return offsets, end


class _Slot:
    """The executor's state of a slot."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = 0
        self.expected = False
        """Whether a reply that will fill it is still expected."""
        self.view: weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]] | None = None
        """The array under all views of its outputs."""
        self.touched = 0

    @property
    def begin(self) -> int:
        return self.index * SLOT_BYTES


class ExecutorSlots:
    """The executor's end. Used in the event loop only. Raises `OSError` when the memory cannot be made."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files that lie in memory")
        self.descriptor = os.memfd_create("charonia-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """For the model process. Call `close_descriptor` when it has inherited it."""
        try:
            os.ftruncate(self.descriptor, _SIZE_BYTES)
            # without seals, the model process could truncate the memory under our views
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._mapping = mmap.mmap(self.descriptor, _SIZE_BYTES)
        except OSError:
            os.close(self.descriptor)
            raise
        self._memory = memoryview(self._mapping)
        self.keeps_pages = False
        """Whether a driver of the model process knows the pages of slots, which then stay where they are."""
        self._inputs = [_Slot(index) for index in range(INPUT_SLOTS)]
        self._outputs = [_Slot(INPUT_SLOTS + index) for index in range(OUTPUT_SLOTS)]

    def close_descriptor(self) -> None:
        """Close the descriptor. The mapping stays until its last view is gone."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def put(self, columns: Sequence[Buffer]) -> tuple[int, int] | None:
        """Copy the inputs of a batch into a slot; return its index and generation, None to send them in a frame."""
        sizes = [len(column) for column in columns]
        offsets, end = offsets_of(sizes)
        if not SHARED_BYTES <= end <= SLOT_BYTES:
            return None
        slot = self._free(self._inputs, end)
        if slot is None:
            return None
        for column, offset, size in zip(columns, offsets, sizes, strict=True):
            at = slot.begin + offset
            if size < _LONG_COPY_BYTES:
                self._memory[at : at + size] = column
            else:  # this lets go of the interpreter's lock
                np.copyto(np.frombuffer(self._memory[at : at + size], np.uint8), np.frombuffer(column, np.uint8))
        return slot.index, slot.generation

    def expect(self) -> tuple[int, int] | None:
        """Reserve a slot for the outputs of a batch until `take` or `drop`; None when none is free."""
        slot = self._free(self._outputs, 0)
        if slot is None:
            return None
        slot.expected = True
        return slot.index, slot.generation

    def take(self, index: int, sizes: Sequence[int]) -> list[memoryview]:
        """Return the outputs that a reply has put into a reserved slot. Raises `ValueError` when they cannot fit."""
        slot = self._outputs[index - INPUT_SLOTS]
        offsets, end = offsets_of(sizes)
        if end > SLOT_BYTES or min(sizes, default=0) < 0 or not self._is_done(slot):
            raise ValueError("outputs are not in the slot that was meant for them")
        whole = np.frombuffer(self._memory[slot.begin : slot.begin + end], np.uint8)
        slot.view = weakref.ref(whole)
        slot.touched = max(slot.touched, end)
        view = whole.data.toreadonly()
        return [view[at : at + size] for at, size in zip(offsets, sizes, strict=True)]

    def drop(self, index: int) -> None:
        """Release a reserved slot: its reply was read, or its caller has gone."""
        self._outputs[index - INPUT_SLOTS].expected = False

    def _free(self, slots: Sequence[_Slot], size: int) -> _Slot | None:
        for slot in slots:
            if not slot.expected and self._is_done(slot) and (slot.view is None or slot.view() is None):
                shrinks = slot.touched > _KEPT_BYTES and size * 4 < slot.touched and not self.keeps_pages
                if shrinks and hasattr(mmap, "MADV_REMOVE"):
                    self._mapping.madvise(mmap.MADV_REMOVE, slot.begin + _KEPT_BYTES, SLOT_BYTES - _KEPT_BYTES)
                    slot.touched = _KEPT_BYTES
                slot.generation += 1
                slot.touched = max(slot.touched, size)
                slot.view = None
                return slot
        return None

    def _is_done(self, slot: _Slot) -> bool:
        generation: int
        (generation,) = _HEADER.unpack_from(self._memory, slot.begin)
        return generation == slot.generation


class ModelSlots:
    """The model process's end. Raises `OSError` or `ValueError` when the memory cannot be mapped."""

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, _SIZE_BYTES))
        self.pin: Callable[[int, int], None] | None = None
        """Pins memory, (address, bytes), before inputs in it are used: a slot's begin, and then more of it."""
        self._used: dict[int, weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]]] = {}
        os.register_at_fork(before=self._used.clear)

    def columns(self, index: int, generation: int, sizes: Sequence[int]) -> list[memoryview]:
        """Return the inputs in a slot, writable. The executor reuses the slot when the last view of them is gone."""
        offsets, end = offsets_of(sizes)
        begin = index * SLOT_BYTES
        whole = np.frombuffer(self._memory[begin : begin + end], np.uint8)
        if self.pin is not None:
            self.pin(whole.ctypes.data, min(SLOT_BYTES, 1 << (end - 1).bit_length()))
        # the weak reference must outlive the views: without it, their end is not noticed
        self._used[index] = weakref.ref(whole, partial(self._unused, index, generation))
        return [whole.data[at : at + size] for at, size in zip(offsets, sizes, strict=True)]

    def output_views(self, index: int, sizes: Sequence[int]) -> list[memoryview] | None:
        """Return views in a slot for outputs of these sizes; None to send them in a frame."""
        offsets, end = offsets_of(sizes)
        if not SHARED_BYTES <= end <= SLOT_BYTES:
            return None
        begin = index * SLOT_BYTES
        return [self._memory[begin + at : begin + at + size] for at, size in zip(offsets, sizes, strict=True)]

    def done(self, index: int, generation: int) -> None:
        """Mark a use of a slot as finished."""
        _HEADER.pack_into(self._memory, index * SLOT_BYTES, generation)

    def _unused(self, index: int, generation: int, _reference: object) -> None:
        if self._used.pop(index, None) is not None:
            self.done(index, generation)


__all__ = ["ALIGNMENT", "INPUT_SLOTS", "OUTPUT_SLOTS", "SHARED_BYTES", "SLOT_BYTES", "ExecutorSlots", "ModelSlots"]
