"""What a process and its children hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from executors.host.memory import process_bytes, release_free_memory, tree_bytes, usable_bytes


def put(proc: Path, pid: int, *, pss_kib: int | None, children: str = "") -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (task / "children").write_text(children)
    if pss_kib is not None:
        (proc / str(pid) / "smaps_rollup").write_text(
            f"00-ff ---p 00 00:00 0 [rollup]\nRss: 9 kB\nPss:    {pss_kib} kB\n"
        )


def test_descendants_count_and_those_that_ended_do_not(tmp_path: Path) -> None:
    put(tmp_path, 1, pss_kib=10, children="2 3 ")
    put(tmp_path, 2, pss_kib=20, children="4")
    put(tmp_path, 4, pss_kib=40)
    assert tree_bytes(1, tmp_path) == 70 * 1024
    assert process_bytes(3, tmp_path) == 0


def test_without_shares_the_resident_size_counts(tmp_path: Path) -> None:
    put(tmp_path, 1, pss_kib=None)
    (tmp_path / "1" / "statm").write_text("100 7 3 1 0 5 0\n")
    assert process_bytes(1, tmp_path) == 7 * os.sysconf("SC_PAGE_SIZE")


def test_this_process_and_a_child() -> None:
    own = process_bytes(os.getpid())
    assert own > 1024**2
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdout.readline()
        assert process_bytes(child.pid) > 0
        assert tree_bytes() > process_bytes(os.getpid())
    finally:
        child.communicate(b"\n")
    release_free_memory()


def test_a_container_may_use_less_than_the_machine_has(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    assert usable_bytes(proc, cgroup) == 0
    (proc / "meminfo").write_text("MemTotal:        1000 kB\nMemFree: 1 kB\n")
    assert usable_bytes(proc, cgroup) == 1_024_000
    (cgroup / "memory.max").write_text("max\n")
    assert usable_bytes(proc, cgroup) == 1_024_000
    (cgroup / "memory.max").write_text("512000\n")
    assert usable_bytes(proc, cgroup) == 512_000
