"""Gateways over one log in memory, and an executor in the test's own hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from memory_log.log import MemoryLog

from charonia import keys
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.port import EventLog, Reply
from charonia.facts.events import FIELD_FACT, Fact, ProcessJoined, RepositoryScanned, VersionLoaded, facts_of, pack_fact
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState
from charonia.inference import InferenceRequest
from charonia.models.config_forms import parse
from charonia.options.settings import GatewaySettings
from charonia.tensors import Tensor
from charonia.wire import RequestRecord, pack_failure, pack_response, record_fields, records_of, unpack_request
from executors.configuration.config import normalise
from gateway.requests.delivery import ANYONE, Caller, DeliveryOptions
from gateway.service import GatewayService

MODEL = "m"
HASH = "h"
CONFIG = """
name: "m" backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
output { name: "z" data_type: TYPE_INT32 dims: 1 }
"""
PATIENCE_S = 30.0

__all__ = ["ANYONE", "LogUnavailable", "pack_response", "record_fields"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def until_so(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.001)


def request(value: int = 1, **more: Any) -> InferenceRequest:
    tensor = Tensor("x", DataType.INT32, (1, 1), np.array([[value]], np.int32).tobytes())
    return InferenceRequest(MODEL, -1, [tensor], **more)


def options(key: str = "", tenant: str | None = None, **more: Any) -> DeliveryOptions:
    caller = ANYONE if tenant is None else Caller(tenant, scoped=True)
    return DeliveryOptions(idempotency_key=key, caller=caller, **more)


def numbers(tensors: list[Tensor]) -> dict[str, int]:
    return {t.name: int(t.array()[0, 0]) for t in tensors}


class JobBench:
    """`queued` are the records nobody has taken out of the queue; `begin` and `finish` are the executor's."""

    def __init__(self, log: Any = None) -> None:
        self.log = log or MemoryLog()
        self._gateways: list[tuple[GatewayService, ControlPlane]] = []
        self._token = 0

    async def serve(self, config: str = CONFIG, *, slots: int = 1) -> None:
        packed = normalise(parse(config)).SerializeToString()
        for fact in (
            ProcessJoined("batcher", "b"),
            ProcessJoined("executor", "e"),
            VersionLoaded("e", MODEL, 1, HASH, slots, packed),
            RepositoryScanned("e", (MODEL,), "explicit", ready=True),
        ):
            await self.tell(fact)
        self._token = await self.log.take_ownership(MODEL, "b", "")

    async def tell(self, fact: Fact) -> None:
        await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def gateway(self, name: str = "g", *, log: EventLog | None = None, **settings: Any) -> GatewayService:
        log = log or self.log
        control = ControlPlane(log, check_interval_ms=3_600_000, incarnation=name)
        await control.start()
        gateway = GatewayService(log, control, GatewaySettings(name, **settings))
        await gateway.start()
        self._gateways.append((gateway, control))
        return gateway

    async def kill(self, gateway: GatewayService) -> None:
        """End a gateway as by SIGKILL: nothing is said, whoever waits at it is cut off."""
        (found,) = [pair for pair in self._gateways if pair[0] is gateway]
        self._gateways.remove(found)
        requester = gateway._dataplane.requester
        await requester._reader.close()
        requester._tasks.cancel()
        requester._watching.cancel()
        await gateway.jobs.close()
        await found[1].close()

    async def close(self) -> None:
        for gateway, control in self._gateways:
            await gateway.close()
            await control.close()

    # -- the executor -------------------------------------------------------------------------------------------------

    async def queued(self) -> list[RequestRecord]:
        """What lies in the queues and is not settled, oldest first."""
        found = []
        for level, lane in await self.log.lanes(MODEL):
            for entry in await self.log.range(keys.queue(MODEL, level, lane)):
                found += [unpack_request(record) for record in records_of(entry.fields)]
        attempts = await self.log.unsettled(MODEL, [record.id for record in found])
        return [record for record, attempt in zip(found, attempts, strict=True) if attempt >= 0]

    async def comes(self, count: int = 1) -> list[RequestRecord]:
        """Wait until so many requests are queued."""

        async def there() -> bool:
            return len(await self.queued()) >= count

        await until_so(there)
        return await self.queued()

    async def begin(self, record: RequestRecord, attempt: int = 1) -> bool:
        jobs = [record.id] if record.is_job else []
        journalled = [record.id] if record.journalled else []
        (going,) = await self.log.begin_attempt(
            MODEL, self._token, [record.id], attempt, jobs=jobs, journalled=journalled, executor="e", batch_id="b1"
        )
        return going

    async def finish(
        self,
        record: RequestRecord,
        attempt: int = 1,
        *,
        error: CharoniaError | None = None,
        reply: bool = True,
    ) -> bool:
        """Settle as executors do: a job's record first, then the reply."""
        if error is None:
            (given,) = record.inputs()
            outputs = [Tensor(name, given.datatype, given.shape, given.data) for name in ("y", "z")]
            answer = pack_response(record.id, MODEL, 1, outputs, {"note": "kept"})
        else:
            answer = pack_failure(record.id, MODEL, 1, error)
        state = JobState.SUCCEEDED if error is None else JobState.FAILED
        detail = {} if error is None else {"error": error.message, "code": error.code.name}
        replies = [Reply(keys.replies(record.endpoint), record_fields([answer]))] if record.endpoint and reply else []
        (won,) = await self.log.settle(
            MODEL,
            [(record.id, attempt)],
            None,
            [] if record.is_job else replies,
            ends={record.id: JobEnd(state, answer, detail)} if record.is_job else None,
            outcomes=OUTCOME_CODES[state] if record.journalled else b"",
        )
        if record.is_job and won:
            for each in replies:
                await self.log.append(each.stream, each.fields)
        return won

    async def facts(self) -> list[Fact]:
        return [fact for entry in await self.log.range(keys.facts(MODEL)) for fact in facts_of(entry)]
