"""Memory that an executor and a model process share: slots for the columns of batches, used again and again.

A file that lies in memory and belongs to one model process; both ends map it whole, but pages that were never written
take no memory. The executor copies the inputs of a batch into an input slot, where the model's arrays are views, and
names an output slot, into which the model process copies the outputs; the executor's outputs are views of that.

    slot     generation u64 | 56 bytes unused | columns, each at a multiple of `ALIGNMENT` from the slot's begin

A slot is used again when no view of it is left, at either end. The executor counts the uses of a slot; the model
process writes the number of a use into the slot when it is done with it: with the last view of the inputs, so that a
model may keep its inputs as long as it likes, and with the reply to the batch. When no slot is free, or one is too
small, the bytes travel in frames. What a model forks while it has views of inputs shares them with it, so those slots
are not used again at all.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np

from .frames import Buffer

SLOT_BYTES = 64 << 20
INPUT_SLOTS, OUTPUT_SLOTS = 2, 4
"""A model that keeps the inputs of its last batch needs two of the former; answers wait in the latter to be sent."""

SHARED_BYTES = 32 << 10
"""Columns of fewer bytes travel in frames, which costs less than a slot."""

ALIGNMENT = 64
_HEADER = struct.Struct("<Q")
_SIZE_BYTES = SLOT_BYTES * (INPUT_SLOTS + OUTPUT_SLOTS)
_KEPT_BYTES = 4 << 20
"""What a slot keeps of its memory when a batch comes that is far smaller than an earlier one."""


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where columns of these sizes begin in a slot, and where the last one ends."""
    offsets, end = [], ALIGNMENT
    for size in sizes:
        offsets.append(end)
        end += size + -size % ALIGNMENT
    return offsets, end


class _Slot:
    """A slot as the executor knows it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = 0
        self.expected = False
        """Whether the reply that is to fill it is still wanted."""
        self.view: weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]] | None = None
        """What all views of its outputs are views of."""
        self.touched = 0

    @property
    def begin(self) -> int:
        return self.index * SLOT_BYTES


class ExecutorSlots:
    """The executor's end. Event loop only. Raises `OSError` when there can be none."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files that lie in memory")
        self.descriptor = os.memfd_create("charonia-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """For the model process; `close_descriptor` when it has it."""
        try:
            os.ftruncate(self.descriptor, _SIZE_BYTES)
            # else a model process could take the memory from under our views
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._mapping = mmap.mmap(self.descriptor, _SIZE_BYTES)
        except OSError:
            os.close(self.descriptor)
            raise
        self._memory = memoryview(self._mapping)
        self._inputs = [_Slot(index) for index in range(INPUT_SLOTS)]
        self._outputs = [_Slot(INPUT_SLOTS + index) for index in range(OUTPUT_SLOTS)]

    def close_descriptor(self) -> None:
        """The mapping stays until the last view of it is gone."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def put(self, columns: Sequence[Buffer]) -> tuple[int, int] | None:
        """Copy the inputs of a batch into a slot: its index and generation; None when a frame should carry them."""
        sizes = [len(column) for column in columns]
        offsets, end = offsets_of(sizes)
        if not SHARED_BYTES <= end <= SLOT_BYTES:
            return None
        slot = self._free(self._inputs, end)
        if slot is None:
            return None
        for column, offset, size in zip(columns, offsets, sizes, strict=True):
            at = slot.begin + offset
            self._memory[at : at + size] = column
        return slot.index, slot.generation

    def expect(self) -> tuple[int, int] | None:
        """A slot for the outputs of a batch, to be given back with `take` or `drop`; None when there is none."""
        slot = self._free(self._outputs, 0)
        if slot is None:
            return None
        slot.expected = True
        return slot.index, slot.generation

    def take(self, index: int, sizes: Sequence[int]) -> list[memoryview]:
        """The outputs that a reply says are in an expected slot. Raises `ValueError` when they cannot be there."""
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
        """Expect no more for a slot: its reply was read, or its caller has gone."""
        self._outputs[index - INPUT_SLOTS].expected = False

    def _free(self, slots: Sequence[_Slot], size: int) -> _Slot | None:
        for slot in slots:
            if not slot.expected and self._is_done(slot) and (slot.view is None or slot.view() is None):
                if slot.touched > _KEPT_BYTES and size * 4 < slot.touched and hasattr(mmap, "MADV_REMOVE"):
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
    """The model process's end. Raises `OSError` and `ValueError` when the memory cannot be mapped."""

    def __init__(self, descriptor: int) -> None:
        self._memory = memoryview(mmap.mmap(descriptor, _SIZE_BYTES))
        self._used: dict[int, weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]]] = {}
        os.register_at_fork(before=self._used.clear)

    def columns(self, index: int, generation: int, sizes: Sequence[int]) -> list[memoryview]:
        """The inputs in a slot, writable; the executor uses it again when the last view of them is gone."""
        offsets, end = offsets_of(sizes)
        begin = index * SLOT_BYTES
        whole = np.frombuffer(self._memory[begin : begin + end], np.uint8)
        # the reference must be there as long as the views: with it gone nothing is said of their end
        self._used[index] = weakref.ref(whole, partial(self._unused, index, generation))
        return [whole.data[at : at + size] for at, size in zip(offsets, sizes, strict=True)]

    def room(self, index: int, sizes: Sequence[int]) -> list[memoryview] | None:
        """Where to put outputs of these sizes in a slot; None when they are better sent in a frame."""
        offsets, end = offsets_of(sizes)
        if not SHARED_BYTES <= end <= SLOT_BYTES:
            return None
        begin = index * SLOT_BYTES
        return [self._memory[begin + at : begin + at + size] for at, size in zip(offsets, sizes, strict=True)]

    def done(self, index: int, generation: int) -> None:
        """Say that a use of a slot is over."""
        _HEADER.pack_into(self._memory, index * SLOT_BYTES, generation)

    def _unused(self, index: int, generation: int, _reference: object) -> None:
        if self._used.pop(index, None) is not None:
            self.done(index, generation)


__all__ = ["ALIGNMENT", "INPUT_SLOTS", "OUTPUT_SLOTS", "SHARED_BYTES", "SLOT_BYTES", "ExecutorSlots", "ModelSlots"]
