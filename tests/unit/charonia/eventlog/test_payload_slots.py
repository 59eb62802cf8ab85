from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from charonia.errors import InvalidRecord
from charonia.eventlog import payload_slots as slots
from charonia.eventlog.payload_slots import SlotPool, SlotReader
from charonia.eventlog.payloads import PayloadDirectory
from charonia.wire import Reference

KB = 1024


@pytest.fixture
def pool(tmp_path: Path) -> SlotPool:
    (tmp_path / "g-1").mkdir()
    return SlotPool(tmp_path / "g-1", max_bytes=1024 * KB)


@pytest.fixture
def reader(tmp_path: Path) -> SlotReader:
    return SlotReader(tmp_path)


def kept(pool: SlotPool, content: bytes) -> str:
    view = pool.lend(len(content))
    assert view is not None
    view[:] = content
    name = pool.name_of(view)
    assert name is not None
    pool.keep(name, view)
    return name


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "g-1").iterdir())


def open_files(tmp_path: Path) -> int:
    """How many descriptors of this process are of files in there, removed ones included."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of this listing itself
            targets.append(os.readlink(link))
    return sum(target.startswith(f"{tmp_path}/") for target in targets)


def test_a_slot_is_used_again_and_what_was_in_it_is_gone(pool: SlotPool, reader: SlotReader, tmp_path: Path) -> None:
    first = kept(pool, b"a" * 50_000)
    assert bytes(reader.read("g-1/" + first, 50_000)) == b"a" * 50_000
    pool.drop(first)
    second = kept(pool, b"b" * 50_000)
    assert files(tmp_path) == ["s1"]
    assert second != first
    assert bytes(reader.read("g-1/" + second, 50_000)) == b"b" * 50_000
    with pytest.raises(InvalidRecord, match="gone"):
        reader.read("g-1/" + first, 50_000)


def test_a_slot_that_is_read_is_not_used_again(pool: SlotPool, reader: SlotReader, tmp_path: Path) -> None:
    name = kept(pool, b"a" * 50_000)
    part = reader.read("g-1/" + name, 50_000)[1000:2000]
    pool.drop(name)
    kept(pool, b"b" * 50_000)
    assert files(tmp_path) == ["s1", "s2"]
    assert bytes(part) == b"a" * 1000
    with np.testing.assert_raises(TypeError):
        part[0] = 1  # readers do not write
    array = np.frombuffer(part, np.uint8)
    del part
    kept(pool, b"c" * 50_000)
    assert files(tmp_path) == ["s1", "s2", "s3"]
    assert array[0] == ord("a")
    del array
    kept(pool, b"d" * 50_000)
    assert files(tmp_path) == ["s1", "s2", "s3"]


def test_a_slot_is_free_when_no_view_of_it_is_left(pool: SlotPool, tmp_path: Path) -> None:
    view = pool.lend(50_000)
    assert view is not None
    tail = view[100:]
    del view
    other = pool.lend(50_000)
    assert other is not None
    del tail, other
    third = pool.lend(50_000)
    assert third is not None
    assert files(tmp_path) == ["s1", "s2"]


def test_the_byte_at_the_skew_is_aligned(pool: SlotPool) -> None:
    for skew in (0, 1, 63, 64, 150):
        view = pool.lend(50_000, skew=skew)
        assert view is not None
        assert len(view) == 50_000
        assert np.frombuffer(view[skew:], np.uint8).ctypes.data % 64 == 0


def test_a_part_of_a_message_is_named_by_its_place(pool: SlotPool, reader: SlotReader) -> None:
    view = pool.lend(50_000, skew=7)
    assert view is not None
    view[7:47] = b"x" * 40
    part = view[7:47]
    name = pool.name_of(part)
    assert name is not None
    assert bytes(reader.read("g-1/" + name, 40)) == b"x" * 40
    assert pool.name_of(b"x" * 40) is None
    assert pool.name_of(memoryview(bytearray(40))) is None
    assert pool.name_of(reader.read("g-1/" + name, 40)) is None


def test_the_pool_is_bounded_and_gives_up_free_slots_of_other_sizes(pool: SlotPool, tmp_path: Path) -> None:
    held = [pool.lend(200 * KB) for _ in range(6)]
    assert sum(view is not None for view in held) == 4
    assert pool.size_bytes <= 1024 * KB
    held.clear()
    assert pool.lend(800 * KB) is not None
    assert pool.size_bytes <= 1024 * KB
    assert pool.lend(2048 * KB) is None
    assert pool.lend(0) is None


def test_the_number_of_slots_is_bounded(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, max_slots=2)
    held = [pool.lend(50_000) for _ in range(3)]
    assert held[1] is not None
    assert held[2] is None


def test_a_full_file_system_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlotPool(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", _full)
    assert pool.lend(50_000) is None
    assert pool.size_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_a_large_slot_is_made_in_a_thread_for_the_next_payload(
    pool: SlotPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_POPULATED_BYTES", 0)
    first = pool.receive(50_000, skew=7)
    _wait_for_slots(pool)
    second = pool.receive(50_000, skew=7)
    for view, name in ((first, None), (second, "s1-1-1039")):
        assert view is not None
        view[:] = bytes(50_000)
        assert np.frombuffer(view[7:], np.uint8).ctypes.data % 64 == 0
        assert pool.name_of(view) == name
    assert files(tmp_path) == ["s1"]


def test_a_large_slot_that_cannot_be_made(pool: SlotPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_POPULATED_BYTES", 0)
    held = pool.lend(900 * KB)
    assert pool.receive(200 * KB) is None  # the pool is full
    del held
    monkeypatch.setattr(os, "posix_fallocate", _full)
    for _ in range(2):
        assert pool.receive(200 * KB) is not None
        _wait_for_slots(pool)
        assert (pool.size_bytes, files(tmp_path)) == (0, [])


def test_a_slot_that_is_made_while_the_pool_closes_is_removed(
    pool: SlotPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_POPULATED_BYTES", 0)
    may_make, fallocate = threading.Event(), os.posix_fallocate

    def waits(*arguments: int) -> None:
        may_make.wait(60)
        fallocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", waits)
    received = [pool.receive(200 * KB) for _ in range(3)]  # only one slot is made at a time
    assert None not in received
    pool.close()
    may_make.set()
    _wait_for_slots(pool)
    assert (pool.size_bytes, files(tmp_path)) == (0, [])


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def _wait_for_slots(pool: SlotPool) -> None:
    """Until no thread makes a slot."""
    while True:
        with pool._lock:
            if not pool._preparing:
                return
        threading.Event().wait(0.001)


def test_a_given_payload_is_held_until_it_was_taken(pool: SlotPool, reader: SlotReader, tmp_path: Path) -> None:
    (tmp_path / "g-2").mkdir()
    name = _give(pool, b"a" * 50_000)
    kept(pool, b"b" * 50_000)
    assert files(tmp_path) == ["s1", "s2"]
    first = reader.read("g-1/" + name, 50_000, takes=True)
    second = reader.read("g-1/" + name, 50_000, takes=True)
    del first
    with pytest.raises(InvalidRecord, match="gone"):  # its reader has had it
        reader.read("g-1/" + name, 50_000, takes=True)
    kept(pool, b"c" * 50_000)
    assert bytes(second) == b"a" * 50_000
    assert files(tmp_path) == ["s1", "s2", "s3"]
    del second
    kept(pool, b"d" * 50_000)
    assert files(tmp_path) == ["s1", "s2", "s3"]
    assert pool.outstanding == 3


def _give(pool: SlotPool, content: bytes) -> str:
    view = pool.lend(len(content))
    assert view is not None
    view[:] = content
    name = pool.name_of(view)
    assert name is not None
    pool.give(name, view, "g-2")
    return name


def test_what_was_given_to_a_process_that_is_gone_is_freed(pool: SlotPool, tmp_path: Path) -> None:
    (tmp_path / "g-2").mkdir()
    _give(pool, b"a" * 50_000)
    pool.tidy()
    assert pool.outstanding == 1
    (tmp_path / "g-2").rmdir()
    pool.tidy()
    assert pool.outstanding == 0
    assert pool.lend(50_000) is not None
    assert files(tmp_path) == ["s1"]


def test_what_is_never_taken_is_removed_and_stays_right_where_it_is_read(
    pool: SlotPool, reader: SlotReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "g-2").mkdir()
    view = reader.read("g-1/" + _give(pool, b"a" * 50_000), 50_000, takes=True)
    unread = _give(pool, b"b" * 50_000)
    monkeypatch.setattr(slots, "UNTAKEN_S", 0.0)
    pool.tidy()
    assert (pool.outstanding, pool.size_bytes, files(tmp_path)) == (0, 0, [])
    kept(pool, b"c" * 50_000)
    assert bytes(view) == b"a" * 50_000
    with pytest.raises(InvalidRecord):
        reader.read("g-1/" + unread, 50_000, takes=True)


def test_slots_that_nobody_used_for_a_while_are_removed(
    pool: SlotPool, reader: SlotReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kept(pool, b"a" * 50_000)
    reader.read("g-1/" + name, 50_000)
    descriptors = open_files(tmp_path)
    pool.drop(name)
    pool.tidy()
    assert files(tmp_path) == ["s1"]
    monkeypatch.setattr(slots, "IDLE_S", -1.0)
    pool.tidy()
    reader.tidy()
    assert files(tmp_path) == []
    assert pool.size_bytes == 0
    assert (descriptors, open_files(tmp_path)) == (4, 0)  # a map has one of its own


@pytest.mark.parametrize("name", ["s1", "s1-1", "s1-x-1000", "s1-1-1000-1", "s9-1-1000", "-1-1", "s1-1-0", "s1-1-ffff"])
def test_what_names_no_payload_is_refused(pool: SlotPool, reader: SlotReader, name: str) -> None:
    kept(pool, b"a" * 50_000)
    with pytest.raises(InvalidRecord):
        reader.read("g-1/" + name, 50_000)


def test_a_file_that_is_no_slot_is_refused(tmp_path: Path, reader: SlotReader) -> None:
    (tmp_path / "g-1").mkdir()
    (tmp_path / "g-1" / "s1").write_bytes(bytes(100_000))
    with pytest.raises(InvalidRecord, match="no slot"):
        reader.read("g-1/s1-0-1000", 10)


_HOLDS = """
import sys
from contextlib import suppress
from pathlib import Path
from charonia.eventlog.payload_slots import SlotReader
view = SlotReader(Path(sys.argv[1])).read(sys.argv[2], 50_000, takes=True)
print(bytes(view[:4]).decode(), flush=True)
sys.stdin.read()
"""


def test_a_reader_that_dies_holds_nothing(pool: SlotPool, tmp_path: Path) -> None:
    name = kept(pool, b"a" * 50_000)
    command = [sys.executable, "-c", _HOLDS, str(tmp_path), "g-1/" + name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"aaaa\n"
        pool.drop(name)
        kept(pool, b"b" * 50_000)
        assert files(tmp_path) == ["s1", "s2"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept(pool, b"c" * 50_000)
    assert files(tmp_path) == ["s1", "s2"]


# -- directories ------------------------------------------------------------------------------------------------------


def opened(tmp_path: Path, incarnation: str) -> PayloadDirectory:
    directory = PayloadDirectory(str(tmp_path / "shm"), incarnation)
    directory.open()
    return directory


def test_directories_lend_and_give_to_those_that_read_slots(tmp_path: Path) -> None:
    gateway, executor = opened(tmp_path, "g-1"), opened(tmp_path, "e-1")
    lent = gateway.lend([b"a" * 40_000, memoryview(b"b" * 1000)])
    assert lent is not None
    again = Reference.unpack(lent.pack())
    assert bytes(executor.read(again)) == b"a" * 40_000 + b"b" * 1000
    gateway.remove(lent)
    gateway.lend([b"c" * 41_000])
    with pytest.raises(InvalidRecord):
        executor.read(again)
    given = executor.give([b"d" * 40_000], "g-1")
    assert given is not None
    gateway.remove(given)  # it is not its own to remove
    assert bytes(gateway.read(given, takes=True)) == b"d" * 40_000
    with pytest.raises(InvalidRecord):
        gateway.read(given, takes=True)


def test_what_lies_in_a_slot_is_lent_where_it_is(tmp_path: Path) -> None:
    gateway, executor = opened(tmp_path, "g-1"), opened(tmp_path, "e-1")
    assert gateway.slots is not None
    view = gateway.slots.lend(50_000, skew=10)
    assert view is not None
    view[:] = b"h" * 10 + b"t" * 49_990
    lent = gateway.lend([view[10:]])
    assert lent is not None
    assert bytes(executor.read(lent)) == b"t" * 49_990
    gateway.remove(lent)
    assert bytes(view[10:]) == b"t" * 49_990  # it is still held here


def test_a_process_of_an_earlier_release_gets_files(tmp_path: Path) -> None:
    executor = opened(tmp_path, "e-1")
    old = opened(tmp_path, "g-0")
    (tmp_path / "shm" / "g-0" / "slots").unlink()
    assert not executor.reads_slots("g-0")
    assert executor.give([b"a" * 40_000], "g-0") is None
    written = executor.write([b"a" * 40_000], owner="g-0")
    assert written is not None
    assert bytes(old.read(written)) == b"a" * 40_000
    standing = PayloadDirectory(str(tmp_path / "shm"), "ensemble.m")
    standing.open(standing=True)
    assert not executor.reads_slots("ensemble.m")
    assert standing.slots is None
    assert standing.lend([b"a" * 40_000]) is None


def test_an_orderly_end_leaves_the_answers_that_were_not_taken(tmp_path: Path) -> None:
    gateway, executor = opened(tmp_path, "g-1"), opened(tmp_path, "e-1")
    given = executor.give([b"a" * 40_000], "g-1")
    taken = executor.give([b"b" * 70_000], "g-1")
    assert given is not None
    assert taken is not None
    gateway.read(taken, takes=True)
    executor.close()
    assert [path.name for path in (tmp_path / "shm" / "e-1").iterdir()] == ["s1"]
    assert bytes(gateway.read(given, takes=True)) == b"a" * 40_000
    gateway.sweep(["e-1"])
    gateway.close()
    assert list((tmp_path / "shm").iterdir()) == []
