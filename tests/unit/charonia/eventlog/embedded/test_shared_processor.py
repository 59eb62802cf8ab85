"""Real processes and masks; the kernel's times of them are written by the tests, except in the last one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from charonia.eventlog.embedded import SharedProcessor
from charonia.offload.time_slices import BULK

SECOND_NS = 1_000_000_000
CHILD = "import os, sys; input(); child = os.fork(); print(child, flush=True) if child else None; sys.stdin.read()"

if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
    pytest.skip("needs an operating system with masks of processors, and two of them", allow_module_level=True)

TWO = set(sorted(os.sched_getaffinity(0))[:2])


IN_BULK = f"import sys; open('/proc/self/comm', 'w').write({BULK!r}); print(flush=True); sys.stdin.read()"


def started(mask: set[int], program: str = CHILD) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    os.sched_setaffinity(process.pid, mask)
    return process


class Kernel:
    """A directory of processes with times that a test sets; threads and places are the real ones."""

    def __init__(self, path: Path, pids: tuple[int, int]) -> None:
        self._path = path
        self.add(*pids)

    def add(self, *pids: int) -> None:
        for pid in pids:
            home = self._path / str(pid)
            home.mkdir()
            (home / "task").symlink_to(f"/proc/{pid}/task")
            (home / "stat").symlink_to(f"/proc/{pid}/stat")
            self.set(pid, 0)

    def set(self, pid: int, waited_s: float) -> None:
        (self._path / str(pid) / "schedstat").write_text(f"0 {int(waited_s * 1e9)} 7\n")


@pytest.fixture
def pair() -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    with started(TWO) as first, started(TWO) as second:
        yield first, second
        for process in (first, second):
            process.kill()


@pytest.fixture
def pids(pair: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]) -> tuple[int, int]:
    return pair[0].pid, pair[1].pid


@pytest.fixture
def kernel(tmp_path: Path, pids: tuple[int, int]) -> Kernel:
    return Kernel(tmp_path, pids)


@pytest.fixture
def shared(tmp_path: Path, kernel: Kernel) -> SharedProcessor:
    return SharedProcessor(tmp_path)


def masks(pids: tuple[int, ...]) -> list[set[int]]:
    return [os.sched_getaffinity(pid) for pid in pids]


def is_kept(pids: tuple[int, ...]) -> bool:
    """Whether they are kept on one of their two processors."""
    return masks(pids) != [TWO, TWO]


def test_two_processes_are_kept_on_one_of_their_two_processors(
    shared: SharedProcessor, kernel: Kernel, pids: tuple[int, int]
) -> None:
    shared.look(pids, tuple, SECOND_NS)
    one, other = masks(pids)
    assert one == other
    assert len(one) == 1
    assert one < TWO
    kernel.set(pids[0], 0.9)  # the log server may wait for the gateway
    shared.look(pids, tuple, 2 * SECOND_NS)
    assert masks(pids) == [one, one]


@pytest.mark.parametrize(("waited_s", "kept"), [(0.14, True), (0.16, False)])
def test_a_gateway_that_has_to_wait_ends_it(
    shared: SharedProcessor, kernel: Kernel, pids: tuple[int, int], waited_s: float, kept: bool
) -> None:
    shared.look(pids, tuple, SECOND_NS)
    kernel.set(pids[1], waited_s)
    shared.look(pids, tuple, 2 * SECOND_NS)
    assert is_kept(pids) == kept


def test_each_pause_is_longer_until_they_were_left_in_peace(
    shared: SharedProcessor, kernel: Kernel, pids: tuple[int, int]
) -> None:
    now_s, waited_s = 1, 0
    shared.look(pids, tuple, now_s * SECOND_NS)
    for pause_s in (10, 20, 40):
        now_s, waited_s = now_s + 1, waited_s + 1
        kernel.set(pids[1], waited_s)
        shared.look(pids, tuple, now_s * SECOND_NS)
        shared.look(pids, tuple, (now_s + pause_s) * SECOND_NS - 1)
        assert masks(pids) == [TWO, TWO]
        now_s += pause_s
        shared.look(pids, tuple, now_s * SECOND_NS)
        assert is_kept(pids)
    now_s += 81  # longer than the next pause would be
    shared.look(pids, tuple, now_s * SECOND_NS)
    kernel.set(pids[1], waited_s + 9)
    now_s += 1
    shared.look(pids, tuple, now_s * SECOND_NS)
    assert not is_kept(pids)
    shared.look(pids, tuple, (now_s + 10) * SECOND_NS)
    assert is_kept(pids)


@pytest.mark.parametrize("waited_s", [0.0, 0.9])
def test_what_they_start_may_use_all_processors_again(
    shared: SharedProcessor,
    pair: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]],
    kernel: Kernel,
    waited_s: float,
) -> None:
    first, pids = pair[0], (pair[0].pid, pair[1].pid)
    children: list[int] = []
    shared.look(pids, lambda: children, SECOND_NS)
    assert first.stdin is not None
    assert first.stdout is not None
    first.stdin.write(b"\n")
    first.stdin.flush()
    child = int(first.stdout.readline())
    try:
        kernel.add(child)
        children += [child, 2**22 + 1]
        assert len(os.sched_getaffinity(child)) == 1  # inherited
        if waited_s:
            kernel.set(pids[1], waited_s)
        shared.look(pids, lambda: children, 2 * SECOND_NS)
        assert os.sched_getaffinity(child) == TWO
        assert is_kept(pids) == (not waited_s)
    finally:
        os.kill(child, 9)


def test_work_in_bulk_has_the_other_processor_meanwhile(
    shared: SharedProcessor, kernel: Kernel, pids: tuple[int, int]
) -> None:
    with started(TWO, IN_BULK) as bulk, started(TWO) as other:
        assert bulk.stdout is not None
        bulk.stdout.readline()
        kernel.add(bulk.pid, other.pid)
        shared.look(pids, lambda: [bulk.pid, other.pid], SECOND_NS)
        assert masks((bulk.pid, other.pid)) == [TWO - masks(pids)[0], TWO]
        shared.look(None, lambda: [bulk.pid, other.pid], 2 * SECOND_NS)
        assert masks((bulk.pid, other.pid)) == [TWO, TWO]
        shared.look(pids, lambda: [bulk.pid, other.pid], 3 * SECOND_NS)
        os.sched_setaffinity(bulk.pid, masks(pids)[0])  # begun by a thread that is kept
        shared.look(pids, lambda: [bulk.pid, other.pid], 4 * SECOND_NS)
        assert masks((bulk.pid,)) == [TWO - masks(pids)[0]]
        bulk.kill()
        other.kill()


def test_a_successor_takes_the_place_of_one_that_has_ended(
    shared: SharedProcessor, kernel: Kernel, pair: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]
) -> None:
    shared.look((pair[0].pid, pair[1].pid), tuple, SECOND_NS)
    pair[1].kill()
    pair[1].wait()
    shared.look((pair[0].pid, pair[1].pid), tuple, 2 * SECOND_NS)
    assert masks((pair[0].pid,)) == [TWO]
    with started(TWO) as successor:
        kernel.add(successor.pid)
        shared.look((pair[0].pid, successor.pid), tuple, 3 * SECOND_NS)
        assert is_kept((pair[0].pid, successor.pid))
        assert masks((pair[0].pid,)) == masks((successor.pid,))
        successor.kill()


def test_masks_that_others_set_are_left_as_they_are(
    shared: SharedProcessor, kernel: Kernel, pids: tuple[int, int]
) -> None:
    shared.look(pids, tuple, SECOND_NS)
    os.sched_setaffinity(pids[1], TWO)
    shared.look(pids, tuple, 2 * SECOND_NS)
    assert masks(pids) == [TWO, TWO]  # what was set here is taken back
    os.sched_setaffinity(pids[0], {min(TWO)})
    shared.look(pids, tuple, 60 * SECOND_NS)
    assert masks(pids) == [{min(TWO)}, TWO]


def test_they_are_left_to_the_kernel_while_one_does_not_serve(
    shared: SharedProcessor, kernel: Kernel, pids: tuple[int, int]
) -> None:
    shared.look(pids, tuple, SECOND_NS)
    shared.look(None, tuple, 2 * SECOND_NS)
    assert masks(pids) == [TWO, TWO]
    shared.look(pids, tuple, 3 * SECOND_NS)
    assert is_kept(pids)


@pytest.mark.parametrize("own", [{min(TWO)}, os.sched_getaffinity(0)])
def test_nothing_is_done_where_they_may_not_use_the_same_two(
    shared: SharedProcessor, pids: tuple[int, int], own: set[int]
) -> None:
    if own == TWO:
        pytest.skip("there are no more than two processors")
    os.sched_setaffinity(pids[0], own)
    shared.look(pids, tuple, SECOND_NS)
    assert masks(pids) == [own, TWO]


def test_nothing_is_done_where_the_kernel_tells_no_times(tmp_path: Path, pids: tuple[int, int]) -> None:
    shared = SharedProcessor(tmp_path / "none")
    shared.look(pids, tuple, SECOND_NS)
    assert masks(pids) == [TWO, TWO]


def test_the_kernel_tells_the_times_of_processes(pids: tuple[int, int]) -> None:
    shared = SharedProcessor()
    shared.look(pids, tuple, SECOND_NS)
    if not Path(f"/proc/{pids[0]}/schedstat").exists():
        pytest.skip("this kernel tells no times of threads")
    assert is_kept(pids)
