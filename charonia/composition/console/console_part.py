"""The console of `serve`: passes requests below `/console` of the metrics port to a process that starts with the first.

Most servers are never looked at, so the process costs nothing before. When it ends, the next request starts another.
What it does is `console_role`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from charonia.options.values import Values

INSTALL = "needs jinja2: pip install 'charonia[console]'"
_START_TIMEOUT_S = 60.0
_PAUSE_S = 5.0
"""For so long after a start for which the system had no process, requests are refused without trying another."""
_CHUNK_BYTES = 65_536
_MAX_BODY_BYTES = 131_072
"""More than a form of the console may have: it refuses longer ones itself."""
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*(?=\r\n)", re.IGNORECASE)
_GUARDS = (
    "http_restricted_api",
    "grpc_restricted_protocol",
    "tenant_header",
    "http_use_ssl",
    "http_use_ssl_mutual",
    "grpc_use_ssl",
    "grpc_use_ssl_mutual",
)
"""Options of servers that do not show everything to everyone who reaches them, as the metrics port does."""
_PER_HOP = re.compile(rb"\r\n(?:connection|keep-alive|upgrade|http2-settings):[^\r\n]*", re.IGNORECASE)


def kept_off_by(values: Values) -> str:
    """The option for whose sake `serve` has no console, "" if none.

    The metrics port has no TLS, knows no restrictions, and takes a tenant's name from anyone: on such servers the
    console has to be asked for (`--allow-console=true`).
    """
    if values["allow_console"] is not None:
        return ""
    return next((f"--{key.replace('_', '-')}" for key in _GUARDS if values[key]), "")


class ConsolePart:
    """Starts the console's process and connects viewers to its socket."""

    def __init__(self, socket_path: Path, start: Callable[[], None]) -> None:
        """`start` starts the process, which listens at `socket_path`; called again after one that ended."""
        self._socket_path = socket_path
        self._start = start
        self._started = False
        self._not_before_s = 0.0
        self._up = asyncio.Event()
        self._changed = asyncio.Event()
        self._reason = ""

    def announced(self, where: str) -> str:
        """What `serve` says about it as it starts."""
        return f"http://{where}/console" if is_installed() else INSTALL

    def is_up(self) -> None:
        """The process listens."""
        self._up.set()
        self._tell()

    def is_down(self, reason: str) -> None:
        """The process ended; the next request starts another."""
        self._up.clear()
        self._reason = reason
        self._started = False
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _up_or_ended(self) -> None:
        """Until it listens. Raises `ConnectionError` when it has ended without that."""
        while not self._up.is_set():
            await self._changed.wait()
            if not self._started:
                raise ConnectionError

    def _start_once(self) -> None:
        """Raises `OSError` where there is no process for it, and for a while afterwards."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._not_before_s:
            raise ConnectionError
        try:
            self._start()
        except OSError as error:
            self._not_before_s, self._reason = now_s + _PAUSE_S, error.strerror or str(error)
            raise
        self._started, self._reason = True, ""

    async def forward(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Have the console answer a request; one for each connection, as the next may be for the metrics."""
        if not is_installed():
            await _refuse(writer, f"the console {INSTALL}")
            return
        try:
            if not self._started:
                self._start_once()
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._up_or_ended()
            upstream, to_console = await asyncio.open_unix_connection(str(self._socket_path))
        except (OSError, TimeoutError):
            await _refuse(writer, f"the console does not answer{f': {self._reason}' if self._reason else ''}")
            return
        try:
            first, _, rest = _PER_HOP.sub(b"", head).partition(b"\r\n")
            to_console.write(first + b"\r\nconnection: close\r\n" + rest)
            length = _LENGTH.search(head)
            await _relay(upstream, writer, reader, to_console, int(length[1]) if length is not None else 0)
        finally:
            to_console.close()


def as_host(where: str) -> str:
    """An address and a port as they stand in a URL: IPv6 addresses in brackets."""
    host, _, port = where.rpartition(":")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else where


def is_installed() -> bool:
    """Whether what the console needs beyond the server is there."""
    return find_spec("jinja2") is not None


async def _relay(
    upstream: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    reader: asyncio.StreamReader,
    to_console: asyncio.StreamWriter,
    body_bytes: int,
) -> None:
    """Pass the body on, and the answer until it ends, or the viewer has left, which ends streams of events."""
    gone = asyncio.create_task(_until_closed(reader, to_console, body_bytes), name="console viewer")
    passing = asyncio.create_task(_pass_on(upstream, writer), name="console answer")
    try:
        await asyncio.wait([gone, passing], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (gone, passing):
            task.cancel()
        for task in (gone, passing):
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await task


async def _pass_on(upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await upstream.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()


async def _until_closed(reader: asyncio.StreamReader, to_console: asyncio.StreamWriter, body_bytes: int) -> None:
    """Pass a form on. What comes after it, or beyond the bound, is dropped: it is one request for each connection."""
    left = min(body_bytes, _MAX_BODY_BYTES)
    while data := await reader.read(_CHUNK_BYTES):
        if left:
            to_console.write(data[:left])
            left -= len(data[:left])
            await to_console.drain()


async def _refuse(writer: asyncio.StreamWriter, sentence: str) -> None:
    body = f"{sentence}\n".encode()
    writer.write(
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
    )
    await writer.drain()
