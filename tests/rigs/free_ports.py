"""Loopback ports for servers that have to be told theirs."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

_GIVEN: set[int] = set()


def free_port() -> int:
    """One that nobody has and that the system gives to nobody.

    It gives ports of a range of its own to connections and to who binds port 0: one of these, free now, may be somebody
    else's when the server that was told of it comes to bind it. Each is given out once.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = lowest // 2 + secrets.randbelow(lowest // 2)
        if port in _GIVEN:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _GIVEN.add(port)
            return port
