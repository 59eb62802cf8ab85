"""Writes responses of streamed batches to the log as soon as they are made, in order: one write at a time.

What is made while a write is under way goes with the next one: one entry for each endpoint. A job's responses are kept
in the log before anybody sees them; the owner of a batch hears of a request's first response in the write that makes it
visible. Final responses go with the settlement of their requests (`settler`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from charonia import keys
from charonia.calls.reporting import replies_of
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import EventLog
from charonia.facts.events import FIELD_FACT, ResponsesBegun, SlotFreed, pack_fact
from charonia.tensors import Buffer
from charonia.wire import FLAG_JOB, FLAG_REPLY_BY_REFERENCE, RequestRecord
from executors.announcing import insist
from executors.batches.batch_payloads import Payloads
from executors.running.job import Job, SettlePart
from executors.streams.streamed_batch import Outgoing, StreamedBatch

from .owner_reports import OwnerReports

_log = logging.getLogger(__name__)

_NOT_TAKEN = "responses cannot be written"


class ResponseWriter:
    """The responses of one executor. `unwanted` is told of jobs that take no more responses: (job, their ids)."""

    def __init__(
        self,
        log: EventLog,
        executor: str,
        payloads: Payloads,
        unwanted: Callable[[Job, frozenset[bytes]], None],
        reports: OwnerReports,
    ) -> None:
        self._log = log
        self._executor = executor
        self._payloads = payloads
        self._unwanted = unwanted
        self._reports = reports
        self.on_first: Callable[[Job, RequestRecord], None] | None = None
        """Told of the first responses of models that may give several."""
        self._jobs: dict[StreamedBatch, tuple[Job, SettlePart]] = {}
        self._waiting: list[Outgoing] = []
        self._unwritten: dict[StreamedBatch, int] = {}
        self._written = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, batch: StreamedBatch, job: Job, settle: SettlePart) -> None:
        """Responses of this batch may come from now on."""
        self._jobs[batch] = (job, settle)
        self._unwritten[batch] = 0
        if self.on_first is not None and batch.several:
            batch.on_first = partial(self.on_first, job)

    def close(self, batch: StreamedBatch) -> None:
        """It has ended, one way or another."""
        self._jobs.pop(batch, None)
        self._unwritten.pop(batch, None)

    def put(self, outgoing: Outgoing) -> None:
        if outgoing.batch not in self._jobs:
            outgoing.batch.flow.written(outgoing.record)
            return
        self._unwritten[outgoing.batch] += 1
        self._waiting.append(outgoing)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write_all(), name="responses")

    def freed(self, batch: StreamedBatch) -> None:
        """Tell the owner, unless the batch ends in the same moment."""
        asyncio.get_running_loop().call_soon(self._tell_freed, batch)

    async def written(self, batch: StreamedBatch) -> None:
        """Wait until all that was put of a batch is in the log."""
        while self._unwritten.get(batch):
            await self._written.wait()

    async def say_again(self, model: str) -> None:
        """A new owner knows nothing of what was told to the one before."""
        for batch, (job, _) in list(self._jobs.items()):
            if job.header is None or job.header.model != model:
                continue
            stream = keys.facts(model)
            if batch.freed.is_set():
                await self._append(stream, _freed(self._executor, job))
            if begun := batch.begun_ids():
                await self._append(stream, _begun(self._executor, job, begun))

    async def closed(self) -> None:
        """Give up what the log would not take."""
        tasks = [*self._tasks, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tell_freed(self, batch: StreamedBatch) -> None:
        known = self._jobs.get(batch)
        if known is None or batch.all_ended or known[0].header is None:
            return
        task = asyncio.get_running_loop().create_task(
            self._reports.send(known[0].header, _freed(self._executor, known[0]))
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                for part in _parts(waiting):
                    await self._write_part(part)
        finally:
            self._task = None

    async def _write_part(self, part: list[Outgoing]) -> None:
        try:
            await self._write(part)
        except Exception:  # ours: those after them must not wait for ever
            _log.exception("%d responses were not written", len(part))
        for one in part:
            one.batch.flow.written(one.record)
            if one.batch in self._unwritten:
                self._unwritten[one.batch] -= 1
        written, self._written = self._written, asyncio.Event()
        written.set()

    async def _write(self, waiting: list[Outgoing]) -> None:
        by_batch: dict[StreamedBatch, list[Outgoing]] = {}
        for one in waiting:
            by_batch.setdefault(one.batch, []).append(one)
        facts: list[Awaitable[None]] = []
        for batch, ones in by_batch.items():
            if (known := self._jobs.get(batch)) is not None:
                facts += self._first_responses(batch, known[0], ones)
        if any(known[0].flags & FLAG_JOB for batch in by_batch if (known := self._jobs.get(batch)) is not None):
            # who reads a job sees what is kept of it at once: whoever owns it next must know by then
            await asyncio.gather(*facts)
            facts.clear()
            await self._keep(by_batch)
        settlements: list[Awaitable[None]] = []
        sent: list[tuple[str, bytes]] = []
        for batch, ones in by_batch.items():
            known = self._jobs.get(batch)
            if known is None:
                continue
            job, settle = known
            records = [(job.records[one.index].endpoint, self._of(job, one)) for one in ones if not one.final]
            records = [(endpoint, record) for endpoint, record in records if endpoint and record]
            ended = {one.index: one.record for one in ones if one.final}
            if ended:
                last = batch.all_ended and self._unwritten[batch] == len(ones)
                part = batch.part(ended)
                job.ended.update(job.records[one.index].id for one in ones if one.final and not one.again)
                settlements.append(settle(job, part, records, last))
                if over := [job.records[one.index].id for one in ones if one.final and not one.again and one.place]:
                    settlements.append(self._unmark(batch, job, over))
            else:
                sent += records
        replies = [self._append(reply.stream, reply.fields) for reply in replies_of(sent)]
        # in one write, in this order: the log's connection keeps the order of a tick
        await asyncio.gather(*facts, *replies, *settlements)

    async def _keep(self, by_batch: dict[StreamedBatch, list[Outgoing]]) -> None:
        """Keep the responses of jobs, all but final ones; what a job does not take any more is wanted by nobody."""
        keeping: list[Awaitable[None]] = []
        for batch, ones in by_batch.items():
            known = self._jobs.get(batch)
            if known is None or not any(record.is_job for record in known[0].records):
                continue
            of_request: dict[int, list[Outgoing]] = {}
            for one in ones:
                if known[0].records[one.index].is_job and one.record and not one.final:
                    of_request.setdefault(one.index, []).append(one)
            keeping += [self._keep_of(known[0], index, some) for index, some in of_request.items()]
        if keeping:
            await asyncio.gather(*keeping)

    async def _keep_of(self, job: Job, index: int, ones: list[Outgoing]) -> None:
        assert job.header is not None
        model, record, attempt = job.header.model, job.records[index], job.header.attempts[index]
        taken = True

        async def keep() -> None:
            nonlocal taken
            records = [one.record for one in ones]
            taken = await self._log.add_job_responses(model, record.id, attempt, ones[0].place, records)

        await insist(keep, _NOT_TAKEN)
        if not taken:
            self._unwanted(job, frozenset((record.id,)))

    def _first_responses(self, batch: StreamedBatch, job: Job, ones: list[Outgoing]) -> list[Awaitable[None]]:
        """Of requests that do not end in the same write: the owner is told, and marked for the one after it.

        A job's responses can be read before its end is written, so of jobs all are.
        """
        ended = {one.index for one in ones if one.final and not one.again and not job.records[one.index].is_job}
        begun = {one.index for one in ones if one.begins} - ended
        if not begun or job.header is None:
            return []
        ids = [job.records[index].id for index in sorted(begun)]
        told: list[Awaitable[None]] = [self._reports.send(job.header, _begun(self._executor, job, ids))]
        if not batch.batch.interface.repeatable:
            key, times = keys.visible(job.header.model), dict.fromkeys(ids, wall_ns() // 1000)
            told.append(insist(lambda: self._log.set_times(key, times), _NOT_TAKEN))
        return told

    async def _unmark(self, batch: StreamedBatch, job: Job, ids: Sequence[bytes]) -> None:
        """These have ended; what stays marked in spite of it, an owner removes."""
        if job.header is not None and batch.several and not batch.batch.interface.repeatable:
            with contextlib.suppress(CharoniaError):
                await self._log.drop_times(keys.visible(job.header.model), ids)

    def _of(self, job: Job, one: Outgoing) -> bytes:
        """The record as it travels; nothing of what is wanted no more."""
        if not one.batch.wanted(one.index):
            return b""
        if job.flags & FLAG_REPLY_BY_REFERENCE:
            return self._payloads.refer([job.records[one.index]], [one.record])[0]
        return one.record

    async def _append(self, stream: bytes, fields: Sequence[Buffer]) -> None:
        await insist(lambda: self._log.append(stream, fields), _NOT_TAKEN)


def _parts(waiting: list[Outgoing]) -> Iterator[list[Outgoing]]:
    """What may be written at once: final responses are written last, which others of an ordered batch may not pass."""
    part: list[Outgoing] = []
    ended: set[StreamedBatch] = set()
    for one in waiting:
        if one.batch in ended and not one.final:
            yield part
            part, ended = [], set()
        part.append(one)
        if one.final and one.batch.ordered:
            ended.add(one.batch)
    yield part


def _freed(executor: str, job: Job) -> list[bytes]:
    assert job.header is not None
    return [FIELD_FACT, pack_fact(SlotFreed(executor, job.header.batch_id))]


def _begun(executor: str, job: Job, ids: Sequence[bytes]) -> list[bytes]:
    assert job.header is not None
    return [FIELD_FACT, pack_fact(ResponsesBegun(executor, job.header.batch_id, b"".join(ids)))]
