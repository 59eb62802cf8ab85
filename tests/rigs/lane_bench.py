"""A gateway on virtual time over a log in memory: it serves one model in waves, and the test is what executes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from memory_log.log import MemoryLog
from memory_log.waves import MemoryWaves
from virtual_time import VirtualLoop

from charonia import keys
from charonia.datatypes import DataType
from charonia.errors import CharoniaError, LogUnavailable
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.payloads import PayloadDirectory
from charonia.eventlog.port import EndedWave, Reply, Sent
from charonia.facts.events import FIELD_FACT, Fact, ProcessJoined, RepositoryScanned, VersionLoaded, facts_of, pack_fact
from charonia.inference import InferenceRequest
from charonia.models.config_forms import parse
from charonia.options.settings import GatewaySettings
from charonia.tensors import Buffer, Tensor
from charonia.wire import (
    FIELD_RECORD,
    FIELD_WAVE,
    ResponseRecord,
    Wave,
    WaveReply,
    pack_failure,
    pack_response,
    pack_wave_reply,
    records_of,
    reply_meta,
    unpack_request,
    unpack_wave,
)
from executors.configuration.config import normalise
from gateway.lane.door import Call, Door, values_of
from gateway.lane.leases import Lease
from gateway.lane.pending_waves import Waves
from gateway.service import GatewayService
from gateway.tracing.writer import trace_writer

MODEL = "m"
GATEWAY = "g"
QUICK_NS = 1000
_INPUTS = ("x", "x2", "x3")
_NEVER_MS = 3_600_000
_T = TypeVar("_T")


@dataclass(frozen=True)
class SentWave:
    """A wave that waits in the log."""

    entry_id: bytes
    stream: bytes
    wave: Wave

    @property
    def values(self) -> list[int]:
        return [int(value) for value in np.frombuffer(self.wave.columns[0], np.int32)]


class Front:
    """What a front knows of one door: a signature that notes what it is told of its calls, in order."""

    def __init__(self, bench: LaneBench, door: Door, *, counted_by_lane: bool = True) -> None:
        self._bench = bench
        self.door = door
        self.counted_by_lane = counted_by_lane
        self.told: list[tuple[Call, object]] = []
        self.runs: list[int] = []
        """How many calls were answered together, for each time."""

    def call(self, value: int, client_id: bytes = b"", deadline_ns: int = 0) -> Call:
        """One whose inputs are `value`, `value` + 1000 and so on."""
        inputs = range(value, value + 1000 * self._bench.inputs, 1000)
        call = Call(self, tuple([one.to_bytes(4, "little") for one in inputs]), client_id)
        call.deadline_ns = deadline_ns
        return call

    def read(self, *calls: Call) -> None:
        """The front has read these calls, and there are no more."""
        self._append(calls)
        self._bench.now(self.door.waves.ready)

    def _append(self, calls: Sequence[Call]) -> None:
        self.door.waiting += calls
        if not self.door.touched:
            self.door.touched = True
            self.door.waves.touched.append(self.door)

    def send(self, *values: int) -> list[Call]:
        calls = [self.call(value) for value in values]
        self.read(*calls)
        return calls

    # -- what a signature is asked -------------------------------------------------------------------------------------

    def answer(self, calls: list[Call], start: int, reply: WaveReply) -> None:
        self.runs.append(len(calls))
        for call, (data,) in zip(calls, values_of(calls, start, reply, with_ids=False), strict=True):
            if not call.gone:
                self.told.append((call, int.from_bytes(data, "little")))

    def respond(self, call: Call, record: ResponseRecord) -> None:
        self.told.append((call, record.error or int(record.outputs[0].array()[0, 0])))

    def fail(self, call: Call, error: CharoniaError) -> None:
        self.told.append((call, error))

    def leave_lane(self, call: Call) -> None:
        self.told.append((call, "left"))

    # -- what it was told ----------------------------------------------------------------------------------------------

    @property
    def answers(self) -> list[object]:
        return [what for _, what in self.told]

    def told_of(self, call: Call) -> list[object]:
        return [what for one, what in self.told if one is call]


class GatedWaves(MemoryWaves):
    """Writes what was sent with the next flush or tick, as servers have it.

    Takes nothing while `is_away`, fails what it took while there is an `error`, accepts nothing while it `holds`.
    """

    is_away = holds = False
    error: CharoniaError | None = None

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log, log._of, lambda _key, _increments: None)
        self._unwritten: list[Callable[[], object]] = []
        self._held: list[Callable[[], object]] = []

    def send(self, stream: bytes, record: Sequence[Buffer], done: Sent) -> bool:
        if self.is_away:
            raise LogUnavailable("the log is away")
        error = self.error
        if error is not None:
            self._unwritten.append(lambda: done(error))
        else:
            held = self._held
            accepted: Sent = (lambda result: held.append(lambda: done(result))) if self.holds else done
            self._unwritten.append(lambda: MemoryWaves.send(self, stream, record, accepted))
        asyncio.get_running_loop().call_soon(self.flush)
        return True

    def flush(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        for write in unwritten:
            write()

    async def burst(self, *words: Any, **more: Any) -> bytes:
        if self.is_away:
            raise LogUnavailable("the log is away")
        return await super().burst(*words, **more)

    async def lease(self, *words: Any) -> bool:
        if self.is_away:
            raise LogUnavailable("the log is away")
        return await super().lease(*words)

    def release(self) -> None:
        """Accept what was held."""
        self.holds = False
        held, self._held = self._held, []
        for accept in held:
            accept()


class LaneBench:
    """A context. `service` has the lane, `stream` is the queue of `level`; `ready` once waves may be sent there.

    With `shared` the gateway and the executor share this directory for large tensors.
    """

    def __init__(
        self,
        block: str = "dynamic_batching { }",
        *,
        rows: int = 8,
        slots: int = 1,
        datatype: str = "TYPE_INT32",
        inputs: int = 1,
        level: int = 0,
        ready: bool = True,
        shared: Path | None = None,
        reads_wave_slots: bool = True,
        **settings: Any,
    ) -> None:
        self._block, self._rows, self._slots, self._datatype, self._ready = block, rows, slots, datatype, ready
        self.inputs = inputs
        self._reads_wave_slots = reads_wave_slots
        self.stream = keys.queue(MODEL, level, 0)
        self.settings = GatewaySettings(GATEWAY, **settings)
        self.loop = VirtualLoop()
        self.log = MemoryLog()
        self.gate = self.log.waves = GatedWaves(self.log)
        self.directories: dict[str, PayloadDirectory] = {}
        """By incarnation."""
        if shared is not None:  # of so long a name that the gateway has no socket there
            root = shared / ("d" * 100)
            self.directories = {name: PayloadDirectory(str(root), name) for name in (GATEWAY, "e")}
            for directory in self.directories.values():
                directory.open()

    def __enter__(self) -> LaneBench:
        self.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._close())
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run something that waits for no time to pass."""
        return self.loop.run_until_complete(work)

    def now(self, what: Callable[[], _T]) -> _T:
        """Call a function in the loop, in one tick; what it calls soon comes in later ones."""
        found: list[_T] = []
        failed: list[Exception] = []

        def call() -> None:
            try:
                found.append(what())
            except Exception as error:
                failed.append(error)

        self.loop.call_soon(call)
        self.loop.tick()
        if failed:
            raise failed[0]
        return found[0]

    def settle(self) -> None:
        """All that can happen without time."""
        for _ in range(20):
            self.loop.tick()

    async def _start(self) -> None:
        self.control = ControlPlane(self.log, check_interval_ms=_NEVER_MS, incarnation=GATEWAY)
        await self.control.start()
        directory = self.directories.get(GATEWAY)
        traces = trace_writer(self.settings)
        self.service = GatewayService(self.log, self.control, self.settings, directory, traces=traces)
        await self.service.start()
        if self._ready:
            await self.tell(*self.facts())
            await self.open_queue()
            assert await self.waves.leases.reserve(MODEL)

    async def _close(self) -> None:
        await self.service.close()
        await self.control.close()
        for directory in self.directories.values():
            directory.close()

    def loaded(self, content_hash: str = "h", *, takes_waves: bool = True) -> VersionLoaded:
        names = _INPUTS[: self.inputs]
        config = normalise(
            parse(
                f'name: "{MODEL}" backend: "python" max_batch_size: {self._rows} {self._block} '
                + " ".join(f'input {{ name: "{name}" data_type: {self._datatype} dims: -1 }}' for name in names)
                + ' output { name: "y" data_type: TYPE_INT32 dims: -1 }'
            )
        )
        packed = config.SerializeToString()
        return VersionLoaded("e", MODEL, 1, content_hash, self._slots, packed, takes_waves=takes_waves)

    def facts(self) -> list[Fact]:
        """That a batcher which reads waves and an executor of the model are there."""
        scanned = RepositoryScanned("e", (MODEL,), "explicit", ready=True)
        batcher = ProcessJoined("batcher", "b", reads_waves=True, reads_wave_slots=True)
        token = self.directories["e"].token if self.directories else ""
        executor = ProcessJoined("executor", "e", payload_token=token, reads_wave_slots=self._reads_wave_slots)
        return [batcher, executor, self.loaded(), scanned]

    async def tell(self, *facts: Fact) -> None:
        """Facts that the gateway has heard once this returns."""
        for fact in facts:
            await self.log.append(keys.CONTROL, [FIELD_FACT, pack_fact(fact)])
        for _ in range(20):
            await asyncio.sleep(0)

    async def open_queue(self) -> None:
        """Send the first request of the queue, which goes the full way, and answer it."""
        request = self.request() if self._datatype == "TYPE_INT32" else self.text_request(b"\0\0\0\0")
        asked = asyncio.ensure_future(self.service.infer(request))
        while not (entries := await self.log.range(self.stream)):
            await asyncio.sleep(0)
        for entry in entries:
            for record in records_of(entry.fields):
                request_id = unpack_request(record).id
                await self.log.settle(MODEL, [(request_id, 0)], None, [])
                await self.respond(request_id, 1)
            await self.log.delete_entries(self.stream, [entry.id])
        await self.log.delete_stream(keys.facts(MODEL))
        await asked

    def request(self, value: int = 1, *, batch: int = 1, width: int = 1, **fields: Any) -> InferenceRequest:
        names = _INPUTS[: self.inputs]
        shape = (batch, width) if self._rows else (width,)
        tensors = [Tensor.of(name, np.full(shape, value, np.int32)) for name in names]
        return InferenceRequest(MODEL, -1, tensors, **fields)

    def text_request(self, element: bytes, **fields: Any) -> InferenceRequest:
        """Of a model with a BYTES input: one element, its length before it."""
        return InferenceRequest(MODEL, -1, [Tensor("x", DataType.BYTES, (1, 1), element)], **fields)

    def begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run something that waits."""
        return self.now(lambda: asyncio.ensure_future(work))

    def front(self, **fields: Any) -> Front:
        """A signature of requests like this one."""
        door = self.door(**fields)
        assert door is not None
        return Front(self, door)

    def door(self, **fields: Any) -> Door | None:
        """The door for a request like this one, if there is one."""
        return self.now(lambda: self.service.lane.door_for(self.request(**fields)))

    @property
    def waves(self) -> Waves:
        return self.service.lane.waves

    @property
    def lease(self) -> Lease:
        """The room for waves of the model."""
        return self.waves.leases._held[MODEL]

    # -- the queue and what executes it --------------------------------------------------------------------------------

    def sent(self) -> list[SentWave]:
        """The waves in the queue. Takes no tick."""
        entries = _at_once(self.log.range(self.stream))
        found = [entry for entry in entries if bytes(entry.fields[0]) == FIELD_WAVE]
        return [SentWave(bytes(entry.id), self.stream, unpack_wave(entry.fields[1])) for entry in found]

    def values(self) -> list[list[int]]:
        """Of the requests in those waves."""
        return [sent.values for sent in self.sent()]

    def answer(self, *waves: SentWave, infer_ns: int = QUICK_NS) -> None:
        """Answer waves with their own inputs, as an executor does; all of the queue if none is named."""
        for sent in waves or self.sent():
            self.run(self._end(sent, reply_to(sent.wave, infer_ns=infer_ns)))
        self.settle()

    async def _end(self, sent: SentWave, reply: bytes) -> None:
        replies = [Reply(keys.replies(GATEWAY), [FIELD_WAVE, reply])]
        counted = (keys.statistics(MODEL, 1, "hash"), {})
        assert self.log.waves.end([EndedWave(sent.stream, sent.entry_id)], counted, replies, lambda _: None)

    async def respond(self, request_id: bytes, answer: int | CharoniaError) -> None:
        """Answer one request by itself."""
        if isinstance(answer, CharoniaError):
            record = pack_failure(request_id, MODEL, 1, answer)
        else:
            y = Tensor.of("y", np.full((1, 1), answer, np.int32))
            record = pack_response(request_id, MODEL, 1, [y], {})
        await self.log.append(keys.replies(GATEWAY), [FIELD_RECORD, record])

    def answer_one(self, request_id: bytes, answer: int | CharoniaError) -> None:
        self.run(self.respond(request_id, answer))
        self.settle()

    def is_quiet(self) -> bool:
        """Whether the gateway has nothing under way, neither counted nor held."""
        pending = self.service._dataplane.requester
        nothing = not self.waves._under_way and not pending._size_bytes and not pending._coming
        return nothing and all(lease.is_idle for lease in self.waves.leases._held.values())

    def pending_metric(self) -> int:
        """The gauge of requests without an answer, as the metrics page has it."""
        (line,) = [
            line
            for line in self.service.metrics.render().decode().splitlines()
            if line.startswith("charonia_gateway_pending_requests ")
        ]
        return int(float(line.split()[1]))

    def age(self, seconds: float) -> None:
        """Let waves have left, and doors have been used, so much earlier: they go by the clock of the machine."""
        for wave in self.waves._under_way.values():
            wave.sent_ns -= int(seconds * 1e9)
        for way in self.service.lane._ways.values():
            way.door.used_ns -= int(seconds * 1e9)

    def owner_was_told(self) -> list[Fact]:
        """The facts in the stream of the model's owner."""
        return [fact for entry in _at_once(self.log.range(keys.facts(MODEL))) for fact in facts_of(entry)]

    def prove(self) -> None:
        """Let the model be seen to be quick, by lone requests."""
        front = self.front()
        for value in range(4):
            front.send(value)
            self.answer()


def _at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of what waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


def reply_to(wave: Wave, values: Sequence[int] = (), *, infer_ns: int = QUICK_NS) -> bytes:
    """The answers to a wave: these values, or its own first inputs."""
    columns: Sequence[Buffer] = wave.columns[:1]
    if values:
        columns = [np.array(values, np.int32).tobytes()]
    place = wave.meta.inputs[0]
    meta = reply_meta(MODEL, 1, (("y", DataType.INT32, place.shape, place.size_bytes),))
    return pack_wave_reply(wave.prefix, wave.count, meta, columns, infer_ns)


__all__ = ["GATEWAY", "MODEL", "QUICK_NS", "Front", "LaneBench", "SentWave", "reply_to"]
