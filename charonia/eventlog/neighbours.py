"""Watches processes of this machine: the kernel reports their end at once, before their leases end.

`ProcessJoined` names the boot and the pid namespace of a process, its pid and its start time: so its pid is never
confused with one on another machine or in another container, or with an earlier process of that pid. If any of this is
unavailable (no pidfd, no /proc, another namespace), only the lease shows the process's end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from charonia.facts.events import ProcessJoined

_STATE, _FLAGS, _STARTED, _PENDING = 0, 6, 19, 28
"""Places in /proc/<pid>/stat behind the command."""
_STAT_BYTES = 4096
_ENDING_FLAGS = 0x4 | 0x200 | 0x400
"""PF_EXITING, PF_DUMPCORE, PF_SIGNALED."""
_KILL_PENDING = 1 << (signal.SIGKILL - 1)


def pid_space() -> str:
    """Names the boot of this machine and the pid namespace of this process; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def started_ticks(pid: int) -> int:
    """When a process was started, in the kernel's ticks since its boot; 0 if that cannot be read."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields else 0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, and thus not busy."""
    fields = _stat(pid)
    return bool(fields) and fields[_STATE] == b"T"


def is_ending(pid: int) -> bool:
    """Whether a process executes nothing of its program any more: it was killed, crashed, exits or has ended.

    Its pidfd says so only at the end of that, which needs processor time: seconds on a machine with too much to do.
    False where it cannot be found out.
    """
    fields = _stat(pid)
    if not fields:
        return False
    ends = int(fields[_FLAGS]) & _ENDING_FLAGS or int(fields[_PENDING]) & _KILL_PENDING
    return fields[_STATE] in (b"Z", b"X") or bool(ends)


def _stat(pid: int) -> list[bytes]:
    """What /proc says of a process behind its command; empty where it says nothing. Read several times a second by the
    process beside each part, so without a file object.
    """
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(descriptor, _STAT_BYTES).rpartition(b")")[2].split()
        finally:
            os.close(descriptor)
    except OSError:
        return []
    return fields if len(fields) > _PENDING else []


class Neighbours:
    """Watches processes by their pidfds. Calls `on_end` in the event loop with the incarnation that ended."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._space = pid_space()
        self._watched: dict[str, tuple[int, int]] = {}

    def watch(self, joined: ProcessJoined) -> None:
        """Watch a process, if it is of this machine."""
        if not self._space or joined.pid_space != self._space or joined.incarnation in self._watched:
            return
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(joined.pid)
        except ProcessLookupError:
            loop.call_soon(self._on_end, joined.incarnation)
            return
        except OSError:
            return
        started = started_ticks(joined.pid)
        if started != joined.started_ticks:
            os.close(descriptor)
            if started:
                loop.call_soon(self._on_end, joined.incarnation)
            return
        self._watched[joined.incarnation] = (joined.pid, descriptor)
        loop.add_reader(descriptor, self._ended, joined.incarnation)

    def is_busy(self, incarnation: str) -> bool:
        """Whether a process is known to live, and is neither stopped nor ending."""
        pid, _ = self._watched.get(incarnation, (0, 0))
        return bool(pid) and not is_stopped(pid) and not is_ending(pid)

    def forget(self, incarnation: str) -> None:
        _, descriptor = self._watched.pop(incarnation, (0, -1))
        if descriptor >= 0:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        for incarnation in list(self._watched):
            self.forget(incarnation)

    def _ended(self, incarnation: str) -> None:
        self.forget(incarnation)
        self._on_end(incarnation)
