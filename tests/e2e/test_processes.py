"""Start and end of `charonia serve`: what it starts it stops, whatever happens to it, and errors are one sentence."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_server import start
from free_ports import free_port

from charonia.eventlog.embedded import short_directory

CHARONIA = str(Path(sys.executable).parent / "charonia")


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status != "Z"


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:  # the process that completed a configuration ends by itself
        return None


def _wait_gone(pids: list[int]) -> None:
    async def poll() -> None:
        async with asyncio.timeout(60):
            while any(_alive(pid) for pid in pids):
                await asyncio.sleep(0.02)

    asyncio.run(poll())


def _everyone(server: Any) -> list[int]:
    async def poll() -> list[int]:
        async with asyncio.timeout(60):
            while not any(p["role"].startswith("instance:") for p in server.processes()):
                await asyncio.sleep(0.05)
            return [p["pid"] for p in server.processes()]

    return asyncio.run(poll())


def test_sigterm_drains_and_leaves_nothing(few_models: Path, tmp_path: Path) -> None:
    server = start(few_models, tmp_path / "state")
    server.wait_ready()
    pids = _everyone(server)
    roles = {p["role"] for p in server.processes()}
    assert {"serve", "gateway", "executor+batcher", "redis"} <= roles
    assert {_group(pid) for pid in pids} <= {server.process.pid, None}
    assert server.stop() == 0, server.log()
    _wait_gone(pids)
    assert "Traceback" not in server.log()


def test_gateway_and_private_log_share_a_processor_of_two(few_models: Path, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2 or not Path("/proc/self/schedstat").exists():
        pytest.skip("needs two processors, and a kernel that tells the times of threads")
    before = os.sched_getaffinity(0)
    two = set(sorted(before)[:2])
    os.sched_setaffinity(0, two)
    try:
        server = start(few_models, tmp_path / "state")
    finally:
        os.sched_setaffinity(0, before)
    server.wait_ready()
    (log,), (gateway,), (executor,) = (server.pids(role) for role in ("redis", "gateway", "executor+batcher"))
    _wait_for(
        lambda: len(os.sched_getaffinity(log)) == 1 and os.sched_getaffinity(log) == os.sched_getaffinity(gateway)
    )
    assert os.sched_getaffinity(executor) == two
    assert server.stop() == 0, server.log()


@pytest.mark.long
def test_an_executor_killed_before_it_was_up_is_started_again(few_models: Path, tmp_path: Path) -> None:
    server = start(few_models, tmp_path / "state", "--executors=2")

    async def executors() -> list[int]:
        async with asyncio.timeout(60):
            while not (server.state_dir / "processes.json").exists() or len(server.pids("executor")) < 2:
                await asyncio.sleep(0.002)
            return server.pids("executor")

    first, second = asyncio.run(executors())
    os.kill(second, signal.SIGKILL)
    server.wait_ready()

    async def replaced() -> None:
        async with asyncio.timeout(60):
            while (pids := set(server.pids("executor"))) and (len(pids) < 2 or second in pids or first not in pids):
                await asyncio.sleep(0.01)

    asyncio.run(replaced())
    assert f"executor (pid {second}) ended with status -9; starting it again" in server.log()
    assert server.stop() == 0, server.log()


@pytest.mark.long
def test_kill_9_of_the_parent_ends_every_child(few_models: Path, tmp_path: Path) -> None:
    server = start(few_models, tmp_path / "state")
    server.wait_ready()
    pids = _everyone(server)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    _wait_gone(pids)
    # and the same state directory serves again, and clears away what the killed one could not
    left = short_directory(tmp_path / "state")
    assert list(left.glob("*.metrics"))
    again = start(few_models, tmp_path / "state")
    again.wait_ready()
    assert again.stop() == 0
    assert not left.exists()


def test_log_lines_go_to_a_file(few_models: Path, tmp_path: Path) -> None:
    """L1: those of all parts to the end of one file, and none to stderr."""
    file = tmp_path / "lines"
    file.write_text("before\n")
    server = start(few_models, tmp_path / "state", f"--log-file={file}", "--log-verbose=1")
    server.wait_ready()
    assert json.loads(server.get("/v2/logging")[1])["log_file"] == str(file)
    parts = ("gateway.", "batcher.", "executors.", "charonia.composition.heartbeat_process")
    _wait_for(lambda: all(f" {part}" in file.read_text() for part in parts))
    moved = file.rename(tmp_path / "rotated")
    assert server.request("POST", "/v2/logging", b'{"log_verbose_level": 2}')[0] == 200
    _wait_for(lambda: file.exists() and "log settings of this process" in file.read_text())
    assert server.stop() == 0
    lines = moved.read_text().splitlines()
    assert lines[0] == "before"
    for part in parts:
        assert any(f" {part}" in line for line in lines), part
    assert "] " not in server.log(), server.log()


def _fails(*arguments: str, cwd: Path) -> str:
    result = subprocess.run(
        [CHARONIA, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert result.returncode != 0
    assert "Traceback" not in result.stderr, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model-repository", "nowhere"], "model repository 'nowhere' is not a directory"),
        (["--model-repository", ""], "model repository '' is not a directory"),
        ([], "needs --model-repository"),
        (["--model-repository", ".", "--nonsense"], "unknown option '--nonsense'"),
        (
            ["--model-repository", ".", "--log-file=/proc/none"],
            "--log-file '/proc/none' cannot be written: No such file",
        ),
        (
            ["--model-repository", ".", "--model-load-gpu-limit=0:1"],
            "gpu-limit' is known but not supported",
        ),
        (["--model-repository", ".", "--cache-config=disk,size=1"], "unknown cache 'disk' in --cache-config"),
        (
            ["--model-repository", ".", "--cache-config=redis,host=127.0.0.1,port=1"],
            "the response cache at redis://127.0.0.1:1/0",
        ),
        (["--model-repository", ".", "--http-port=x"], "--http-port must be a number, got 'x'"),
        (
            ["--model-repository", ".", "--model-control-mode=often"],
            "--model-control-mode must be none, poll or explicit",
        ),
        (
            ["--model-repository", ".", "--model-control-mode=explicit", "--load-model=*", "--load-model=a"],
            "Wildcard model name '*' must be the ONLY startup model if specified at all.",
        ),
        (
            ["--model-repository", ".", "--model-control-mode=explicit", "--load-model=nowhere"],
            "failed to load 'nowhere', failed to poll from model repository",
        ),
        (["--model-repository", ".", "--load-model=a"], "requires setting '--model-control-mode=explicit' as well."),
        (["--model-repository", ".", "--log-url=redis://127.0.0.1:1"], "127.0.0.1:1/0 cannot be reached"),
        (["--model-repository", ".", "--log-url=redis+cluster://"], "must read redis+cluster://host:port"),
        (["--model-repository", ".", "--blob-url=redis://127.0.0.1:1"], "the blob server at redis://127.0.0.1:1/0"),
        (["--model-repository", ".", "--blob-url=http://x"], "the URL of --blob-url must begin with redis://"),
        (["--model-repository", ".", "--blob-password-file=x"], "--blob-password-file needs --blob-url"),
        (["--model-repository", ".", "--grpc-use-ssl=true"], "--grpc-use-ssl needs --grpc-server-key and"),
    ],
)
@pytest.mark.long
def test_errors_at_start_are_one_sentence(flags: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    text = _fails(
        "serve",
        f"--state-dir={tmp_path / 'state'}",
        "--http-port=0",
        "--grpc-port=0",
        "--metrics-port=0",
        *flags,
        cwd=tmp_path / "empty",
    )
    assert sentence in text
    assert sum(line.startswith("charonia: ") for line in text.splitlines()) == 1, text


def test_help_may_be_read_in_part() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run([CHARONIA, "serve", "--help"], stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert result.returncode == 141
    assert result.stderr == b""


@pytest.mark.parametrize("front", ["http", "grpc", "metrics"])
def test_a_taken_port_is_named(front: str, few_models: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"http": 0, "grpc": 0, "metrics": 0, front: port}
        text = _fails(
            "serve",
            f"--model-repository={few_models}",
            f"--state-dir={tmp_path / 'state'}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            *(f"--{name}-port={number}" for name, number in ports.items()),
            cwd=tmp_path,
        )
    assert "already in use" in text
    assert str(port) in text


def test_a_broken_model_ends_the_start(tmp_path: Path) -> None:
    version = tmp_path / "models" / "broken" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"not a model")
    (version.parent / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    text = _fails(
        "serve",
        f"--model-repository={tmp_path / 'models'}",
        f"--state-dir={tmp_path / 'state'}",
        "--http-port=0",
        "--grpc-port=0",
        "--metrics-port=0",
        cwd=tmp_path,
    )
    assert "failed to load all models" in text
    assert "broken" in text


def test_two_servers_do_not_share_a_state_directory(server: Any, few_models: Path, tmp_path: Path) -> None:
    text = _fails(
        "serve",
        f"--model-repository={few_models}",
        f"--state-dir={server.state_dir}",
        "--http-port=0",
        "--grpc-port=0",
        "--metrics-port=0",
        cwd=tmp_path,
    )
    assert f"is used by another charonia serve (pid {server.process.pid}, since 20" in text


_HANGS = """
import threading


