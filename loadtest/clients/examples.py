"""Runs the Python examples of a checkout of Triton's client repository, unchanged, against `charonia serve`.

All `simple_*.py` there are run, those that this module has no arguments for with the server's address alone. An
example says by its exit code whether it got what it expects.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.servers import Charonia, Endpoints
from loadtest.model import LoadTestError

from . import models
from .outcome import Outcome, environment, run

FOLDER = Path("src", "python", "examples")
WITHIN_S = 120.0
PICTURE = "PICTURE"
"""Stands for the path of a picture among the arguments."""
CONTROL = ("simple_http_model_control", "simple_grpc_model_control")
FIXED_PORTS = "memory_growth_test"
"""It asks localhost:8000 and :8001 and has no option for another address."""
VARIANTS: dict[str, list[list[str]]] = {
    "simple_http_infer_client": [[], ["--request-compression-algorithm=gzip", "--response-compression-algorithm=gzip"],
        ["--request-compression-algorithm=deflate", "--response-compression-algorithm=deflate"]],
    "simple_http_aio_infer_client": [[], ["--request-compression-algorithm=gzip",
        "--response-compression-algorithm=gzip"]],
    "simple_grpc_infer_client": [[], ["-C", "gzip"], ["-C", "deflate"]],
    "simple_grpc_aio_infer_client": [[], ["-C", "gzip"]],
    "simple_http_sequence_sync_infer_client": [[], ["-d"]],
    "simple_grpc_sequence_sync_infer_client": [[], ["-d"]],
    "simple_grpc_sequence_stream_infer_client": [[], ["-d"]],
    "simple_grpc_aio_sequence_stream_infer_client": [[], ["-d"]],
    "reuse_infer_objects_client": [["-i", "http"], ["-i", "grpc"]],
    "image_client": [
        [*way, "-m", "densenet_onnx", "-s", "INCEPTION", "-c", "3", PICTURE]
        for way in (["-i", "http"], ["-i", "grpc"], ["-i", "http", "--async"], ["-i", "grpc", "--streaming"])
    ],
    "grpc_image_client": [["-m", "densenet_onnx", "-s", "INCEPTION", "-c", "3", PICTURE],
        ["-m", "densenet_onnx", "--streaming", PICTURE]],
    "ensemble_image_client": [["-i", "http", PICTURE], ["-i", "grpc", "-c", "2", PICTURE]],
    FIXED_PORTS: [["-i", "http"], ["-i", "grpc"]],
}  # fmt: skip
"""The arguments of each run of an example, without the address; one run without any where there is no entry."""


@dataclass(frozen=True)
class Example:
    """One run of one example."""

    script: Path
    arguments: list[str]

    @property
    def name(self) -> str:
        return " ".join([self.script.name, *self.arguments])

    @property
    def is_grpc(self) -> bool:
        if "-i" in self.arguments:
            return self.arguments[self.arguments.index("-i") + 1] == "grpc"
        return "grpc" in self.script.stem


def version(checkout: Path) -> str:
    """The commit of the checkout, its date first."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%cs %h"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def found(checkout: Path) -> list[Example]:
    """The runs of all examples of a checkout. Raises LoadTestError for a folder that has none."""
    scripts = sorted((checkout / FOLDER).glob("*.py"))
    if not scripts:
        raise LoadTestError(f"no examples in {checkout / FOLDER}")
    return [
        Example(script, arguments)
        for script in sorted(scripts, key=lambda script: (script.stem in CONTROL, script.stem == CONTROL[1], script))
        for arguments in VARIANTS.get(script.stem, [[]])
    ]


def play(checkout: Path, python: str, serve: Sequence[str] = (), only: str = "") -> Iterator[Outcome]:
    """Runs each example with the interpreter `python`, which has tritonclient and what else examples import.

    `serve` are more options of the servers.
    """
    wanted = [one for one in found(checkout) if only in one.name]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="charonia-examples-")))
        picture = folder / "picture.png"
        draw(picture)
        servers = _Servers(folder, serve, stack)
        for one in wanted:
            if "cudashm" in one.script.stem and not Path("/dev/nvidiactl").exists():
                yield Outcome(one.name, "not run", 0.0, "needs an NVIDIA GPU")
                continue
            server = servers.of(one)
            if server is None:
                yield Outcome(one.name, "not run", 0.0, "it asks ports 8000 and 8001, and one is taken on this machine")
                continue
            address = [] if one.script.stem == FIXED_PORTS else ["-u", server.grpc if one.is_grpc else server.http]
            arguments = [str(picture) if word == PICTURE else word for word in one.arguments]
            command = [python, str(one.script), *map(str, address), *arguments]
            yield run(one.name, command, WITHIN_S, env=environment({}), cwd=folder)[0]


class _Servers:
    """The servers of a run, each started when the first example needs it."""

    def __init__(self, folder: Path, more: Sequence[str], stack: ExitStack) -> None:
        self._folder = folder
        self._more = more
        self._stack = stack
        self._running: dict[str, Charonia] = {}

    def of(self, example: Example) -> Endpoints | None:
        """Where the server for an example listens; None where another program has the ports it asks."""
        stem = example.script.stem
        if stem in CONTROL:
            running = self._start("control", "--model-control-mode=explicit", "--load-model=simple")
            if stem == CONTROL[1] and not (self._folder / "control" / "simple_string_dyna_sequence").exists():
                models.write_one_more(self._folder / "control")
                _await_names(running.endpoints, 8)
        elif stem == FIXED_PORTS:
            if "all8000" not in self._running and not (_is_free(8000) and _is_free(8001)):
                return None
            running = self._start("all", "--allow-client-shm=true", ports=("8000", "8001"))
        else:
            running = self._start("all", "--allow-client-shm=true")
        return running.endpoints

    def _start(self, repository: str, *options: str, ports: tuple[str, str] = ("0", "0")) -> Charonia:
        key = repository + ports[0]
        if key not in self._running:
            path = self._folder / repository
            if not path.exists():
                path.mkdir()
                models.write_simple(path)
                if repository == "all":
                    models.write_one_more(path)
                    models.write_others(path)
            listen = (f"--http-port={ports[0]}", f"--grpc-port={ports[1]}", "--http-address=127.0.0.1")
            server = Charonia(path, (*listen, "--grpc-address=127.0.0.1", *options, *self._more))
            self._running[key] = self._stack.enter_context(server)
        return self._running[key]


def _await_names(server: Endpoints, count: int) -> None:
    """Until the index has `count` models: a new directory is in it after a second at the latest."""
    give_up_at = time.monotonic() + WITHIN_S
    while time.monotonic() < give_up_at:
        request = urllib.request.Request(f"http://{server.http}/v2/repository/index", b"", method="POST")
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            if len(json.load(answer)) == count:
                return
        time.sleep(0.05)
    raise LoadTestError(f"the repository index never had {count} models")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def draw(path: Path) -> None:
    """Writes a small picture."""
    from PIL import Image

    Image.linear_gradient("L").resize((320, 240)).convert("RGB").save(path)
