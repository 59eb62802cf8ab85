"""Measures the memory of this process and its children, and returns free memory to the system.

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