class TritonPythonModel:
    def initialize(self, args):
        threading.Event().wait()

    def execute(self, requests):
        return []
"""


def _broken_repository(path: Path) -> Path:
    version = path / "broken" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text("max_batch_size: many\n")
    return path


def _wait_for(seen: Callable[[], bool]) -> None:
    async def poll() -> None:
        async with asyncio.timeout(60):
            while not seen():
                await asyncio.sleep(0.02)

    asyncio.run(poll())


@pytest.mark.long
def test_what_a_killed_server_left_does_not_look_ready(few_models: Path, tmp_path: Path) -> None:
    before = start(few_models, tmp_path / "state")
    before.wait_ready()
    before.process.kill()
    before.process.wait()
    after = start(_broken_repository(tmp_path / "models"), tmp_path / "state")
    assert after.process.wait(180) == 1
    assert "failed to load all models" in after.log()
    assert "ready:" not in after.log()


def test_a_broken_model_may_be_left_out(tmp_path: Path) -> None:
    models = _broken_repository(tmp_path / "models")
    # a configuration that cannot be read, as the other model's, does not count (R40)
    (models / "no_graph" / "1").mkdir(parents=True)
    (models / "no_graph" / "1" / "model.onnx").write_bytes(b"no model at all")
    server = start(models, tmp_path / "state", "--exit-on-error=false")
    _wait_for(lambda: "up, not every model is ready: Ctrl-C stops the server" in server.log())
    server.read_endpoints()
    assert server.get("/v2/health/ready")[0] == 400
    assert server.stop() == 0


@pytest.mark.long
def test_a_start_that_hangs_can_be_stopped(tmp_path: Path) -> None:
    version = tmp_path / "models" / "hangs" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_HANGS)
    tensor = '[{ name: "%s" data_type: TYPE_FP32 dims: [1] }]'
    config = f'backend: "python"\ninput {tensor % "A"}\noutput {tensor % "B"}\n'
    (version.parent / "config.pbtxt").write_text(config)
    server = start(tmp_path / "models", tmp_path / "state")
    _wait_for(lambda: (tmp_path / "state" / "processes.json").exists())
    pids = _everyone(server)
    assert server.stop() == 0, server.log()
    _wait_gone(pids)


def _slow_repository(models: Path, go: Path) -> Path:
    """A model that is loaded when `go` exists."""
    version = models / "slow" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_HANGS.replace("threading.Event().wait()", _WAITS.format(go=str(go))))
    tensor = '[{ name: "%s" data_type: TYPE_FP32 dims: [1] }]'
    (version.parent / "config.pbtxt").write_text(f'backend: "python"\ninput {tensor % "A"}\noutput {tensor % "B"}\n')
    return models


_WAITS = """
        import os, time
        while not os.path.exists("{go}"):
            time.sleep(0.02)
