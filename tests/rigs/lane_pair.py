"""Two gateways over one log, batcher and executor: one with the express lane and one without it.

Everything runs in one loop of its own, so that plain tests (and Hypothesis) may ask again and again. A client is in
that loop as well: what it writes is read by a gateway before its next segment leaves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from memory_log.log import MemoryLog

from batcher.app import BatcherApp
from charonia import keys
from charonia.backend import InstanceDied, InstanceSpec, ModelRequest, ModelResponse, ModelSource
from charonia.datatypes import DataType
from charonia.errors import InvalidArgument
from charonia.eventlog.port import EventLog
from charonia.eventlog.redis import open_log
from charonia.options.settings import BatcherSettings, ExecutorSettings, GatewaySettings, LogSettings
from charonia.tensors import Tensor
from executors.app import create
from executors.backends.registry import BackendRegistry
from gateway.app import GatewayApp
from gateway.lane import gathering
from gateway.lane.pending_waves import Waves
from gateway.service import GatewayService

PATIENCE_S = 60.0
_NEVER_NS = 3_600_000_000_000
"""On a busy machine quick models look slow, and get no waves for a while: tests count who rides."""
UNLUCKY = 13
DEADLY = 66
_CONFIG = 'backend: "%s" max_batch_size: 8 dynamic_batching { %s } instance_group { count: 1 kind: KIND_CPU }'
CONFIGS = {
    "one": _CONFIG % ("arrays", "")
    + ' input { name: "x" data_type: TYPE_INT32 dims: 2 } output { name: "y" data_type: TYPE_INT32 dims: 2 }',
    "two": _CONFIG % ("arrays", "priority_levels: 2 default_priority_level: 1")
    + ' input [{ name: "a" data_type: TYPE_FP32 dims: 1 }, { name: "b" data_type: TYPE_INT32 dims: -1 }]'
    + ' output [{ name: "p" data_type: TYPE_FP32 dims: 1 }, { name: "q" data_type: TYPE_INT32 dims: -1 }]',
    "real": _CONFIG % ("arrays", "")
    + ' input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 2 }',
    "told": _CONFIG % ("told", "")
    + ' input { name: "x" data_type: TYPE_INT32 dims: 2 } output { name: "y" data_type: TYPE_INT32 dims: 2 }',
    "of_tenants": _CONFIG % ("onnxruntime", "")
    + ' input { name: "x" data_type: TYPE_INT32 dims: 2 } output { name: "y" data_type: TYPE_INT32 dims: 2 }',
    "picky": _CONFIG % ("requests", "")
    + ' input { name: "x" data_type: TYPE_INT32 dims: 2 } output { name: "y" data_type: TYPE_INT32 dims: 2 }',
}
DEATHS: list[int] = []
"""How many requests were aboard each death."""
_T = TypeVar("_T")


class _Arrays:
    """Adds one to everything."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def execute(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        return {output: inputs[self._names[output]] + 1 for output in outputs}

    def close(self) -> None: ...


class ArraysBackend:
    """Models over arrays: output i is input i and one."""

    name = "arrays"

    async def load(self, source: ModelSource) -> Self:
        return self

    async def signature(self) -> None: ...

    async def close(self) -> None: ...

    async def create_instance(self, spec: InstanceSpec) -> _Arrays:
        return _Arrays(dict(zip(spec.interface.outputs, spec.interface.inputs, strict=True)))


