"""The event log in one process's memory: the whole port, nothing durable.

It states plainly what the port means. Buffers are kept as they are given, so a caller must not change one after handing
it over. One log may be shared by several services of a process: `open` and `close` do nothing, the data lives as long
as the object. Streams and readers are `streams`', the rules of accepted work `work`'s, what is kept by key
`projections`'.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence

from charonia import keys
from charonia.clock import wall_ns
from charonia.eventlog.port import START, Entry, Fields, Limits, ProgressPart, Reply, Settled, kept_response
from charonia.eventlog.refusal_texts import not_owner
from charonia.facts.counters import without
from charonia.facts.events import FIELD_FACT, LaneOpened, pack_fact
from charonia.facts.jobs import JobEnd, JobPlace, JobRecord, JobTicket, NewJob
from charonia.facts.journal import FIELD, FIELD_MASK, Ran, pack_accepted, pack_batched, pack_ended
from charonia.facts.seals import FIELD_SEAL
from charonia.facts.sequence_states import SequenceStep
from charonia.tensors import Buffer

from .projections import MemoryProjections
from .streams import SEQUENCE_BITS, MemoryStreams, entry_number
from .waves import MemoryWaves
from .work import ModelWork, now_us

_DURABILITY = "memory"
_NOT_JOURNALLED = ord("-")


class MemoryLog(MemoryStreams, MemoryProjections):
    """`EventLog` in memory."""

    def __init__(self) -> None:
        MemoryStreams.__init__(self)
        MemoryProjections.__init__(self)
        self._work: dict[str, ModelWork] = {}
        self._epoch = secrets.token_hex(16)
        self._job_models: dict[str, None] = {}
        self.waves = MemoryWaves(self, self._of, self.count_here)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    # -- accepted work of a model -------------------------------------------------------------------------------------

    def _of(self, model: str) -> ModelWork:
        work = self._work.get(model)
        if work is None:
            work = self._work[model] = ModelWork(model, self._job_forgotten)
        return work

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
        work = self._of(model)
        work.accept(requests, limits, tenant)
        self._queue(work, level, lane, fields)
        if journalled:
            self._journal(model, pack_accepted([request_id for request_id, _ in requests]))

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
        work = self._of(model)
        known = work.earlier(job)
        if known is not None:
            return JobTicket(known.new.id, False, known.durability)
        work.accept([(job.id, job.size_bytes)], limits, job.tenant)
        work.add_job(job, _DURABILITY, (level, lane))
        if job.deadline_us:
            await self.set_times(keys.job_deadlines(model), {job.id: job.deadline_us})
        self._job_models[model] = None
        self._queue(work, level, lane, fields)
        if journalled:
            self._journal(model, pack_accepted([job.id]))
        return JobTicket(job.id, True, _DURABILITY)

    def _queue(self, work: ModelWork, level: int, lane: int, fields: Fields) -> None:
        self._append(keys.queue(work.model, level, lane), fields)
        if (level, lane) not in work.lanes:
            work.lanes.add((level, lane))
            self._append(keys.facts(work.model), [FIELD_FACT, pack_fact(LaneOpened(level, lane))])

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
        ran: Ran | None = None,
        sequences: Mapping[bytes, SequenceStep] | None = None,
        rows: Sequence[int] = (),
    ) -> list[bool]:
        work = self._of(model)
        for reply in replies:
            self._append(reply.stream, reply.fields)
        won = [work.take(request_id, attempt) for request_id, attempt in requests]
        if ends:
            for (request_id, _), wins in zip(requests, won, strict=True):
                end = ends.get(request_id)
                if not wins or end is None:
                    continue
                if work.end_job(request_id, end):
                    self._append(keys.webhooks(model), [b"i", request_id.hex().encode()])
                await self.drop_times(keys.job_deadlines(model), [request_id])
        for (request_id, _), wins in zip(requests, won, strict=True):
            step = sequences.get(request_id) if sequences and wins else None
            if step is not None:
                work.step(step)
        if outcomes:
            self._journal_ends(model, requests, won, outcomes, ran)
        if statistics is not None and (all(won) or (rows and any(won))):
            lost = [count for count, wins in zip(rows, won, strict=True) if not wins] if rows else []
            self.count_here(statistics[0], without(statistics[1], len(lost), sum(lost)))
        for fact in facts:
            self._append(fact.stream, fact.fields)
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
        ran: Ran | None = None,
        rows: Sequence[int] = (),
    ) -> bool:
        try:
            self.settle(model, requests, statistics, replies, facts, outcomes=outcomes, ran=ran, rows=rows).send(None)
        except StopIteration as settled:  # nothing of it waits
            asyncio.get_running_loop().call_soon(done, settled.value)
        return True

    def _journal_ends(
        self,
        model: str,
        requests: Sequence[tuple[bytes, int]],
        won: Sequence[bool],
        outcomes: bytes,
        ran: Ran | None,
    ) -> None:
        told = [n for n, outcome in enumerate(outcomes) if outcome != _NOT_JOURNALLED]
        mask = b"".join([b"1" if won[n] else b"0" for n in told])
        if b"1" not in mask:
            return
        ids, attempts = zip(*[requests[n] for n in told], strict=True)
        fact = pack_ended(ids, attempts, bytes([outcomes[n] for n in told]), ran)
        self._journal(model, fact, mask if b"0" in mask else b"")

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
        work = self._of(model)
        if not work.owner or work.token != token:
            raise not_owner(model, token)
        for request_id in ids:
            request = work.requests.get(request_id)
            if request is not None:
                request.attempt = max(request.attempt, attempt)
        for job_id in jobs:
            if job_id in work.requests:
                work.begin_job(job_id, attempt, {"executor": executor, "batch_id": batch_id} if executor else {})
        going = [request_id for request_id in journalled if request_id in work.requests]
        if going:
            self._journal(model, pack_batched(going, attempt, executor, batch_id))
        return [request_id in work.requests for request_id in ids]

    async def unsettled(self, model: str, ids: Sequence[bytes]) -> list[int]:
        requests = self._of(model).requests
        return [requests[request_id].attempt if request_id in requests else -1 for request_id in ids]

    async def unsettled_ids(self, model: str) -> list[bytes]:
        return list(self._of(model).requests)

    # -- progress -----------------------------------------------------------------------------------------------------

    async def append_progress(self, model: str, parts: Sequence[ProgressPart]) -> list[int]:
        work = self._of(model)
        return [work.append_progress(part) for part in parts]

    async def append_progress_and_replies(
        self, model: str, parts: Sequence[ProgressPart], replies: Sequence[Reply]
    ) -> tuple[list[int], bool]:
        lengths = await self.append_progress(model, parts)
        if not parts or not all(
            n >= part.first_index + len(part.records) for n, part in zip(lengths, parts, strict=True)
        ):
            return lengths, False
        for reply in replies:
            await self.append(reply.stream, reply.fields)
        return lengths, bool(replies)

    async def progress(self, model: str, ids: Sequence[bytes]) -> list[list[bytes]]:
        requests = self._of(model).requests
        return [list(requests[one].progress) if one in requests else [] for one in ids]

    async def progress_ids(self, model: str) -> list[bytes]:
        return [one for one, request in self._of(model).requests.items() if request.progress]

    async def drop_progress(self, model: str, ids: Sequence[bytes]) -> None:
        requests = self._of(model).requests
        for one in ids:
            if one in requests:
                requests[one].progress.clear()

    # -- sequences ----------------------------------------------------------------------------------------------------

    async def sequences(self, model: str) -> dict[bytes, bytes]:
        return {key: about for key, (about, _) in self._of(model).sequences.items()}

    async def sequence_states(self, model: str, names: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        return [self._of(model).sequences.get(name) for name in names]

    async def keep_states(self, model: str, states: Mapping[bytes, tuple[bytes, bytes]]) -> list[bool]:
        known, written = self._of(model).sequences, list[bool]()
        for key, (about, state) in states.items():
            written.append(key in known and known[key][0] == about)
            if written[-1]:
                known[key] = (about, state)
        return written

    async def forget_sequences(self, model: str, runs: Mapping[bytes, bytes]) -> None:
        known = self._of(model).sequences
        for key, run in runs.items():
            if key in known and known[key][0].startswith(run):
                del known[key]

    # -- jobs and journal ---------------------------------------------------------------------------------------------

    async def set_retention(self, model: str, *, size_bytes: int, journal_s: int, journal_size_bytes: int) -> None:
        work = self._of(model)
        work.keep_size_bytes = size_bytes
        work.keep_journal_s = journal_s
        work.keep_journal_size_bytes = journal_size_bytes

    async def job(self, model: str, job_id: bytes) -> JobRecord | None:
        found = self._of(model).job(job_id)
        return None if found is None else found.record(model, with_events=True)

    async def jobs_of_keys(self, model: str, key_digests: Sequence[bytes]) -> list[bytes | None]:
        work = self._of(model)
        known = [work.keys.get(key) for key in key_digests]
        return [job_id if job_id and work.job(job_id) is not None else None for job_id in known]

    async def job_result(self, model: str, job_id: bytes) -> bytes | None:
        found = self._of(model).job(job_id)
        return None if found is None else found.result or None

    async def add_job_responses(
        self, model: str, job_id: bytes, attempt: int, first_index: int, records: Sequence[Buffer]
    ) -> bool:
        fresh = self._of(model).add_responses(job_id, attempt, first_index, records)
        if fresh is None:
            return False
        stream = keys.job_responses(model, job_id)
        for index, record in fresh:
            self._append_at(stream, (index + 1) << SEQUENCE_BITS, [b"a", b"%d" % attempt, b"r", bytes(record)])
        return True

    async def job_responses(
        self, model: str, job_id: bytes, after_index: int = -1, count: int = 100
    ) -> list[tuple[int, int, bytes]]:
        if self._of(model).job(job_id) is None:
            return []
        entries = await self.range(keys.job_responses(model, job_id), b"%d-0" % (after_index + 1), count)
        return [kept_response(entry) for entry in entries]

    def _job_forgotten(self, model: str, job_id: bytes) -> None:
        self._streams.pop(keys.job_responses(model, job_id), None)

    async def add_job_event(self, model: str, job_id: bytes, kind: str, detail: Mapping[str, object]) -> bool:
        return self._of(model).tell_job(job_id, kind, detail)

    async def jobs(
        self, model: str, *, ended: bool, after: tuple[int, bytes] | None = None, count: int = 100
    ) -> list[JobRecord]:
        work = self._of(model)
        if ended:
            found = [job for job in work.ended() if after is None or (job.ended_us, job.new.id) < after]
        else:
            found = [job for job in work.active() if after is None or (job.new.accepted_us, job.new.id) > after]
        return [job.record(model, with_events=False) for job in found[:count]]

    async def job_position(self, model: str, job_id: bytes) -> JobPlace | None:
        return self._of(model).place(job_id)

    async def job_models(self) -> list[str]:
        return sorted(self._job_models)

    async def trim_journal(self, model: str, oldest_unfinished: bytes, *, sealed: bool = False) -> int:
        work, stream = self._of(model), keys.journal(model)
        entries = self._streams.get(stream, {})
        bound = None if oldest_unfinished == b"+" else entry_number(oldest_unfinished)
        expired = (now_us() // 1000 - work.keep_journal_s * 1000) << SEQUENCE_BITS if work.keep_journal_s else 0
        size_bytes = sum(sum(map(len, entry.fields)) for entry in entries.values())
        gone = []
        for number, entry in entries.items():
            too_large = work.keep_journal_size_bytes and size_bytes > work.keep_journal_size_bytes
            if (bound is not None and number >= bound) or not (number < expired or too_large):
                break
            size_bytes -= sum(map(len, entry.fields))
            gone.append(number)
        seals = self._streams.get(keys.journal_seals(model), {})
        covered = [number for number in seals if gone and number <= gone[-1]]
        if sealed or len(covered) < len(seals):
            gone = [number for number in gone if covered and number <= covered[-1]]
        for number in covered[:-1]:
            del seals[number]
        for number in gone:
            del entries[number]
        work.journal_complete = work.journal_complete and not gone
        return len(gone)

    async def last_seal(self, model: str) -> Entry | None:
        seals = self._streams.get(keys.journal_seals(model), {})
        return seals[next(reversed(seals))] if seals else None

    async def seal_journal(self, model: str, after: bytes, seal_id: bytes, record: bytes) -> bool:
        last, work, number = await self.last_seal(model), self._of(model), entry_number(seal_id)
        if (last.id if last is not None else START) != after or number <= work.sealed_to:
            return False
        work.sealed_to = number
        self._append_at(keys.journal_seals(model), number, [FIELD_SEAL, record])
        return True

    async def journal_complete(self, model: str) -> bool:
        return self._of(model).journal_complete

    def _journal(self, model: str, fact: bytes, mask: bytes = b"") -> None:
        self._append(keys.journal(model), [FIELD, fact, FIELD_MASK, mask] if mask else [FIELD, fact])

    async def pending(self, model: str) -> tuple[int, int]:
        work = self._of(model)
        return len(work.requests), work.size_bytes

    async def pending_of_tenants(self, model: str, tenants: Sequence[str]) -> list[tuple[int, int]]:
        known = self._of(model).tenants
        return [known.get(tenant, (0, 0)) for tenant in tenants]

    async def set_paused(self, model: str, paused: bool) -> None:
        self._of(model).paused = paused

    async def paused(self, model: str) -> bool:
        return self._of(model).paused

    async def lanes(self, model: str) -> list[tuple[int, int]]:
        return sorted(self._of(model).lanes)

    # -- epoch --------------------------------------------------------------------------------------------------------

    async def clock_ns(self) -> int:
        return wall_ns()

    async def memory_bytes(self) -> tuple[int, int]:
        fields = (field for entries in self._streams.values() for entry in entries.values() for field in entry.fields)
        return sum(len(field) for field in fields), 0

    async def epoch(self) -> str:
        return self._epoch

    # -- ownership and liveness ---------------------------------------------------------------------------------------

    async def owner(self, model: str) -> tuple[str, int]:
        work = self._of(model)
        return work.owner, work.token

    async def take_ownership(self, model: str, owner: str, previous: str) -> int:
        work = self._of(model)
        if work.owner != previous:
            return 0
        work.owner = owner
        work.token += 1
        return work.token

    async def release_ownership(self, model: str, owner: str, token: int) -> None:
        work = self._of(model)
        if (work.owner, work.token) == (owner, token):
            work.owner = ""

    async def append_fenced(self, stream: bytes, fence: bytes, token: int, fields: Fields, ttl_s: int) -> bool:
        (known,) = await self.notes([fence])
        if token < int(known or 0):
            return False
        await self.put_note(fence, b"%d" % token, ttl_s)
        if fields:
            self._append(stream, fields)
        return True

    async def keep_until(self, key: bytes, until_us: int) -> None:
        await super().keep_until(key, until_us)
        if key not in self._until:
            self._streams.pop(key, None)

    async def delete_keys(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._streams.pop(key, None)
            self._forget(key)