"""


def _refused(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("gateways", [1, 2])
def test_the_ports_open_when_the_first_loads_are_over(tmp_path: Path, gateways: int) -> None:
    ports, go = (free_port(), free_port()), tmp_path / "go"
    flags = (f"--http-port={ports[0]}", f"--grpc-port={ports[1]}", f"--gateways={gateways}")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "endpoints.json").write_text("{}")  # of a server that was killed: it ends with the start
    server = start(_slow_repository(tmp_path / "models", go), tmp_path / "state", *flags)
    _wait_for(lambda: server.log().count("the ports open when 1 executors have loaded") == gateways)
    _wait_for(lambda: server.log().count("the ports stay closed: 0 of 1 executors have loaded") >= gateways)
    (executor, *_) = server.pids("executor+batcher")
    said = rf"still loading 'slow' version 1 since \d+ s on executor \S+ \(pid {executor}\)"
    _wait_for(lambda: re.search(said, server.log()) is not None)  # not in the first lines, if it starts slowly
    assert all(map(_refused, ports))
    assert not (tmp_path / "state" / "endpoints.json").exists()
    go.touch()
    server.wait_ready()
    assert not any(map(_refused, ports))
    (gateway, *_) = server.pids("gateway")
    os.kill(gateway, signal.SIGKILL)  # one that is started again listens at once
    _wait_for(lambda: len(server.pids("gateway")) == gateways and gateway not in server.pids("gateway"))
    _wait_for(lambda: not any(map(_refused, ports)))
    assert server.log().count("the ports open when 1 executors have loaded") == gateways
    assert server.stop() == 0


def test_a_port_that_is_taken_is_said_before_models_are_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        models = _slow_repository(tmp_path / "models", tmp_path / "never")
        server = start(models, tmp_path / "state", f"--http-port={port}")
        assert server.process.wait(180) == 1
        assert f"failed to start HTTP service: Unavailable - Socket '127.0.0.1:{port}' already in use" in server.log()


@pytest.mark.long
def test_a_slow_start_may_be_watched(tmp_path: Path) -> None:
    go = tmp_path / "go"
    models = _slow_repository(tmp_path / "models", go)
    server = start(models, tmp_path / "state", "--listen-while-loading=true")
    _wait_for((tmp_path / "state" / "endpoints.json").exists)
    server.read_endpoints()
    assert server.get("/v2/health/live")[0] == 200
    assert server.get("/v2/health/ready")[0] == 400

    def said(model: str) -> tuple[int, str]:
        status, body = server.get(f"/v2/models/{model}")
        return status, json.loads(body)["error"]

    for model in ("slow", "other"):
        _wait_for(
            lambda model=model: said(model) == (503, f"model '{model}' cannot be served yet: still loading 'slow'")
        )
    status, body = server.request("POST", "/v2/repository/index")
    assert (status, [row["state"] for row in json.loads(body)]) == (200, ["LOADING"])
    go.touch()
    server.wait_ready()
    assert said("other") == (404, "Request for unknown model: 'other' is not found")
    assert server.stop() == 0


@pytest.mark.long
def test_parts_that_die_come_back_where_they_were(few_models: Path, tmp_path: Path) -> None:
    server = start(few_models, tmp_path / "state")
    server.wait_ready()
    where = (server.http, server.grpc)
    for role in ("gateway", "redis"):
        (pid,) = server.pids(role)
        os.kill(pid, signal.SIGKILL)
        _wait_gone([pid])
        _wait_for(lambda role=role, pid=pid: server.pids(role) not in ([], [pid]))  # type: ignore[misc]
        server.wait_ready()
        assert (server.http, server.grpc) == where
    (executor,) = server.pids("executor+batcher")
    os.kill(executor, signal.SIGKILL)
    assert server.stop() == 0, server.log()


def test_temporary_folders_of_a_killed_executor_are_removed_by_the_next(few_models: Path, tmp_path: Path) -> None:
    shutil.copytree(few_models / "identity", tmp_path / "models" / "identity", symlinks=False)
    with (tmp_path / "models" / "identity" / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "charonia.isolation" value { string_value: "sandbox" } }\n')
    with tempfile.TemporaryDirectory() as temporary:  # its name is short: sockets lie there as well

        def folders() -> set[Path]:
            return set(Path(temporary).glob("charonia-owned-*"))

        server = start(tmp_path / "models", tmp_path / "state", environment={"TMPDIR": temporary})
        server.wait_ready()
        (abandoned,) = folders()
        (executor,) = server.pids("executor+batcher")
        os.kill(executor, signal.SIGKILL)
        _wait_for(lambda: len(now := folders()) == 1 and abandoned not in now)
        assert server.stop() == 0, server.log()
        assert not folders()


def test_flags_win_over_the_environment_in_every_part(
    few_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARONIA_ID", "of the environment")
    server = start(few_models, tmp_path / "state", "--id=triton")
    server.wait_ready()
    assert json.loads(server.get("/v2")[1])["name"] == "triton"
    assert server.stop() == 0
