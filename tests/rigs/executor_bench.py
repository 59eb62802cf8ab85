"""An executor over a memory log, with the sides of a batcher and a gateway played by the test."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnxruntime as ort
from memory_log.log import MemoryLog
from onnx import TensorProto, helper, numpy_helper

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import Entry, Limits
from charonia.facts.events import (
    FIELD_FACT,
    BatchFinished,
    ExecutionUnwanted,
    ModelRequested,
    ModelRequestFinished,
    RepositoryScanned,
    facts_of,
    pack_fact,
)
from charonia.facts.jobs import NewJob
from charonia.options.settings import ExecutorSettings
from charonia.tensors import Tensor
from charonia.wire import (
    FIELD_HEADER,
    FIELD_RECORD,
    FLAG_JOB,
    FLAG_JOURNALLED,
    BatchHeader,
    Reference,
    ResponseRecord,
    pack_request,
    records_of,
    request_meta,
    unpack_request,
    unpack_response,
)
from executors.app import create
from executors.service import ExecutorService

ME = "executor-1"
WEIGHTS = np.random.default_rng(7).standard_normal((16, 3)).astype(np.float32)


def linear(path: Path, weights: np.ndarray = WEIGHTS, batch: str | int = "n") -> None:
    """y = x W, x [n,16]."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, weights.shape[1]])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def expected(path: Path, x: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


class Follower:
    """Every entry of a stream, and a way to wait for what must come. `running` closes those of its log."""

    _of_logs: ClassVar[WeakKeyDictionary[Any, list[Follower]]] = WeakKeyDictionary()

    def __init__(self, log: MemoryLog, stream: bytes) -> None:
        self.entries: list[Entry] = []
        self._arrived = asyncio.Event()
        self._reader = log.reader()
        self._of_logs.setdefault(log, []).append(self)
        self._reader.start(self._take)
        self._reader.add(stream)

    def _take(self, _stream: bytes, entries: list[Entry]) -> None:
        self.entries.extend(entries)
        self._arrived.set()

    def facts(self) -> list[Any]:
        return [fact for entry in self.entries for fact in facts_of(entry)]

    async def until(self, met: Callable[[], Any]) -> Any:
        async with asyncio.timeout(30):
            while not (found := met()):
                self._arrived.clear()
                await self._arrived.wait()
        return found

    async def fact(self, kind: type, **wanted: Any) -> Any:
        def find() -> Any:
            for fact in self.facts():
                if isinstance(fact, kind) and all(getattr(fact, name) == value for name, value in wanted.items()):
                    return fact
            return None

        return await self.until(find)

    @classmethod
    def has_any(cls, log: MemoryLog) -> bool:
        return log in cls._of_logs

    @classmethod
    async def close_all(cls, log: MemoryLog) -> None:
        """A reader of a real log goes on with its connection until it is closed, also behind the end of that log."""
        for follower in cls._of_logs.pop(log, []):
            await follower._reader.close()


class Bench:
    """A batcher's and a gateway's side of the log; with a `link` the batcher is in the executor's process."""

    def __init__(self, log: MemoryLog, service: ExecutorService, control: Follower, link: LocalLink | None) -> None:
        self.log, self.service, self.control, self.link = log, service, control, link
        self._serial = 0

    async def request(self, action: str, model: str, **fields: Any) -> ModelRequestFinished:
        self._serial += 1
        request_id = f"call-{self._serial}"
        fact = ModelRequested(action, model, request_id, **fields)
        await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
        return await self.control.fact(ModelRequestFinished, request_id=request_id)

    async def accept(
        self,
        model: str,
        tensors: Sequence[Tensor],
        *,
        endpoint: str = "gw",
        outputs: tuple[str, ...] = (),
        flags: int = 0,
        deadline_ns: int = 0,
        window: int = 0,
        reference: Reference | None = None,
    ) -> tuple[bytes, bytes]:
        """Accept a request as a gateway does: (id, record)."""
        self._serial += 1
        request_id = self._serial.to_bytes(16, "big")
        record = pack_request(
            request_id,
            endpoint.encode(),
            b"",
            request_meta(1, "", tensors, outputs, {}),
            [t.data for t in tensors],
            rows=tensors[0].shape[0] if tensors[0].shape else 1,
            signature=0,
            level=0,
            accepted_ns=wall_ns(),
            deadline_ns=deadline_ns,
            flags=flags,
            window=window,
            reference=reference,
        )
        fields, journalled = [FIELD_RECORD, record], bool(flags & FLAG_JOURNALLED)
        if flags & FLAG_JOB:
            job = NewJob(request_id, len(record), wall_ns() // 1000, 3600)
            await self.log.accept_job(model, 0, 0, job, fields, Limits(), journalled=journalled)
        else:
            await self.log.accept(model, 0, 0, [(request_id, len(record))], fields, Limits(), journalled=journalled)
        return request_id, record

    async def unwant(self, batch_id: str, *ids: bytes, gentle: bool = False) -> None:
        """Tell the executor, as an owner does, that requests of a batch are settled already, or cancelled gently."""
        joined = b"".join(ids)
        fact = ExecutionUnwanted(batch_id, b"", joined) if gentle else ExecutionUnwanted(batch_id, joined)
        if self.link is not None:
            self.link.facts.hand(fact)
        else:
            await self.log.append(keys.batches(ME), [FIELD_FACT, pack_fact(fact)])

    async def dispatch(
        self,
        model: str,
        records: Sequence[bytes],
        *,
        version: int = 1,
        content_hash: str = "",
        via_owner: bool = False,
    ) -> str:
        self._serial += 1
        batch_id = f"b-{self._serial}"
        header = BatchHeader(
            batch_id, model, version, content_hash, 1, (0,) * len(records), keys.facts(model), via_owner
        )
        if self.link is not None:
            self.link.batches.hand(header, [unpack_request(record) for record in records])
            return batch_id
        fields: list[Any] = [FIELD_HEADER, header.pack()]
        for record in records:
            fields += [FIELD_RECORD, record]
        await self.log.append(keys.batches(ME), fields)
        return batch_id

    async def replies(self, endpoint: str, count: int) -> dict[bytes, ResponseRecord]:
        follower = Follower(self.log, keys.replies(endpoint))
        await follower.until(lambda: sum(len(records_of(e.fields)) for e in follower.entries) >= count)
        found = {}
        for entry in follower.entries:
            for record in records_of(entry.fields):
                response = unpack_response(record)
                found[response.id] = response
        return found

    async def finished(self, model: str, batch_id: str, kind: type = BatchFinished) -> Any:
        return await Follower(self.log, keys.facts(model)).fact(kind, batch_id=batch_id)


@asynccontextmanager
async def running(repository: Path, *, log: Any = None, **settings: Any) -> AsyncIterator[Bench]:
    log = log or MemoryLog()
    is_outermost = not Follower.has_any(log)
    control = Follower(log, keys.CONTROL)
    settings.setdefault("model_repository", (os.fspath(repository),))
    incarnation = settings.pop("incarnation", ME)
    backends = settings.pop("backends", None)
    link = LocalLink(ME) if settings.get("hosts_batcher") else None
    service = create(ExecutorSettings(incarnation, **settings), log, backends=backends, link=link)
    try:
        await service.start()
        await control.fact(RepositoryScanned, executor=incarnation, ready=True)
        try:
            yield Bench(log, service, control, link)
        finally:
            await service.drain(10)
            await service.close()
    finally:
        if is_outermost:
            await Follower.close_all(log)


def x(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float32)
