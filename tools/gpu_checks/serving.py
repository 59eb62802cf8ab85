"""A server of a check's own, and the load that a check puts on it.

Models of torch are served by the backend `pytorch` where it is installed, else by a python model that runs the same
file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia.client import Client
from charonia.errors import CharoniaError
from executors.backends.registry import BackendRegistry

Array = npt.NDArray[Any]

_READY_S = 300.0
"""The time limit of the check ends it sooner."""
_WARM_UP = 4
"""TorchScript compiles in its second execution; each thread asks so often before it counts."""
_PYTHON_MODEL = """
import numpy as np
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        on_gpu = args["model_instance_kind"] == "GPU"
        self.device = torch.device(f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu")
        path = f"{args['model_repository']}/{args['model_version']}/model.pt"
        self.module = torch.jit.load(path, map_location=self.device).eval()

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(r, "INPUT__0").as_numpy() for r in requests]
        with torch.inference_mode():
            # one module call for all requests, as a native backend makes it
            joined = torch.from_numpy(np.concatenate(arrays)).to(self.device, non_blocking=True)
            found = self.module(joined).cpu().numpy()
        answers, at = [], 0
        for array in arrays:
            part = found[at : at + len(array)]
            at += len(array)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT__0", part)]))
        return answers
"""


def has_backend(name: str) -> bool:
    """Whether a backend is installed here."""
    return BackendRegistry().has(name)


def write_model(directory: Path, name: str, config: str, files: Mapping[str, bytes | str]) -> Path:
    """A model with one version. Returns the version's directory."""
    version = directory / name / "1"
    version.mkdir(parents=True)
    (directory / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}\n')
    for file, content in files.items():
        (version / file).write_bytes(content.encode() if isinstance(content, str) else content)
    return version


def write_torch_model(
    directory: Path, name: str, module: bytes, device: str, config: str, *, count: int = 1, isolated: bool = False
) -> None:
    """A TorchScript module with INPUT__0 and OUTPUT__0. `config` has tensors and what else the model says."""
    kind = "KIND_GPU" if device == "cuda" else "KIND_CPU"
    text = f"{config}\ninstance_group {{ kind: {kind} count: {count} }}"
    if has_backend("pytorch"):
        if isolated:
            text += '\nparameters { key: "charonia.isolation" value { string_value: "process" } }'
        write_model(directory, name, f'platform: "pytorch_libtorch"\n{text}', {"model.pt": module})
    else:
        write_model(directory, name, f'backend: "python"\n{text}', {"model.pt": module, "model.py": _PYTHON_MODEL})


class Served:
    """`charonia serve` on loopback, for the length of a block."""

    def __init__(self, models: Path, *flags: str) -> None:
        self._state = Path(tempfile.mkdtemp(prefix="state_"))
        self._models, self._flags = models, flags
        self.url = self.metrics_url = ""
        self.pid = 0

    def __enter__(self) -> Served:
        self._log = (self._state / "serve.log").open("wb")
        listening = ("--http-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0")
        command = [sys.executable, "-m", "charonia.cli", "serve", "--model-repository", str(self._models)]
        # in the session of the check, so that its end takes the server along
        self._process = subprocess.Popen(
            [*command, *listening, f"--state-dir={self._state}", "--allow-client-shm=true", *self._flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        self.pid = self._process.pid
        try:
            where = self._wait(lambda: json.loads((self._state / "endpoints.json").read_text()))
            self.url, self.metrics_url = f"http://{where['http']}", f"http://{where['metrics']}/metrics"
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def wait_ready(self, model: str = "") -> None:
        """Wait until the server, or a model, takes requests. Raises `RuntimeError` with its log otherwise."""

        def ready() -> bool:
            with Client(self.url) as client:
                if not client.ready(model):
                    raise OSError
                return True

        self._wait(ready)

    def log(self) -> str:
        """What it wrote."""
        return (self._state / "serve.log").read_text(errors="replace")

    def _wait(self, ask: Callable[[], Any]) -> Any:
        give_up = time.monotonic() + _READY_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                return ask()
            except (OSError, ValueError, KeyError, CharoniaError):
                time.sleep(0.05)
        raise RuntimeError(f"the server is not ready: {' / '.join(self.log().splitlines()[-5:])}")


@dataclass(slots=True)
class Load:
    """What a load found: rows answered in `seconds`, latencies in ms, errors."""

    rows: int = 0
    seconds: float = 0.0
    ended_at: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def p50_ms(self) -> float:
        return float(np.median(self.latencies_ms)) if self.latencies_ms else float("inf")


def saturate(
    url: str,
    model: str,
    name: str,
    array: Array,
    output: tuple[str, tuple[int, ...], Any],
    *,
    in_flight: int,
    seconds: float,
) -> Load:
    """Keep so many requests in flight, each with `array` in shared memory, for some seconds."""
    load, lock = Load(), threading.Lock()
    began_at = ended_at = 0.0

    def start() -> None:
        nonlocal began_at
        began_at = time.monotonic()

    begin = threading.Barrier(in_flight, action=start)
    out_name, out_shape, out_dtype = output

    def work() -> None:
        own = Load()
        try:
            ask(own)
        except Exception as error:  # the others wait for this thread
            begin.abort()
            own.errors.append(f"{type(error).__name__}: {error}")
        nonlocal ended_at
        with lock:
            ended_at = max(ended_at, own.ended_at)
            load.rows += own.rows
            load.latencies_ms += own.latencies_ms
            load.errors += own.errors

    def ask(own: Load) -> None:
        size = array.nbytes + int(np.prod(out_shape)) * np.dtype(out_dtype).itemsize + 256
        with Client(url) as client, client.shared_memory(size) as region:
            given, found = region.array(array.shape, array.dtype), region.array(out_shape, out_dtype)
            given.array[...] = array
            for _ in range(_WARM_UP):
                client.infer(model, {name: given}, outputs={out_name: found})
            begin.wait()
            while (began := time.monotonic()) < began_at + seconds:
                client.infer(model, {name: given}, outputs={out_name: found})
                own.rows += len(array)
                own.ended_at = time.monotonic()
                own.latencies_ms.append((own.ended_at - began) * 1e3)

    threads = [threading.Thread(target=work) for _ in range(in_flight)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load.seconds = ended_at - began_at
    if load.errors:
        raise RuntimeError(f"model {model}: {len(load.errors)} of {in_flight} clients failed: {load.errors[0]}")
    return load
