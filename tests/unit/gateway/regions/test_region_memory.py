"""The bytes of an open region, whatever its client does to the object."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from memory_objects import MemoryObjects

from charonia.errors import InternalError, InvalidArgument
from gateway.regions.region_memory import RegionMemory
from gateway.regions.region_store import Region, open_object

TOO_SMALL = r"^shared memory region 'r' is smaller than it was registered$"
Opened = Callable[[bytes], tuple[RegionMemory, str]]


@pytest.fixture
def opened(objects: MemoryObjects) -> Opened:
    def make(content: bytes) -> tuple[RegionMemory, str]:
        key = objects.make(content)
        return RegionMemory(Region("r", "system", len(content) - 2, key, 2), open_object(key)), key

    return make


def test_offsets_are_added(opened: Opened, objects: MemoryObjects) -> None:
    memory, key = opened(b"..0123456789")
    into = bytearray(4)
    memory.read(3, into)
    assert into == b"3456"
    memory.write(8, b"ab")
    memory.write(0, memoryview(b"xyz")[1:])
    memory.write(4, b"")
    assert objects.path(key).read_bytes() == b"..yz234567ab"


def test_a_smaller_object_is_an_error_and_stays_small(opened: Opened, objects: MemoryObjects) -> None:
    memory, key = opened(b"..0123456789")
    os.truncate(objects.path(key), 6)
    into = bytearray(4)
    memory.read(0, into)
    for offset in (1, 4, 6):
        with pytest.raises(InvalidArgument, match=TOO_SMALL):
            memory.read(offset, into)
        with pytest.raises(InvalidArgument, match=TOO_SMALL):
            memory.write(offset, into)
    assert objects.path(key).read_bytes() == b"..0123"


def test_a_deleted_object_is_still_there_for_who_has_it(opened: Opened, objects: MemoryObjects) -> None:
    memory, key = opened(b"..0123")
    objects.path(key).unlink()
    into = bytearray(4)
    memory.write(0, b"abcd")
    memory.read(0, into)
    assert into == b"abcd"


def test_failures_of_the_system_are_typed(objects: MemoryObjects) -> None:
    key = objects.make(b"1234")
    unwritable = RegionMemory(Region("r", "system", 4, key), os.open(objects.path(key), os.O_RDONLY))
    with pytest.raises(InternalError, match=r"^shared memory region 'r' cannot be written: Bad file descriptor$"):
        unwritable.write(0, b"1")
    unreadable = RegionMemory(Region("r", "system", 4, key), os.open(objects.path(key), os.O_WRONLY))
    with pytest.raises(InternalError, match=r"^shared memory region 'r' cannot be read: Bad file descriptor$"):
        unreadable.read(0, bytearray(1))


def test_the_last_user_closes_it(objects: MemoryObjects) -> None:
    descriptor = open_object(objects.make(b"1234"))
    memory = RegionMemory(Region("r", "system", 4), descriptor)
    os.fstat(descriptor)
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
