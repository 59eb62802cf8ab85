"""The worker process: does one task after the other until its owner closes the socket.

A task names its function as `module:function`; that takes the note and the buffers, and returns a note and buffers.

To free the pages of 64 MB takes 20 ms, and does it where the last reference ends. So the worker holds on to the memory
of a task and of its result until the next task, or for a moment: its owner, whose threads event loops wait for, is done
with it by then. Nothing here runs in a thread: with two of its threads at work the processors of a small machine are
all busy, and a call that comes then waits for the kernel's next tick, 4 ms.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from charonia.errors import CharoniaError, InternalError

from .handover import Buffer, receive, send
from .reclaimed import unmap_where_it_ends
from .time_slices import follow_processors, name_bulk, work_in_bulk

_HELD_S = 1.0
"""From the end of a task until its memory is free at the latest, as far as the worker is concerned."""

Function = Callable[[Any, list[memoryview]], tuple[Any, Sequence[Buffer]]]


def main(descriptor: int, *, is_large: bool) -> None:
    """Serve the socket with this descriptor until its other end is closed. `is_large`: only large tasks come."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of the whole process group: the owner still has tasks
        signal.signal(number, signal.SIG_IGN)
    work_in_bulk(ends_first=True)
    if is_large:
        name_bulk()
        follow_processors(os.getppid())
    unmap_where_it_ends()
    gc.disable()  # tasks make millions of objects and no cycles
    known: dict[str, Function] = {}
    held: list[int] = []
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(EOFError, OSError):
        polled = select.poll()
        polled.register(connection, select.POLLIN)
        while True:
            if held:
                polled.poll(_HELD_S * 1000)
                while held:
                    os.close(held.pop())
            _serve_one(connection, known, held)


def _serve_one(connection: socket.socket, known: dict[str, Function], held: list[int]) -> None:
    (name, note), buffers = receive(connection, held)
    made: Sequence[Buffer] = ()
    try:
        function = known.get(name)
        if function is None:
            module, _, attribute = name.partition(":")
            function = known[name] = getattr(import_module(module), attribute)
        answer, made = function(note, buffers)
        result: list[Any] = [answer, None]
    except CharoniaError as error:
        result = [None, [int(error.code), error.message]]
    except MemoryError:
        result = [None, [int(InternalError.code), "there is not enough memory for a message of this size"]]
    except Exception as error:
        sys.stderr.write(f"a task of {name} failed: {error!r}\n")
        result = [None, [int(InternalError.code), "internal server error"]]
    send(connection, result, made, held)  # the task's memory is unmapped after that, when no caller waits


if __name__ == "__main__":
    main(int(sys.argv[1]), is_large=sys.argv[2] == "large")
