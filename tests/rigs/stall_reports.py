"""The reports of `--debug-stalls` in a server's log."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REPORT = re.compile(
    r"^W\S+ \S+ (\d+) charonia\.stalls\] the event loop stood still for (\d+) ms \((\d+) ms of it on a processor, "
    r"\d+ ms other threads, (\d+) ms collecting garbage\) in\n((?:    .*\n)*)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Report:
    """One report: of which process, for how long, how much of that on a processor, and the stack, innermost last."""

    pid: int
    length_ms: int
    on_processor_ms: int
    stack: tuple[str, ...]


def reports(log: str) -> list[Report]:
    """All reports in a log."""
    found = []
    for pid, length, processor, _, lines in _REPORT.findall(log):
        stack = tuple(line.strip() for line in lines.splitlines() if not line.startswith("    beside:"))
        found.append(Report(int(pid), int(length), int(processor), stack))
    return found


def own_work(log: str, limit_ms: int) -> list[Report]:
    """The reports that name code as running for so long: a loop that only was not run, on a busy machine, is none."""
    return [one for one in reports(log) if one.on_processor_ms >= limit_ms and "no callback" not in one.stack[0]]
