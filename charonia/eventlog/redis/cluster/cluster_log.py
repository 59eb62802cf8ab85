"""`ClusterLog`: the port over a Redis Cluster, as one `RedisLog` for each primary.

All keys of a model are in one slot (`charonia.keys`), so a method about one model goes to the server of that slot.
What a server refuses because a slot is moving was not done: it is repeated elsewhere after the move. `topology` knows
the slots, `cluster_reader` follows streams.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from charonia import keys
from charonia.errors import CharoniaError, StartupError
from charonia.eventlog.port import (
    START,
    Counted,
    Ended,
    EndedWave,
    Entry,
    Fields,
    Limits,
    ProgressPart,
    Reply,
    Sent,
    StreamReader,
)
from charonia.eventlog.redis.blob_server import BlobServer, is_passing
from charonia.eventlog.redis.epoch import Epoch
from charonia.eventlog.redis.log import RedisLog, level_of
from charonia.eventlog.redis.server.address import Address, parse_address
from charonia.eventlog.redis.server.topology import Place, Topology, slot_of
from charonia.eventlog.redis.server.transport import Refused
from charonia.tasks import Tasks
from charonia.tensors import Buffer

from .cluster_reader import ClusterReader

T = TypeVar("T")

_ELSEWHERE = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")
_PATIENCE_S = 10.0
"""How long a call waits for a moving slot; a failover takes the cluster's `cluster-node-timeout` and a little more."""
_WAIT_S = 0.03


class _Node(RedisLog):
    """One primary's part of the log.

    `ClusterLog` does what follows an acceptance: if that were refused here because the slot moved, the acceptance
    itself would be repeated.
    """

    def __init__(self, address: Address, durability: str, epoch: Epoch, whole: ClusterLog) -> None:
        super().__init__(address, durability=durability, epoch=epoch)
        self._whole = whole

    async def note_job_model(self, model: str) -> None:
        await self._whole.note_job_model(model)

    async def raise_level(self, model: str, job_id: bytes, level: str) -> None:
        await self._whole.raise_level(model, job_id, level)


def _of_model(name: str) -> Any:
    """The port's method of this name, whose first argument is a model."""

    async def call(self: ClusterLog, model: str, *arguments: Any, **named: Any) -> Any:
        return await self.at(keys.counters(model), lambda log: getattr(log, name)(model, *arguments, **named))

    call.__name__ = name
    return call


def _of_key(name: str) -> Any:
    """The port's method of this name, whose first argument is a key."""

    async def call(self: ClusterLog, key: bytes, *arguments: Any, **named: Any) -> Any:
        return await self.at(key, lambda log: getattr(log, name)(key, *arguments, **named))

    call.__name__ = name
    return call


class ClusterWaves:
    """`Waves` on a cluster: what one server refuses because a slot is moving is repeated elsewhere."""

    def __init__(self, log: ClusterLog) -> None:
        self._log = log

    def send(self, stream: bytes, record: Sequence[Buffer], done: Sent) -> bool:
        async def send() -> None:
            try:
                entry_id = await self._log.at(stream, lambda log: log.waves.append(stream, record))
            except CharoniaError as error:
                done(error)
            else:
                done(entry_id)

        self._log.tasks.spawn(send())
        return True

    def flush(self) -> None:
        pass

    def end(
        self,
        waves: Sequence[EndedWave],
        statistics: tuple[bytes, Mapping[str, int]],
        replies: Sequence[Reply],
        done: Ended,
    ) -> bool:
        async def end() -> None:
            try:
                for reply in replies:  # endpoints have slots of their own
                    await self._log.append(reply.stream, reply.fields)
                there = await self._log.at(statistics[0], lambda log: log.waves.delete(waves, statistics))
            except CharoniaError as error:
                done(error)
            else:
                done(there)

        self._log.tasks.spawn(end())
        return True

    async def burst(
        self,
        model: str,
        stream: bytes,
        entry_id: bytes,
        requests: Sequence[tuple[bytes, int]],
        fields: Fields,
        *,
        tenant: str = "",
    ) -> bytes:
        return await self._log.at(
            stream, lambda log: log.waves.burst(model, stream, entry_id, requests, fields, tenant=tenant)
        )

    async def waiting(self, stream: bytes, entry_ids: Sequence[bytes]) -> list[bool]:
        return await self._log.at(stream, lambda log: log.waves.waiting(stream, entry_ids))

    def count(self, key: bytes, increments: Mapping[str, int], done: Counted) -> bool:
        async def count() -> None:
            try:
                await self._log.add_statistics(key, increments)
            except CharoniaError as error:
                done(error)
            else:
                done(None)

        self._log.tasks.spawn(count())
        return True

    async def queue_entries(self, model: str) -> int:
        return await self._log.at(keys.counters(model), lambda log: log.waves.queue_entries(model))

    async def lease(self, model: str, holder: str, requests: int, size_bytes: int, limits: Limits) -> bool:
        at = keys.counters(model)
        return await self._log.at(at, lambda log: log.waves.lease(model, holder, requests, size_bytes, limits))

    async def leases(self, model: str) -> list[str]:
        return await self._log.at(keys.counters(model), lambda log: log.waves.leases(model))


