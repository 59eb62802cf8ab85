"""What the supervisor does when a part ends, and what it says about itself; with parts that are no processes."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from charonia.composition import supervisor as module
from charonia.composition.children import Child
from charonia.composition.console.console_part import ConsolePart
from charonia.composition.supervisor import Supervisor
from charonia.options.values import CONSOLE, EXECUTOR, SERVE, parse


def supervised(directory: Path) -> Supervisor:
    directory.mkdir(exist_ok=True)
    return Supervisor(parse(SERVE, [f"--state-dir={directory}", f"--model-repository={directory}"], {}, {}))


def part(serve: Supervisor, role: str) -> Child:
    child = Child(role, [role], serve._on_report, serve._on_exit)
    serve._children.append(child)
    child.was_ready = True
    return child


async def test_a_console_that_ended_waits_for_the_next_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = supervised(tmp_path / "state")
    serve._console = ConsolePart(tmp_path / "socket", lambda: None)
    serve._console._started = True
    console = part(serve, CONSOLE)
    monkeypatch.setattr(module, "backoff_s", lambda _: pytest.fail("it is not started again by itself"))
    serve._on_exit(console, -9)
    assert serve._children == []
    assert not serve._console._started


async def test_a_part_for_which_there_is_no_process_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, tries, up = supervised(tmp_path / "state"), list[int](), asyncio.Event()
    executor = part(serve, EXECUTOR)

    def start() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise BlockingIOError(errno.EAGAIN, "no process")
        up.set()

    monkeypatch.setattr(executor, "start", start)
    monkeypatch.setattr(module, "backoff_s", lambda _: 0.0)
    serve._restart(executor)
    async with asyncio.timeout(30):
        await up.wait()
    assert len(tries) == 3


async def test_addresses_are_announced_as_they_stand_in_urls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = supervised(tmp_path / "state")
    serve._endpoints = {"http": "::1:8000", "grpc": "[::1]:8001", "metrics": "0.0.0.0:8002"}
    serve._announce()
    said = capsys.readouterr().out
    for line in ("http     http://[::1]:8000\n", "grpc     [::1]:8001\n", "metrics  http://127.0.0.1:8002/metrics\n"):
        assert line in said


async def test_a_server_is_ready_when_its_parts_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, asked = supervised(tmp_path / "state"), list[Path]()

    async def first(paths: set[Path]) -> str:
        asked.extend(paths)
        return "executor-1: it drains"

    monkeypatch.setattr(module, "first_unready", first)
    part(serve, EXECUTOR).metrics_socket = tmp_path / "executor-1.metrics"
    part(serve, CONSOLE).metrics_socket = tmp_path / "console.metrics"
    (serve._runtime_dir / "executor-bound.metrics").touch()
    assert await serve._unready() == "it starts"
    serve._started.set()
    assert await serve._unready() == "executor-1: it drains"
    assert {path.name for path in asked} == {"executor-1.metrics", "executor-bound.metrics"}
    serve._stopping = True
    assert await serve._unready() == "it drains"
