"""How each peer is set up from package indexes, configured for the benched models, and started.

A peer lives in a directory of its own below the peers' directory, with its own virtual environment. Model files and
configuration are written for each run. Setting one up needs CPython 3.11 or newer and, for Triton, exactly 3.11 with
a shared libpython (its python backend's stub links libpython3.11.so.1.0).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.bench.cases import Case, models_of
from loadtest.bench.points import Server
from loadtest.bench.processes import members
from loadtest.bench.scrape import fetch
from loadtest.bench.servers import Endpoints, stop
from loadtest.model import LoadTestError
from loadtest.peers.triton import max_batch, write_triton_repository

LAUNCHERS = Path(__file__).with_name("servers")
READY_WITHIN_S = 180
POLL_S = 0.1
RUN = "LOADTEST_RUN"
"""Environment variable that marks all processes of one started peer; Ray's and LitServe's outlive their parents."""


@dataclass(frozen=True)
class Launch:
    """How a peer is started: command, environment on top of this process's, and whether it speaks gRPC."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """One peer: pip requirements, what starts it, the dialect of its HTTP front, whether it speaks gRPC, what it is
    in the page's words, and its readiness path.

    `launch` is called with the peer's home, a scratch directory for configuration, the cases and the repository of
    their model files, and the HTTP and gRPC ports. `after_install` finishes a set-up that pip alone cannot do.
    """

    requirements: Sequence[str]
    launch: Callable[[Path, Path, Sequence[Case], Path, tuple[int, int]], Launch]
    http_style: str
    grpc: bool
    what: str
    ready_path: str = "/v2/health/ready"
    after_install: Callable[[Path], None] = lambda _: None


def python_of(home: Path) -> Path:
    """The interpreter of a peer's virtual environment."""
    return home / "venv" / "bin" / "python"


TRITON_WHEEL = "nvidia-pytriton==0.7.0"
"""Holds tritonserver 2.51.0 with the python backend, for CPUs alone and without a container."""


