"""A shared log, with streams beside it that never leave the process (`local:`, see `charonia.keys`).

For a batcher inside an executor: what the two tell each other needs neither a server nor a copy, and it is lost with
both of them, which is right. Everything else goes to the shared log as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from charonia import keys
from charonia.errors import CharoniaError
from charonia.facts.job_places import JobPlace
from charonia.facts.jobs import JobEnd, JobRecord, JobTicket, NewJob
from charonia.facts.sequence_states import SequenceStep
from charonia.tensors import Buffer

from .memory.log import MemoryLog
from .port import START, Entry, EventLog, Fields, Limits, OnEntries, Reply, Settled, StreamReader, Waves


class ColocatedLog:
    """`EventLog` over two: `local` for streams whose name starts with `local:`, `shared` for all else."""

    def __init__(self, shared: EventLog, local: MemoryLog) -> None:
        self._shared = shared
        self._local = local
        self._takers: dict[bytes, Callable[..., None]] = {}

    async def open(self) -> None:
        await self._local.open()
        await self._shared.open()

    async def close(self) -> None:
        await self._shared.close()
        await self._local.close()

    def _of(self, stream: bytes) -> EventLog:
        return self._local if stream.startswith(keys.LOCAL) else self._shared

    # -- streams ------------------------------------------------------------------------------------------------------

    async def append(self, stream: bytes, fields: Fields) -> bytes:
        return await self._of(stream).append(stream, fields)

    def take_over(self, stream: bytes, take: Callable[..., None] | None) -> None:
        """What is handed to a stream of this process goes to `take` at once, as it is; None to end that."""
        if take is None:
            self._takers.pop(stream, None)
        else:
            self._takers[stream] = take

    def hand(self, stream: bytes, *what: object) -> bool:
        """Hand something to what has taken over a stream of this process; False when nothing has."""
        take = self._takers.get(stream)
        if take is None:
            return False
        take(*what)
        return True

    def append_here(self, stream: bytes, fields: Fields) -> None:
        """Append to a stream of this process at once; nothing of it can fail or take time."""
        self._local.append_here(stream, fields)

    async def delete_entries(self, stream: bytes, ids: Sequence[bytes]) -> None:
        await self._of(stream).delete_entries(stream, ids)

    async def range(self, stream: bytes, after: bytes = START, count: int = 1000) -> list[Entry]:
        return await self._of(stream).range(stream, after, count)

    async def delete_stream(self, stream: bytes) -> None:
        await self._of(stream).delete_stream(stream)

    def reader(self) -> StreamReader:
        return ColocatedReader(self._shared.reader(), self._local.reader())

    @property
    def waves(self) -> Waves:
        return self._shared.waves

    # -- accepted work of a model -------------------------------------------------------------------------------------

    async def accept(
        self,
        model: str,
        level: int,
        lane: int,
        requests: Sequence[tuple[bytes, int]],
        fields: Fields,
        limits: Limits,
        *,
        tenant: str = "",
        journalled: bool = False,
        durability: str = "",
    ) -> None:
        await self._shared.accept(
            model, level, lane, requests, fields, limits, tenant=tenant, journalled=journalled, durability=durability
        )

    async def accept_job(
        self,
        model: str,
        level: int,
        lane: int,
        job: NewJob,
        fields: Fields,
        limits: Limits,
        *,
        journalled: bool = True,
        durability: str = "",
    ) -> JobTicket:
        return await self._shared.accept_job(
            model, level, lane, job, fields, limits, journalled=journalled, durability=durability
        )

    async def settle(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply] = (),
        *,
        ends: Mapping[bytes, JobEnd] | None = None,
        outcomes: bytes = b"",
        ran: tuple[str, str] | None = None,
        sequences: Mapping[bytes, SequenceStep] | None = None,
    ) -> list[bool]:
        """What is local goes to the local log, in the same order: replies, the shared settlement, facts."""
        near, far = _parted(replies)
        near_facts, far_facts = _parted(facts)
        for reply in near:
            self._local.append_here(reply.stream, reply.fields)
        won = await self._shared.settle(
            *(model, requests, statistics, far, far_facts),
            ends=ends,
            outcomes=outcomes,
            ran=ran,
            sequences=sequences,
        )
        for fact in near_facts:
            self._local.append_here(fact.stream, fact.fields)
        return won

    def settle_now(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        statistics: tuple[bytes, Mapping[str, int]] | None,
        replies: Sequence[Reply],
        facts: Sequence[Reply],
        done: Settled,
        *,
        outcomes: bytes = b"",
        ran: tuple[str, str] | None = None,
    ) -> bool:
        near, far = _parted(replies)
        near_facts, far_facts = _parted(facts)

        def settled(outcome: list[bool] | CharoniaError) -> None:
            try:
                done(outcome)
            finally:  # it is settled, whatever becomes of who settled it: the owner must hear of that
                if isinstance(outcome, list):
                    for fact in near_facts:
                        if not self.hand(fact.stream, fact.fields):
                            self._local.append_here(fact.stream, fact.fields)

        settlement = (model, requests, statistics, far, far_facts, settled)
        if not self._shared.settle_now(*settlement, outcomes=outcomes, ran=ran):
            return False
        for reply in near:
            self._local.append_here(reply.stream, reply.fields)
        return True

    async def begin_attempt(
        self,
        model: str,
        token: int,
        ids: Sequence[bytes],
        attempt: int,
        *,
        jobs: Sequence[bytes] = (),
        journalled: Sequence[bytes] = (),
        executor: str = "",
        batch_id: str = "",
    ) -> list[bool]:
        return await self._shared.begin_attempt(
            model, token, ids, attempt, jobs=jobs, journalled=journalled, executor=executor, batch_id=batch_id
        )

    async def unsettled(self, model: str, ids: Sequence[bytes]) -> list[int]:
        return await self._shared.unsettled(model, ids)

    async def unsettled_ids(self, model: str) -> list[bytes]:
        return await self._shared.unsettled_ids(model)

    # -- sequences ----------------------------------------------------------------------------------------------------

    async def sequences(self, model: str) -> dict[bytes, bytes]:
        return await self._shared.sequences(model)

    async def sequence_states(self, model: str, names: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        return await self._shared.sequence_states(model, names)

    async def keep_states(self, model: str, states: Mapping[bytes, tuple[bytes, bytes]]) -> list[bool]:
        return await self._shared.keep_states(model, states)

    async def forget_sequences(self, model: str, runs: Mapping[bytes, bytes]) -> None:
        await self._shared.forget_sequences(model, runs)

    # -- jobs and journal ---------------------------------------------------------------------------------------------

    async def set_retention(self, model: str, *, size_bytes: int, journal_s: int, journal_size_bytes: int) -> None:
        await self._shared.set_retention(
            model, size_bytes=size_bytes, journal_s=journal_s, journal_size_bytes=journal_size_bytes
        )

    async def job(self, model: str, job_id: bytes) -> JobRecord | None:
        return await self._shared.job(model, job_id)

    async def job_result(self, model: str, job_id: bytes) -> bytes | None:
        return await self._shared.job_result(model, job_id)

    async def add_job_responses(
        self, model: str, job_id: bytes, attempt: int, first_index: int, records: Sequence[Buffer]
    ) -> bool:
        return await self._shared.add_job_responses(model, job_id, attempt, first_index, records)

    async def job_responses(
        self, model: str, job_id: bytes, after_index: int = -1, count: int = 100
    ) -> list[tuple[int, int, bytes]]:
        return await self._shared.job_responses(model, job_id, after_index, count)

    async def add_job_event(self, model: str, job_id: bytes, kind: str, detail: Mapping[str, object]) -> bool:
        return await self._shared.add_job_event(model, job_id, kind, detail)

    async def jobs(
        self, model: str, *, ended: bool, after: tuple[int, bytes] | None = None, count: int = 100
    ) -> list[JobRecord]:
        return await self._shared.jobs(model, ended=ended, after=after, count=count)

    async def job_position(self, model: str, job_id: bytes) -> JobPlace | None:
        return await self._shared.job_position(model, job_id)

    async def job_models(self) -> list[str]:
        return await self._shared.job_models()

    async def trim_journal(self, model: str, oldest_unfinished: bytes) -> int:
        return await self._shared.trim_journal(model, oldest_unfinished)

    async def journal_complete(self, model: str) -> bool:
        return await self._shared.journal_complete(model)

    async def pending(self, model: str) -> tuple[int, int]:
        return await self._shared.pending(model)

    async def pending_of_tenants(self, model: str, tenants: Sequence[str]) -> list[tuple[int, int]]:
        return await self._shared.pending_of_tenants(model, tenants)

    async def set_paused(self, model: str, paused: bool) -> None:
        await self._shared.set_paused(model, paused)

    async def paused(self, model: str) -> bool:
        return await self._shared.paused(model)

    async def lanes(self, model: str) -> list[tuple[int, int]]:
        return await self._shared.lanes(model)

    # -- epoch --------------------------------------------------------------------------------------------------------

    async def clock_ns(self) -> int:
        return await self._shared.clock_ns()

    async def epoch(self) -> str:
        return await self._shared.epoch()

    # -- ownership and liveness ---------------------------------------------------------------------------------------

    async def owner(self, model: str) -> tuple[str, int]:
        return await self._shared.owner(model)

    async def take_ownership(self, model: str, owner: str, previous: str) -> int:
        return await self._shared.take_ownership(model, owner, previous)

    async def release_ownership(self, model: str, owner: str, token: int) -> None:
        await self._shared.release_ownership(model, owner, token)

    async def beat(self, role: str, incarnation: str, ttl_ms: int) -> None:
        await self._shared.beat(role, incarnation, ttl_ms)

    async def end_beat(self, role: str, incarnation: str) -> None:
        await self._shared.end_beat(role, incarnation)

    async def alive(self, role: str, incarnations: Sequence[str]) -> list[bool]:
        return await self._shared.alive(role, incarnations)

    async def last_beat_ms(self, role: str, incarnations: Sequence[str]) -> list[int]:
        return await self._shared.last_beat_ms(role, incarnations)

    # -- projections and payloads -------------------------------------------------------------------------------------

    async def add_statistics(self, key: bytes, increments: Mapping[str, int]) -> None:
        await self._shared.add_statistics(key, increments)

    async def statistics(self, key: bytes) -> dict[str, int]:
        return await self._shared.statistics(key)

    async def delete_keys(self, keys: Iterable[bytes]) -> None:
        names = list(keys)
        await self._local.delete_keys(names)
        await self._shared.delete_keys([name for name in names if self._of(name) is self._shared])

    async def put_note(self, key: bytes, data: bytes, ttl_s: int) -> None:
        await self._shared.put_note(key, data, ttl_s)

    async def notes(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._shared.notes(keys)

    async def add_to_count(self, key: bytes, amount: int) -> int:
        return await self._shared.add_to_count(key, amount)

    async def set_times(self, key: bytes, times: Mapping[bytes, int]) -> None:
        await self._shared.set_times(key, times)

    async def due(self, key: bytes, until_us: int, count: int) -> list[bytes]:
        return await self._shared.due(key, until_us, count)

    async def drop_times(self, key: bytes, members: Sequence[bytes]) -> None:
        await self._shared.drop_times(key, members)

    async def count_times(self, key: bytes) -> int:
        return await self._shared.count_times(key)

    async def keep_recent(
        self, key: bytes, uses: Mapping[bytes, tuple[int, int]], limit_bytes: int, drop: Sequence[bytes] = ()
    ) -> list[bytes]:
        return await self._shared.keep_recent(key, uses, limit_bytes, drop)

    async def put_blob(self, blob_id: str, data: Buffer, ttl_s: int) -> None:
        await self._shared.put_blob(blob_id, data, ttl_s)

    async def blob(self, blob_id: str) -> bytes | None:
        return await self._shared.blob(blob_id)


def _parted(appended: Sequence[Reply]) -> tuple[list[Reply], list[Reply]]:
    """(local, shared)."""
    local: list[Reply] = []
    shared: list[Reply] = []
    for one in appended:
        (local if one.stream.startswith(keys.LOCAL) else shared).append(one)
    return local, shared


class ColocatedReader:
    """Two readers behind one callback. Only the shared log can be lost, so only its state is told."""

    def __init__(self, shared: StreamReader, local: StreamReader) -> None:
        self._shared = shared
        self._local = local

    def _of(self, stream: bytes) -> StreamReader:
        return self._local if stream.startswith(keys.LOCAL) else self._shared

    def start(self, on_entries: OnEntries, on_state: Callable[[bool], None] | None = None) -> None:
        self._local.start(on_entries)
        self._shared.start(on_entries, on_state)

    def add(self, stream: bytes, after: bytes = START, *, consume: bool = False) -> None:
        self._of(stream).add(stream, after, consume=consume)

    def remove(self, stream: bytes) -> None:
        self._of(stream).remove(stream)

    async def close(self) -> None:
        await self._local.close()
        await self._shared.close()
