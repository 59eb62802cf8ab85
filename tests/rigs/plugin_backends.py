"""Backends as a distribution of their own, which processes of isolated models find: `install` makes one of this file.

`shapes` answers in every shape: input `x` FP32 [-1], output `y` = 2x; its parameter `shape` is batch, requests, stream
or calls, or exit or cancel for an instance whose making ends in that, `health` cancel for a health check that does,
`wants` where it wants its arrays, `score` a number that responses of the shape requests have as a parameter. `deep`
doubles on a device that takes `device_ms` for a batch, after `host_ms` on the host, and has up to `depth` batches under
way. `hostile` does what its input `act` says, and answers with the error number, 0 for success. `slow` holds the
interpreter's lock for seconds while it loads.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from charonia.backend import (
    Array,
    GraphSignature,
    InstanceDied,
    InstanceSpec,
    MemoryUse,
    ModelRequest,
    ModelResponse,
    ModelSource,
    Outcome,
    ResponseStream,
    TensorSignature,
    Timings,
)
from charonia.errors import InvalidArgument
from charonia.inference import InferenceRequest
from charonia.tensors import Tensor

ECHO, SEGFAULT, HANG, READ, WRITE, CONNECT, DATAGRAM, FORK, SIGNAL, ENVIRONMENT, SPAWN, THREADS, BOMB = range(13)
"""What a hostile model may be asked for. BOMB is answered with how many processes it could start."""
BOMB_SIZE = 20
SLEEP = ("sleep", "86399")


def install(directory: Path) -> Path:
    """Make a distribution of this module in a directory, to be put on PYTHONPATH."""
    name = Path(__file__).stem
    (directory / f"{name}-1.dist-info").mkdir(parents=True)
    shutil.copy(__file__, directory)
    (directory / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    words = {"shapes": "Shapes", "deep": "Deep", "hostile": "Hostile", "slow": "Slow"}
    entries = "".join(f"{word} = {name}:{backend}\n" for word, backend in words.items())
    (directory / f"{name}-1.dist-info" / "entry_points.txt").write_text(f"[charonia.backends]\n{entries}")
    return directory


class _Model:
    def __init__(self, source: ModelSource) -> None:
        self.source = source

    async def signature(self) -> GraphSignature | None:
        return None

    async def close(self) -> None: ...


class Shapes:
    name = "shapes"
    api = (1, 0)
    isolation = "process"

    async def load(self, source: ModelSource) -> ShapesModel:
        return ShapesModel(source)


class ShapesModel(_Model):
    def __init__(self, source: ModelSource) -> None:
        super().__init__(source)
        self.wants = source.parameter("wants") or "host"

    async def create_instance(self, spec: InstanceSpec) -> object:
        shape = spec.source.parameter("shape")
        if shape in ("exit", "cancel"):
            raise SystemExit(3) if shape == "exit" else asyncio.CancelledError("upstream")
        made = {"batch": Batches, "requests": Requests, "stream": Streams, "calls": Calls}[str(shape)]
        return made(spec)


class Batches:
    stateless = True
    rows_fail_alone = True
    batch_sizes = (1, 4)
    checks_health = True

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.thread: threading.Thread | None = None

    def started(self) -> None:
        self.thread = threading.current_thread()

    async def check_health(self) -> bool:
        return self.thread is not None and self.thread.name == f"instance {self.spec.name}"

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array] | Outcome:
        (x,) = inputs.values()
        assert self.thread is threading.current_thread()
        if np.any(x == -1):
            raise InvalidArgument("this model takes no -1")
        if np.any(x == -4):
            raise TimeoutError("it waited in vain")
        arrays = dict.fromkeys(outputs, x * 2)
        if np.any(x == -5):
            return Outcome(arrays, Timings(1, -2, 3))
        if np.any(x == -6):
            rows: Any = np.flatnonzero(np.any(x == -6, axis=1))
            return Outcome(arrays, None, {row: InvalidArgument("no file 'a\udcff'") for row in rows})
        failures = {row: InvalidArgument("this model takes no -2") for row in range(len(x)) if np.any(x[row] == -2)}
        return Outcome(arrays, Timings(1, 2, 3), failures) if failures else arrays

    def close(self) -> None: ...


def _shaped(tensor: Tensor, request: ModelRequest) -> Tensor:
    """With NumPy's integers in its shape, which no message takes, where the request wants them."""
    return replace(tensor, shape=tuple(np.array(tensor.shape))) if "shape" in request.parameters else tensor


