"""Takes batches from the link or the batch stream, submits them to instance pools, and returns those it cannot run.

Entries that hold no batch are dropped and counted. `executors.settling.settler` writes the ends of batches to the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from charonia import failpoints, keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError, InvalidRecord
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
    facts_of,
    pack_fact,
)
from charonia.facts.processor_use import BATCHER_APART, BATCHER_HERE
from charonia.tasks import Tasks, insist
from charonia.wire import FLAG_JOURNALLED, FLAG_REFERENCE, FLAG_REPLY_BY_REFERENCE, BatchHeader, RequestRecord, Wave

from .batches.batch_payloads import BatchPayloads
from .batches.batch_results import Death, Executed
from .batches.wave_execution import ExecutedWaves
from .host.processor_meter import ProcessorMeter
from .metrics import ExecutorMetrics
from .running.instance_pool import LoadedVersion
from .running.submitted_batch import Responses, SubmittedBatch, decode_entry
from .settling.checkpoints import is_late, restore
from .settling.progress_records import read_progress
from .settling.reply_sockets import ReplySockets
from .settling.response_writer import ResponseWriter
from .settling.settlement import batch_died
from .settling.settler import JournalledStarts, Outcome, OwnerReports, Settler
from .settling.usage_counts import UsageCounts
from .settling.wave_settler import WaveSettler

_log = logging.getLogger(__name__)

DRAINS = "executor drains"
"""The reason of batches that a draining executor returns."""


class Intake:
    """Takes the batches of one executor and settles them. `serving` holds what is served now, by model and version.

    `link` leads to the batcher in this process that dispatches the batches, if there is one.
    """

    def __init__(
        self,
        log: EventLog,
        executor: str,
        serving: Mapping[tuple[str, int], LoadedVersion],
        metrics: ExecutorMetrics,
        payloads: BatchPayloads,
        sockets: ReplySockets,
        link: LocalLink | None,
    ) -> None:
        self._log = log
        self._tasks = Tasks(lambda error: _log.error("a batch was not settled", exc_info=error))
        self._payloads = payloads
        self._executor = executor
        self._serving = serving
        self._metrics = metrics
        self._link = link
        self.stream = keys.batches(executor)
        meter = ProcessorMeter(metrics.work, batcher=BATCHER_APART if link is None else BATCHER_HERE)
        self._starts = JournalledStarts(log, executor, meter)
        self._reports = OwnerReports(log, link)
        usage = UsageCounts(metrics)
        self._settler = Settler(log, executor, metrics, payloads, self._starts, self._reports, usage, meter)
        self.waves = WaveSettler(log, executor, metrics, sockets, self._tasks, self._reports, usage)
        self._responses = ResponseWriter(log, executor, payloads, self._cancel, self._reports)
        if metrics.measures:
            self._responses.on_first = self._responded
        self._reader = log.reader()
        self._held_entries: set[bytes] = set()
        self._accepted: dict[str, tuple[SubmittedBatch, LoadedVersion]] = {}
        """By id: the batches that were accepted and not executed yet."""
        self._stopped = False
        self._returned: set[bytes] = set()
        """Entries whose batches were returned before they were read."""
        self.on_wanted: Callable[[str, int], None] | None = None
        """Called with (model, version) when requests wait for a version; only where models are loaded on demand."""
        self._settling = 0
        """The number of pending settlements that have no task."""
        self._all_settled: asyncio.Event | None = None
        """Set when there are none; made by the first call that waits for that."""
        self._closed = False
        self._hung_reports: list[Reply] = []

    def start(self) -> None:
        """Begin to take batches. With a link, batches come over it, and the stream's entries are removed when read."""
        self._reader.start(self._on_entries)
        self._reader.add(self.stream, consume=self._link is not None)
        if self._link is not None:
            loop = asyncio.get_running_loop()
            self._link.batches.follow(self._take)
            self._link.facts.follow(lambda fact: loop.call_soon(self._on_fact, fact))

    async def stop(self) -> None:
        """Accept no more batches: return those not yet read, and those that arrive from now on.

        The stream is still read, because running batches need its facts, such as how many responses are wanted.
        """
        self._stopped = True
        if self._link is not None:
            return  # no batches wait in the stream
        for entry in await self._log.range(self.stream):
            entry_id = bytes(entry.id)
            if entry_id in self._held_entries:
                continue
            try:
                header, _ = decode_entry(entry)
            except InvalidRecord:
                continue
            self._returned.add(entry_id)
            self.return_batch(header, entry_id, DRAINS)

    def return_batch(self, header: BatchHeader, entry_id: bytes, reason: str) -> None:
        """Return a batch to its owner unexecuted. This does not count against its requests."""
        self._metrics.returned(header.model, header.version)
        fact = BatchReturned(self._executor, header.batch_id, reason)
        self._tasks.spawn(self._report(header, [FIELD_FACT, pack_fact(fact)], entry_id))

    def return_queued(self, loaded: LoadedVersion, reason: str) -> None:
        """Return the batches of a version that no instance has started."""
        for batch in loaded.pool.take_queued():
            self.return_batch(self._forget(batch), batch.entry_id, reason)

    async def settled(self) -> None:
        """Wait until every executed or returned batch is settled in the log."""
        while self._tasks or self._settling:
            await self._tasks.settled()
            if self._settling:
                if self._all_settled is None:
                    self._all_settled = asyncio.Event()
                await self._all_settled.wait()
        await self.waves.settled()

    async def settled_so_far(self) -> None:
        """Wait for the tasks that settle batches now."""
        if self._tasks:
            await asyncio.wait([*self._tasks])

    async def close(self) -> None:
        """Stop reading, and abandon what the log has not taken."""
        self._closed = True
        if self._link is not None:
            self._link.batches.follow(None)
            self._link.facts.follow(None)
        await self._reader.close()
        self._tasks.cancel()
        await self.settled_so_far()  # not for tasks that start meanwhile: they may repeat a write for ever
        self._starts.close()
        await self._responses.closed()

    async def report_hung_batches(self) -> None:
        """Report the batches that made this process end to the next owners of their models."""
        reports, self._hung_reports = self._hung_reports, []
        for report in reports:
            await self._log.append(report.stream, report.fields)

    # -- taking batches -----------------------------------------------------------------------------------------------

    def _on_entries(self, _stream: bytes, entries: list[Entry]) -> None:
        for entry in entries:
            entry_id = bytes(entry.id)
            if entry.fields and entry.fields[0] == FIELD_FACT:
                for fact in facts_of(entry):
                    self._on_fact(fact)
                self._tasks.spawn(self._delete(entry_id))
                continue
            try:
                header, records = decode_entry(entry)
            except InvalidRecord as error:
                _log.error("entry %s of %s holds no batch: %s", entry_id.decode(), self.stream.decode(), error)
                self._metrics.invalid()
                self._tasks.spawn(self._delete(entry_id))
                continue
            if entry_id not in self._returned:
                self._take(header, records, entry_id)

    def _take(self, header: BatchHeader, records: Sequence[RequestRecord | Wave], entry_id: bytes = b"") -> None:
        """Accept a batch. `entry_id` is empty when it was passed on in this process, without an entry."""
        try:
            self._accept(header, records, entry_id)
        except Exception as error:  # the batches after it are taken all the same, and the caller is not at fault
            self._end_failed(_submitted(records, _ignore_end, header, entry_id), error)

    def _accept(self, header: BatchHeader, records: Sequence[Any], entry_id: bytes) -> None:
        if self._stopped:
            self.return_batch(header, entry_id, DRAINS)
            return
        loaded = self._serving.get((header.model, header.version))
        if loaded is None:
            self.return_batch(header, entry_id, f"version {header.version} of '{header.model}' is not served here")
            return
        sequences = loaded.pool.sequences
        if sequences is not None and header.sequences is None:
            self.return_batch(header, entry_id, f"'{header.model}' has a sequence batcher now")
            return
        if header.waves:
            if loaded.pool.streams or sequences is not None:
                self.return_batch(header, entry_id, f"'{header.model}' takes no waves")
                return
            done = partial(self._waves_executed, loaded)
            batch = SubmittedBatch((), done, header, entry_id, waves=records, settler=self.waves)
            batch.put_columns, batch.take_back = self._payloads.put_columns, self._payloads.take_back
            for wave in records:
                if wave.lacks_tensors:
                    self._payloads.map_wave(wave)
            if entry_id:
                self._held_entries.add(entry_id)
            self._accepted[header.batch_id] = (batch, loaded)
            loaded.pool.submit(batch)
            return
        flags = 0
        for record in records:
            flags |= record.flags
        batch = SubmittedBatch(records, partial(self._executed, loaded), header, entry_id, flags)
        if flags & FLAG_REPLY_BY_REFERENCE and not header.via_owner:
            batch.put = self._payloads.put
        if flags & FLAG_JOURNALLED:
            self._starts.watch(batch)
        if loaded.pool.streams:
            batch.responses = Responses(self._responses, partial(self._settle_part, loaded))
        if entry_id:
            self._held_entries.add(entry_id)
        self._accepted[header.batch_id] = (batch, loaded)
        blobs = self._payloads.map(records) if flags & FLAG_REFERENCE else []
        names = sequences.to_restore(header, records) if sequences is not None else []
        resumes = loaded.interface.resumable and max(header.attempts) > 1
        if blobs or names or resumes:
            self._tasks.spawn(self._guarded(batch, self._submit_fetched(batch, loaded, blobs, names, resumes=resumes)))
        else:
            loaded.pool.submit(batch)

    async def _submit_fetched(
        self,
        batch: SubmittedBatch,
        loaded: LoadedVersion,
        blobs: list[RequestRecord],
        names: list[bytes],
        *,
        resumes: bool,
    ) -> None:
        if blobs:
            await self._payloads.fetch(blobs)
        if names:
            await restore(self._log, loaded, names)
        if resumes:
            await read_progress(self._log, batch)
        assert batch.header is not None
        if self._stopped:
            self.return_batch(self._forget(batch), batch.entry_id, DRAINS)
        elif self._serving.get((batch.header.model, batch.header.version)) is not loaded:
            # its instances may be unloaded by now
            self.return_batch(self._forget(batch), batch.entry_id, f"'{batch.header.model}' was reloaded meanwhile")
        else:
            loaded.pool.submit(batch)

    def _on_fact(self, fact: Fact) -> None:
        if isinstance(fact, VersionWanted):
            if self.on_wanted is not None and not self._stopped:
                self.on_wanted(fact.model, fact.version)
        elif isinstance(fact, ResponsesWanted):
            if (running := self._accepted.get(fact.batch_id)) is not None:
                running[1].pool.allow(running[0], fact.id, fact.count)
        elif isinstance(fact, StatisticsWanted):
            self._tasks.spawn(self._write_statistics(fact))
        elif isinstance(fact, ExecutionUnwanted):
            if (running := self._accepted.get(fact.batch_id)) is not None:
                self._cancel(running[0], _split(fact.ids))
                running[1].pool.ask_to_end(running[0], _split(fact.gentle))
        elif isinstance(fact, OwnerChanged):
            self._tasks.spawn(self._responses.report_again(fact.model))

    async def _write_statistics(self, fact: StatisticsWanted) -> None:
        await self.waves.fold()
        written = StatisticsWritten(self._executor, fact.token)
        with contextlib.suppress(CharoniaError):  # the requester has a time-out
            await self._log.append(keys.replies(fact.endpoint), [FIELD_FACT, pack_fact(written)])

    def _cancel(self, batch: SubmittedBatch, ids: frozenset[bytes]) -> None:
        taken = self._accepted.get(batch.header.batch_id) if batch.header is not None else None
        if taken is not None:
            taken[1].pool.cancel(batch, ids)

    def _responded(self, batch: SubmittedBatch, record: RequestRecord) -> None:
        if batch.header is not None and not keys.counts_its_requests(record.endpoint):
            taken_ns = max(0, wall_ns() - record.accepted_ns)
            self._metrics.responded(batch.header.model, batch.header.version, taken_ns)

    # -- settling -----------------------------------------------------------------------------------------------------

    def _executed(self, loaded: LoadedVersion, batch: SubmittedBatch, executed: Executed) -> None:
        try:
            self._end(loaded, batch, executed)
        except Exception as error:  # not the instance's fault: it goes on
            self._end_failed(batch, error)

    def _end(self, loaded: LoadedVersion, batch: SubmittedBatch, executed: Executed) -> None:
        failpoints.hit("executor.executed")
        self._forget(batch)
        if batch.steps is not None and batch.stream is None:
            self._remember_sequences(loaded, batch, executed)
        self._metrics.executed(loaded.model, loaded.version, executed)
        if executed.death is not None:
            self._metrics.died(loaded.model, loaded.version)
        if self._settler.settle_plain(batch, executed, loaded, partial(self._settled, batch, executed, loaded)):
            self._settling += 1
        else:
            self._tasks.spawn(self._guarded(batch, self._settle(batch, executed, loaded)))

    def _waves_executed(self, loaded: LoadedVersion, batch: SubmittedBatch, executed: Executed) -> None:
        try:
            assert isinstance(executed, ExecutedWaves)
            if executed.sent is None:
                failpoints.hit("executor.executed")
            self._forget(batch)
            if executed.death is not None:
                self._metrics.died(loaded.model, loaded.version)
            self.waves.settle(batch, executed, loaded)
            failpoints.hit("executor.settled")
            if self._link is None:
                self._tasks.spawn(self._delete(batch.entry_id))
            else:
                self._held_entries.discard(batch.entry_id)
        except Exception as error:  # the instance is not to blame, and goes on
            self._end_failed(batch, error)

    def _settled(
        self, batch: SubmittedBatch, executed: Executed, loaded: LoadedVersion, outcome: Outcome | None
    ) -> None:
        """Called when the log has answered a settlement. With an `outcome`, a task does the rest."""
        self._settling -= 1
        if not self._settling and self._all_settled is not None:
            self._all_settled.set()
            self._all_settled = None
        if outcome is not None:
            if not self._closed:
                self._tasks.spawn(self._guarded(batch, self._settle(batch, executed, loaded, outcome)))
            return
        failpoints.hit("executor.settled")
        if self._link is None:
            self._tasks.spawn(self._delete(batch.entry_id))
        else:
            self._held_entries.discard(batch.entry_id)

    def _remember_sequences(self, loaded: LoadedVersion, batch: SubmittedBatch, executed: Executed) -> None:
        """Remember the sequences of requests that have ended, or that the model reschedules."""
        sequences = loaded.pool.sequences
        if sequences is None or batch.steps is None or batch.header is None:
            return
        ended = {index for index, answer in enumerate(executed.answers) if answer}
        failed = {failure.index for failure in executed.failures}
        if lost := batch.steps.errors.keys() & ended:
            self._metrics.states_lost(loaded.model, loaded.version, len(lost))
        batch.written, batch.before = sequences.commit(
            *(
                batch.header,
                batch.records,
                batch.steps,
                ended,
                failed,
                executed.rescheduled,
                self._executor,
                batch.generation,
            ),
            is_leaving=is_late(loaded, batch.header),
        )

    async def _settle_part(
        self,
        loaded: LoadedVersion,
        batch: SubmittedBatch,
        part: Executed,
        before: Sequence[tuple[str, bytes]],
        last: bool,
    ) -> None:
        """Settle requests of a batch that had their final response; `last`: now all had."""
        try:
            self._remember_sequences(loaded, batch, part)
            self._metrics.executed(loaded.model, loaded.version, part)
            if last:
                failpoints.hit("executor.executed")
                self._forget(batch)
            await self._settler.settle(batch, part, loaded, before=before, last=last)
            if last:
                failpoints.hit("executor.settled")
                self._tasks.spawn(self._delete(batch.entry_id))
        except Exception as error:
            self._end_failed(batch, error)

    async def _settle(
        self, batch: SubmittedBatch, executed: Executed, loaded: LoadedVersion, outcome: Outcome | None = None
    ) -> None:
        await self._settler.settle(batch, executed, loaded, outcome=outcome)
        failpoints.hit("executor.settled")
        await self._delete(batch.entry_id)

    async def _guarded(self, batch: SubmittedBatch, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._end_failed(batch, error)

    def _end_failed(self, batch: SubmittedBatch, error: Exception) -> None:
        """Report a batch after an unforeseen error like one whose instance died, so that its owner hears of it."""
        header = self._forget(batch)
        self._accepted.pop(header.batch_id, None)
        _log.error("batch %s of '%s' could not be ended", header.batch_id, header.model, exc_info=error)
        death = Death("", f"its executor could not end it: {type(error).__name__}: {error}")
        fields = batch_died(self._executor, header.batch_id, death, _ids_of(batch))
        self._tasks.spawn(self._report(header, fields, batch.entry_id))

    # -- hung batches -------------------------------------------------------------------------------------------------

    def report_hung(self, batch: SubmittedBatch, death: Death) -> None:
        """Report a batch that exceeded its time limit in a thread, which makes this process end.

        A batcher in another process is notified now. A batcher in this process ends too, so its model's next owner is
        notified later, through the shared facts (`report_hung_batches`).
        """
        header = self._forget(batch)
        self._metrics.died(header.model, header.version)
        fields = batch_died(self._executor, header.batch_id, death, _ids_of(batch))
        if self._link is not None:
            self._hung_reports.append(Reply(keys.facts(header.model), fields))
        else:
            self._tasks.spawn(self._report(header, fields, batch.entry_id))

    def _forget(self, batch: SubmittedBatch) -> BatchHeader:
        """A batch has ended here, executed or not: release its tensors that lie elsewhere."""
        assert batch.header is not None
        for wave in batch.waves:
            if wave.payloads or wave.column_at is not None:
                wave.release()
        taken = self._accepted.get(batch.header.batch_id)
        if taken is not None and taken[0] is batch:
            del self._accepted[batch.header.batch_id]
        if batch.flags & FLAG_JOURNALLED:
            self._starts.forget(batch)
        return batch.header

    async def _report(self, header: BatchHeader, fields: Fields, entry_id: bytes) -> None:
        await self._reports.send(header, fields)
        await self._delete(entry_id)

    async def _delete(self, entry_id: bytes) -> None:
        if self._link is None:
            await insist(lambda: self._log.delete_entries(self.stream, [entry_id]), "a batch entry cannot be deleted")
        self._held_entries.discard(entry_id)


def _submitted(
    records: Sequence[Any], done: Callable[[SubmittedBatch, Executed], None], header: BatchHeader, entry_id: bytes
) -> SubmittedBatch:
    """Make a batch of requests, or of waves."""
    if header.waves:
        return SubmittedBatch((), done, header, entry_id, waves=records)
    return SubmittedBatch(records, done, header, entry_id)


def _split(ids: bytes) -> frozenset[bytes]:
    """Joined ids."""
    return frozenset([ids[at : at + 16] for at in range(0, len(ids), 16)])


def _ids_of(batch: SubmittedBatch) -> Iterator[bytes]:
    """The ids of a batch's requests, or of its waves."""
    yield from (record.id for record in batch.records)
    yield from (wave.id for wave in batch.waves)


def _ignore_end(_submitted: SubmittedBatch, _executed: Executed) -> None:
    """Do nothing: the callback of a batch that never reached an instance."""
