"""The listening sockets of fronts (V5)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat

from charonia.errors import StartupError

BACKLOG = 2048

_HIGHEST_DESCRIPTOR = 65_536
_ROOM_FOR_LISTENERS = 64


def listen(address: str, port: int, *, service: str, reuse_port: bool = False) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises `StartupError`, for a taken port with V5's text."""
    listener = bound(address, port, service=service, reuse_port=reuse_port)
    try:
        listener.listen(BACKLOG)
        if reuse_port:
            listener = _released_first(listener)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _unusable(address, port, service, error) from None
    return listener


def listen_unix(path: str, *, service: str) -> socket.socket:
    """A listening Unix socket. Replaces the file of a process that has ended. Raises `StartupError`."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_served(path):
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        found.close()
        raise _unusable_file(path, service, error) from None
    try:
        found.bind(path)
        found.listen(BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        raise _unusable_file(path, service, error) from None
    return found


def _is_served(path: str) -> bool:
    """Whether a process listens at the path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        return True


def unlink_own(path: str, listener_inode: int) -> None:
    """Remove the file of this process's Unix socket, unless another has replaced it."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_ino == listener_inode:
            os.unlink(path)


def _unusable_file(path: str, service: str, error: OSError) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"failed to start {service} service: Unavailable - Socket '{path}' already in use")
    return StartupError(f"failed to start {service} service: cannot listen on '{path}': {error.strerror or error}")


def _released_first(listener: socket.socket) -> socket.socket:
    """The listening socket, under a high descriptor if one is free.

    Linux closes the files of a killed process from the highest descriptor to the lowest. A client that loses its
    connection reconnects at once: if the listener is still open then, it may accept that connection and reset it,
    although other processes listen on the port. Without this it happened to a fifth of such clients.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _HIGHEST_DESCRIPTOR if limit == resource.RLIM_INFINITY else min(limit, _HIGHEST_DESCRIPTOR)
    try:
        descriptor = fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD_CLOEXEC, max(0, most - _ROOM_FOR_LISTENERS))
    except OSError:  # none is free: the original one works as well
        return listener
    listener.close()
    return socket.socket(fileno=descriptor)


def bound(address: str, port: int, *, service: str, reuse_port: bool = False) -> socket.socket:
    """A socket bound to the address that does not listen yet. Raises `StartupError` as `listen`.

    It is created with IPPROTO_TCP: asyncio sets TCP_NODELAY only on connections accepted from such a socket, and
    Nagle's algorithm would delay answers by 40 ms.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind((address, port))
    except OSError as error:
        found.close()
        raise _unusable(address, port, service, error) from None
    return found


def _unusable(address: str, port: int, service: str, error: OSError) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(
            f"failed to start {service} service: Unavailable - Socket '{address}:{port}' already in use"
        )
    return StartupError(
        f"failed to start {service} service: cannot listen on '{address}:{port}': {error.strerror or error}"
    )
