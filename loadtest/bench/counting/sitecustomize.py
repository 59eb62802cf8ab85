"""Counts every call of a Python function in this process; Python imports it at start when its folder is on PYTHONPATH.

It does nothing unless LOADTEST_COUNT_CALLS names a directory. Then each process listens on the socket PID.sock there
and answers every connection with its counts as JSON: {"FILE:LINE:FUNCTION": calls}. What is counted is the entry of
an interpreter frame, so a coroutine counts once for its call and once for each time that it goes on after a wait.
Functions written in C are not counted, nor are threads that were started without `threading`.
"""

import os

_DIRECTORY = os.environ.get("LOADTEST_COUNT_CALLS")

if _DIRECTORY:
    import json
    import socket
    import sys
    import threading
    from types import CodeType, FrameType
    from typing import Any

    _counts: dict[int, int] = {}
    _codes: dict[int, CodeType] = {}

    def _count(frame: FrameType, event: str, _: Any) -> None:
        """The profile function; a code object is known by its address, for its hash is computed from its content."""
        if event == "call":
            code = frame.f_code
            key = id(code)
            if key in _counts:
                _counts[key] += 1
            else:
                _codes[key] = code  # keeps it alive, so that its address stays its own
                _counts[key] = 1

    def _document() -> bytes:
        calls: dict[str, int] = {}
        for key, count in list(_counts.items()):
            code = _codes[key]
            name = f"{code.co_filename}:{code.co_firstlineno}:{code.co_qualname}"
            calls[name] = calls.get(name, 0) + count
        return json.dumps(calls).encode()

    def _serve(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.sendall(_document())
                except OSError:
                    continue

    def _start() -> None:
        """Listens and counts in the thread that calls it and in all that start after it."""
        _counts.clear()
        path = os.path.join(str(_DIRECTORY), f"{os.getpid()}.sock")
        if os.path.exists(path):  # the same process, after an exec
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(16)
        listener.set_inheritable(False)
        threading.Thread(target=_serve, args=(listener,), daemon=True, name="loadtest-calls").start()
        threading.setprofile(_count)
        sys.setprofile(_count)

    _start()
    os.register_at_fork(after_in_child=_start)
