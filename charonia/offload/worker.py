"""The worker process: does one task after the other until its owner closes the socket.

A task names its function as `module:function`; that takes the note and the buffers, and returns a note and buffers.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from charonia.errors import CharoniaError, InternalError

from .handover import Buffer, receive, send
from .spare_time import IN_SPARE_TIME, run_in_spare_time
from .time_slices import work_in_bulk

Function = Callable[[Any, list[memoryview]], tuple[Any, Sequence[Buffer]]]


def main(descriptor: int, *, in_spare_time: bool) -> None:
    """Serve the socket with this descriptor until its other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of the whole process group: the owner still has tasks
        signal.signal(number, signal.SIG_IGN)
    work_in_bulk(ends_first=True)
    if in_spare_time:
        run_in_spare_time()
    gc.disable()  # tasks make millions of objects and no cycles
    known: dict[str, Function] = {}
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(EOFError, OSError):
        while True:
            _serve_one(connection, known)


def _serve_one(connection: socket.socket, known: dict[str, Function]) -> None:
    (name, note), buffers = receive(connection)
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
    del buffers
    send(connection, result, made)


if __name__ == "__main__":
    main(int(sys.argv[1]), in_spare_time=IN_SPARE_TIME in sys.argv[2:])