def _unpack_triton(home: Path) -> None:
    """Unpacks the server from the wheel; wheels do not keep mode bits, so the programs are made executable."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(home), TRITON_WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = home.glob("nvidia_pytriton-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "x")
    wheel.unlink()
    server = home / "x" / "pytriton" / "tritonserver"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = server / "backends" / "python" / "triton_python_backend_stub"
    shutil.copy(server / "python_backend_stubs" / version / stub.name, stub)
    for program in (stub, server / "bin" / "tritonserver"):
        program.chmod(0o755)


def _launch_triton(
    home: Path, scratch: Path, cases: Sequence[Case], repository: Path, ports: tuple[int, int]
) -> Launch:
    write_triton_repository(scratch / "models", cases, repository)
    return _serve_triton(home, scratch / "models", ports)


def _serve_triton(home: Path, models: Path, ports: tuple[int, int]) -> Launch:
    """The stub runs isolated and finds its packages by the first `python3` on PATH: the peer's own."""
    server = home / "x" / "pytriton" / "tritonserver"
    python = python_of(home)
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"]
    libraries = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    command = [
        str(server / "bin" / "tritonserver"), f"--model-repository={models}",
        f"--backend-directory={server / 'backends'}", f"--http-port={ports[0]}", f"--grpc-port={ports[1]}",
        "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false",
    ]  # fmt: skip
    environment = {
        "LD_LIBRARY_PATH": f"{home / 'x' / 'nvidia_pytriton.libs'}:{libraries}",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    return Launch(command, environment)


def _python_peer(script: str, *words: str) -> Callable[[Path, Path, Sequence[Case], Path, tuple[int, int]], Launch]:
    """Launches a script of `servers/` with the peer's interpreter; "http", "grpc", "spare" become ports, "scratch"
    the scratch directory."""

    def launch(home: Path, scratch: Path, cases: Sequence[Case], repository: Path, ports: tuple[int, int]) -> Launch:
        known = {"http": str(ports[0]), "grpc": str(ports[1]), "spare": str(_free_port()), "scratch": str(scratch)}
        first = [str(python_of(home)), str(LAUNCHERS / script)]
        if script == "bento_service:Peer":
            first = [str(python_of(home).with_name("bentoml")), "serve", script, "--host", "127.0.0.1", "--port"]
        return Launch([*first, *(known[word] for word in words)], _peer_environment(cases, repository))

    return launch


def _peer_environment(cases: Sequence[Case], repository: Path) -> dict[str, str]:
    document = {
        case.name: {
            "input": case.input,
            "output": case.output,
            "shape": case.shape,
            "path": None if case.path is None else str(repository / case.path),
            "max_batch": max_batch(case),
        }
        for case in models_of(list(cases))
    }
    quiet = {"BENTOML_DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {"LOADTEST_CASES": json.dumps(document), "PYTHONPATH": str(LAUNCHERS), **quiet}


RECIPES: dict[str, Recipe] = {
    "triton": Recipe(
        ("numpy<2", "onnxruntime"),  # numpy 2 breaks the stub's old pybind11: outputs are empty and gRPC answers OK
        _launch_triton,
        "v2bin",
        True,
        "tritonserver 2.51.0 with its python backend",
        after_install=_unpack_triton,
    ),
    "mlserver": Recipe(
        ("mlserver==1.7.1", "onnxruntime", "uvloop<0.22"),  # with newer uvloop its parallel worker dies at start
        _python_peer("mlserver_server.py", "http", "grpc", "spare"),
        "v2json",
        True,
        "MLServer 1.7.1, one inference worker, JSON over HTTP",
    ),
    "kserve": Recipe(
        ("kserve==0.21.0", "onnxruntime"),
        _python_peer("kserve_server.py", "http", "grpc"),
        "v2bin",
        True,
        "KServe SDK 0.21.0, which does not batch",
    ),
    "bentoml": Recipe(
        ("bentoml==1.4.39", "onnxruntime"),
        _python_peer("bento_service:Peer", "http"),
        "model+list",
        False,
        "BentoML 1.4.39, JSON",
        "/readyz",
    ),
    "litserve": Recipe(
        ("litserve==0.2.19", "onnxruntime"),
        _python_peer("litserve_server.py", "http"),
        "model+b64",
        False,
        "LitServe 0.2.19, JSON",
        "/health",
    ),
    "rayserve": Recipe(
        ("ray[serve]==2.60.0", "onnxruntime"),
        _python_peer("ray_server.py", "http", "scratch"),
        "model+same",
        False,
        "Ray Serve 2.60.0, JSON or raw bytes",
        "/ready",
    ),
    "fastapi": Recipe(
        ("fastapi", "uvicorn", "httptools", "uvloop", "onnxruntime"),
        _python_peer("fastapi_server.py", "http"),
        "model+raw",
        False,
        "FastAPI and uvicorn in one process, which does not batch, JSON or raw bytes",
        "/ready",
    ),
}


def set_up(name: str, peers: Path) -> None:
    """Makes a peer's environment below `peers`, unless it is complete. Raises CalledProcessError when pip fails."""
    home = peers / name
    complete = home / "complete"
    if complete.exists():
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
    recipe = RECIPES[name]
    subprocess.run([str(python_of(home)), "-m", "pip", "install", "-q", *recipe.requirements], check=True)
    recipe.after_install(home)
    complete.touch()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _role(pid: int, root: int) -> str:
    """Triton's model processes are its stubs; all else of a peer is one role."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        words = b""
    return "model" if pid != root and b"python_backend_stub" in words else "server"


class _Started:
    """A started peer that can be started again on the same ports, because some die when load ends in mid-request."""

    def __init__(self, name: str, launch: Launch, ready: str, address: str, log: Path) -> None:
        self.name, self._launch, self._ready, self._address, self._log = name, launch, ready, address, log
        self.deaths = -1
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process and waits until it is ready. Raises LoadTestError with its last words."""
        self.stop()
        self.deaths += 1
        marked = {**os.environ, "OMP_NUM_THREADS": "1", **self._launch.environment, RUN: str(self._log.parent)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._launch.command, env=marked,
                cwd=self._log.parent, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        give_up_s = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                if fetch(self._address, self._ready)[0] == 200:
                    return
            except LoadTestError:
                pass
            if self.process.poll() is not None or time.monotonic() > give_up_s:
                lines = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
                raise LoadTestError(f"{self.name} is not ready (exit status {self.process.returncode}):\n{lines}")
            time.sleep(POLL_S)

    def roles(self) -> Mapping[int, str]:
        """Role by pid of the process and all its descendants."""
        if self.process is None:
            return {}
        root = self.process.pid
        listed = {root: "server"} | dict.fromkeys(self._strays(), "server")
        return {pid: _role(pid, root) for pid in members(listed)}

    def _strays(self) -> list[int]:
        """Every process of this run, those that left the tree included: all have inherited its mark."""
        mark, found = f"{RUN}={self._log.parent}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def stop(self) -> None:
        """Stops the process, if it runs, and whatever of it left its tree."""
        if self.process is not None:
            stop(self.process)
            for pid in self._strays():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def running_triton(peers: Path, models: Path) -> Iterator[Endpoints]:
    """Triton over any repository, while it runs. Raises LoadTestError when it was not set up or does not start."""
    home, recipe = peers / "triton", RECIPES["triton"]
    if not (home / "complete").exists():
        raise LoadTestError(f"triton is not set up: make peers-setup PEERS={peers} PEER=triton")
    with tempfile.TemporaryDirectory(prefix="lt-") as scratch:
        ports = _free_port(), _free_port()
        http, grpc = (f"127.0.0.1:{port}" for port in ports)
        launch = _serve_triton(home, models, ports)
        started = _Started("triton", launch, recipe.ready_path, http, Path(scratch) / "server.log")
        try:
            started.start()
            yield Endpoints(http, grpc)
        finally:
            started.stop()


@contextmanager
def running(name: str, peers: Path, cases: Sequence[Case], repository: Path) -> Iterator[Server]:
    """A peer while it runs. Raises LoadTestError when it was not set up or does not start."""
    home, recipe = peers / name, RECIPES[name]
    if not (home / "complete").exists():
        raise LoadTestError(f"{name} is not set up: make peers-setup PEERS={peers} PEER={name}")
    with tempfile.TemporaryDirectory(prefix="lt-") as scratch_name:
        scratch = Path(scratch_name)
        ports = _free_port(), _free_port()
        launch = recipe.launch(home, scratch, cases, repository, ports)
        http, grpc = (f"127.0.0.1:{port}" for port in ports)
        started = _Started(name, launch, recipe.ready_path, http, scratch / "server.log")

        def make() -> Server:
            started.start()
            return Server(name, Endpoints(http, grpc if recipe.grpc else None), started.roles, recipe.http_style, make)

        try:
            yield make()
        finally:
            started.stop()
            if started.deaths > 0:
                print(f"{name} died {started.deaths} times and was started again", file=sys.stderr)
