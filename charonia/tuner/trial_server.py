"""A private `charonia serve` over a copy of the models, one for each configuration that is measured, and its memory.

A server that loads configurations one after the other would be quicker to start, but what a library keeps of the one
before (arenas, pools of threads) would count for the next, and one that crashes would end the run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia.errors import InvalidArgument, NotFound, Unavailable
from charonia.models.config_forms import from_json
from charonia.options.cloud_options import VARIABLES
from charonia.options.table import OPTIONS
from protos.model_config_pb2 import ModelConfig

from .knobs import config_of

CONFIG = "config.pbtxt"
_STOPS_WITHIN_S = 60.0
_POLL_S = 0.02
_SHOWN_LINES = 3
_CACHE_BYTES = 256 << 20
"""Of the server's response cache, when the knob `cache` is tuned."""
_OPTION_VARIABLES = frozenset(option.variable for option in OPTIONS) | VARIABLES
_FRONTS = ("http", "grpc", "metrics", "openai", "sagemaker", "vertex-ai")


class ModelCopies:
    """A repository of copies of some models, whose configurations are written before each server starts."""

    def __init__(self, repositories: Sequence[str], models: Sequence[str], root: Path) -> None:
        """Raises `NotFound` for a model that is in no repository, `InvalidArgument` when it cannot be copied."""
        self.path, self.state = root / "models", root / "state"
        self.sources = {model: _find(repositories, model) for model in models}
        for model, source in self.sources.items():
            try:
                shutil.copytree(source, self.path / model)
            except (OSError, shutil.Error) as error:
                raise InvalidArgument(f"model '{model}' cannot be copied for the run: {error}") from None

    def written(self, model: str) -> ModelConfig:
        """The configuration as its user wrote it; empty without a file. Raises `InvalidArgument`."""
        return written_config(self.sources[model], model)

    def write(self, configs: Mapping[str, str]) -> None:
        """Put the text of `config.pbtxt` there for some models."""
        for model, text in configs.items():
            (self.path / model / CONFIG).write_text(text, encoding="utf-8")


def find_model(repositories: Sequence[str], model: str) -> Path:
    """The model's directory, of the first repository that has it. Raises `NotFound`."""
    return _find(repositories, model)


def written_config(source: Path, model: str) -> ModelConfig:
    """The configuration in a model's directory; empty without a file. Raises `InvalidArgument`."""
    try:
        return config_of((source / CONFIG).read_text(encoding="utf-8"), model)
    except FileNotFoundError:
        return ModelConfig()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the config.pbtxt of '{model}' cannot be read: {error}") from None


def _find(repositories: Sequence[str], model: str) -> Path:
    if model in ("", ".", "..") or "/" in model or "\0" in model:
        raise InvalidArgument(f"'{model}' is no name of a model")
    for repository in repositories:
        if (path := Path(repository) / model).is_dir():
            return path
    raise NotFound(f"model '{model}' is in none of the repositories: {', '.join(repositories)}")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where it listens (host:port), and its process."""

    http: str
    grpc: str
    process: subprocess.Popen[bytes]
    state: Path

    def config(self, model: str) -> ModelConfig:
        """The model's configuration as the server completed it."""
        with urllib.request.urlopen(f"http://{self.http}/v2/models/{model}/config", timeout=60) as answer:
            return from_json(answer.read())

    def memory(self) -> dict[str, Any]:
        """Bytes of its processes by name, shared pages in equal parts where the system says so; empty where nothing is
        known of processes."""
        names = {}
        with suppress(OSError, ValueError, KeyError):
            names = {part["pid"]: part["role"] for part in json.loads((self.state / "processes.json").read_text())}
        found: dict[str, int] = {}
        for pid in _tree(self.process.pid):
            if size := _bytes_of(pid):
                name = str(names.get(pid) or _instance_name(pid))
                found[name] = found.get(name, 0) + size
        return {"bytes": sum(found.values()), "processes": found}


