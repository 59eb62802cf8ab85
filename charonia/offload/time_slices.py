"""Sets the time slice of a thread: how soon it runs when it wakes on a busy processor (Linux 6.12 and later).

The kernel lets a thread that wakes interrupt another one of the same priority only if its slice is shorter. Otherwise
it waits for the end of that slice, which is noticed at a tick (4 ms with 250 ticks a second). A slice changes no share
of the processor and needs no right. Elsewhere, and on older kernels, it has no effect.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from struct import Struct

LOOP_SLICE_NS = 100_000
"""Of an event loop: the shortest that the kernel knows."""
WORK_SLICE_NS = 100_000_000
"""Of work in bulk: the longest that the kernel knows."""

BULK = "charonia-bulk"
"""Name of threads whose work in bulk stays off the processor of an event loop, where there are only two
(`charonia.eventlog.embedded.shared_processor`); at most 15 bytes."""

_NICE = 5
"""Small calls of others go first where processors are short."""
_FIRST_TO_END = b"600"
"""Where memory is short the system ends a worker, whose task then fails, before it ends its owner."""
_SCHED_ATTR = Struct("<IIQiIQQQ")
"""The structure sched_attr, first version: size, policy, flags, nice, priority, runtime, deadline, period."""
_RESET_ON_FORK = 1
_NUMBERS = {"x86_64": 314, "aarch64": 274}
"""Of the system call sched_setattr, which the C library of many systems does not wrap."""


def set_time_slice(slice_ns: int, *, inherited: bool, thread: int = 0) -> bool:
    """Sets a thread's slice, and that of the threads and processes it starts later if it is `inherited`.

    `thread` is its system-wide id (of a process: its main thread), 0 the calling one. Returns False where that cannot
    be done, and for a thread that has a policy or priority of its own: it keeps them.
    """
    number = _NUMBERS.get(os.uname().machine)
    try:
        if number is None or os.sched_getscheduler(thread) != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:
        return False
    if nice < 0 and not inherited:
        return False  # the threads it starts would lose that priority
    flags = 0 if inherited else _RESET_ON_FORK
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, flags, nice, 0, slice_ns, 0, 0)
    try:
        return bool(ctypes.CDLL(None).syscall(number, thread, attributes, 0) == 0)
    except (OSError, AttributeError):
        return False


def name_bulk() -> None:
    """Call the calling thread `BULK`, where threads have such names."""
    with contextlib.suppress(OSError), open("/proc/thread-self/comm", "wb", buffering=0) as file:
        file.write(BULK.encode())


def follow_processors(process: int) -> None:
    """Let a thread that is named `BULK`, and has one processor, use those of a process's main thread, if these are two.

    The thread that started this one may have been kept on one processor then, and this one inherited that. Who lifts it
    finds threads by their name, so it overlooks a thread without the name: such a thread calls this once it has it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    with contextlib.suppress(OSError):
        processors = os.sched_getaffinity(process)
        if len(processors) == 2 and len(os.sched_getaffinity(0)) == 1:
            os.sched_setaffinity(0, processors)


def work_in_bulk(*, ends_first: bool) -> None:
    """Give this process the priority and the slice of work that others do not wait for.

    `ends_first`: where memory is short the system ends it before others.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICE)
        set_time_slice(WORK_SLICE_NS, inherited=True)
        if not ends_first:
            return
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(_FIRST_TO_END)
