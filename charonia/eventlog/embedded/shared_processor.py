"""Keeps the private server and the event loop of the only gateway on one processor of two.

A request passes client, gateway, log server and executor, and each wakes the next. The kernel starts one that wakes on
the processor that is idle, so on two processors all of them move to and fro: they find cold caches, and a virtual
machine pays for every wake-up of the other processor. Kept together, these two take turns in warm caches, and leave the
other processor to the model. With more processors nothing is done, because nothing was measured there.

The kernel cannot move threads that are kept, so they are left to it when the gateway has to wait for its processor: for
other work, or for the log server where they do not work in turn. Threads and processes that they start inherit the
restriction, which is lifted a second later. Those that work in bulk (`charonia.offload.time_slices.BULK`) keep to the
other processor meanwhile: beside 64 MB of JSON log server and gateway would wait for them until the next tick.
A mask that an operator sets is left as it is, except that threads for large messages do not keep to a mask of one
processor. Models are not touched: libraries count the processors that threads may use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from charonia.offload.time_slices import BULK

_PROCESSORS = 2
_MAX_WAIT = 0.15
"""Share of the time that the gateway may wait. It was 0.02 to 0.07 where keeping them gained, and 0.2 or more where it
cost: with 256 requests in flight, and with requests of many forms (docs/benchmarks.md)."""
_PAUSES_S = (10.0, 60.0)
"""How long they are left to the kernel after that: at first, and at most."""


class SharedProcessor:
    """`look` is called about once a second. `proc` is the directory of processes of Linux."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._pids: tuple[int, int] | None = None
        self._started: Callable[[], Collection[int]] = tuple
        self._usable: set[int] = set()
        """The processors of both while they are kept on one of them; empty while they are not."""
        self._processor = -1
        self._waited_ns = 0
        """How long the gateway had waited for a processor."""
        self._looked_ns = self._kept_since_ns = self._closed_until_ns = 0
        self._pause_s, _ = _PAUSES_S
        self._is_left_alone = not hasattr(os, "sched_setaffinity")

    def look(self, pids: tuple[int, int] | None, started: Callable[[], Collection[int]], now_ns: int) -> None:
        """Keep the main threads of log server and gateway together, or leave them to the kernel.

        `pids` are theirs, None while one of them does not serve; `started` tells the ids of their children. Does
        nothing where the system does not tell what threads wait for, or does not allow it.
        """
        if self._is_left_alone:
            return
        try:
            if pids != self._pids:
                self._release()
                self._pids, self._started = pids, started
            if pids is None:
                return
            if not self._usable:
                if now_ns >= self._closed_until_ns:
                    self._keep(pids, now_ns)
                return
            if any(os.sched_getaffinity(pid) != {self._processor} for pid in pids):
                self._release()
                self._is_left_alone = True  # an operator decides
                return
            waited_ns = self._read_waited(pids)
            if waited_ns - self._waited_ns > _MAX_WAIT * (now_ns - self._looked_ns):
                self._pause(now_ns)
                return
            self._waited_ns, self._looked_ns = waited_ns, now_ns
            self._widen(pids, self._usable - {self._processor})
        except (OSError, ValueError, IndexError):  # one has ended: the next look gets its successor
            self._release()

    def _keep(self, pids: tuple[int, int], now_ns: int) -> None:
        usable, other = (os.sched_getaffinity(pid) for pid in pids)
        if usable != other or len(usable) != _PROCESSORS:
            return
        stat = (self._proc / str(pids[1]) / "stat").read_text()
        self._processor = int(stat.rpartition(")")[2].split()[36])  # the one where it ran last
        if self._processor not in usable:
            return
        self._waited_ns = self._read_waited(pids)
        self._usable, self._kept_since_ns, self._looked_ns = usable, now_ns, now_ns
        for pid in pids:
            os.sched_setaffinity(pid, {self._processor})
        self._widen(pids, usable - {self._processor})

    def _pause(self, now_ns: int) -> None:
        """The gateway has to wait: leave them to the kernel, for longer each time that it happens again soon."""
        first_s, most_s = _PAUSES_S
        if now_ns - self._kept_since_ns > self._pause_s * 1e9:
            self._pause_s = first_s
        self._closed_until_ns = now_ns + int(self._pause_s * 1e9)
        self._pause_s = min(most_s, 2 * self._pause_s)
        self._release()

    def _release(self) -> None:
        if self._usable and self._pids is not None:
            for pid in self._pids:
                self._move(pid, {self._processor}, self._usable)
            # after them: what they start from now on inherits nothing
            self._widen(self._pids, self._usable)
        self._usable = set()

    def _widen(self, pids: tuple[int, int], for_bulk: set[int]) -> None:
        """Lift the restriction of all that the two have started since; threads that work in bulk get `for_bulk`."""
        for pid in (*pids, *self._started()):
            with contextlib.suppress(OSError):  # it has ended
                for thread in map(int, os.listdir(self._proc / str(pid) / "task")):
                    if thread not in pids:
                        with contextlib.suppress(OSError):
                            self._place(pid, thread, for_bulk)

    def _place(self, pid: int, thread: int, for_bulk: set[int]) -> None:
        if (self._proc / str(pid) / "task" / str(thread) / "comm").read_bytes().strip() != BULK.encode():
            self._move(thread, {self._processor}, self._usable)
            return
        for mask in ({self._processor}, self._usable, self._usable - {self._processor}):
            self._move(thread, mask, for_bulk)

    def _move(self, thread: int, mask: set[int], to: set[int]) -> None:
        """Give a thread with this mask another one; what an operator sets is another mask."""
        with contextlib.suppress(OSError):  # it has ended
            if mask != to and os.sched_getaffinity(thread) == mask:
                os.sched_setaffinity(thread, to)

    def _read_waited(self, pids: tuple[int, int]) -> int:
        return int((self._proc / str(pids[1]) / "schedstat").read_text().split()[1])
