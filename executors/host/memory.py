"""How much memory this process and its children hold, and giving back what is free.

Shared pages are counted in part (PSS). Linux; reads /proc.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PROC = Path("/proc")


def tree_bytes(pid: int | None = None, proc: Path = PROC) -> int:
    """Of a process and all its descendants. One that ends meanwhile counts for nothing. Not for the event loop."""
    total = 0
    waiting = [os.getpid() if pid is None else pid]
    while waiting:
        one = waiting.pop()
        total += process_bytes(one, proc)
        waiting += _children(one, proc)
    return total


def release_free_memory() -> None:
    """Let the allocator give the system what it has free; without this a process stays as large as it ever was.

    Where the C library cannot (not glibc) nothing happens. Takes milliseconds: not for the event loop.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def process_bytes(pid: int, proc: Path = PROC) -> int:
    """Of one process; 0 when it is gone."""
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
