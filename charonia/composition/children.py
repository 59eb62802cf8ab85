"""Child processes of `charonia serve`: started in its process group, watched by pidfd, told apart by role."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from charonia.options.values import OPTIONS

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
HEARTBEATS = "charonia-beats"
"""The name of the process that prolongs a part's leases; the system keeps 15 bytes."""
_FIRST_BACKOFF_S = 0.05
_MOST_BACKOFF_S = 5.0
STABLE_S = 30.0
"""What ends later than this after its start has not failed to start."""

_OPTION_VARIABLES = frozenset(option.variable for option in OPTIONS)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; ends it now if the parent is gone already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def name_process(name: str) -> None:
    """Give this process a name for /proc/<pid>/comm, where the system has such names."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def backoff_s(failures: int) -> float:
    """How long to wait before what has ended so many times in a row is started again."""
    return min(_MOST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 10))


class Child:
    """One part as a process. `on_report` gets every JSON line it reports, `on_exit` its exit status once.

    `ready` is a part that has started, `serving` a gateway whose readiness has been true.
    """

    def __init__(
        self,
        role: str,
        argv: list[str],
        on_report: Callable[[Child, dict[str, Any]], None],
        on_exit: Callable[[Child, int], None],
    ) -> None:
        self.role = role
        self._argv = argv
        self._pinned: list[str] = []
        self._on_report = on_report
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._report = b""
        self._reader = -1
        self.metrics_socket = Path()
        self.exited = asyncio.Event()
        self.ready = self.was_ready = self.serving = False
        self.status: int | None = None
        self.failures = 0
        self.reason = ""
        self.started_at_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def pin(self, *flags: str) -> None:
        """Flags for every later start: what this one found out and its successors must keep."""
        self._pinned = list(flags)

    def start(self) -> None:
        """Start (again). SIGINT stays blocked in the child: Ctrl-C reaches the whole group, the parent decides.

        Raises `OSError` where the system gives no process or no descriptor.
        """
        reader, writer = os.pipe()
        process = None
        try:
            process = self._spawn(writer)
            os.set_blocking(reader, False)
            self._loop.add_reader(reader, self._read, reader)
            watch(self._loop, process, self._ended)
        except BaseException:  # nothing is left of a start that failed, however often it is tried
            self._loop.remove_reader(reader)
            os.close(reader)
            if process is not None:
                process.kill()
                process.wait()
            raise
        self._process, self._report, self._reader = process, b"", reader
        self.ready = self.serving = False
        self.exited.clear()
        self.started_at_s = self._loop.time()

    def _spawn(self, writer: int) -> subprocess.Popen[bytes]:
        """The process; `writer`, where it reports, is its own from then on."""
        command = [sys.executable, "-m", "charonia.cli", self._argv[0], f"--report-fd={writer}", *self._argv[1:]]
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return subprocess.Popen(
                [*command, *self._pinned], pass_fds=[writer], stdin=subprocess.DEVNULL, env=_environment()
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            os.close(writer)

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            if self._reader == descriptor:
                self._reader = -1
            return
        *lines, self._report = (self._report + data).split(b"\n")
        for line in lines:
            self._on_report(self, json.loads(line))

    def _ended(self, status: int) -> None:
        if self._reader >= 0:  # its last words, which tell why, may not have been read yet
            self._read(self._reader)
        self.ready = self.serving = False
        self.status = status
        self.exited.set()
        self._on_exit(self, status)


def _environment() -> dict[str, str]:
    """The parent's, without option variables: the flags are complete, and what a flag had overruled stays overruled."""
    kept = {name: value for name, value in os.environ.items() if name not in _OPTION_VARIABLES}
    return {**kept, "CHARONIA_PARENT_PID": str(os.getpid())}


def watch(loop: asyncio.AbstractEventLoop, process: subprocess.Popen[bytes], ended: Callable[[int], None]) -> None:
    """Call `ended(returncode)` in the loop when a child ends."""
    descriptor = os.pidfd_open(process.pid)

    def exited() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ended(process.wait())

    try:
        loop.add_reader(descriptor, exited)
    except BaseException:
        os.close(descriptor)
        raise


def descendants(pid: int) -> list[tuple[int, str]]:
    """(pid, name) of every process below `pid`: `instance:<model>...`, `beats`, `offload`, others by their command."""
    found: list[tuple[int, str]] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
        except OSError:
            continue
        for task in tasks:
            try:
                children = [int(child) for child in (task / "children").read_text().split()]
            except OSError:
                continue
            for child in children:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace").split("\0")
                    marked = next((word for word in words if word.startswith("charonia-instance:")), "")
                    if "charonia.offload.worker" in words:
                        marked = "offload"
                    # it was forked, so its words are the part's
                    if Path(f"/proc/{child}/comm").read_text().strip() == HEARTBEATS:
                        marked = HEARTBEATS
                    found.append((child, marked.removeprefix("charonia-") or words[0]))
                    waiting.append(child)
    return found
