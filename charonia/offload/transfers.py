"""Moves large data between a connection and memory in threads, some milliseconds at a time.

An event loop that does so itself has no pause while 64 MB pass, in however small pieces. What shares its processor then
waits for the end of a tick, and so does the loop when it wakes for a small call later: the kernel is fair, and the loop
has had its share (docs/adr/0084).
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

APART_BYTES = 4 << 20
"""From this size on threads move what is left of a body. For less, the way to a thread and back costs more than it
saves."""

_PIECE_BYTES = 1 << 16
"""Of one system call, up to 0.1 ms. A kernel without preemption lets no other thread run before the call returns."""
_TURN_S = 0.01
"""After this time the thread serves another connection."""
_PATIENCE_MS = 2
"""How long a thread waits for a peer that is a little slower, once for each piece that this turn has moved: that costs
less than the way to the event loop and back. Peers that send or read less are not waited for."""

Step = Callable[[int, int], int]
"""Moves a piece, from this place up to that one. Returns how much, 0 at the end of what there is; raises
`BlockingIOError` when the connection is not ready, and `OSError`."""


def sends_file(connection: int, file: int, offset: int) -> Step:
    """Sends a file from `offset` on: the kernel passes its pages on, and nothing is copied."""
    return lambda at, end: os.sendfile(connection, file, offset + at, end - at)


def sends(connection: int, view: memoryview) -> Step:
    """Sends memory: the kernel copies it."""
    return lambda at, end: os.write(connection, view[at:end])


def move(step: Step, at: int, end: int, connection: int, event: int) -> tuple[int, bool]:
    """Move what is between `at` and `end` for one turn.

    `connection` is a descriptor that does not block, `event` what it has to be ready for (`select.POLLIN` or
    `POLLOUT`). Returns how far it came, and whether the next turn has to wait until the connection is ready. Raises
    `EOFError` when there is no more, and `OSError`.
    """
    over_s, begin, waits = time.monotonic() + _TURN_S, at, 0
    poll = select.poll()
    poll.register(connection, event)
    while at < end and time.monotonic() < over_s:
        try:
            size = step(at, min(end, at + _PIECE_BYTES))
        except BlockingIOError:
            if (at - begin) // _PIECE_BYTES <= waits or not poll.poll(_PATIENCE_MS):
                return at, True
            waits += 1
            continue
        if not size:
            raise EOFError(f"the data ends {end - at} bytes early")
        at += size
    return at, False
