"""Reads CPU time, context switches and memory of a server's processes from /proc, by role.

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


def parse_parent(text: str) -> int:
    """Parent of a process, from /proc/PID/stat. Raises ValueError for text that is no /proc/PID/stat line."""
    # The command is in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    if len(fields) < 2:
        raise ValueError(f"not a process stat line: {text[:80]!r}")
    return int(fields[1])


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


def load_roles(path: Path, models: bool = False) -> dict[int, str]:
    """Role by pid. Raises ValueError when the file is not such a list, OSError when it cannot be read.

    Entries with a "parent" (processes of model instances) count towards the role of their parent, or with `models`
    have the role "model".
    """
    try:
        entries = json.loads(path.read_bytes())
        roles = {int(entry["pid"]): str(entry["role"]) for entry in entries if "parent" not in entry}
        return roles | ({int(entry["pid"]): "model" for entry in entries if "parent" in entry} if models else {})
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


def read_parents(proc: Path = PROC) -> dict[int, int]:
    """Parent of every readable process of the machine; one that ends meanwhile is left out."""
    parents = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = parse_parent((entry / "stat").read_text(errors="replace"))
            except (OSError, ValueError):
                continue
    return parents


@dataclass(frozen=True)
class Usage:
    """CPU nanoseconds and voluntary context switches (each is followed by a wake-up) of all threads of a role."""

    cpu_ns: int = 0
    switches: int = 0

    def since(self, before: Usage) -> Usage:
        """What was used after `before`."""
        return Usage(self.cpu_ns - before.cpu_ns, self.switches - before.switches)


def usage_of(pid: int, proc: Path = PROC) -> Usage:
    """Usage of the live threads of one process; what an ended thread used is lost."""
    cpu_ns = switches = 0
    try:
        threads = list((proc / str(pid) / "task").iterdir())
    except OSError:
        return Usage()
    for thread in threads:
        try:
            cpu_ns += int((thread / "schedstat").read_bytes().split()[0])
            status = (thread / "status").read_bytes()
            switches += int(status.split(b"\nvoluntary_ctxt_switches:", 1)[1].split(None, 1)[0])
        except (OSError, IndexError):
            continue
    return Usage(cpu_ns, switches)


def members(listed: Mapping[int, str], proc: Path = PROC) -> dict[int, str]:
    """Role of every listed process and of all that descend from one."""
    return assign_roles(listed, read_parents(proc))


def usage_by_role(roles: Mapping[int, str], proc: Path = PROC) -> dict[str, Usage]:
    """Usage per role of exactly the given processes (see `members`)."""
    totals: dict[str, Usage] = {}
    for pid, role in roles.items():
        one, sum_ = usage_of(pid, proc), totals.get(role, Usage())
        totals[role] = Usage(sum_.cpu_ns + one.cpu_ns, sum_.switches + one.switches)
    return totals


def machine_busy_ns(proc: Path = PROC) -> int:
    """CPU nanoseconds that the whole machine has spent on anything, to the 10 ms of the clock tick."""
    ticks = [int(word) for word in (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))


def pss_bytes_by_role(listed: Mapping[int, str], proc: Path = PROC) -> dict[str, int]:
    """Proportional set size per role in bytes; processes of other users cannot be read and are left out."""
    totals: Counter[str] = Counter()
    for pid, role in members(listed, proc).items():
        try:
            totals[role] += parse_pss((proc / str(pid) / "smaps_rollup").read_text())
        except (OSError, ValueError):
            continue
    return dict(totals)