class ClusterLog:
    """`EventLog` on a Redis Cluster of Redis or Valkey >= 7.0. Raises `StartupError` for a URL without a cluster.

    Its readers report whether the servers can be reached.
    """

    def __init__(self, url: str, *, durability: str = "memory") -> None:
        self.blobs: BlobServer | None = None
        """Holds the payloads of work at the level `memory`, if set."""
        self._address = parse_address(url)
        if not self._address.nodes:
            raise StartupError("the event log URL names no Redis Cluster")
        level_of(durability)
        self._durability = durability
        self._epoch = Epoch()
        self._topology = Topology(self._address)
        self._topology.listeners.append(self._moved)
        self._nodes: dict[Place, _Node] = {}
        self.tasks = Tasks()
        self._closed = False
        self.waves = ClusterWaves(self)

    async def open(self) -> None:
        await self._topology.open()
        try:
            await asyncio.gather(*(self._node(place).open() for place in self._topology.places))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._closed = True
        await self._topology.close()
        nodes, self._nodes = list(self._nodes.values()), {}
        await asyncio.gather(*(node.close() for node in nodes), return_exceptions=True)
        await self.tasks.settled()

    def reader(self) -> StreamReader:
        return ClusterReader(self._topology, self._holder)

    # -- where ---------------------------------------------------------------------------------------------------------

    def _node(self, place: Place) -> _Node:
        node = self._nodes.get(place)
        if node is None:
            scheme = "rediss" if self._address.tls is not None else "redis"
            address = replace(
                self._address,
                text=f"{scheme}://{place[0]}:{place[1]}",
                host=place[0],
                port=place[1],
                nodes=(),
                in_cluster=True,
            )
            node = self._nodes[place] = _Node(address, self._durability, self._epoch, self)
        return node

    def _holder(self, slot: int) -> _Node | None:
        """The part of the log that holds a slot; None while no server does."""
        place = self._topology.place(slot)
        return None if place is None else self._node(place)

    def _moved(self) -> None:
        """The topology changed: connect to new primaries, disconnect from those without slots."""
        if self._closed:
            return
        wanted = self._topology.places
        for place in wanted:
            if place not in self._nodes and self._nodes:
                self._node(place).start()
        for place in [place for place in self._nodes if place not in wanted]:
            self.tasks.spawn(self._nodes.pop(place).close())

    async def at(self, key: bytes, call: Callable[[_Node], Awaitable[T]]) -> T:
        """Run an operation on the server that holds a key."""
        slot = slot_of(key)
        give_up_s = 0.0
        while True:
            node = self._holder(slot)
            try:
                if node is None:
                    raise Refused("CLUSTERDOWN no server holds the slot")
                return await call(node)
            except Refused as error:
                now_s = asyncio.get_running_loop().time()
                give_up_s = give_up_s or now_s + _PATIENCE_S
                if not error.reply.startswith(_ELSEWHERE) or now_s > give_up_s:
                    raise
            await self._topology.refresh()
            await asyncio.sleep(random.uniform(0, _WAIT_S))

    async def note_job_model(self, model: str) -> None:
        await self.at(keys.JOB_MODELS, lambda log: log.name_job_model(model))
        await self.at(keys.counters(model), lambda log: log.mark_job_model(model))

    async def raise_level(self, model: str, job_id: bytes, level: str) -> None:
        await self.at(keys.counters(model), lambda log: RedisLog.raise_level(log, model, job_id, level))

    # -- one model, or one key -----------------------------------------------------------------------------------------

    accept = _of_model("accept")
    accept_job = _of_model("accept_job")
    begin_attempt = _of_model("begin_attempt")
    unsettled = _of_model("unsettled")
    unsettled_ids = _of_model("unsettled_ids")
    append_progress = _of_model("append_progress")

    async def append_progress_and_replies(
        self, model: str, parts: Sequence[ProgressPart], replies: Sequence[Reply]
    ) -> tuple[list[int], bool]:
        """The records alone: endpoints have slots of their own."""
        return await self.append_progress(model, parts), False

    progress = _of_model("progress")
    progress_ids = _of_model("progress_ids")
    drop_progress = _of_model("drop_progress")
    sequences = _of_model("sequences")
    sequence_states = _of_model("sequence_states")
    keep_states = _of_model("keep_states")
    forget_sequences = _of_model("forget_sequences")
    set_retention = _of_model("set_retention")
    job = _of_model("job")
    jobs_of_keys = _of_model("jobs_of_keys")
    job_result = _of_model("job_result")
    add_job_event = _of_model("add_job_event")
    add_job_responses = _of_model("add_job_responses")
    job_responses = _of_model("job_responses")
    jobs = _of_model("jobs")
    job_position = _of_model("job_position")
    trim_journal = _of_model("trim_journal")
    last_seal = _of_model("last_seal")
    seal_journal = _of_model("seal_journal")
    journal_complete = _of_model("journal_complete")
    pending = _of_model("pending")
    pending_of_tenants = _of_model("pending_of_tenants")
    set_paused = _of_model("set_paused")
    paused = _of_model("paused")
    lanes = _of_model("lanes")
    owner = _of_model("owner")
    take_ownership = _of_model("take_ownership")
    release_ownership = _of_model("release_ownership")

    append = _of_key("append")
    append_fenced = _of_key("append_fenced")
    delete_entries = _of_key("delete_entries")
    delete_stream = _of_key("delete_stream")
    put_note = _of_key("put_note")
    add_to_count = _of_key("add_to_count")
    set_times = _of_key("set_times")
    due = _of_key("due")
    drop_times = _of_key("drop_times")
    count_times = _of_key("count_times")
    keep_until = _of_key("keep_until")
    keep_recent = _of_key("keep_recent")
    add_statistics = _of_key("add_statistics")
    statistics = _of_key("statistics")

    async def range(self, stream: bytes, after: bytes = START, count: int = 1000) -> list[Entry]:
        return await self.at(stream, lambda log: log.range(stream, after, count))

    async def job_models(self) -> list[str]:
        return await self.at(keys.JOB_MODELS, lambda log: log.job_models())

    async def clock_ns(self) -> int:
        return await self.at(keys.EPOCH, lambda log: log.clock_ns())

    async def memory_bytes(self) -> tuple[int, int]:
        each = await asyncio.gather(*(self._node(place).memory_bytes() for place in self._topology.places))
        return sum(used for used, _ in each), sum(most for _, most in each)

    async def epoch(self) -> str:
        return await self.at(keys.EPOCH, lambda log: log.epoch())

    async def beat(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        return await self.at(keys.alive(role, incarnation), lambda log: log.beat(role, incarnation, ttl_ms))

    async def prolong(self, role: str, incarnation: str, ttl_ms: int) -> bool:
        return await self.at(keys.alive(role, incarnation), lambda log: log.prolong(role, incarnation, ttl_ms))

    async def end_beat(self, role: str, incarnation: str) -> None:
        await self.at(keys.alive(role, incarnation), lambda log: log.end_beat(role, incarnation))

    async def put_blob(self, blob_id: str, data: Buffer, ttl_s: int) -> None:
        if self.blobs is not None and is_passing(blob_id):
            await self.blobs.put(blob_id, data, ttl_s)
            return
        await self.at(keys.blob(blob_id), lambda log: log.put_blob(blob_id, data, ttl_s))

    async def blob(self, blob_id: str) -> bytes | None:
        if self.blobs is not None and is_passing(blob_id):
            return await self.blobs.get(blob_id)
        return await self.at(keys.blob(blob_id), lambda log: log.blob(blob_id))

    # -- several slots -------------------------------------------------------------------------------------------------

    async def settle(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply] = (),
        **more: Any,
    ) -> list[bool]:
        # Endpoints have their own slots, so one write becomes three, in the order that the port promises. Facts are
        # written separately, though they may share the slot: refused after the settlement, they would have it repeated.
        if replies:
            await asyncio.gather(*(self.append(reply.stream, reply.fields) for reply in replies))
        won = await self.at(keys.counters(model), lambda log: log.settle(model, requests, statistics, (), **more))
        for fact in facts:
            await self.append(fact.stream, fact.fields)
        return won

    def settle_now(self, *_settlement: Any, **_journal: Any) -> bool:
        """Endpoints have their own slots: `settle` awaits one after the other."""
        return False

    async def alive(self, role: str, incarnations: Sequence[str]) -> list[bool]:
        async def one(incarnation: str) -> bool:
            return (await self.at(keys.alive(role, incarnation), lambda log: log.alive(role, [incarnation])))[0]

        return list(await asyncio.gather(*map(one, incarnations)))

    async def last_beat_ms(self, role: str, incarnations: Sequence[str]) -> list[int]:
        async def one(incarnation: str) -> int:
            return (await self.at(keys.alive(role, incarnation), lambda log: log.last_beat_ms(role, [incarnation])))[0]

        return list(await asyncio.gather(*map(one, incarnations)))

    async def notes(self, names: Sequence[bytes]) -> list[bytes | None]:
        async def one(name: bytes) -> bytes | None:
            return (await self.at(name, lambda log: log.notes([name])))[0]

        return list(await asyncio.gather(*map(one, names)))

    async def delete_keys(self, names: Iterable[bytes]) -> None:
        async def one(name: bytes) -> None:
            await self.at(name, lambda log: log.delete_keys([name]))

        await asyncio.gather(*map(one, names if self.blobs is None else await self.blobs.delete_its_own(names)))


def open_log(url: str, *, durability: str = "memory") -> RedisLog | ClusterLog:
    """The log at a URL, not opened yet. Raises `StartupError` for an invalid URL or durability level."""
    if parse_address(url).nodes:
        return ClusterLog(url, durability=durability)
    return RedisLog(url, durability=durability)
