"""Requests below `/console` of the metrics port reach the console, which starts with the first of them."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from charonia.composition.console import console_part
from charonia.composition.console.console_part import INSTALL, ConsolePart, as_host, kept_off_by
from charonia.metrics.endpoint import MetricsEndpoint
from charonia.options.values import SERVE, parse


class Console:
    """In the place of the console's process: answers with the head it got, or with a stream that does not end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts = 0
        self.left = asyncio.Event()
        self.part = ConsolePart(path, self.start)
        self._server: asyncio.Server | None = None
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.starts += 1
        self._starting = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._answer, str(self.path))
        self.part.is_up()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /console/live"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nevent: update\n\n")
            await reader.read()  # until the viewer has left
            self.left.set()
        else:
            length = re.search(rb"\r\nContent-Length:[ \t]*(\d+)", head)
            body = await reader.readexactly(int(length[1])) if length is not None else b""
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + head + body)
        writer.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Console, int]]:
    """A metrics endpoint with a console behind it, and its port."""
    console = Console(path)
    endpoint = MetricsEndpoint(lambda: b"# metrics\n", forwarded={b"/console": console.part.forward})
    await endpoint.start()
    yield console, endpoint.port
    await endpoint.close()
    await console.close()


async def ask(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


async def test_only_what_lies_below_its_path_is_passed_on(tmp_path: Path) -> None:
    async with served(tmp_path / "console") as (console, port):
        assert b"# metrics" in await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b" 404 " in await ask(port, b"GET /consoles HTTP/1.1\r\n\r\n")
        assert console.starts == 0
        for path in (b"/console", b"/console/models/a?b=c"):
            answer = await ask(port, b"GET %b HTTP/1.1\r\nHost: here\r\nConnection: keep-alive, x\r\n\r\n" % path)
            assert answer.endswith(b"GET %b HTTP/1.1\r\nconnection: close\r\nHost: here\r\n\r\n" % path)
        assert console.starts == 1


async def test_a_form_is_passed_on_and_nothing_after_it(tmp_path: Path) -> None:
    async with served(tmp_path / "console") as (console, port):
        form = b"model=m&token=" + b"t" * 70_000
        head = b"POST /console/actions/pause HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(form)
        answer = await ask(port, head + form + b"GET /console/jobs HTTP/1.1\r\n\r\n")
        assert answer.endswith(b"\r\n\r\n" + form)
        answer = await ask(port, b"POST /console/actions/pause HTTP/1.1\r\nContent-Length:\t7 \r\n\r\nmodel=m")
        assert answer.endswith(b"\r\n\r\nmodel=m")
        assert console.starts == 1


async def test_a_stream_ends_when_its_viewer_leaves(tmp_path: Path) -> None:
    async with served(tmp_path / "console") as (console, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /console/live HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"\n\n")).endswith(b"event: update\n\n")
        writer.close()
        async with asyncio.timeout(30):
            await console.left.wait()


async def test_a_console_that_ended_says_so(tmp_path: Path) -> None:
    async with served(tmp_path / "console") as (console, port):
        await ask(port, b"GET /console HTTP/1.1\r\n\r\n")
        await console.close()
        (tmp_path / "console").unlink(missing_ok=True)
        answer = await ask(port, b"GET /console HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert answer.endswith(b"the console does not answer\n")


async def test_what_is_missing_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_part, "find_spec", lambda _name: None)
    async with served(tmp_path / "console") as (console, port):
        answer = await ask(port, b"GET /console HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert INSTALL.encode() in answer
        assert console.starts == 0
        assert console.part.announced("here") == INSTALL


async def test_one_that_cannot_start_is_refused_with_its_reason_and_tried_again_with_the_next_request(
    tmp_path: Path,
) -> None:
    async with served(tmp_path / "console") as (console, port):
        listen = console.start

        def fail() -> None:
            console.starts += 1
            asyncio.get_running_loop().call_soon(lambda: console.part.is_down("no log"))

        console.part._start = fail
        for _ in range(2):
            answer = await ask(port, b"GET /console HTTP/1.1\r\n\r\n")
            assert answer.endswith(b"the console does not answer: no log\n")
        console.part._start = listen
        assert b"GET /console" in await ask(port, b"GET /console HTTP/1.1\r\n\r\n")
        assert console.starts == 3


async def test_after_a_start_without_a_process_others_wait_a_while(tmp_path: Path) -> None:
    async with served(tmp_path / "console") as (console, port):

        def fail() -> None:
            console.starts += 1
            raise BlockingIOError(errno.EAGAIN, "no process")

        listen, console.part._start = console.start, fail
        for _ in range(3):
            answer = await ask(port, b"GET /console HTTP/1.1\r\n\r\n")
            assert answer.endswith(b"the console does not answer: no process\n")
        assert console.starts == 1
        console.part._start, console.part._not_before_s = listen, 0.0
        assert b" 200 " in await ask(port, b"GET /console HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    "flag",
    [
        "--http-restricted-api=shared-memory:key=value",
        "--grpc-restricted-protocol=shared-memory:key=value",
        "--tenant-header=x-tenant",
        "--http-use-ssl=true",
        "--grpc-use-ssl=true",
    ],
)
def test_servers_that_let_not_everyone_in_have_it_only_when_asked(flag: str) -> None:
    assert kept_off_by(parse(SERVE, [flag], {}, {})) == flag.partition("=")[0]
    assert kept_off_by(parse(SERVE, [flag, "--allow-console=true"], {}, {})) == ""
    assert kept_off_by(parse(SERVE, [flag, "--allow-console=false"], {}, {})) == ""
    assert kept_off_by(parse(SERVE, [], {}, {})) == ""


def test_addresses_in_urls() -> None:
    assert as_host("::1:8002") == "[::1]:8002"
    assert as_host("[::1]:8002") == "[::1]:8002"
    assert as_host("127.0.0.1:8002") == "127.0.0.1:8002"
