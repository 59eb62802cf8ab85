"""An endpoint of webhooks on this machine that keeps what it was sent and answers as a test tells it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from standardwebhooks.webhooks import Webhook

SECRET = "whsec_" + "QUJD" * 8
PATIENCE_S = 60.0


@dataclass
class Received:
    """One request. `verified` is its body, once the reference library has accepted the signature."""

    path: str
    headers: dict[str, str]
    body: bytes
    verified: Any = None


Answering = Callable[[Received], Awaitable[bytes]]


def status(code: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {code} Whatever", "content-length: 0", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass
class Receiver:
    """Answers 204 unless `answers` has something for a path: statuses in turn (the last for good), or a function."""

    answers: dict[str, list[bytes] | Answering] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    most_open: dict[str, int] = field(default_factory=dict)
    port: int = 0
    names: list[str | None] = field(default_factory=list)
    """Server names asked for in TLS handshakes."""

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        self._changed = asyncio.Event()
        self._open: dict[str, int] = {}
        # the event loop forgets the task of a connection that the other end has closed, whatever it waits for
        self._serving: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    @property
    def open_now(self) -> int:
        """Requests that have come and are not answered."""
        return sum(self._open.values())

    def at(self, path: str) -> list[Received]:
        return [r for r in self.received if r.path == path]

    async def wait_for(self, path: str, count: int) -> list[Received]:
        """Until so many requests have come to a path."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.at(path)) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.at(path)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = ""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            assert method == "POST"
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers["content-length"]))
            received = Received(path, headers, body)
            if "webhook-id" in headers:
                received.verified = Webhook(SECRET).verify(body.decode(), headers)
            self._open[path] = self._open.get(path, 0) + 1
            self.most_open[path] = max(self.most_open.get(path, 0), self._open[path])
            self.received.append(received)
            self._changed.set()
            writer.write(await self._answer(received))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open[path] = self._open.get(path, 1) - 1
            writer.close()

    async def _answer(self, received: Received) -> bytes:
        answers = self.answers.get(received.path, [status(204)])
        if callable(answers):
            return await answers(received)
        return answers.pop(0) if len(answers) > 1 else answers[0]
