"""From a batch entry to its settlement: reads the executor's batch stream, hands batches to instances, settles them.

Per executed batch one `settle` with everything that follows from it: outcomes, statistics, replies (one entry per
endpoint) and the fact that frees the slot. Entries that hold no batch are dropped and counted, never a crash (H27).
Which versions there are is `executors.service`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from charonia import keys
from charonia.errors import InvalidRecord
from charonia.eventlog.port import Entry, EventLog, Reply
from charonia.events import FIELD_FACT, BatchFinished, BatchReturned, pack_fact
from charonia.tensors import Buffer
from charonia.wire import FIELD_HEADER, BatchHeader, RequestRecord, record_fields, records_of, unpack_request

from .accounting import Executed, increments
from .announcing import insist
from .instance import Job
from .loading import Incarnation
from .metrics import ExecutorMetrics

_log = logging.getLogger(__name__)


class Intake:
    """The batches of one executor. `find(model, version)` is the incarnation that serves a version now, or None."""

    def __init__(
        self,
        log: EventLog,
        executor: str,
        find: Callable[[str, int], Incarnation | None],
        metrics: ExecutorMetrics,
        *,
        local: bool,
    ) -> None:
        self._log = log
        self._executor = executor
        self._find = find
        self._metrics = metrics
        self._local = local
        self.stream = keys.LOCAL + keys.batches(executor) if local else keys.batches(executor)
        self._reader = log.reader()
        self._held: dict[bytes, Job] = {}
        self._incarnations: dict[Job, Incarnation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Take batches from now on. A local stream's entries are gone once they are handed over."""
        self._reader.start(self._on_entries)
        self._reader.add(self.stream, consume=self._local)

    async def stop(self) -> None:
        """Take no more batches; those not yet read go back to the batcher."""
        await self._reader.close()
        for entry in await self._log.range(self.stream):
            if bytes(entry.id) in self._held:
                continue
            try:
                header, _ = _decode(entry)
            except InvalidRecord:
                continue
            self.give_back(header, bytes(entry.id), "executor drains")

    def give_back(self, header: BatchHeader, entry_id: bytes, reason: str) -> None:
        """Return a batch unexecuted; its requests are not at fault."""
        self._metrics.returned(header.model, header.version)
        fact = BatchReturned(self._executor, header.batch_id, reason)
        self._spawn(self._return(header.report_to, pack_fact(fact), entry_id))

    def give_back_queued(self, incarnation: Incarnation, reason: str) -> None:
        """Return the batches of an incarnation that no instance has begun."""
        for job in incarnation.pool.take_back():
            self._incarnations.pop(job, None)
            if job.header is not None:
                self.give_back(job.header, job.entry_id, reason)

    async def settled(self) -> None:
        """Wait until every executed or returned batch has been settled in the log."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Give up what the log would not take."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- taking -------------------------------------------------------------------------------------------------------

    def _on_entries(self, _stream: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            entry_id = bytes(entry.id)
            try:
                header, records = _decode(entry)
            except InvalidRecord as error:
                _log.error("entry %s of %s holds no batch: %s", entry_id.decode(), self.stream.decode(), error)
                self._metrics.invalid()
                self._spawn(self._delete(entry_id))
                continue
            incarnation = self._find(header.model, header.version)
            if incarnation is None:
                self.give_back(header, entry_id, f"version {header.version} of '{header.model}' is not served here")
                continue
            job = Job(records, self._executed, header, self.stream, entry_id)
            self._held[entry_id] = job
            self._incarnations[job] = incarnation
            incarnation.pool.submit(job)

    # -- settling -----------------------------------------------------------------------------------------------------

    def _executed(self, job: Job, executed: Executed) -> None:
        incarnation = self._incarnations.pop(job)
        self._metrics.executed(incarnation.model, incarnation.version, executed)
        self._spawn(self._settle(job, executed, incarnation))

    async def _settle(self, job: Job, executed: Executed, incarnation: Incarnation) -> None:
        header, records = job.header, job.records
        assert header is not None
        requests = [(record.id, attempt) for record, attempt in zip(records, header.attempts, strict=True)]
        key = keys.statistics(incarnation.model, incarnation.version, incarnation.content_hash)
        counted = increments(records, executed)
        replies, finished = _replies(self._executor, header, job, executed)

        async def settle() -> None:
            won = await self._log.settle(header.model, requests, (key, counted), replies, [finished])
            mine = counted
            if not all(won):
                mine = increments(records, executed, won)
                if mine:
                    await self._log.add_statistics(key, mine)
            self._metrics.settled(incarnation.model, incarnation.version, mine)

        await insist(settle, f"batch {header.batch_id} of '{header.model}' cannot be settled")
        await self._delete(job.entry_id)

    async def _return(self, report_to: bytes, fact: bytes, entry_id: bytes) -> None:
        async def tell() -> None:
            await self._log.append(report_to, [FIELD_FACT, fact])

        await insist(tell, "a batch cannot be given back")
        await self._delete(entry_id)

    async def _delete(self, entry_id: bytes) -> None:
        if not self._local:

            async def delete() -> None:
                await self._log.delete_entries(self.stream, [entry_id])

            await insist(delete, "a batch entry cannot be deleted")
        self._held.pop(entry_id, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a batch was not settled", exc_info=error)


def _decode(entry: Entry) -> tuple[BatchHeader, list[RequestRecord]]:
    fields = entry.fields
    if len(fields) < 2 or fields[0] != FIELD_HEADER:
        raise InvalidRecord("no batch header")
    header = BatchHeader.unpack(fields[1])
    # a batcher in this process hands over what it has decoded already
    records = [r if isinstance(r, RequestRecord) else unpack_request(r) for r in records_of(fields)]
    try:
        attempts = len(header.attempts)
    except TypeError:
        raise InvalidRecord("the batch header has no list of attempts") from None
    if attempts != len(records):
        raise InvalidRecord(f"{attempts} attempts for {len(records)} requests")
    return header, records


def _replies(executor: str, header: BatchHeader, job: Job, executed: Executed) -> tuple[list[Reply], Reply]:
    """One entry per endpoint, and the fact that frees the slot; or all answers inside the fact (S6)."""
    if header.via_owner:
        pairs = tuple((record.endpoint, answer) for record, answer in zip(job.records, executed.answers, strict=True))
        fact = BatchFinished(executor, header.batch_id, pairs)
        return [], Reply(header.report_to, [FIELD_FACT, pack_fact(fact)])
    by_endpoint: dict[str, list[Buffer]] = {}
    for record, answer in zip(job.records, executed.answers, strict=True):
        answers = by_endpoint.get(record.endpoint)
        if answers is None:
            answers = by_endpoint[record.endpoint] = []
        answers.append(answer)
    replies = [
        Reply(keys.replies(endpoint), record_fields(answers)) for endpoint, answers in by_endpoint.items() if endpoint
    ]
    fact = BatchFinished(executor, header.batch_id)
    return replies, Reply(header.report_to, [FIELD_FACT, pack_fact(fact)])
