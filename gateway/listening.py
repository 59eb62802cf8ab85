"""The listening sockets of fronts (V5)."""

from __future__ import annotations

import errno
import socket

from charonia.errors import StartupError

BACKLOG = 2048


def listen(address: str, port: int, *, service: str, reuse_port: bool = False) -> socket.socket:
    """A bound TCP socket; port 0 picks a free one. Raises `StartupError`, for a taken port with V5's text.

    It is created with IPPROTO_TCP: asyncio sets TCP_NODELAY on accepted connections only of such a socket, and Nagle's
    algorithm would add 40 ms to answers.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"failed to start {service} service: Unavailable - Socket '{address}:{port}' already in use"
            ) from None
        raise StartupError(
            f"failed to start {service} service: cannot listen on '{address}:{port}': {error.strerror or error}"
        ) from None
    return listener