@contextmanager
def started(
    copies: ModelCopies, models: Sequence[str], options: Sequence[str], *, caches: bool, within_s: float
) -> Iterator[RunningServer]:
    """A server with these models loaded; stopped at the end. `options` are further ones of `serve`.

    Raises `Unavailable` with its own sentence when it ends or is not ready in time.
    """
    shutil.rmtree(copies.state, ignore_errors=True)
    copies.state.mkdir(parents=True)
    log = copies.state / "serve.log"
    command = [sys.executable, "-P", "-m", "charonia.tuner.server_launcher", str(os.getpid())]
    command += server_arguments(copies, models, options, caches=caches)
    with log.open("wb") as output:
        # a group of its own: Ctrl-C of the terminal is the tuner's, which stops the server
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, env=server_environment(os.environ),
        )  # fmt: skip
    try:
        http, grpc = _wait_ready(process, copies.state, log, within_s)
        yield RunningServer(http, grpc, process, copies.state)
    finally:
        _stop(process)


def server_arguments(copies: ModelCopies, models: Sequence[str], options: Sequence[str], *, caches: bool) -> list[str]:
    """The arguments of `serve`: defaults of a run, the user's options, and what no option may change, last, as the
    last one counts: an empty log URL is a private log, port 0 one that is free."""
    defaults = [f"--{front}-address=127.0.0.1" for front in _FRONTS if front != "metrics"]  # which has that of HTTP
    defaults.append("--allow-webhooks=false")
    if caches:
        defaults.append(f"--cache-config=local,size={_CACHE_BYTES}")
    return [
        *defaults, *options,
        f"--model-repository={copies.path}", f"--state-dir={copies.state}", "--config=", "--log-url=", "--shm-dir=",
        "--http-socket=", "--grpc-socket=", *(f"--{front}-port=0" for front in _FRONTS),
        "--model-control-mode=explicit", *(f"--load-model={model}" for model in models),
    ]  # fmt: skip


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without variables that are options: CHARONIA_LOG_URL would have the server join the log of another, AIP_MODE (of
    Vertex AI) would turn off the fronts that are measured."""
    return {name: value for name, value in environment.items() if name not in _OPTION_VARIABLES}


def _wait_ready(process: subprocess.Popen[bytes], state: Path, log: Path, within_s: float) -> tuple[str, str]:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if (code := process.poll()) is not None:
            raise Unavailable(f"the server ended with {code}: {_last_words(log)}")
        with suppress(OSError, ValueError, KeyError):
            where = json.loads((state / "endpoints.json").read_text())
            with urllib.request.urlopen(f"http://{where['http']}/v2/health/ready", timeout=10) as answer:
                if answer.status == 200:
                    return str(where["http"]), str(where["grpc"])
        time.sleep(_POLL_S)
    raise Unavailable(f"the server was not ready within {within_s:g} s: {_last_words(log)}")


def _last_words(log: Path) -> str:
    """The end of its log, errors before other lines."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E2", "charonia: "))]
    return " / ".join((errors or lines)[-_SHOWN_LINES:]) or "it said nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and after a while SIGKILL to all that is below it too. A Ctrl-C meanwhile is raised when it is done."""
    interrupted = False
    members = _tree(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    until_s = time.monotonic() + _STOPS_WITHIN_S
    while time.monotonic() < until_s:
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
            break
        except KeyboardInterrupt:
            interrupted = True
        except subprocess.TimeoutExpired:
            break
    if process.poll() is None:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    if interrupted:
        raise KeyboardInterrupt


def _tree(root: int) -> list[int]:
    """The process and all below it; only itself where /proc does not tell."""
    found, waiting = [root], [root]
    while waiting:
        for task in _tasks(waiting.pop()):
            with suppress(OSError):
                children = [int(child) for child in (task / "children").read_text().split()]
                found += children
                waiting += children
    return found


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _bytes_of(pid: int) -> int:
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with suppress(OSError, IndexError, ValueError):
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                if line.startswith(key):
                    return int(line.split()[1]) << 10
    return 0


def _instance_name(pid: int) -> str:
    """`instance:MODEL...` of a process that executes a model, else the name that the system has for it."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        for word in words:
            if word.startswith("charonia-instance:"):
                return word.removeprefix("charonia-")
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "other"
