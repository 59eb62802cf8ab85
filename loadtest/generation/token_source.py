"""A backend without a model: each of its requests gets a token in every turn of the event loop, or every `step_ms`.

`durable` installs it as a distribution of its own in a directory for PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from charonia.backend import InstanceSpec, ModelRequest, ModelResponse, ModelSource, ResponseStream
from charonia.datatypes import DataType
from charonia.tensors import Tensor

BACKEND = "token_source"
_CONFIG = """
backend: "token_source" max_batch_size: 0
input { name: "COUNT" data_type: TYPE_INT32 dims: 1 }
output { name: "TOKEN" data_type: TYPE_INT32 dims: 1 }
model_transaction_policy { decoupled: true }
instance_group { count: 1 kind: KIND_CPU }
"""


def install(directory: Path) -> Path:
    """Make a distribution of this module in a directory, to be put on PYTHONPATH."""
    name = Path(__file__).stem
    (directory / f"{name}-1.dist-info").mkdir(parents=True)
    shutil.copy(__file__, directory)
    (directory / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (directory / f"{name}-1.dist-info" / "entry_points.txt").write_text(
        f"[charonia.backends]\n{BACKEND} = {name}:TokenSource\n"
    )
    return directory


def write_model(repository: Path, name: str, **parameters: str) -> None:
    """A model of this backend in a repository."""
    (repository / name / "1").mkdir(parents=True)
    said = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{said}" }} }}\n' for key, said in parameters.items()
    )
    (repository / name / "config.pbtxt").write_text(_CONFIG + said)


class TokenSource:
    name = BACKEND
    api = (1, 0)

    async def load(self, source: ModelSource) -> TokenModel:
        return TokenModel((source.integer("step_ms") or 0) / 1000)


class TokenModel:
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def signature(self) -> None:
        return None

    async def create_instance(self, spec: InstanceSpec) -> TokenInstance:
        return TokenInstance(self._step_s)

    async def close(self) -> None: ...


class _Running:
    def __init__(self, request: ModelRequest, index: int, responses: ResponseStream) -> None:
        self.index, self.responses = index, responses
        self.left = int(request.inputs[0].array()[0]) - len(request.progress)
        self.ended = asyncio.Event()


class TokenInstance:
    """All running requests share a step, whose responses are sent together."""

    reports_responses = False

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: list[_Running] = []
        self._begun = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._steps())
        self._output = Tensor("TOKEN", DataType.INT32, (1,), (7).to_bytes(4, "little"))

    async def execute_stream(self, requests: Sequence[ModelRequest], responses: ResponseStream) -> None:
        mine = [_Running(request, index, responses) for index, request in enumerate(requests)]
        self._running += mine
        self._begun.set()
        responses.free()
        for one in mine:
            await one.ended.wait()

    def cancel_requests(self, requests: Sequence[ModelRequest]) -> None: ...

    async def _steps(self) -> None:
        while True:
            await self._begun.wait()
            for stream in {id(one.responses): one.responses for one in self._running}.values():
                if stream.full:
                    await stream.drain()
            hold: Any = getattr(self._running[0].responses, "hold", None)
            if hold is None:
                self._step()
            else:
                with hold():
                    self._step()
            await asyncio.sleep(self._step_s)
            if not self._running:
                self._begun.clear()

    def _step(self) -> None:
        going = []
        for one in self._running:
            one.left -= 1
            final = one.left == 0
            response = ModelResponse([self._output], progress=b"" if final else b"7777")
            one.responses.send(one.index, response, final=final)
            if final:
                one.ended.set()
            else:
                going.append(one)
        self._running = going

    async def close_instance(self) -> None:
        self._task.cancel()