class _Requests:
    """Adds one, refuses `UNLUCKY` numbers, and dies of `DEADLY` ones."""

    async def execute_requests(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        if any(request.inputs[0].array()[0, 0] == DEADLY for request in requests):
            DEATHS.append(len(requests))
            raise InstanceDied("the instance is no more", "Segmentation fault")
        return [self._answer(request) for request in requests]

    def _answer(self, request: ModelRequest) -> ModelResponse:
        (given,) = request.inputs
        if given.array()[0, 0] == UNLUCKY:
            return ModelResponse(error=InvalidArgument("an unlucky number"))
        return ModelResponse([Tensor("y", DataType.INT32, given.shape, (given.array() + 1).tobytes())])

    async def close_instance(self) -> None: ...


class RequestsBackend:
    """Models over requests."""

    name = "requests"

    async def load(self, source: ModelSource) -> Self:
        return self

    async def signature(self) -> None: ...

    async def close(self) -> None: ...

    async def create_instance(self, spec: InstanceSpec) -> _Requests:
        return _Requests()


class _Told(_Requests):
    """Adds what the parameter `x-add` says."""

    def _answer(self, request: ModelRequest) -> ModelResponse:
        (given,) = request.inputs
        sum_ = given.array() + int(request.parameters.get("x-add", 0))
        return ModelResponse([Tensor("y", DataType.INT32, given.shape, sum_.astype(np.int32).tobytes())])


class ToldBackend:
    """Models that are told by a parameter what to add."""

    name = "told"

    async def load(self, source: ModelSource) -> Self:
        return self

    async def signature(self) -> None: ...

    async def close(self) -> None: ...

    async def create_instance(self, spec: InstanceSpec) -> _Told:
        return _Told()


class LanePair:
    """`url` "" is a log in memory. `with_lane` and `without` are the gateways, which have these options besides."""

    def __init__(self, directory: Path, url: str = "", **options: Any) -> None:
        self._directory = directory
        self._options = options
        self._url = url
        self.loop = asyncio.new_event_loop()
        self._closing: list[Any] = []
        self._slow_ns = gathering.SLOW_NS

    def run(self, work: Coroutine[Any, Any, _T], timeout_s: float = PATIENCE_S) -> _T:
        """Run something beside the servers, which stand still in between."""
        return self.loop.run_until_complete(asyncio.wait_for(work, timeout_s))

    def __enter__(self) -> LanePair:
        gathering.SLOW_NS = _NEVER_NS
        try:
            self.run(self._start(), 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._stop(), 60)
        finally:
            gathering.SLOW_NS = self._slow_ns
            self.loop.close()

    async def _log(self) -> EventLog:
        if not self._url:
            return self._memory
        log = open_log(self._url)
        await log.open()
        self._closing.append(log.close)
        return log

    async def _start(self) -> None:
        self._memory = MemoryLog()
        for name, config in CONFIGS.items():
            (self._directory / name / "1").mkdir(parents=True)
            (self._directory / name / "config.pbtxt").write_text(config)
        log_settings = LogSettings(self._url, heartbeat_ttl_ms=30_000, gateway_ttl_ms=30_000)
        self.log = await self._log()
        batcher = BatcherApp(await self._log(), BatcherSettings("batcher-1"), log_settings)
        await batcher.start()
        self._closing.append(batcher.stop)
        self.with_lane = await self._gateway("on", log_settings, express_lane=True)
        self.without = await self._gateway("off", log_settings, express_lane=False)
        arrays = ArraysBackend()  # `onnxruntime` is a word of models that call no others
        made = {"arrays": arrays, "onnxruntime": arrays, "requests": RequestsBackend(), "told": ToldBackend()}
        backends = BackendRegistry(made)
        settings = ExecutorSettings("executor-1", (str(self._directory),))
        executor = create(settings, await self._log(), log_settings, backends)
        await executor.start()

        async def stop() -> None:
            await executor.drain(5)
            await executor.close()

        self._closing.append(stop)
        for gateway in (self.with_lane, self.without):
            async with asyncio.timeout(PATIENCE_S):
                await gateway.became_ready()
                await self._load_control(gateway)

    async def _load_control(self, gateway: GatewayApp) -> None:
        """Have the control calls loaded: two threads at once break pydantic, and elsewhere a process has one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port(gateway))
        writer.write(b"GET /v2/models/one HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()

    async def _gateway(self, name: str, log_settings: LogSettings, **more: Any) -> GatewayApp:
        settings = GatewaySettings(
            name,
            http_address="127.0.0.1",
            http_port=0,
            grpc_address="127.0.0.1",
            grpc_port=0,
            metrics_port=-1,
            exit_timeout_secs=5,
            **self._options,
            **more,
        )
        app = GatewayApp(await self._log(), settings, log_settings)
        await app.start()
        self._closing.append(app.stop)
        return app

    async def _stop(self) -> None:
        for close in reversed(self._closing):
            await close()
        await passed()  # transports that were closed

    # -- what there is to see -----------------------------------------------------------------------------------------

    @property
    def service(self) -> GatewayService:
        """That of the gateway with the lane."""
        return self.with_lane.service

    @property
    def waves(self) -> Waves:
        return self.service.lane.waves

    def ridden(self) -> int:
        """How many requests were recognised so far, as the metrics have it."""
        name = b"charonia_gateway_lane_requests_total "
        page = self.service.metrics.render()
        (line,) = [line for line in page.splitlines() if line.startswith(name)]
        assert name + b"0.0" in self.without.service.metrics.render()
        return int(float(line.split()[1]))

    async def settled(self) -> None:
        """Nothing of any request is left, in the log or at a gateway. Raises `TimeoutError` when that does not come."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self._is_settled():
                await asyncio.sleep(0.002)

    async def rests(self) -> None:
        """Nothing is under way, and nothing is held back in the expectation of more."""
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(2):
                while not await self._is_settled():
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.02)

    async def _is_settled(self) -> bool:
        for app in (self.with_lane, self.without):
            if app.service._dataplane.pending_requests or app.service.lane.waves._under_way:
                return False
        if any(not lease.is_idle for lease in self.waves.leases._held.values()):
            return False
        for model in CONFIGS:
            if await self.log.pending(model) != (0, 0):
                return False
            for level, lane in await self.log.lanes(model):
                if await self.log.range(keys.queue(model, level, lane)):
                    return False
        return True

    def http_port(self, app: GatewayApp) -> int:
        return int(app.endpoints["http"].rpartition(":")[2])

    def grpc_port(self, app: GatewayApp) -> int:
        return int(app.endpoints["grpc"].rpartition(":")[2])


