"""What the server says of the GPUs, and what models leave behind on them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from charonia.client import Client
from executors.isolation import sandbox

from .outcome import FAILED, PASSED, Outcome
from .regions import through_regions
from .serving import Served, write_model

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    "nv_gpu_utilization",
    "nv_gpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "nv_gpu_power_limit",
    "nv_energy_consumption",
)
_ASKED = {
    "memory.total": ("nv_gpu_memory_total_bytes", 1 << 20),
    "memory.used": ("nv_gpu_memory_used_bytes", 1 << 20),
    "enforced.power.limit": ("nv_gpu_power_limit", 1),
}
"""What `nvidia-smi` is asked, the family that says the same, and its unit in that of the family."""

_ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
"""
_DRIVER = """
import sys
from executors.isolation import sandbox

sandbox.enter([], sys.argv[1])
from charonia.cuda.cuda_stream import CudaDevice, CudaDevices, CudaStream, DeviceMemory

device = CudaDevice(CudaDevices.shared(), 0)
with device.current():
    CudaStream(device).close()
    DeviceMemory(device, 1 << 20).free()
"""
_TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }'


def metrics(device: str) -> Outcome:
    """The driver starts in a sandbox, a model that asks for a GPU loads, its tensors may lie in a client's memory
    there, and the figures of the GPUs move and are those of `nvidia-smi`.
    """
    kind = "KIND_GPU" if device == "cuda" else "KIND_CPU"
    if device == "cuda" and sandbox.is_available() and (fault := driver_in_sandbox()):
        return Outcome(FAILED, reason=f"NVIDIA's driver does not start in the sandbox of models: {fault}")
    with tempfile.TemporaryDirectory() as folder:
        write_model(
            Path(folder), "echo", f'backend: "python" {_TENSORS} instance_group {{ kind: {kind} }}', {"model.py": _ECHO}
        )
        with Served(Path(folder)) as server, Client(server.url) as client:
            server.wait_ready("echo")
            given = np.arange(4, dtype=np.float32)
            if not np.array_equal(client.infer("echo", {"x": given})["y"], given):
                return Outcome(FAILED, reason="a model on this device gave another answer than its input")
            if device == "cuda" and not np.array_equal(through_regions(server.url, "echo", ("x", "y"), given), given):
                return Outcome(FAILED, reason="through memory of this process on the GPU, an answer was another one")
            first = families(_page(server))
            if device == "cpu":
                extra = [name for name in FAMILIES if name in first]
                return Outcome(FAILED if extra else PASSED, "no GPU, and no family of one", ", ".join(extra))
            missing = [name for name in FAMILIES if name not in first]
            if missing:
                return Outcome(FAILED, reason=f"missing: {', '.join(missing)}; is nvidia-ml-py installed?")
            _keep_busy(3.0)
            second, truth = families(_page(server)), smi(_asked(["uuid", *_ASKED]))
            return compare(second, truth, second["nv_energy_consumption"] != first["nv_energy_consumption"])


def driver_in_sandbox() -> str:
    """What NVIDIA's driver says to the first GPU's use in a sandboxed process; "" when it can be used there."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-c", _DRIVER, temporary]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    lines = done.stderr.strip().splitlines()[-1:] or [f"its process ended with {done.returncode}"]
    return lines[0] if done.returncode else ""


def compare(found: dict[str, dict[str, float]], truth: dict[str, dict[str, float]], moved: bool) -> Outcome:
    """The figures of the page against those of `nvidia-smi`: both by family and GPU."""
    worst, values = 0.0, {}
    for family, cards in truth.items():
        for uuid, value in cards.items():
            own = found.get(family, {}).get(uuid)
            if own is None:
                return Outcome(FAILED, reason=f"{family} has no value of {uuid}")
            worst = max(worst, abs(own - value) / max(value, 1.0))
            values[f"{family} {uuid}"] = own
    figure = f"six families, off by {100 * worst:.1f} % at most, energy {'moves' if moved else 'STANDS STILL'}"
    return Outcome(PASSED if worst <= 0.05 and moved else FAILED, figure, "", values)


def families(page: str) -> dict[str, dict[str, float]]:
    """The GPUs' families of a metrics page: by name and GPU."""
    found: dict[str, dict[str, float]] = {}
    for name, uuid, value in re.findall(r'^(nv_\w+)\{gpu_uuid="([^"]+)"\} (\S+)$', page, re.MULTILINE):
        found.setdefault(name, {})[uuid] = float(value)
    return found