class Requests:
    checks_health = True

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.cancelled: list[ModelRequest] = []

    async def check_health(self) -> bool:
        if self.spec.source.parameter("health") == "cancel":
            raise asyncio.CancelledError("upstream")
        return True

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        self.cancelled += requests

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        if any(value_of(request) == -4 for request in requests):
            raise TimeoutError("it waited in vain")
        while any(value_of(request) == -2 and request not in self.cancelled for request in requests):
            await asyncio.sleep(0.001)
        return [self.answer(request) for request in requests]

    def answer(self, request: ModelRequest) -> ModelResponse:
        if value_of(request) == -1:
            return ModelResponse(error=InvalidArgument("this model takes no -1"))
        found = {"id": request.id, "sequence": request.correlation_id, "flags": request.flags} | request.parameters
        if (score := self.spec.source.parameter("score")) is not None:
            found["score"] = float(score)
        return ModelResponse([_shaped(Tensor.of("y", request.inputs[0].array() * 2), request)], found)

    async def close_instance(self) -> None: ...


class Streams:
    """Answers as many times as the first number of `x` says."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.sent = 0

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        if any(value_of(request) == -3 for request in requests):
            responses.free()
        for index, request in enumerate(requests):
            value = value_of(request)
            if value == -4:
                raise TimeoutError("it waited in vain")
            if value == -3:
                raise InvalidArgument("this model takes no -3")
            for number in range(int(value)):
                outputs = [_shaped(Tensor.of("y", request.inputs[0].array() + number), request)]
                responses.send(index, ModelResponse(outputs, request.parameters), final=False)
                await responses.drain()
            if value != -1:
                responses.send(index, None, final=True)

    async def close_instance(self) -> None: ...


class Calls(Requests):
    """Asks the model `doubles` in its place."""

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> Sequence[ModelResponse]:
        return [await self.asked(request) for request in requests]

    async def asked(self, request: ModelRequest) -> ModelResponse:
        calls = self.spec.calls
        assert calls is not None
        interface = await calls.find("doubles", -1)
        made = InferenceRequest("doubles", -1, request.inputs, outputs=tuple(interface.outputs))
        call = await calls.open(made, self.spec.source.name, [request.origin])
        response = await call.next()
        assert response is not None
        assert await call.next() is None
        return response


class Deep:
    name = "deep"
    api = (1, 0)

    async def load(self, source: ModelSource) -> DeepModel:
        return DeepModel(source)


class DeepModel(_Model):
    async def create_instance(self, spec: InstanceSpec) -> DeepInstance:
        return DeepInstance(spec.source)

    def memory(self) -> list[MemoryUse]:
        if memory_gate := self.source.parameter("memory_gate"):
            Path(memory_gate).read_bytes()
        return [MemoryUse("GPU", 1, 4096), MemoryUse("CPU", 0, 512)]


class DeepInstance:
    """A device that runs one batch after another: a thread. It refuses -1, ends the process for -2, waits for
    another process to open the FIFO `gate` for -3, and cannot be used any more after -4.
    """

    stateless = True
    checks_health = True

    def __init__(self, source: ModelSource) -> None:
        self.depth = source.integer("depth") or 2
        self.device_s = (source.integer("device_ms") or 0) / 1000
        self.host_s = (source.integer("host_ms") or 0) / 1000
        self.device = ThreadPoolExecutor(1, thread_name_prefix="device")
        self.gate = Path(source.parameter("gate") or "")
        self.threads: set[int] = set()

    def started(self) -> None:
        self.threads.add(threading.get_ident())

    async def check_health(self) -> bool:
        return True

    def submit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Future[Mapping[str, Array]]:
        assert threading.get_ident() in self.threads
        time.sleep(self.host_s)
        return self.device.submit(self.run, inputs, outputs)

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        return self.submit(inputs, outputs).result()

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        (x,) = inputs.values()
        time.sleep(self.device_s)
        if np.any(x == -1):
            raise InvalidArgument("this model takes no -1")
        if np.any(x == -2):
            os._exit(3)
        if np.any(x == -3):
            self.gate.read_bytes()
        if np.any(x == -4):
            raise InstanceDied("the device is worn out")
        return dict.fromkeys(outputs, x * 2)

    def close(self) -> None:
        self.device.shutdown()


class Hostile:
    name = "hostile"
    api = (1, 0)
    isolation = "sandbox"

    async def load(self, source: ModelSource) -> HostileModel:
        return HostileModel(source)


class HostileModel(_Model):
    async def create_instance(self, spec: InstanceSpec) -> HostileInstance:
        return HostileInstance(spec.source)


class HostileInstance:
    stateless = True

    def __init__(self, source: ModelSource) -> None:
        self.file = str(source.parameter("file"))
        self.port = int(source.parameter("port") or 0)

    def execute(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        act = inputs["act"]
        errors = np.array([self.error_of(int(one)) for one in act.ravel()], np.int32).reshape(act.shape)
        return dict.fromkeys(outputs, errors)

    def error_of(self, act: int) -> int:
        if act == BOMB:
            return self.bomb()
        try:
            self.act(act)
        except OSError as error:
            return error.errno or -1
        return 0

    def bomb(self) -> int:
        """Start processes that never end, each in another way than the one before; their ids go to `file`.pids."""
        pids: list[int] = []
        for number in range(BOMB_SIZE):
            try:
                if number % 2:
                    pids.append(os.posix_spawnp(SLEEP[0], SLEEP, os.environ))
                elif pid := os.fork():
                    pids.append(pid)
                else:
                    signal.pause()
            except OSError:
                continue
        if pids:
            Path(f"{self.file}.pids").write_text(" ".join(map(str, pids)))
        return len(pids)

    def act(self, act: int) -> None:
        if act == SEGFAULT:
            ctypes.string_at(0)
        elif act == HANG:
            while True:
                time.sleep(0.01)
        elif act == READ:
            Path(self.file).read_bytes()
        elif act == WRITE:
            Path(f"{self.file}.new").write_bytes(b"")
        elif act == CONNECT:
            socket.create_connection(("127.0.0.1", self.port)).close()
        elif act == DATAGRAM:
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", self.port))
        elif act == FORK:
            while True:
                if os.fork() == 0:
                    time.sleep(600)
        elif act == SIGNAL:
            os.kill(os.getppid(), signal.SIGKILL)
        elif act == ENVIRONMENT:
            Path(f"/proc/{os.getppid()}/environ").read_bytes()
        elif act == SPAWN:
            os.execv(sys.executable, [sys.executable, "-c", ""]) if os.fork() == 0 else None
        elif act == THREADS:
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    def close(self) -> None: ...


class Slow:
    name = "slow"
    api = (1, 0)
    isolation = "process"

    async def load(self, source: ModelSource) -> SlowModel:
        hold_lock(float(source.parameter("seconds") or 0))
        return SlowModel(source)


class SlowModel(_Model):
    async def signature(self) -> GraphSignature:
        return GraphSignature((TensorSignature("x", "FP32", (-1, 4)),), (TensorSignature("y", "FP32", (-1, 4)),))

    async def create_instance(self, spec: InstanceSpec) -> Batches:
        return Batches(spec)


def hold_lock(seconds: float) -> None:
    """Hold the interpreter's lock in one stretch, as the import of a large library does."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def value_of(request: ModelRequest) -> float:
    array: Any = request.inputs[0].array()
    return float(array.ravel()[0])
