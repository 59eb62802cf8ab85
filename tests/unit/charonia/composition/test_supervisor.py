"""What the supervisor does when a part ends, and what it says about itself; with parts that are no processes."""

from __future__ import annotations

import asyncio
import errno
import re
from pathlib import Path

import pytest

from charonia.composition import supervisor as module
from charonia.composition.children import Child
from charonia.composition.console.console_part import ConsolePart
from charonia.composition.roles import check_urls
from charonia.composition.supervisor import Supervisor
from charonia.errors import StartupError
from charonia.options.role_settings import check_settings, gateway_settings
from charonia.options.values import CONSOLE, EXECUTOR, GATEWAY, SERVE, parse, render


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


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--trace-config=bad", "--trace-config must be <mode>,<key>=<value>"),
        ("--journal=bad", "--journal must be off, jobs or all, got 'bad'"),
        ("--cache-config=bad", "--cache-config must be"),
        ("--rate-limit=bad", "--rate-limit must be"),
        ("--model-control-mode=bad", "--model-control-mode must be"),
        ("--host-policy=bad", "--host-policy option format is"),
        ("--metrics-config=bad", "--metrics-config option format is"),
        ("--batcher=bad", "--batcher must be auto, separate or colocated, got 'bad'"),
        ("--http-restricted-api=bad", "--http-restricted-api must be"),
        ("--http-restricted-api=bad:a=b", "unknown restricted api 'bad'"),
        ("--grpc-restricted-protocol=bad:a=b", "unknown restricted protocol 'bad'"),
        ("--grpc-infer-response-compression-level=bad", "--grpc-infer-response-compression-level must be none, low"),
        ("--webhook-allow=bad/bad", "--webhook-allow 'bad/bad' is no network"),
        ("--grpc-header-forward-pattern=(", "invalid --grpc-header-forward-pattern"),
        ("--webhook-secrets=/none/such", "webhook secrets '/none/such' cannot be used"),
        ("--log-url=bad://log", "the event log URL must begin with redis://"),
        ("--log-password-file=/none/such", "--log-password-file: '/none/such' cannot be read"),
        ("--blob-url=redis://host:bad", "the URL of --blob-url cannot be read: Port"),
        ("--blob-password-file=/none/such", "--blob-password-file needs --blob-url"),
        ("--cache-config=redis,host=h,port=99999", "the URL of --cache-config cannot be read: Port out of range"),
        (
            "--cache-config=redis,host=h,tls_enabled=true,cacert=/none/such",
            "a certificate of the URL of --cache-config cannot be loaded",
        ),
        ("--model-repository=http://me:secret@host", "model repository 'http://***@host' is not a directory"),
        ("--tenant-header=a:b", "--tenant-header must be the name of a header, got 'a:b'"),
        ("--api-keys=/none/such", "--api-keys: /none/such cannot be read"),
        ("--http-use-ssl=true", "--http-use-ssl needs --http-server-key and --http-server-cert"),
        ("--grpc-use-ssl=true", "--grpc-use-ssl needs --grpc-server-key and --grpc-server-cert"),
    ],
)
async def test_a_value_that_a_part_refuses_is_refused_before_anything_is_started(
    option: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    words = [f"--model-repository={tmp_path}/models", f"--state-dir={tmp_path}/state", option]
    supervisor = Supervisor(parse(SERVE, words, {}, {}))
    with pytest.raises(StartupError, match=re.escape(sentence)):
        await supervisor.run()
    assert supervisor._private_log is None
    assert not supervisor._children


async def test_values_are_warned_of_by_the_parts_alone(caplog: pytest.LogCaptureFixture) -> None:
    values = parse(SERVE, ["--strict-model-config=true", "--trace-file=/tmp/x", "--response-cache-byte-size=9"], {}, {})
    check_settings(values)
    check_urls(values)
    assert not caplog.records
    gateway_settings(parse(GATEWAY, render(GATEWAY, values), {}, {}))
    assert "--trace-file is the old spelling" in caplog.text
