"""Measures what the processors of this machine do: how many there are for this process, and what uses them.

Read from the clocks of processes and from `/proc/stat`, about 0.3 ms together, and at most once a second. Which
processes there are is read every ten seconds, from a file of each of their threads. Elsewhere than on Linux nothing is
measured.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from charonia.clock import monotonic_ns, wall_ns
from charonia.facts.processor_use import BATCHER_APART, ProcessorUse

_EVERY_NS = 1_000_000_000
_TREE_NS = 10_000_000_000
"""How long a list of the server's processes is used before it is read again."""
_MOST_KEPT = 10_000
"""The most pairs of reader and model that are remembered. Beyond it all are forgotten, and so due again."""


class ProcessorMeter:
    """`work` says how many batches this executor has run, and for how many ns; `batcher` is what is said of where they
    come from. Used in the event loop only.
    """

    def __init__(
        self,
        work: Callable[[], tuple[int, int]],
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
        now_ns: Callable[[], int] = monotonic_ns,
        batcher: int = BATCHER_APART,
    ) -> None:
        self._work = work
        self._batcher = batcher
        self._proc = proc
        self._now_ns = now_ns
        self._due_ns: dict[tuple[str, str], int] = {}
        self._taken_ns = -_EVERY_NS
        self._latest: ProcessorUse | None = None
        self._host = socket.gethostname()
        self._pid = os.getpid()
        # `charonia serve` is the parent of the roles that it starts
        parent = os.getppid()
        self._root = parent if os.environ.get("CHARONIA_PARENT_PID") == str(parent) else self._pid
        self._usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        quota = _quota(cgroup)
        is_bounded = 0 < quota < len(self._usable)
        self._processors = quota if is_bounded else float(len(self._usable))
        self._shared = shared_number(_boot_id(proc), self._usable, self._host if is_bounded else "")
        # what others use of the machine takes nothing of a quota, and nothing of a real-time process
        self._is_alone = is_bounded or _is_real_time()
        self._is_low = bool(self._usable) and os.getpriority(os.PRIO_PROCESS, 0) > 0
        self._server, self._children = _Clocks(), _Clocks()
        self._server_pids: set[int] = set()
        self._child_pids: set[int] = set()
        self._listed_ns = -_TREE_NS
        self._ticks: tuple[int, int, int] | None = None
        self._busy_ns = self._threads_ns = 0

    def due(self, reader: str, model: str) -> ProcessorUse | None:
        """What the processors do, once a second for each reader and model; None in between, or where that is unknown.

        Never raises: what is measured must not cost an answer.
        """
        now_ns = self._now_ns()
        if now_ns < self._due_ns.get((reader, model), 0):
            return None
        if len(self._due_ns) >= _MOST_KEPT:
            self._due_ns.clear()
        self._due_ns[reader, model] = now_ns + _EVERY_NS
        if now_ns - self._taken_ns >= _EVERY_NS // 2:
            self._taken_ns = now_ns
            try:
                self._latest = self._take(now_ns)
            except (OSError, ValueError, IndexError):  # no such files here
                self._latest = None
        return self._latest

    def _take(self, now_ns: int) -> ProcessorUse | None:
        if not self._usable:
            return None
        if now_ns - self._listed_ns >= _TREE_NS:
            self._listed_ns = now_ns
            self._child_pids = _below(self._proc, self._pid)
            self._server_pids = {self._root, self._pid, *self._child_pids}
            if self._root != self._pid:
                self._server_pids |= _below(self._proc, self._root)
        self._count_busy()
        batches, ran_ns = self._work()
        server_ns = self._server.total_ns(self._server_pids)
        # all of this process's threads but this one, the event loop's, run instances; two clocks differ by a little
        self._threads_ns = max(self._threads_ns, time.process_time_ns() - time.thread_time_ns())
        return ProcessorUse(
            host=self._host,
            processors=self._processors,
            tree=self._root,
            at_ns=wall_ns(),
            busy_ns=server_ns if self._is_alone else self._busy_ns,
            server_ns=server_ns,
            instances_ns=self._children.total_ns(self._child_pids) + self._threads_ns,
            ran_ns=ran_ns,
            batches=batches,
            shared=self._shared,
            batcher=self._batcher,
        )

    def _count_busy(self) -> None:
        """Adds what was used since the call before. System time counts as processes of low priority as user time does,
        since the kernel does not tell them apart.
        """
        tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        ticks = busy_ticks((self._proc / "stat").read_text(), self._usable)
        if self._ticks is not None:
            usual, low, system = (max(0, now - before) for now, before in zip(ticks, self._ticks, strict=True))
            if self._is_low:
                usual, low = usual + low, 0
            share = usual / (usual + low) if usual + low else 1.0
            self._busy_ns += round((usual + system * share) * tick_ns)
        self._ticks = ticks


