"""Starts and stops `charonia serve` of any checkout as a child process, on free ports and with its own state."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from loadtest.model import LoadTestError

from .scrape import fetch

READY_WITHIN_S = 180
STOP_WITHIN_S = 40
POLL_S = 0.02


@dataclass(frozen=True)
class Endpoints:
    """Addresses as HOST:PORT; None where there is none to ask."""

    http: str | None = None
    grpc: str | None = None
    metrics: str | None = None
    processes_file: Path | None = None
    log_url: str | None = None
    openai: str | None = None


def endpoints_of(state_dir: Path) -> Endpoints:
    """What a running `charonia serve` wrote into its state directory. Raises OSError, ValueError or KeyError."""
    ports = json.loads((state_dir / "endpoints.json").read_bytes())
    processes = state_dir / "processes.json"
    given = {name: ports.get(name) for name in ("grpc", "metrics", "openai")}
    return Endpoints(ports["http"], processes_file=processes, log_url=ports.get("log"), **given)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL when the process has not ended after `STOP_WITHIN_S`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Charonia:
    """`charonia serve` on free ports with a state directory of its own; a context manager.

    `checkout` is the source tree to serve from, by default the installed package; `environment` is added to the
    server's. `ready_s` is the time from its start to readiness. Raises LoadTestError with the server's last lines
    when it ends or does not become ready.
    """

    def __init__(
        self,
        model_repository: Path,
        extra: Sequence[str] = (),
        checkout: Path | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._state = Path(tempfile.mkdtemp(prefix="charonia-bench-"))
        self._command = [python, "-m", "charonia.cli", "serve"]
        self._command += ["--model-repository", str(model_repository.resolve())]
        self._command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        self._command += ["--state-dir", str(self._state), *extra]
        self._checkout = checkout
        path = [os.environ.get("PYTHONPATH", "")] if checkout is None else [str(checkout)]
        given = dict(environment or {})
        path.insert(0, given.pop("PYTHONPATH", ""))
        self._environment = {**os.environ, **given, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._log = self._state / "bench-serve.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0
        self.endpoints = Endpoints()

    def __enter__(self) -> Charonia:
        started = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._checkout,
                env=self._environment,
            )
        try:
            while not self._is_ready():
                if self._process.poll() is not None:
                    raise LoadTestError(f"charonia serve ended with {self._process.returncode}:\n{self._last_lines()}")
                if time.monotonic() - started > READY_WITHIN_S:
                    raise LoadTestError(f"charonia serve not ready after {READY_WITHIN_S} s:\n{self._last_lines()}")
                time.sleep(POLL_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.ready_s = time.monotonic() - started
        return self

    def _is_ready(self) -> bool:
        try:
            endpoints = endpoints_of(self._state)
            status, _ = fetch(str(endpoints.http), "/v2/health/ready")
        except (OSError, ValueError, KeyError, LoadTestError):
            return False
        self.endpoints = endpoints
        return status == 200

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            stop(self._process)
        shutil.rmtree(self._state, ignore_errors=True)
