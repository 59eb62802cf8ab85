"""Gateway, batchers and echo executors around one log, for tests of what they do together.

The executors here are as small as an executor can be: they read their batch stream and settle. A closed gate holds
their batches, so that a test decides what is still running.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from memory_log.log import MemoryLog

from batcher.service import BatcherService
from charonia import keys
from charonia.clock import wall_ns
from charonia.datatypes import DataType
from charonia.errors import LogUnavailable
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import EndedWave, Entry, EventLog, Reply
from charonia.eventlog.redis import open_log
from charonia.facts.events import (
    FIELD_FACT,
    BatchDied,
    BatchFinished,
    BatchReturned,
    ExecutionUnwanted,
    Fact,
    OwnerChanged,
    ProcessJoined,
    ProcessLeft,
    RepositoryScanned,
    RequestsEnded,
    VersionLoaded,
    VersionUnloaded,
    facts_of,
    pack_fact,
)
from charonia.facts.jobs import OUTCOME_CODES, JobEnd, JobState
from charonia.inference import InferenceRequest, InferenceResponse
from charonia.models.config_forms import parse
from charonia.options.settings import BatcherSettings, GatewaySettings
from charonia.tensors import Buffer, Tensor
from charonia.wire import (
    FIELD_HEADER,
    FIELD_RECORD,
    FIELD_WAVE,
    BatchHeader,
    RequestRecord,
    Wave,
    pack_response,
    pack_wave_reply,
    reply_meta,
    requests_in,
    work_in,
)
from executors.configuration.config import normalise
from gateway.service import GatewayService

MODEL = "echo"
HASH = "hash-1"
PATIENCE_S = 60.0
NEVER_MS = 3_600_000

CONFIG = """
name: "echo" backend: "python" max_batch_size: %d
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
%s
"""


async def until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def until_so(condition: Callable[[], Awaitable[bool]]) -> None:
    """The same for a condition that asks the log."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.001)


