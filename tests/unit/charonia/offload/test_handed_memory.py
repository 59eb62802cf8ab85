"""Memory that is handed to a worker: no copy is made, and no file stays open."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator

import pytest

from charonia.offload import handed_memory as module
from charonia.offload.handed_memory import file_of, handed_memory, part_of
from charonia.offload.handover import SENT_FROM_FILE_BYTES, receive, send


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    before = set(module._open)
    yield
    assert module._open == before


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def test_it_arrives_as_the_same_memory_beside_others() -> None:
    memory = handed_memory(3000)
    assert memory is not None
    memory[:5] = b"given"
    ours, theirs = pair()
    with ours, theirs:
        send(ours, ["note"], [b"first", memory[:], b"", b"last"])
        memory[:5] = b"later"
        note, buffers = receive(theirs)
    assert note == ["note"]
    assert [bytes(part) for part in (buffers[0], buffers[2], buffers[3])] == [b"first", b"", b"last"]
    assert bytes(buffers[1][:6]) == b"later\0", "a copy would not have it"
    assert len(buffers[1]) == 3000
    assert buffers[1].readonly


def test_of_two_one_is_copied_and_so_are_parts() -> None:
    memory, second = handed_memory(10), handed_memory(10)
    assert memory is not None
    assert second is not None
    memory[:], second[:] = b"0123456789", b"abcdefghij"
    assert file_of(memory[1:]) is None
    assert file_of(memoryview(b"a")) is None
    ours, theirs = pair()
    with ours, theirs:
        send(ours, None, [memory[2:], second, memory])
        assert [bytes(part) for part in receive(theirs)[1]] == [b"23456789", b"abcdefghij", b"0123456789"]


def test_so_many_at_a_time_and_of_such_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert handed_memory(0) is None
    assert handed_memory(module._MOST_BYTES + 1) is None
    monkeypatch.setattr(module, "_MOST", len(module._open) + 2)
    held = [handed_memory(1), handed_memory(1)]
    assert handed_memory(1) is None
    del held
    assert handed_memory(1) is not None


def test_without_descriptors_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    assert handed_memory(1) is None


def test_a_large_result_can_be_read_from_its_file_until_the_last_view_ends() -> None:
    large = bytes(range(256)) * (SENT_FROM_FILE_BYTES // 256)
    ours, theirs = pair()
    with ours, theirs:
        send(ours, None, [b"first", large])
        _, buffers = receive(theirs)
    part = buffers[1][1000:]
    found = part_of(part)
    assert found is not None
    descriptor, at = found
    assert os.pread(descriptor, 64, at) == large[1000:1064] == bytes(part[:64])
    assert part_of(memoryview(large)) is None
    closed = threading.Event()
    weakref.finalize(part.obj.file, closed.set)  # type: ignore[attr-defined]
    del buffers, part
    assert closed.wait(30.0)
