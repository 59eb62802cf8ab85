"""Reads the executor's batch stream and hands batches to instances; gives back what it cannot run.

Entries that hold no batch are dropped and counted, never a crash. What the end of a batch means is
`executors.settling.settler`'s, which versions there are `executors.service`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from charonia import failpoints, keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InvalidRecord
from charonia.eventlog.control import facts_of
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import Entry, EventLog, Fields, Reply
from charonia.facts.events import (
    FIELD_FACT,
    BatchReturned,
    ExecutionUnwanted,
    Fact,
    OwnerChanged,
    ResponsesWanted,
    StatisticsWanted,
    StatisticsWritten,
    VersionWanted,
    pack_fact,
)
from charonia.wire import (
    FLAG_JOURNALLED,
    FLAG_REFERENCE,
    FLAG_REPLY_BY_REFERENCE,
    BatchHeader,
    RequestRecord,
    Wave,
)

from .announcing import insist
from .batches.accounting import Death, Executed
from .batches.batch_payloads import Payloads
from .batches.wave_execution import ExecutedWaves
from .metrics import ExecutorMetrics
from .running.incarnation import Incarnation
from .running.job import Job, Responses, decoded
from .settling.beginnings import Beginnings
from .settling.checkpoints import comes_late, restore
from .settling.owner_reports import OwnerReports
from .settling.responding import ResponseWriter
from .settling.settlement import batch_died
from .settling.settler import Outcome, Settler
from .waves.reply_sockets import ReplySockets
from .waves.wave_settler import WaveSettler

_log = logging.getLogger(__name__)

DRAINS = "executor drains"
"""Why batches come back from one that is about to end."""


class Intake:
    """The batches of one executor. `find(model, version)` is the incarnation that serves a version now, or None."""

    def __init__(
        self,
        log: EventLog,
        executor: str,
        find: Callable[[str, int], Incarnation | None],
        metrics: ExecutorMetrics,
        payloads: Payloads,
        sockets: ReplySockets,
        link: LocalLink | None,
    ) -> None:
        self._log = log
        self._payloads = payloads
        self._executor = executor
        self._find = find
        self._metrics = metrics
        self._link = link
        self.stream = keys.batches(executor)
        self._beginnings = Beginnings(log, executor)
        self._reports = OwnerReports(log, link)
        self._settler = Settler(log, executor, metrics, payloads, self._beginnings, self._reports)
        self.waves = WaveSettler(log, executor, metrics, sockets, self._spawn, self._reports)
        self._responses = ResponseWriter(log, executor, payloads, self._cancel, self._reports)
        if metrics.measures:
            self._responses.on_first = self._responded
        self._reader = log.reader()
        self._held: set[bytes] = set()
        self._taken: dict[str, tuple[Job, Incarnation]] = {}
        """Batches that were taken and not executed yet, by id."""
        self._stopped = False
        self._returned: set[bytes] = set()
        """Entries that were given back before they were read."""
        self.on_wanted: Callable[[str, int], None] | None = None
        """Told of versions that requests wait for; only where models are loaded on demand."""
        self._settling = 0
        """Settlements under way without a task of their own."""
        self._quiet: asyncio.Event | None = None
        """Set when there are none any more, for who waits for that."""
        self._closed = False
        self._last_words: list[Reply] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Take batches from now on. Beside a batcher, which uses the link, what the stream brings goes when read."""
        self._reader.start(self._on_entries)
        self._reader.add(self.stream, consume=self._link is not None)
        if self._link is not None:
            loop = asyncio.get_running_loop()
            self._link.batches.follow(self._take)
            self._link.facts.follow(lambda fact: loop.call_soon(self._on_fact, fact))

    async def stop(self) -> None:
        """Take no more batches: those not yet read, and those that come from now on, go back to the batcher.

        The stream is read on: what runs waits for words about it, as how many of its responses are wanted.
        """
        self._stopped = True
        if self._link is not None:
            return  # nothing waits to be read
        for entry in await self._log.range(self.stream):
            entry_id = bytes(entry.id)
            if entry_id in self._held:
                continue
            try:
                header, _ = decoded(entry)
            except InvalidRecord:
                continue
            self._returned.add(entry_id)
            self.give_back(header, entry_id, DRAINS)

    def give_back(self, header: BatchHeader, entry_id: bytes, reason: str) -> None:
        """Return a batch unexecuted; its requests are not at fault."""
        self._metrics.returned(header.model, header.version)
        fact = BatchReturned(self._executor, header.batch_id, reason)
        self._spawn(self._report(header, [FIELD_FACT, pack_fact(fact)], entry_id))

    def give_back_queued(self, incarnation: Incarnation, reason: str) -> None:
        """Return the batches of an incarnation that no instance has begun."""
        for job in incarnation.pool.take_back():
            self.give_back(self._forget(job), job.entry_id, reason)

    async def settled(self) -> None:
        """Wait until every executed or returned batch has been settled in the log."""
        while self._tasks or self._settling:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._settling:
                if self._quiet is None:
                    self._quiet = asyncio.Event()
                await self._quiet.wait()
        await self.waves.settled()

    async def settled_so_far(self) -> None:
        """Wait for what is under way now."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Give up what the log would not take."""
        self._closed = True
        if self._link is not None:
            self._link.batches.follow(None)
            self._link.facts.follow(None)
        await self._reader.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._beginnings.close()
        await self._responses.closed()

    async def say_last_words(self) -> None:
        """Tell of the batches because of which this process ends to whoever owns their models next."""
        words, self._last_words = self._last_words, []
        for word in words:
            await self._log.append(word.stream, word.fields)

    # -- taking -------------------------------------------------------------------------------------------------------

    def _on_entries(self, _stream: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            entry_id = bytes(entry.id)
            if entry.fields and entry.fields[0] == FIELD_FACT:
                for fact in facts_of(entry):
                    self._on_fact(fact)
                self._spawn(self._delete(entry_id))
                continue
            try:
                header, records = decoded(entry)
            except InvalidRecord as error:
                _log.error("entry %s of %s holds no batch: %s", entry_id.decode(), self.stream.decode(), error)
                self._metrics.invalid()
                self._spawn(self._delete(entry_id))
                continue
            if entry_id not in self._returned:
                self._take(header, records, entry_id)

    def _take(self, header: BatchHeader, records: Sequence[RequestRecord | Wave], entry_id: bytes = b"") -> None:
        """Give a batch to an instance of its model; without an entry when it came without one, from this process."""
        try:
            self._begin(header, records, entry_id)
        except Exception as error:  # what comes after it is taken all the same, and who hands over is not to blame
            self._stumbled(_job(records, _nothing, header, entry_id), error)

    def _begin(self, header: BatchHeader, records: Sequence[Any], entry_id: bytes) -> None:
        if self._stopped:
            self.give_back(header, entry_id, DRAINS)
            return
        incarnation = self._find(header.model, header.version)
        if incarnation is None:
            self.give_back(header, entry_id, f"version {header.version} of '{header.model}' is not served here")
            return
        sequences = incarnation.pool.sequences
        if sequences is not None and header.sequences is None:
            self.give_back(header, entry_id, f"'{header.model}' has a sequence batcher now")
            return
        if header.waves:
            if incarnation.pool.streams or sequences is not None:
                self.give_back(header, entry_id, f"'{header.model}' takes no waves")
                return
            job = _job(records, partial(self._waves_executed, incarnation), header, entry_id)
            job.settler = self.waves
            job.put_columns = self._payloads.put_columns
            self._payloads.map_waves(records)
            if entry_id:
                self._held.add(entry_id)
            self._taken[header.batch_id] = (job, incarnation)
            incarnation.pool.submit(job)
            return
        flags = 0
        for record in records:
            flags |= record.flags
        job = Job(records, partial(self._executed, incarnation), header, entry_id, flags)
        if flags & FLAG_REPLY_BY_REFERENCE and not header.via_owner:
            job.put = self._payloads.put
        if flags & FLAG_JOURNALLED:
            self._beginnings.watch(job)
        if incarnation.pool.streams:
            job.responses = Responses(self._responses, partial(self._settle_part, incarnation))
        if entry_id:
            self._held.add(entry_id)
        self._taken[header.batch_id] = (job, incarnation)
        blobs = self._payloads.map(records) if flags & FLAG_REFERENCE else []
        names = sequences.missing(header, records) if sequences is not None else []
        if blobs or names:
            self._spawn(self._surely(job, self._submit_fetched(job, incarnation, blobs, names)))
        else:
            incarnation.pool.submit(job)

    async def _submit_fetched(
        self, job: Job, incarnation: Incarnation, blobs: list[RequestRecord], names: list[bytes]
    ) -> None:
        if blobs:
            await self._payloads.fetch(blobs)
        if names:
            await restore(self._log, incarnation, names)
        assert job.header is not None
        if self._stopped:
            self.give_back(self._forget(job), job.entry_id, DRAINS)
        elif self._find(job.header.model, job.header.version) is not incarnation:
            # its instances may be gone by now: they do not wait for what they do not have yet
            self.give_back(self._forget(job), job.entry_id, f"'{job.header.model}' was loaded anew meanwhile")
        else:
            incarnation.pool.submit(job)

    def _on_fact(self, fact: Fact) -> None:
        if isinstance(fact, VersionWanted):
            if self.on_wanted is not None and not self._stopped:
                self.on_wanted(fact.model, fact.version)
        elif isinstance(fact, ResponsesWanted):
            if (running := self._taken.get(fact.batch_id)) is not None:
                running[1].pool.allow(running[0], fact.id, fact.count)
        elif isinstance(fact, StatisticsWanted):
            self._spawn(self._write_statistics(fact))
        elif isinstance(fact, ExecutionUnwanted):
            if (running := self._taken.get(fact.batch_id)) is not None:
                self._cancel(running[0], frozenset(fact.ids[at : at + 16] for at in range(0, len(fact.ids), 16)))
        elif isinstance(fact, OwnerChanged):
            self._spawn(self._responses.say_again(fact.model))

    async def _write_statistics(self, fact: StatisticsWanted) -> None:
        await self.waves.fold()
        written = StatisticsWritten(self._executor, fact.token)
        with contextlib.suppress(CharoniaError):  # the caller does not wait for long
            await self._log.append(keys.replies(fact.endpoint), [FIELD_FACT, pack_fact(written)])

    def _cancel(self, job: Job, ids: frozenset[bytes]) -> None:
        taken = self._taken.get(job.header.batch_id) if job.header is not None else None
        if taken is not None:
            taken[1].pool.cancel(job, ids)

    def _responded(self, job: Job, record: RequestRecord) -> None:
        if job.header is not None and not keys.counts_its_requests(record.endpoint):
            taken_ns = max(0, wall_ns() - record.accepted_ns)
            self._metrics.responded(job.header.model, job.header.version, taken_ns)

    # -- settling -----------------------------------------------------------------------------------------------------

    def _executed(self, incarnation: Incarnation, job: Job, executed: Executed) -> None:
        try:
            self._end(incarnation, job, executed)
        except Exception as error:  # the instance is not to blame, and goes on
            self._stumbled(job, error)

    def _end(self, incarnation: Incarnation, job: Job, executed: Executed) -> None:
        failpoints.hit("executor.executed")
        self._forget(job)
        if job.steps is not None and job.stream is None:
            self._remember(incarnation, job, executed)
        self._metrics.executed(incarnation.model, incarnation.version, executed)
        if executed.death is not None:
            self._metrics.died(incarnation.model, incarnation.version)
        if self._settler.settle_plain(job, executed, incarnation, partial(self._settled, job, executed, incarnation)):
            self._settling += 1
        else:
            self._spawn(self._surely(job, self._settle(job, executed, incarnation)))

    def _waves_executed(self, incarnation: Incarnation, job: Job, executed: Executed) -> None:
        try:
            assert isinstance(executed, ExecutedWaves)
            if executed.sent is None:
                failpoints.hit("executor.executed")
            self._forget(job)
            for wave in job.waves:
                wave.payloads = ()  # their owner needs the memory
            if executed.death is not None:
                self._metrics.died(incarnation.model, incarnation.version)
            self.waves.settle(job, executed, incarnation)
            failpoints.hit("executor.settled")
            if self._link is None:
                self._spawn(self._delete(job.entry_id))
            else:
                self._held.discard(job.entry_id)
        except Exception as error:  # the instance is not to blame, and goes on
            self._stumbled(job, error)

    def _settled(self, job: Job, executed: Executed, incarnation: Incarnation, outcome: Outcome | None) -> None:
        """A settlement was answered; where that was not all, its task goes on."""
        self._settling -= 1
        if not self._settling and self._quiet is not None:
            self._quiet.set()
            self._quiet = None
        if outcome is not None:
            if not self._closed:
                self._spawn(self._surely(job, self._settle(job, executed, incarnation, outcome)))
            return
        failpoints.hit("executor.settled")
        if self._link is None:
            self._spawn(self._delete(job.entry_id))
        else:
            self._held.discard(job.entry_id)

    def _remember(self, incarnation: Incarnation, job: Job, executed: Executed) -> None:
        """What is known of the sequences of the requests that end here, or that want another turn."""
        sequences = incarnation.pool.sequences
        if sequences is None or job.steps is None or job.header is None:
            return
        ended = {index for index, answer in enumerate(executed.answers) if answer}
        failed = {failure.index for failure in executed.failures}
        if lost := job.steps.errors.keys() & ended:
            self._metrics.states_lost(incarnation.model, incarnation.version, len(lost))
        job.written, job.before = sequences.commit(
            *(job.header, job.records, job.steps, ended, failed, executed.again, self._executor, job.life),
            leaves=comes_late(incarnation, job.header),
        )

    async def _settle_part(self, incarnation: Incarnation, job: Job, *part: Any) -> None:
        await self._surely(job, self._end_part(incarnation, job, *part))

    async def _end_part(
        self, incarnation: Incarnation, job: Job, part: Executed, before: Sequence[tuple[str, bytes]], last: bool
    ) -> None:
        """Some requests of a batch have had their final response; `last`: now all have."""
        self._remember(incarnation, job, part)
        self._metrics.executed(incarnation.model, incarnation.version, part)
        if last:
            failpoints.hit("executor.executed")
            self._forget(job)
        await self._settler.settle(job, part, incarnation, before=before, last=last)
        if last:
            failpoints.hit("executor.settled")
            self._spawn(self._delete(job.entry_id))

    async def _settle(
        self, job: Job, executed: Executed, incarnation: Incarnation, outcome: Outcome | None = None
    ) -> None:
        await self._settler.settle(job, executed, incarnation, outcome=outcome)
        failpoints.hit("executor.settled")
        await self._delete(job.entry_id)

    async def _surely(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._stumbled(job, error)

    def _stumbled(self, job: Job, error: Exception) -> None:
        """An error nobody foresaw: the batch ends like one that took its instance along, or nobody would hear of it."""
        header = self._forget(job)
        self._taken.pop(header.batch_id, None)
        _log.error("batch %s of '%s' could not be ended", header.batch_id, header.model, exc_info=error)
        death = Death("", f"its executor could not end it: {type(error).__name__}: {error}")
        fields = batch_died(self._executor, header.batch_id, death, _ids_of(job))
        self._spawn(self._report(header, fields, job.entry_id))

    # -- batches that hang --------------------------------------------------------------------------------------------

    def hung(self, job: Job, death: Death) -> None:
        """A batch outlasted its ceiling in a thread that cannot be ended, so this process is about to end.

        A batcher of its own is told now. One in this process ends too; then its model's next owner is told, in the
        shared facts, once nobody here reads those (`say_last_words`).
        """
        header = self._forget(job)
        self._metrics.died(header.model, header.version)
        fields = batch_died(self._executor, header.batch_id, death, _ids_of(job))
        if self._link is not None:
            self._last_words.append(Reply(keys.facts(header.model), fields))
        else:
            self._spawn(self._report(header, fields, job.entry_id))

    def _forget(self, job: Job) -> BatchHeader:
        assert job.header is not None
        taken = self._taken.get(job.header.batch_id)
        if taken is not None and taken[0] is job:
            del self._taken[job.header.batch_id]
        self._beginnings.forget(job)
        return job.header

    async def _report(self, header: BatchHeader, fields: Fields, entry_id: bytes) -> None:
        await self._reports.send(header, fields)
        await self._delete(entry_id)

    async def _delete(self, entry_id: bytes) -> None:
        if self._link is None:
            await insist(lambda: self._log.delete_entries(self.stream, [entry_id]), "a batch entry cannot be deleted")
        self._held.discard(entry_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a batch was not settled", exc_info=error)


def _job(records: Sequence[Any], done: Callable[[Job, Executed], None], header: BatchHeader, entry_id: bytes) -> Job:
    """A batch of requests or of waves."""
    if header.waves:
        return Job((), done, header, entry_id, waves=records)
    return Job(records, done, header, entry_id)


def _ids_of(job: Job) -> Iterator[bytes]:
    """What the owner calls the requests, or waves, of a batch."""
    yield from (record.id for record in job.records)
    yield from (wave.id for wave in job.waves)


def _nothing(_job: Job, _executed: Executed) -> None:
    """Of a batch that never came to an instance nobody tells the end."""
