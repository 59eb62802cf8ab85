"""A resumable backend as a distribution of its own: `install` makes one of this file, with the word `chain`.

It gives `N` tokens to each request, one a step, all requests in step, as an engine with continuous batching. A token
depends on `seed` and on all tokens before it, so a run that forgets or repeats one gives others from there on. `TOKEN`
is [token, process that gave it, whether it was repeated from the progress it was given].

Parameters of a request: `until`: it ends when this file is there; `hold`, the number of tokens before which it waits
for the file `gate`; `stray`: its replay gives other tokens; `deadly`: the process ends at this token, each time;
`begun`: a file that is made when the request is run. Parameters of a model: `check_ms`: its health check takes so
long; `checking`: a file that is made when one begins.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from charonia.backend import InstanceSpec, ModelRequest, ModelResponse, ModelSource, ResponseStream
from charonia.tensors import Tensor

CONFIG = """
backend: "chain" max_batch_size: 0
input { name: "N" data_type: TYPE_INT32 dims: 1 }
output { name: "TOKEN" data_type: TYPE_INT64 dims: 3 }
model_transaction_policy { decoupled: true }
instance_group { count: 1 kind: KIND_CPU }
"""
RESUMABLE = 'parameters { key: "charonia.resumable" value { string_value: "true" } }\n'

_TOKEN = struct.Struct("<q")


def install(directory: Path) -> Path:
    """Make a distribution of this module in a directory, to be put on PYTHONPATH."""
    name = Path(__file__).stem
    (directory / f"{name}-1.dist-info").mkdir(parents=True)
    shutil.copy(__file__, directory)
    (directory / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    entries = f"[charonia.backends]\nchain = {name}:Chain\n"
    (directory / f"{name}-1.dist-info" / "entry_points.txt").write_text(entries)
    return directory


def write_model(repository: Path, name: str, more: str = RESUMABLE, step_ms: int = 5) -> None:
    """A model of this backend in a repository."""
    (repository / name / "1").mkdir(parents=True)
    step = f'parameters {{ key: "step_ms" value {{ string_value: "{step_ms}" }} }}\n'
    (repository / name / "config.pbtxt").write_text(CONFIG + step + more)


def tokens_of(seed: int, count: int) -> list[int]:
    """What a request with this seed gets."""
    chain = _Chain(seed)
    return [chain.step() for _ in range(count)]


class _Chain:
    def __init__(self, seed: int) -> None:
        self._hash = hashlib.blake2b(_TOKEN.pack(seed), digest_size=8)

    def step(self) -> int:
        token = int.from_bytes(self._hash.digest(), "little") >> 1
        self.take(token)
        return token

    def take(self, token: int) -> None:
        self._hash.update(_TOKEN.pack(token))


class _Running:
    """One request: its place in its call, and how far it is."""

    def __init__(self, request: ModelRequest, index: int, responses: ResponseStream) -> None:
        self.request, self.index, self.responses = request, index, responses
        self.count = int(request.inputs[0].array()[0])
        self.chain = _Chain(int(request.parameters.get("seed", 0)))
        self.given = 0
        self.cancelled = False
        self.ended = asyncio.Event()
        if "begun" in request.parameters:
            Path(str(request.parameters["begun"])).touch()

    def replay(self) -> None:
        for record in self.request.progress:
            (token,) = _TOKEN.unpack(record)
            self.chain.take(token)
            if self.request.parameters.get("stray"):
                token += 1
            self._send(token, repeated=True)

    def step(self) -> bool:
        """One token; returns whether it has ended."""
        said = self.request.parameters
        if self.cancelled or self.given >= self.count or ("until" in said and os.path.exists(str(said["until"]))):
            self.responses.send(self.index, None, final=True)
            self.ended.set()
            return True
        if self.given == said.get("hold", -1) and not os.path.exists(str(said["gate"])):
            return False
        if self.given == said.get("deadly", -1):
            os.kill(os.getpid(), signal.SIGKILL)
        self._send(self.chain.step(), repeated=False)
        return False

    def _send(self, token: int, *, repeated: bool) -> None:
        output = Tensor.of("TOKEN", np.array([token, os.getpid(), repeated], np.int64))
        self.responses.send(self.index, ModelResponse([output], progress=_TOKEN.pack(token)), final=False)
        self.given += 1


class Chain:
    name = "chain"
    api = (1, 0)

    async def load(self, source: ModelSource) -> ChainModel:
        return ChainModel(source)


class ChainModel:
    def __init__(self, source: ModelSource) -> None:
        self._step_s = (source.integer("step_ms") or 0) / 1000
        self._check_s = (source.integer("check_ms") or 0) / 1000
        self._checking = source.parameter("checking")

    async def signature(self) -> None:
        return None

    async def create_instance(self, spec: InstanceSpec) -> ChainInstance:
        return ChainInstance(self._step_s, self._check_s, self._checking)

    async def close(self) -> None: ...


class ChainInstance:
    def __init__(self, step_s: float, check_s: float, checking: str | None) -> None:
        self._step_s, self._check_s, self._checking = step_s, check_s, checking
        self.checks_health = check_s > 0
        self._running: list[_Running] = []
        self._begun = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._steps())

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        mine = [_Running(request, index, responses) for index, request in enumerate(requests)]
        for one in mine:
            one.replay()
        self._running += mine
        self._begun.set()
        responses.free()
        for one in mine:
            await one.ended.wait()

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None:
        for one in self._running:
            one.cancelled |= any(one.request is request for request in requests)

    async def _steps(self) -> None:
        while True:
            await self._begun.wait()
            await asyncio.sleep(self._step_s)
            self._running = [one for one in self._running if not one.step()]
            if not self._running:
                self._begun.clear()

    async def check_health(self) -> bool:
        if self._checking is not None:
            os.close(os.open(self._checking, os.O_CREAT))
        await asyncio.sleep(self._check_s)
        return True

    async def close_instance(self) -> None:
        self._task.cancel()


def value(record: Any) -> tuple[int, int, bool]:
    """(token, process, repeated) of a response record with outputs."""
    token, process, repeated = record.outputs[0].array().tolist()
    return token, process, bool(repeated)
