"""Asks a log server a few commands, without a library: what a drill reads of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

_CONNECT_WITHIN_S = 10.0


class LogClient:
    """A few commands to a log server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def ask(self, *words: str) -> Any:
        parts = [b"*%d\r\n" % len(words)]
        for word in (word.encode() for word in words):
            parts.append(b"$%d\r\n%b\r\n" % (len(word), word))
        self._connection.sendall(b"".join(parts))
        return self._reply()

    def keys(self, pattern: str) -> list[str]:
        return sorted(key.decode() for key in self.ask("KEYS", pattern))

    def _reply(self) -> Any:
        line = self._file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))]
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest.decode()
        raise OSError(f"the log server said {line!r}")


@contextmanager
def connected(url: str) -> Iterator[LogClient]:
    """A connection to the log server at a URL. Raises `OSError`."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(unquote(parts.path))
    else:
        connection = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), _CONNECT_WITHIN_S)
    with connection:
        log = LogClient(connection)
        if parts.password:
            log.ask("AUTH", *([unquote(parts.username)] if parts.username else []), unquote(parts.password))
        yield log
