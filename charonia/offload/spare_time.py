"""Has a worker run in the time of processors that nothing else asks for, and notices when that is too little.

Under the policy `SCHED_IDLE` a worker is interrupted at once by whatever wakes, and the kernel takes its processor for
a free one when it chooses where a thread wakes: an event loop then does not queue behind the process that woke it. But
beside ordinary work on all processors such a worker gets a three-hundredth of one. So its owner reads its processor
time while it runs a task; where it starves, it runs at its ordinary priority for a while, as all others do.

A process without the right CAP_SYS_NICE cannot leave `SCHED_IDLE`: its owner ends it, and a new one does the task. As
that costs a task's time, spare time is tried again ever more rarely then.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress

IN_SPARE_TIME = "in-spare-time"
"""The word of a worker's command that begins so."""
WINDOW_S = 0.5
"""Of one reading: a starving worker costs its task as much."""
_LEAST_SHARE = 0.1
"""Of a processor. With its ordinary priority, nice 5, a worker has a quarter of one where the others are busy."""
ORDINARY_S = 10.0
"""For so long after it starved a worker has its ordinary priority."""
_LONGEST_ORDINARY_S = 600.0
"""And at most for so long, after it had to be ended again and again."""


def run_in_spare_time(process: int = 0) -> bool:
    """Give a process (0: this one) the policy; False where that is refused, or where it was given another policy."""
    with suppress(OSError):
        if os.sched_getscheduler(process) == os.SCHED_OTHER:
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
            return True
    return False


class SpareTime:
    """The policy of one worker's process. For the thread that talks to it."""

    def __init__(self, *, window_s: float = WINDOW_S, ordinary_s: float = ORDINARY_S) -> None:
        self._window_s = window_s
        self._ordinary_s = ordinary_s
        self._ordinary_until_s = 0.0

    @property
    def may_be_used(self) -> bool:
        """Whether it did not starve lately."""
        return time.monotonic() >= self._ordinary_until_s

    def begin(self, process: int) -> None:
        """A task begins in a process that has run tasks before."""
        if self.may_be_used:
            run_in_spare_time(process)

    def starved(self, process: int, answers: socket.socket) -> bool:
        """Wait for the answer. True when the process starves and cannot get its ordinary priority back."""
        polled = select.poll()
        polled.register(answers, select.POLLIN)
        had_s, at_s = _processor_time_s(process), time.monotonic()
        while not polled.poll(self._window_s * 1000):
            if not self.may_be_used:
                polled.poll()  # with its ordinary priority it has its share
                return False
            now_had_s, now_s = _processor_time_s(process), time.monotonic()
            if now_had_s - had_s < _LEAST_SHARE * (now_s - at_s) and _is_runnable(process):
                self._ordinary_until_s = now_s + self._ordinary_s
                try:
                    if os.sched_getscheduler(process) == os.SCHED_IDLE:
                        os.sched_setscheduler(process, os.SCHED_OTHER, os.sched_param(0))
                except ProcessLookupError:
                    return False
                except PermissionError:
                    self._ordinary_s = min(2 * self._ordinary_s, _LONGEST_ORDINARY_S)
                    return True
            had_s, at_s = now_had_s, now_s
        return False


def _processor_time_s(process: int) -> float:
    """What a process of this machine has had; 0 for one that has ended."""
    try:
        return time.clock_gettime((~process << 3) | 2)  # its clock, as the C library makes it
    except OSError:
        return 0.0


def _is_runnable(process: int) -> bool:
    """Whether it runs or waits for a processor, not for anything else."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"R"
    except OSError:
        return False
