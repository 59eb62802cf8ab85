"""Measures the memory of this process and its children, and of the machine; returns free memory to the system.

Shared pages are counted in proportion (PSS). Linux only; reads /proc.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PROC = Path("/proc")


def tree_bytes(pid: int | None = None, proc: Path = PROC) -> int:
    """Return the memory of a process and its descendants. Processes that end meanwhile count 0. Call it in a thread."""
    total = 0
    waiting = [os.getpid() if pid is None else pid]
    while waiting:
        one = waiting.pop()
        total += process_bytes(one, proc)
        waiting += _children(one, proc)
    return total


def release_free_memory() -> None:
    """Let the allocator return free memory to the system; without this, a process never shrinks.

    Does nothing without glibc. Takes milliseconds: call it in a thread.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def process_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the memory of one process; 0 when it has ended."""
    try:
        for line in (proc / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _children(pid: int, proc: Path) -> list[int]:
    found: list[int] = []
    try:
        for task in (proc / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except (OSError, ValueError):
        pass
    return found


def usable_bytes(proc: Path = PROC, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory that this process may use: the machine's or its container's limit; 0 when neither can be read."""
    found: list[int] = []
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            found.append(int((cgroup / name).read_text()))  # "max" means no limit, and raises ValueError
        except (OSError, ValueError):
            continue
    return min(found, default=0)
