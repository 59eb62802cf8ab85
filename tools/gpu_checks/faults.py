"""What becomes of requests when a model's process is killed, memory runs out, or a kernel fails."""

from __future__ import annotations

import io
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from charonia.client import Client
from charonia.errors import CharoniaError

from .outcome import FAILED, PASSED, Outcome
from .serving import Served, write_torch_model

_TENSORS = (
    'input { name: "INPUT__0" data_type: TYPE_INT64 dims: 1 } output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 1 }'
)
# a request that was alone in the batch that died counts as the culprit, and is answered with an error
_TOGETHER = "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 50000 }"
_BACK_S = 5.0
_HUGE = 1 << 45


class _Fragile(torch.nn.Module):
    """Looks a row up: one that is not there fails a kernel. Above a thousand it takes so many bytes, in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 1)
        self.work = torch.nn.Linear(512, 512)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        if int(row.max()) > 1000:
            return torch.empty(int(row.max()), device=row.device)[:1].reshape(1, 1)
        x = self.table(row).reshape(-1, 1)
        return x + 0 * self.work(x.expand(-1, 512)).mean(1, True)


def faults(device: str) -> Outcome:
    """Kill the process of a busy model, then ask for too much memory, then fail a kernel, beside another model."""
    file = io.BytesIO()
    torch.manual_seed(4)
    torch.jit.save(torch.jit.script(_Fragile().eval()), file)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("victim", "other"):
            config = f"max_batch_size: 8 {_TENSORS} {_TOGETHER}"
            write_torch_model(Path(folder), name, file.getvalue(), device, config, isolated=True)
        with Served(Path(folder)) as server, Client(server.url) as client:
            for name in ("victim", "other"):
                server.wait_ready(name)
            with _Asking(server.url, "other", 1) as other:
                with _Asking(server.url, "victim", 8) as busy:
                    busy.wait_for(20)
                    killed = _process_of(server.pid, "victim")
                    os.kill(killed, signal.SIGKILL)
                    kill_s = busy.wait_for(1)
                    busy.wait_for(20)
                memory = _asked(client, "victim", _HUGE)
                memory_s = _back(client)
                kernel = _asked(client, "victim", 999)
                kernel_s = _back(client)
                other.wait_for(5)
    values = {"kill_s": kill_s, "memory_s": memory_s, "kernel_s": kernel_s}
    lost, unharmed = len(busy.errors), not other.errors
    figure = f"{lost} lost; back after {kill_s:.1f} s, {memory_s:.1f} s, {kernel_s:.1f} s"
    reasons = [*busy.errors[:1], *other.errors[:1]]
    if not memory or not kernel:
        reasons.append("a request that cannot be run was answered")
    if device == "cuda" and max(values.values()) > _BACK_S:  # on a processor speed is not judged
        reasons.append(f"not back within {_BACK_S:g} s")
    verdict = FAILED if reasons or lost or not unharmed else PASSED
    return Outcome(verdict, figure, "; ".join(reasons), {**values, "lost": lost})


class _Asking:
    """Clients that ask a model without pause, for the length of a block."""

    def __init__(self, url: str, model: str, count: int) -> None:
        self.errors: list[str] = []
        self._url, self._model = url, model
        self._answers = 0
        self._news = threading.Condition()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def __enter__(self) -> _Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> float:
        """Wait for so many more answers; the seconds it took. Raises `RuntimeError` after half a minute."""
        began = time.monotonic()
        with self._news:
            wanted = self._answers + more
            if not self._news.wait_for(lambda: self._answers >= wanted, 30):
                raise RuntimeError(f"{self._model} does not answer: {self.errors[-1:]}")
        return time.monotonic() - began

    def _ask(self) -> None:
        with Client(self._url) as client:
            while not self._ended.is_set():
                try:
                    client.infer(self._model, {"INPUT__0": np.array([[3]])})
                except CharoniaError as error:
                    self.errors.append(f"{self._model}: {error}")
                    continue
                with self._news:
                    self._answers += 1
                    self._news.notify_all()


def _asked(client: Client, model: str, number: int) -> str:
    """The error that a request meets; "" when it is answered."""
    try:
        client.infer(model, {"INPUT__0": np.array([[number]])}, timeout_s=20)
    except CharoniaError as error:
        return str(error) or type(error).__name__
    return ""


def _back(client: Client) -> float:
    """Seconds until the victim answers again."""
    began = time.monotonic()
    while time.monotonic() - began < 30 and _asked(client, "victim", 3):
        time.sleep(0.05)
    return time.monotonic() - began


def _process_of(server: int, model: str) -> int:
    """The process that runs a model: of the server's, the one whose command or title names it."""
    from .machine import parents

    pids, above = [server], parents()
    for one in pids:
        pids += [child for child, parent in above.items() if parent == one]
    for pid in reversed(pids):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            opened = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue  # it has ended
        if model in command.split("serve")[0] or any(f"/{model}/" in path for path in opened):
            return pid
    raise RuntimeError(f"no process of model {model} was found")
