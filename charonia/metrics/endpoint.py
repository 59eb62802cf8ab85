"""The metrics endpoint of a process: `GET /metrics` in Prometheus text over TCP or a unix socket (H54).

A few lines of HTTP of its own, so that a batcher or an executor needs no web server. What is exported, and how it is
rendered, is the process's. Beside it are `/health/live`, which is 200 while the event loop answers, and
`/health/ready`, which is 200, or 503 with the reason (`part_health`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from charonia.errors import StartupError
from charonia.models.names import is_namespaced, name_of, namespace_of

from .stalls import render_stalls

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LIVE, READY = b"/health/live", b"/health/ready"

_MAX_HEAD_BYTES = 16_384
_READ_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 64
_MAX_FORWARDED = 32
"""Of those, connections to the console: open pages must not keep scrapers out."""
_SCRAPE_TIMEOUT_S = 2.0
_MAX_PAGE_BYTES = 16 * 1024 * 1024

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}

logger = logging.getLogger("charonia.metrics")


Forward = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Answers a request that is for another server behind this port: gets the request's head, reader and writer."""

_TRITON_COUNTER = re.compile(rb"^((?:# (?:HELP|TYPE) )?nv_[a-z_]+?)_total(?=[ {])", re.MULTILINE)


def log_epoch_changes(count: int) -> CounterMetricFamily:
    """The family in which every part with a log connection reports its own count."""
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(
        "charonia_log_epoch_changes", "Times the event log was flushed, exchanged or rewound under this process", count
    )


def tagged(families: Iterable[Metric], tags_of: Callable[[str, int], Mapping[str, str]]) -> Iterator[Metric]:
    """The families with the labels of models on their series (C13), which `tags_of` returns for a model and version.

    A model's key becomes its name, and its namespace a label, if it has one.
    """
    for family in families:
        if family.name.startswith("nv_"):
            for sample in family.samples:
                if "model" in sample.labels and "version" in sample.labels:
                    model = sample.labels["model"]
                    sample.labels.update(tags_of(model, int(sample.labels["version"])))
                    if is_namespaced(model):
                        sample.labels.update(model=name_of(model), namespace=namespace_of(model))
        yield family


def render(registry: CollectorRegistry) -> bytes:
    """The registry in text exposition 0.0.4.

    Triton's counters have no `_total` suffix (M1-M3), which the client library always adds: it is removed again.
    """
    from prometheus_client.exposition import generate_latest

    return _TRITON_COUNTER.sub(rb"\1", generate_latest(registry))


