"""The processes of this machine: their end is seen by the kernel, at once, and not by their leases.

A process says in `ProcessJoined` in which pid namespace of which boot its pid is, and when it was started: so a pid is
never taken for one of another machine or container, or of a process that had it before. Whatever cannot be found out
(no pidfd, no /proc, another namespace) leaves a process to its lease.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from charonia.facts.events import ProcessJoined

_STATE, _STARTED = 0, 19
"""Places in /proc/<pid>/stat behind the command."""


def pid_space() -> str:
    """Names the boot of this machine and the pid namespace of this process; "" where there is no telling."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def started_ticks(pid: int) -> int:
    """When a process was started, in the kernel's ticks since its boot; 0 where that cannot be read."""
    return int(_stat(pid, _STARTED) or 0)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal: it is not busy then."""
    return _stat(pid, _STATE) == "T"


def _stat(pid: int, place: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[place].decode()
    except (OSError, IndexError):
        return ""


class Neighbours:
    """Watches processes by their pidfds. `on_end` is called in the event loop, with the incarnation that ended."""

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
        """Whether a process is known to live, and is not stopped."""
        pid, _ = self._watched.get(incarnation, (0, 0))
        return bool(pid) and not is_stopped(pid)

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
