"""`charonia.offload.reclaimed`: large memory is unmapped in a thread, and only once nothing refers to it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from queue import Queue

import pytest

from charonia.offload.reclaimed import ReclaimedBytes, ReclaimedMap

WITHIN_S = 30.0


def mapped(size_bytes: int) -> ReclaimedMap:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, size_bytes)
        os.pwrite(descriptor, b"begin", 0)
        return ReclaimedMap(descriptor, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


@pytest.fixture
def closings(monkeypatch: pytest.MonkeyPatch) -> Queue[tuple[str, int]]:
    """The thread and the size of each map that is closed."""
    closed: Queue[tuple[str, int]] = Queue()

    def close(self: ReclaimedMap) -> None:
        size = len(self)
        mmap.mmap.close(self)
        closed.put((threading.current_thread().name, size))

    monkeypatch.setattr(ReclaimedMap, "close", close)
    return closed


def test_large_memory_is_unmapped_in_a_thread_with_its_last_view(closings: Queue[tuple[str, int]]) -> None:
    view = memoryview(mapped(8 << 20))
    part = view[:5]
    del view
    assert bytes(part) == b"begin"
    assert closings.empty()
    del part
    assert closings.get(timeout=WITHIN_S) == ("charonia-reclaim", 8 << 20)


def test_a_process_without_an_event_loop_unmaps_where_the_last_view_ends() -> None:
    """In a process of its own: here the thread may have been started."""
    script = """
import mmap, threading
from charonia.offload import reclaimed
reclaimed.unmap_where_it_ends()
view = memoryview(reclaimed._anonymous(8 << 20))
before = open("/proc/self/maps").read().count(chr(10))
del view
assert open("/proc/self/maps").read().count(chr(10)) < before
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WITHIN_S)


def test_small_memory_goes_where_it_is_dropped(closings: Queue[tuple[str, int]]) -> None:
    view = memoryview(mapped(4096))
    assert bytes(view[:5]) == b"begin"
    del view
    assert closings.empty()


def test_a_map_that_is_closed_is_not_closed_again(closings: Queue[tuple[str, int]]) -> None:
    mapped(2 << 20).close()
    assert closings.get(timeout=WITHIN_S)[0] == threading.current_thread().name
    memoryview(mapped(3 << 20)).release()
    assert closings.get(timeout=WITHIN_S) == ("charonia-reclaim", 3 << 20)
    assert closings.empty()


def test_a_map_that_still_has_views_does_not_end_the_thread(closings: Queue[tuple[str, int]]) -> None:
    """As in a garbage collection that finds both, when another finalizer gives up the interpreter's lock."""
    first = mapped(2 << 20)
    view = memoryview(first)
    first.__del__()
    mapped(4 << 20)
    assert closings.get(timeout=WITHIN_S) == ("charonia-reclaim", 4 << 20)
    assert bytes(view[:5]) == b"begin"


@pytest.mark.parametrize("expected", [0, 3 << 20, 8 << 20])
def test_bytes_are_put_together_whatever_their_size(expected: int, closings: Queue[tuple[str, int]]) -> None:
    whole, plain = ReclaimedBytes(expected), b""
    for number in range(40):
        part = bytes([number]) * (1 << 17)
        whole.append(part)
        plain += part
        if number in (0, 6, 7, 39):
            view = whole.view()
            assert (len(whole), view == plain) == (len(plain), True)
            view.release()
    del view, whole
    assert closings.get(timeout=WITHIN_S)[0] == "charonia-reclaim"


def test_few_bytes_need_no_map(closings: Queue[tuple[str, int]]) -> None:
    whole = ReclaimedBytes(64 << 20)
    whole.append(b"ab")
    whole.append(b"")
    assert bytes(whole.view()) == b"ab"
    del whole
    assert closings.empty()