class MetricsEndpoint:
    """Serves what `render` returns, over a unix socket if `socket_path` is set, otherwise over TCP.

    Port 0 picks a free one, -1 turns the endpoint off. One request per connection: scrapes are seconds apart. `render`
    is called in the event loop: it must be quick, or a coroutine. So must `unready`, which returns why the process is
    not ready, or an empty text; without it there is no `/health/ready`.
    """

    def __init__(
        self,
        render: Callable[[], bytes | Awaitable[bytes]],
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        socket_path: str = "",
        forwarded: Mapping[bytes, Forward] | None = None,
        unready: Callable[[], str | Awaitable[str]] | None = None,
    ) -> None:
        """`forwarded` answers what lies below other paths, by the path."""
        self._render = render
        self._unready = unready
        self._forwarded = forwarded or {}
        self._forwarding = 0
        self._address = address
        self._requested_port = port
        self._socket_path = socket_path
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0
        """The real port, once started on TCP."""

    async def start(self) -> None:
        """Raises `StartupError` if the address cannot be bound."""
        if self._socket_path:
            await self._start_unix()
            return
        if self._requested_port < 0:
            return
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._address, self._requested_port))
            self.port = listener.getsockname()[1]
            self._server = await asyncio.start_server(self._serve, sock=listener, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            listener.close()
            where = f"{self._address}:{self._requested_port}"
            if error.errno == errno.EADDRINUSE:
                reason = f"Unavailable - Socket '{where}' already in use"
            else:
                reason = f"cannot listen on '{where}': {error.strerror or error}"
            raise StartupError(f"failed to start Metrics service: {reason}") from None

    async def _start_unix(self) -> None:
        try:
            # left by a process that was killed; a running owner has its own incarnation in the path
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._socket_path)
            self._server = await asyncio.start_unix_server(self._serve, self._socket_path, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            raise StartupError(
                f"failed to start Metrics service: cannot listen on '{self._socket_path}': {error.strerror or error}"
            ) from None

    async def close(self) -> None:
        """Stop listening, end open connections and remove the unix socket."""
        if self._server is None:
            return
        self._server.close()
        for task in list(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)
        self._server = None
        if self._socket_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._socket_path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._open) >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._open.add(task)
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            if (forward := self._forward_for(head)) is not None:
                await self._pass_on(forward, head, reader, writer)
                return
            status, content_type, body = await self._answer(head)
            writer.write(
                f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: {content_type}\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            )
            writer.write(body)
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that is slow, gone or sends too much is disconnected
        except asyncio.CancelledError:
            pass  # the endpoint closes
        finally:
            self._open.discard(task)
            writer.close()

    def _forward_for(self, head: bytes) -> Forward | None:
        target = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
        path = target[0].partition(b"?")[0] if target else b""
        found = (forward for root, forward in self._forwarded.items() if path == root or path.startswith(root + b"/"))
        return next(found, None)

    async def _pass_on(
        self, forward: Forward, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._forwarding >= _MAX_FORWARDED:
            sentence = b"too many pages are open here: close some, then try again\n"
            head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n"
            writer.write(head % len(sentence) + b"connection: close\r\n\r\n" + sentence)
            return
        self._forwarding += 1
        try:
            await forward(head, reader, writer)
        finally:
            self._forwarding -= 1

    async def _answer(self, head: bytes) -> tuple[int, str, bytes]:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return 400, "application/json", b'{"error":"Bad Request"}'
        method, target = words[0], words[1].split(b"?", 1)[0]
        if target == b"/metrics/":  # Triton's page has both names
            target = b"/metrics"
        if target not in self._known_paths():
            return 404, "application/json", b'{"error":"Not Found"}'
        if method != b"GET":
            return 405, "text/plain", b"" if method == b"HEAD" else b'{"error":"Method Not Allowed"}'
        if target != b"/metrics":
            return await self._health(target)
        try:
            page = self._render()
            return 200, CONTENT_TYPE, (page if isinstance(page, bytes) else await page) + render_stalls()
        except Exception:
            logger.exception("metrics could not be rendered")
            return 500, "application/json", b'{"error":"internal server error"}'

    def _known_paths(self) -> tuple[bytes, ...]:
        return (b"/metrics", LIVE) if self._unready is None else (b"/metrics", LIVE, READY)

    async def _health(self, target: bytes) -> tuple[int, str, bytes]:
        if target == LIVE or self._unready is None:
            return 200, "application/json", b'{"live":true}'
        try:
            found = self._unready()
            reason = found if isinstance(found, str) else await found
        except Exception:
            logger.exception("readiness could not be told")
            return 500, "application/json", b'{"error":"internal server error"}'
        if reason:
            return 503, "application/json", json.dumps({"error": reason}).encode()
        return 200, "application/json", b'{"ready":true}'


async def scrape(path: Path) -> str:
    """The page behind a part's unix socket; empty when there is none within 2 s."""
    status, body = await _get(path, b"/metrics")
    return body.decode(errors="replace") if status == 200 else ""


async def unready(path: Path) -> str:
    """Why the part behind a unix socket is not ready; empty when it is."""
    status, body = await _get(path, READY)
    if status == 200:
        return ""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return "it does not answer"


async def _get(path: Path, target: bytes) -> tuple[int, bytes]:
    """Status and body; 0 when there is no answer in time."""
    try:
        async with asyncio.timeout(_SCRAPE_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_MAX_PAGE_BYTES)
            try:
                writer.write(b"GET %b HTTP/1.1\r\nHost: part\r\nConnection: close\r\n\r\n" % target)
                answer = await reader.read(-1)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
    return (int(status[0]) if status and status[0].isdigit() else 0), body