def smi(lines: str) -> dict[str, dict[str, float]]:
    """What `nvidia-smi` answered, in the units of the families: by name and GPU."""
    found: dict[str, dict[str, float]] = {}
    for line in lines.strip().splitlines():
        uuid, *words = [word.strip() for word in line.split(",")]
        for (family, unit), word in zip(_ASKED.values(), words, strict=True):
            if re.fullmatch(r"[\d.]+", word):  # a card may not have a figure: "[N/A]"
                found.setdefault(family, {})[uuid] = float(word) * unit
    return found


def memory(device: str) -> Outcome:
    """Two torch models on one card: what is used before they are loaded, and after they are unloaded."""
    from .networks import encoder, resnet
    from .serving import write_torch_model

    with tempfile.TemporaryDirectory() as folder:
        for name, network in (("one", resnet(device)), ("two", encoder(device))):
            config = f"max_batch_size: {len(network.array)} {network.tensors}"
            write_torch_model(Path(folder), name, network.script(), device, config)
            del network.module
        _free_own(device)
        with Served(Path(folder), "--model-control-mode=explicit") as server, Client(server.url) as client:
            before = _used_mib(device, server.pid)
            for name in ("one", "two"):
                _control(server, name, "load")
            loaded = _used_mib(device, server.pid)
            for name in ("one", "two"):
                _control(server, name, "unload")
            after = _until_low(device, server.pid, before)
            if client.ready("one"):
                return Outcome(FAILED, reason="a model that was unloaded is ready")
    figure = f"{before:.0f} MiB before, {loaded:.0f} loaded, {after:.0f} after"
    values = {"before_mib": before, "loaded_mib": loaded, "after_mib": after}
    return Outcome(PASSED if after - before <= 100 < loaded - before else FAILED, figure, "", values)


def _control(server: Served, model: str, what: str) -> None:
    request = urllib.request.Request(f"{server.url}/v2/repository/models/{model}/{what}", b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=60):
        pass


def _until_low(device: str, pid: int, before: float) -> float:
    """What is used once the processes of the models have ended; after 10 s what is used then."""
    give_up = time.monotonic() + 10
    while (used := _used_mib(device, pid)) - before > 100 and time.monotonic() < give_up:
        time.sleep(0.2)
    return used


def _used_mib(device: str, pid: int) -> float:
    """Used memory of the first card; on a CPU the memory of the server's processes."""
    if device == "cuda":
        return float(_asked(["memory.used"]).splitlines()[0])
    pids, above = [pid], parents()
    for one in pids:
        pids += [child for child, parent in above.items() if parent == one]
    return sum(_resident_mib(one) for one in pids)


def parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has ended
    return found


def _resident_mib(pid: int) -> float:
    try:
        (size,) = re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except (OSError, ValueError):
        return 0.0
    return int(size) / 1024


def _page(server: Served) -> str:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        return str(answer.read().decode())


def _asked(fields: list[str]) -> str:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def _keep_busy(seconds: float) -> None:
    """Work on the GPU, so that its figures move; with torch where it is installed."""
    try:
        import torch
    except ImportError:
        time.sleep(seconds)
        return
    square = torch.ones(2048, 2048, device="cuda")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        square @ square
        torch.cuda.synchronize()
    del square
    torch.cuda.empty_cache()


def _free_own(device: str) -> None:
    if device == "cuda":
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