# -- requests ----------------------------------------------------------------------------------------------------------

INT32 = {name: [("x", "INT32", [1, 2], 8)] for name in ("one", "picky", "told", "of_tenants")}
INPUTS: dict[str, list[tuple[str, str, list[int], int]]] = {
    **INT32,
    "two": [("a", "FP32", [1, 1], 4), ("b", "INT32", [1, 3], 12)],
    "real": [("x", "FP32", [1, 2], 8)],
}


def raw_inputs(model: str, value: int) -> list[bytes]:
    """The tensors of a request, told from others by `value`."""
    found = []
    for _, datatype, _, size in INPUTS[model]:
        numbers = [value, *range(1, size // 4)]
        found.append(np.array(numbers, np.float32 if datatype == "FP32" else np.int32).tobytes())
    return found


def http_request(
    model: str,
    value: int,
    request_id: str = "",
    *,
    head: str = "",
    more: Mapping[str, Any] | None = None,
    raw: Sequence[bytes] | None = None,
    path: str = "",
) -> bytes:
    """A binary infer request, from its line to its body."""
    inputs = [
        {"name": n, "datatype": t, "shape": shape, "parameters": {"binary_data_size": size}}
        for n, t, shape, size in INPUTS[model]
    ]
    content: dict[str, Any] = {"id": request_id} if request_id else {}
    content |= {"inputs": inputs, "parameters": {"binary_data_output": True}, **(more or {})}
    text = json.dumps(content, separators=(",", ":")).encode()
    body = text + b"".join(raw_inputs(model, value) if raw is None else raw)
    begin = (
        f"POST {path or f'/v2/models/{model}/infer'} HTTP/1.1\r\nHost: x\r\n{head}"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return begin.encode() + body


LAST = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
FILLER = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 24 + LAST
"""Ends a connection even behind a request that is said to be longer than it is."""


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """`data` in segments that end at these places."""
    edges = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(edges)]


async def http_answers(port: int, segments: Sequence[bytes]) -> bytes:
    """All that a server says to these segments, each read before the next is sent, until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for segment in segments:
                writer.write(segment)
                await passed()
            return await reader.read()
    except ConnectionError:
        return b"the connection was broken off"
    finally:
        writer.transport.abort()


async def passed() -> None:
    """What was written has reached the other end, which is in the same loop."""
    for _ in range(3):
        await asyncio.sleep(0)
