"""Reads CPU time and memory of the server's processes from /proc, by role; it leaves rates and verdicts to the bench.

Roles come from a `processes.json`: a list of {"role": str, "pid": int}. A process that is not listed counts towards
the role of its nearest listed ancestor.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Stat:
    """From /proc/PID/stat: parent, and user + system clock ticks of all its threads and of children it has reaped."""

    parent_pid: int
    cpu_ticks: int


def parse_stat(text: str) -> Stat:
    """Raises ValueError for text that is no /proc/PID/stat line."""
    # The command is in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    if len(fields) < 15:
        raise ValueError(f"not a process stat line: {text[:80]!r}")
    return Stat(parent_pid=int(fields[1]), cpu_ticks=sum(int(field) for field in fields[11:15]))


def parse_pss(text: str) -> int:
    """Proportional set size in bytes from smaps_rollup. Raises ValueError when it is not there."""
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss":
            number, unit = rest.split()
            if unit != "kB":
                raise ValueError(f"Pss in an unknown unit: {line!r}")
            return int(number) * 1024
    raise ValueError("no Pss line")


def load_roles(path: Path) -> dict[int, str]:
    """Role by pid. Raises ValueError when the file is not such a list, OSError when it cannot be read.

    Entries with a "parent" are left out: what a process started counts towards its role.
    """
    try:
        entries = json.loads(path.read_bytes())
        return {int(entry["pid"]): str(entry["role"]) for entry in entries if "parent" not in entry}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of role and pid: {error!r}") from None


def assign_roles(listed: Mapping[int, str], parents: Mapping[int, int]) -> dict[int, str]:
    """Role of every process in `parents` (pid to parent pid) that is listed or descends from a listed one."""
    roles = {}
    for pid in parents:
        ancestor = pid
        seen = set()
        while ancestor in parents and ancestor not in listed and ancestor not in seen:
            seen.add(ancestor)
            ancestor = parents[ancestor]
        if ancestor in listed and pid in parents:
            roles[pid] = listed[ancestor]
    return roles


def read_stats(proc: Path = PROC) -> dict[int, Stat]:
    """Every readable process of the machine; one that ends meanwhile is left out."""
    stats = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                stats[int(entry.name)] = parse_stat((entry / "stat").read_text(errors="replace"))
            except (OSError, ValueError):
                continue
    return stats


def cpu_ns_by_role(listed: Mapping[int, str], proc: Path = PROC) -> dict[str, int]:
    """User + system CPU nanoseconds per role, to the 10 ms of the clock tick."""
    stats = read_stats(proc)
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    totals: Counter[str] = Counter()
    for pid, role in assign_roles(listed, {pid: stat.parent_pid for pid, stat in stats.items()}).items():
        totals[role] += stats[pid].cpu_ticks * tick_ns
    return dict(totals)


def pss_bytes_by_role(listed: Mapping[int, str], proc: Path = PROC) -> dict[str, int]:
    """Proportional set size per role in bytes; processes of other users cannot be read and are left out."""
    parents = {pid: stat.parent_pid for pid, stat in read_stats(proc).items()}
    totals: Counter[str] = Counter()
    for pid, role in assign_roles(listed, parents).items():
        try:
            totals[role] += parse_pss((proc / str(pid) / "smaps_rollup").read_text())
        except (OSError, ValueError):
            continue
    return dict(totals)
