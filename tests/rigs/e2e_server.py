"""Starts `charonia serve` as a user would and knows where it listens. Processes are stopped by their pids only."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import topologies

REPOSITORY = Path(__file__).resolve().parents[2]

LEASES = {"CHARONIA_HEARTBEAT_TTL_SECS": "6", "CHARONIA_GATEWAY_HEARTBEAT_TTL_SECS": "6"}
"""Tests that are not about the ends of leases have longer ones: a busy machine may hold up a process for longer than
the default. The end of a process is known at once all the same. Flags of a test win over this.
"""


class Server:
    """A running server: `http` and `grpc` are host:port, `state_dir` holds processes.json and endpoints.json."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        state_dir: Path,
        log_file: Path,
        before: tuple[int, int] | None = None,
    ) -> None:
        """`before` is the `endpoints.json` that a server left which was killed: where it listened may be another's."""
        self.process = process
        self._before = before
        self.state_dir = state_dir
        self.log_file = log_file
        self.http = ""
        self.grpc = ""
        self.metrics = ""
        self.log_url = ""

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        """Until /v2/health/ready is 200; polls, as any load balancer does."""
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            if self.process.poll() is not None:
                raise AssertionError(f"serve ended with {self.process.returncode}:\n{self.log()}")
            try:
                self.read_endpoints()
                if self.get("/v2/health/ready")[0] == 200:
                    return
            except (OSError, ValueError, KeyError):
                pass
            time.sleep(0.02)
        raise AssertionError(f"serve was not ready within {timeout_s} s:\n{self.log()}")

    def read_endpoints(self) -> None:
        """Learn where it listens. Raises `OSError` or `ValueError` while that is not known."""
        told = self.state_dir / "endpoints.json"
        if _identity(told) == self._before:
            raise FileNotFoundError(f"{told} is not there, or of the server before")
        where = json.loads(told.read_text())
        self.http, self.grpc = where["http"], where["grpc"]
        self.metrics, self.log_url = where["metrics"], where["log"]
        if self.state_dir in _logs:
            self.log_url = _logs[self.state_dir].url  # what is told has no password

    def get(self, path: str) -> tuple[int, bytes]:
        return self.request("GET", path)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of one HTTP exchange, errors included."""
        request = urllib.request.Request(f"http://{self.http}{path}", body, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def log_client(self) -> Any:
        """A client of redis-py that may do everything to the log."""
        return _logs[self.state_dir].client() if self.state_dir in _logs else redis.Redis.from_url(self.log_url)

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def processes(self) -> list[dict[str, Any]]:
        return list(json.loads((self.state_dir / "processes.json").read_text()))

    def pids(self, role: str) -> list[int]:
        return [p["pid"] for p in self.processes() if p["role"] == role]

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def stop(self, timeout_s: float = 120.0) -> int:
        """SIGTERM and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def _identity(file: Path) -> tuple[int, int] | None:
    """Its inode and time of writing; None if it is not there."""
    try:
        told = file.stat()
    except FileNotFoundError:
        return None
    return told.st_ino, told.st_mtime_ns


def start(models: Path, state_dir: Path, *flags: str, environment: dict[str, str] | None = None) -> Server:
    """Start `charonia serve` on free loopback ports, in a process group of its own; `environment` adds variables."""
    state_dir.mkdir(parents=True, exist_ok=True)
    if topologies.wanted() and not any(flag.startswith(("--log-url", "--redis")) for flag in flags):
        if state_dir not in _logs:
            _logs[state_dir] = topologies.Topology(topologies.wanted())
        flags = (f"--log-url={_logs[state_dir].url}", *flags)
    log_file = state_dir / "serve.log"
    before = _identity(state_dir / "endpoints.json")
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "charonia"),
                "serve",
                "--model-repository",
                str(models),
                "--http-port=0",
                "--grpc-port=0",
                "--metrics-port=0",
                "--http-address=127.0.0.1",
                "--grpc-address=127.0.0.1",
                f"--state-dir={state_dir}",
                *flags,
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=REPOSITORY,
            env={**LEASES, **os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
    _started.append(process)
    return Server(process, state_dir, log_file, before)


_started: list[subprocess.Popen[bytes]] = []
_logs: dict[Path, topologies.Topology] = {}
"""The logs of servers by their state directories, where the run is over a topology (`topologies`)."""


@atexit.register
def _leave_nothing_behind() -> None:
    """A test that failed before it stopped its server must not leave it running: its children end with it."""
    for process in _started:
        if process.poll() is None:
            process.kill()
            process.wait()
    for log in _logs.values():
        log.stop()


@contextmanager
def serving(models: Path, state_dir: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A ready server for the length of a block; it must end with 0.

    It sends no webhooks unless it is told to: tests of them ask for it, the others need no process for that.
    """
    if not any(flag.startswith("--allow-webhooks") for flag in flags):
        flags = ("--allow-webhooks=false", *flags)
    server = start(models, state_dir, *flags, environment=environment)
    try:
        server.wait_ready()
        yield server
    except BaseException:
        sys.stderr.write(server.log())
        raise
    finally:
        if server.process.poll() is None:
            server.stop()
        if state_dir in _logs:
            # it stays, for a server that begins again in this directory
            assert _logs[state_dir].refusals() == []