def _is_real_time() -> bool:
    return hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)


class _Clocks:
    """The processor time of processes, summed up since each was first seen: one that has ended takes nothing away."""

    def __init__(self) -> None:
        self._seen_ns: dict[int, int] = {}
        self._total_ns = 0

    def total_ns(self, pids: Iterable[int]) -> int:
        for pid in pids:
            try:
                used_ns = time.clock_gettime_ns(_clock_of(pid))
            except OSError:  # it has ended
                self._seen_ns.pop(pid, None)
                continue
            self._total_ns += max(0, used_ns - self._seen_ns.get(pid, used_ns))
            self._seen_ns[pid] = used_ns
        return self._total_ns


def _clock_of(pid: int) -> int:
    """The id of a process's clock, as clock_getcpuclockid(3) of Linux has it."""
    return (~pid << 3) | 2


def _below(proc: Path, pid: int) -> set[int]:
    """The processes that this one has started, and that those have. About 7 us for each of their threads: so it opens
    files itself, which is three times as fast as `Path`.
    """
    found: set[int] = set()
    left = [pid]
    while left:
        threads = f"{proc}/{left.pop()}/task"
        try:
            names = os.listdir(threads)
        except OSError:  # it has ended
            continue
        for name in names:
            children = {int(word) for word in _read(f"{threads}/{name}/children").split()} - found
            found |= children
            left += children
    return found


def _read(path: str) -> bytes:
    """The beginning of a small file; nothing where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 65_536)
    except OSError:  # its process has ended
        return b""
    finally:
        os.close(descriptor)


def busy_ticks(stat: str, processors: set[int]) -> tuple[int, int, int]:
    """Ticks of these processors from the text of `/proc/stat`: of processes of usual priority with interrupts and what
    the hypervisor took, of those of a low one, and of the kernel. Raises ValueError or IndexError for another text.
    """
    usual = low = system = 0
    for line in stat.splitlines():
        name, *words = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in processors:
            counts = list(map(int, words))
            usual += counts[0] + counts[5] + counts[6] + counts[7]
            low += counts[1]
            system += counts[2]
    return usual, low, system


def shared_number(boot_id: str, processors: set[int], container: str) -> int:
    """A number below 2**63 that only executors have alike which use the same processors: these of the machine that
    `boot_id` names, in all of its containers, or those of the `container` alone that has a quota. 0 without a boot id.
    """
    if not boot_id:
        return 0
    named = f"{boot_id} {container or sorted(processors)}"
    return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "big") >> 1


def _boot_id(proc: Path) -> str:
    """What the kernel drew when the machine started, alike in all of its containers; "" where it cannot be read."""
    return _read(f"{proc}/sys/kernel/random/boot_id").decode("ascii", "replace").strip()


def _quota(cgroup: Path) -> float:
    """How many processors the container may use at a time; 0 without a limit, or where none can be read."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return 0.0
    try:
        return max(0.0, int(limit) / int(period))  # without a limit "max", or -1
    except (ValueError, ZeroDivisionError):
        return 0.0