async def insist(step: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a step until the log takes it."""
    while True:
        try:
            return await step()
        except LogUnavailable:
            await asyncio.sleep(0.01)


class Held:
    """One batch an executor has."""

    def __init__(
        self, entry_id: bytes, header: BatchHeader, records: list[RequestRecord], waves: Sequence[Any] = ()
    ) -> None:
        self.entry_id = entry_id
        self.header = header
        self.records = records
        self.waves = waves

    @property
    def values(self) -> list[int]:
        return [int(record.inputs()[0].array()[0, 0]) for record in self.records]


class EchoExecutor:
    """Answers each request with its input. With `gate` closed batches gather in `held`."""

    def __init__(self, log: EventLog, name: str) -> None:
        self.log = log
        self.name = name
        self.held: list[Held] = []
        self.executed: list[int] = []
        self.unwanted: list[bytes] = []
        self.open = True
        self.link: LocalLink | None = None
        self._reader = log.reader()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def tell(self, fact: Fact) -> None:
        await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])

    async def join(self, config: str, *, slots: int = 1) -> None:
        """Join and serve version 1 of the model."""
        self._reader.start(self._on_entries)
        self._reader.add(keys.batches(self.name))
        await self.tell(ProcessJoined("executor", self.name))
        await self.load(config, slots=slots)
        await self.tell(RepositoryScanned(self.name, (MODEL,), "explicit", ready=True))

    async def load(self, config: str, *, slots: int = 1, content_hash: str = HASH) -> None:
        packed = normalise(parse(config)).SerializeToString()
        await self.tell(VersionLoaded(self.name, MODEL, 1, content_hash, slots, packed))

    async def unload(self) -> None:
        await self.tell(VersionUnloaded(self.name, MODEL, 1))

    def serve(self, link: LocalLink) -> None:
        """Take what a batcher in the same process hands over."""
        self.link = link
        link.batches.follow(lambda header, records: self._take(Held(b"", header, list(records))))

    def _on_entries(self, _stream: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            if bytes(entry.fields[0]) == FIELD_FACT:
                for fact in facts_of(entry):
                    if isinstance(fact, OwnerChanged):
                        continue
                    assert isinstance(fact, ExecutionUnwanted)
                    self.unwanted += [fact.ids[at : at + 16] for at in range(0, len(fact.ids), 16)]
                self._run(self.log.delete_entries(keys.batches(self.name), [entry.id]))
                continue
            assert bytes(entry.fields[0]) == FIELD_HEADER
            header = BatchHeader.unpack(entry.fields[1])
            waves = work_in(entry.fields) if header.waves else ()
            self._take(Held(entry.id, header, requests_in(entry.fields), waves))

    def _take(self, held: Held) -> None:
        if self.open:
            self._spawn(held)
        else:
            self.held.append(held)

    def release(self, count: int | None = None) -> None:
        """Open the gate, or let the first `count` held batches through it."""
        if count is None:
            self.open = True
        going, self.held = self.held[:count], self.held[len(self.held) if count is None else count :]
        for held in going:
            self._spawn(held)

    def _spawn(self, held: Held) -> None:
        self._run(self.settle(held))

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self, held: Held, *, answer: bool = True) -> list[bool]:
        """Settle a batch as executors do; which requests were won. Without `answer` as one that died half-way."""
        header = held.header
        self.executed += held.values
        if held.waves:
            return await self._settle_waves(held)
        by_endpoint: dict[str, list[Buffer]] = {}
        pairs: list[tuple[str, bytes]] = []
        ends: dict[bytes, JobEnd] = {}
        outcomes = b""
        for record in held.records:
            (given,) = record.inputs()
            packed = pack_response(record.id, MODEL, 1, [Tensor("y", DataType.INT32, given.shape, given.data)], {})
            outcomes += OUTCOME_CODES[JobState.SUCCEEDED] if record.journalled else b"-"
            if record.is_job:
                ends[record.id] = JobEnd(JobState.SUCCEEDED, packed)
                continue
            pairs.append((record.endpoint, packed))
            by_endpoint.setdefault(record.endpoint, []).extend((FIELD_RECORD, packed))
        fact = BatchFinished(self.name, header.batch_id, tuple(pairs) if header.via_owner else ())
        told: list[Buffer] = [FIELD_FACT, pack_fact(fact)]
        facts = [Reply(header.report_to, told)] if header.report_to else []
        replies = []
        if not header.via_owner and answer:
            replies = [Reply(keys.replies(e), fields) for e, fields in by_endpoint.items()]
        requests = [(r.id, attempt) for r, attempt in zip(held.records, header.attempts, strict=True)]
        counted = {"success_count": len(requests), "execution_count": 1, "last_inference_ms": wall_ns() // 1_000_000}
        statistics = (keys.statistics(MODEL, 1, HASH), counted)
        won = await insist(
            lambda: self.log.settle(MODEL, requests, statistics, replies, facts, ends=ends, outcomes=outcomes)
        )
        if self.link is not None and not facts:
            self.link.reports[MODEL].hand(told)
        if held.entry_id:
            await insist(lambda: self.log.delete_entries(keys.batches(self.name), [held.entry_id]))
        return won

    async def _settle_waves(self, held: Held) -> list[bool]:
        """Answer waves, report their end, and settle them; which were won."""
        meta = reply_meta(MODEL, 1, (("y", DataType.INT32, (1, 1), 4),))
        won: list[bool] = []
        burst: list[Wave] = []
        for wave, (stream, entry_id) in zip(held.waves, held.header.waves, strict=True):
            reply = pack_wave_reply(wave.prefix, wave.count, meta, wave.columns, 1)
            ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            replies = [Reply(keys.replies(wave.endpoint), [FIELD_WAVE, reply])]
            counted = (keys.statistics(MODEL, 1, "hash"), {})
            assert self.log.waves.end([EndedWave(stream, entry_id)], counted, replies, ended.set_result)
            (is_there,) = await ended
            if is_there:
                won += [True] * wave.count
            else:
                burst.append(wave)
        await self.report_waves(held)
        for wave in burst:
            won += await self.settle_burst(wave)
        return won

    async def report_waves(self, held: Held, death: BatchDied | None = None) -> None:
        """Report the end of waves, of which those that were burst are not settled yet."""
        fact = pack_fact(death or BatchFinished(self.name, held.header.batch_id))
        await insist(lambda: self.log.append(held.header.report_to, [FIELD_FACT, fact]))
        await insist(lambda: self.log.delete_entries(keys.batches(self.name), [held.entry_id]))

    async def settle_burst(self, wave: Wave) -> list[bool]:
        """Settle the requests of a wave that was burst; which were won."""
        ids = wave.ids()
        told = Reply(keys.facts(MODEL), [FIELD_FACT, pack_fact(RequestsEnded(b"".join(ids)))])
        return await insist(lambda: self.log.settle(MODEL, [(one, 1) for one in ids], None, [], [told]))

    async def die(self, held: Held, *, blameless: bool = False) -> None:
        """Report that a batch took its instance with it."""
        ids = b"".join(record.id for record in held.records)
        fact = BatchDied(self.name, held.header.batch_id, "gone", "Segmentation fault", blameless, "echo_0", ids)
        await insist(lambda: self.log.append(held.header.report_to, [FIELD_FACT, pack_fact(fact)]))
        await insist(lambda: self.log.delete_entries(keys.batches(self.name), [held.entry_id]))

    async def give_back(self, held: Held) -> None:
        """Return a batch that did not run."""
        fact = BatchReturned(self.name, held.header.batch_id, "it drains")
        await insist(lambda: self.log.append(held.header.report_to, [FIELD_FACT, pack_fact(fact)]))
        await insist(lambda: self.log.delete_entries(keys.batches(self.name), [held.entry_id]))

    async def close(self) -> None:
        await self._reader.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Batcher:
    """A batcher as its app composes it, without heartbeats: tests say who is lost."""

    def __init__(self, log: EventLog, settings: BatcherSettings, link: LocalLink | None) -> None:
        self.log = log
        self.name = settings.incarnation
        self.control = ControlPlane(log, check_interval_ms=NEVER_MS, incarnation=self.name)
        self.service = BatcherService(log, self.control, settings, link=link)
        self.running = False

    async def start(self) -> None:
        await self.control.start()
        await self.control.announce(ProcessJoined("batcher", self.name))
        await self.service.start()
        self.running = True

    async def owns(self) -> None:
        await until(lambda: MODEL in self.service.owned)

    async def die(self) -> None:
        """End as by SIGKILL: nothing is released, nothing said; whatever was under way is broken off."""
        self.running = False
        self.service._closing = True
        for owned in self.service.owned.values():
            owned.close()
        await self.service._reader.close()
        await self.control.close()

    async def stop(self) -> None:
        if self.running:
            self.running = False
            await self.service.close()
            await self.control.close()


class Cluster:
    """Everything around one log; `url` "" is the log in memory, where all share one object."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._memory = MemoryLog()
        self._opened: list[EventLog] = []
        self._executors: list[EchoExecutor] = []
        self._batchers: list[Batcher] = []
        self._gateways: list[tuple[GatewayService, ControlPlane]] = []
        self._numbers = itertools.count(1)
        self.config = ""

    async def log(self) -> EventLog:
        """A log of one's own, as every process has."""
        if not self.url:
            return self._memory
        log = open_log(self.url)
        await log.open()
        self._opened.append(log)
        return log

    def configure(self, extra: str = "", *, max_batch_size: int = 8) -> None:
        self.config = CONFIG % (max_batch_size, extra)

    async def executor(self, name: str = "", *, slots: int = 1, gated: bool = False) -> EchoExecutor:
        executor = EchoExecutor(await self.log(), name or f"executor-{next(self._numbers)}")
        executor.open = not gated
        self._executors.append(executor)
        await executor.join(self.config, slots=slots)
        return executor

    async def batcher(
        self,
        name: str = "",
        *,
        prefetch: int = 1,
        window_requests: int = 8192,
        journal_seal_s: int = 30,
        beside: EchoExecutor | None = None,
    ) -> Batcher:
        """A batcher of its own, or in the process of an executor."""
        link = None
        if beside is not None:
            link = LocalLink(beside.name)
            beside.serve(link)
        name = name or f"batcher-{next(self._numbers)}"
        settings = BatcherSettings(
            name, prefetch=prefetch, window_requests=window_requests, journal_seal_s=journal_seal_s
        )
        batcher = Batcher(await self.log(), settings, link)
        self._batchers.append(batcher)
        await batcher.start()
        return batcher

    async def gateway(self, name: str = "gateway-1") -> GatewayService:
        """A gateway that has heard of the model."""
        log = await self.log()
        await log.beat("gateway", name, NEVER_MS)
        control = ControlPlane(log, check_interval_ms=NEVER_MS, incarnation=name)
        await control.start()
        service = GatewayService(log, control, GatewaySettings(name))
        await service.start()
        self._gateways.append((service, control))
        await until(lambda: service.model_ready(MODEL, ""))
        return service

    async def lose(self, role: str, name: str) -> None:
        """Say of a process that its heartbeat ended."""
        log = await self.log()
        await log.append(keys.CONTROL, [FIELD_FACT, pack_fact(ProcessLeft(role, name, "lost"))])

    async def settled(self) -> None:
        """Return once nothing of any request is left in the log, however long that was under way."""
        log = await self.log()
        streams = [keys.batches(e.name) for e in self._executors]
        streams += [keys.replies(s._settings.incarnation) for s, _ in self._gateways]
        streams += [keys.facts(MODEL)]

        async def empty() -> bool:
            lanes = [keys.queue(MODEL, level, lane) for level, lane in await log.lanes(MODEL)]
            left = [await log.range(stream) for stream in (*streams, *lanes)]
            return not any(left) and await log.pending(MODEL) == (0, 0)

        await until_so(empty)

    async def close(self) -> None:
        for service, control in self._gateways:
            await service.close()
            await control.close()
        for batcher in self._batchers:
            await batcher.stop()
        for executor in self._executors:
            await executor.close()
        for log in self._opened:
            await log.close()


def request(value: int, **fields: object) -> InferenceRequest:
    data = value.to_bytes(4, "little")
    return InferenceRequest(MODEL, -1, [Tensor("x", DataType.INT32, (1, 1), data)], **fields)  # type: ignore[arg-type]


def ask(gateway: GatewayService, value: int, **fields: object) -> asyncio.Task[InferenceResponse]:
    return asyncio.get_running_loop().create_task(gateway.infer(request(value, **fields)))


def value_of(response: InferenceResponse) -> int:
    (output,) = response.outputs
    assert (output.name, output.shape) == ("y", (1, 1))
    return int(output.array()[0, 0])
