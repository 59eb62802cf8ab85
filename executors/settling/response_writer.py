"""Writes responses of streamed batches to the log as soon as they are made: in order, one write at a time.

Responses made during a write go with the next one, in one entry per endpoint. Where a step of a write takes long, for
example because a primary of a cluster is away, its batches alone wait for it (`Line`). A job's responses are stored
before they are visible, and so is the progress of a resumable model's (`progress_records`). The owner of a batch is
notified of a request's first response in the write that makes it visible. Final responses are written with the
settlement of their requests (`settler`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from charonia import keys
from charonia.calls.entry_packer import replies_of
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.payloads import BY_REFERENCE_BYTES
from charonia.eventlog.port import EventLog, Reply
from charonia.eventlog.refusal_texts import answer_too_large
from charonia.facts.events import FIELD_FACT, ResponsesBegun, SlotFreed, pack_fact
from charonia.tasks import Tasks, insist
from charonia.tensors import Buffer
from charonia.wire import FLAG_JOB, FLAG_REPLY_BY_REFERENCE, RequestRecord, failed_response, response_sizes
from executors.batches.batch_payloads import BatchPayloads
from executors.running.streamed_batch import Outgoing, StreamedBatch
from executors.running.submitted_batch import SettlePart, SubmittedBatch

from .progress_records import append_progress
from .settler import OwnerReports

_log = logging.getLogger(__name__)

_NOT_TAKEN = "responses cannot be written"
_STALLED_S = 0.1
"""A write that takes longer is no longer waited for by other batches. It takes about a millisecond."""

_Owner = StreamedBatch | frozenset[StreamedBatch] | bytes
"""What waits for a step of a write: a batch, batches of one model, or those with answers in this reply stream."""


class Line:
    """Responses that are written one part after the other. `part` is the one that is being written, of whose steps
    `steps` has the tasks; `parts` and `waiting` come after it, in this order.
    """

    __slots__ = ("part", "parts", "steps", "task", "turn", "waiting")

    def __init__(self) -> None:
        self.part: list[Outgoing] = []
        self.parts: Iterator[list[Outgoing]] = iter(())
        self.waiting: list[Outgoing] = []
        self.steps: Sequence[tuple[_Owner, asyncio.Task[object]]] = ()
        self.task: asyncio.Task[None] | None = None
        self.turn = 0
        """How many parts were begun."""


class ResponseWriter:
    """Writes one executor's responses. `unwanted(batch, ids)` is called for jobs that take no more responses, and for
    requests of resumable models that have ended or run elsewhere by now.
    """

    def __init__(
        self,
        log: EventLog,
        executor: str,
        payloads: BatchPayloads,
        unwanted: Callable[[SubmittedBatch, frozenset[bytes]], None],
        reports: OwnerReports,
    ) -> None:
        self._log = log
        self._executor = executor
        self._payloads = payloads
        self._unwanted = unwanted
        self._reports = reports
        self.on_first: Callable[[SubmittedBatch, RequestRecord], None] | None = None
        """Called for each first response of models that may give several."""
        self._open: dict[StreamedBatch, tuple[SubmittedBatch, SettlePart]] = {}
        self._line = Line()
        self._apart: dict[StreamedBatch, Line] = {}
        """Batches that wait for a write which takes long, and the line of that."""
        self._check: asyncio.TimerHandle | None = None
        self._unwritten: dict[StreamedBatch, int] = {}
        self._written = asyncio.Event()
        self._tasks = Tasks()

    def open(self, streamed: StreamedBatch, batch: SubmittedBatch, settle: SettlePart) -> None:
        """Accept responses of this batch from now on. `settle` settles requests that end."""
        self._open[streamed] = (batch, settle)
        self._unwritten[streamed] = 0
        if self.on_first is not None and streamed.several:
            streamed.on_first = partial(self.on_first, batch)

    def close(self, streamed: StreamedBatch) -> None:
        """Forget a batch that has ended."""
        self._open.pop(streamed, None)
        self._unwritten.pop(streamed, None)

    def put(self, outgoing: Outgoing) -> None:
        if outgoing.batch not in self._open:
            outgoing.batch.flow.written(outgoing.record)
            return
        self._unwritten[outgoing.batch] += 1
        line = self._apart.get(outgoing.batch, self._line) if self._apart else self._line
        line.waiting.append(outgoing)
        if line.task is None:
            line.task = self._tasks.spawn(self._write_all(line), "responses")
        if self._check is None and line is self._line:
            self._check_later()

    def freed(self, streamed: StreamedBatch) -> None:
        """Notify the owner that the batch's instance is free, unless the batch ends at once."""
        asyncio.get_running_loop().call_soon(self._report_freed, streamed)

    async def written(self, streamed: StreamedBatch) -> None:
        """Wait until all responses that were put of a batch are in the log."""
        while self._unwritten.get(streamed):
            await self._written.wait()

    async def report_again(self, model: str) -> None:
        """Repeat the reports on a model's open batches for its new owner."""
        for streamed, (batch, _) in list(self._open.items()):
            if batch.header is None or batch.header.model != model:
                continue
            stream = keys.facts(model)
            if streamed.freed.is_set():
                await self._append(stream, _freed(self._executor, batch))
            if begun := streamed.begun_ids():
                await self._append(stream, _begun(self._executor, batch, begun))

    async def closed(self) -> None:
        """Abandon what the log has not taken, and what still comes: its reader would miss what is abandoned here."""
        self._open.clear()
        self._unwritten.clear()
        for line in (self._line, *self._apart.values()):
            line.waiting.clear()
        if self._check is not None:
            self._check.cancel()
        self._written.set()
        await self._tasks.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _report_freed(self, streamed: StreamedBatch) -> None:
        known = self._open.get(streamed)
        if known is None or streamed.all_ended or known[0].header is None:
            return
        self._tasks.spawn(self._reports.send(known[0].header, _freed(self._executor, known[0])))

    async def _write_all(self, line: Line) -> None:
        try:
            while line.waiting:
                waiting, line.waiting = line.waiting, []
                line.parts = _parts(waiting)
                for part in line.parts:
                    line.part = part
                    line.turn += 1
                    await self._write_part(line)
        finally:
            line.task = None
            if line is not self._line:
                self._apart = {batch: other for batch, other in self._apart.items() if other is not line}

    async def _write_part(self, line: Line) -> None:
        by_batch: dict[StreamedBatch, list[Outgoing]] = {}
        for one in line.part:
            by_batch.setdefault(one.batch, []).append(one)
        try:
            if len(by_batch) > 1 and self._is_staged(by_batch):
                await self._write_models(by_batch, line)
            else:
                await self._write(by_batch, line)
        except Exception:  # our fault: later responses must not wait for ever
            _log.exception("%d responses were not written", len(line.part))
        line.steps = ()
        part, line.part = line.part, []
        self._count_written(part)

    def _count_written(self, part: list[Outgoing]) -> None:
        for one in part:
            one.batch.flow.written(one.record)
            if one.batch in self._unwritten:
                self._unwritten[one.batch] -= 1
        written, self._written = self._written, asyncio.Event()
        written.set()

    # -- writes that take long -----------------------------------------------------------------------------------------

    def _check_later(self) -> None:
        line = self._line
        self._check = asyncio.get_running_loop().call_later(_STALLED_S, self._find_stalled, line, line.turn)

    def _find_stalled(self, line: Line, turn: int) -> None:
        """See whether a write is the same as before. Checks end with the writes, and there are at most ten a second."""
        self._check = None
        if line is not self._line or line.task is None:
            return
        if line.turn == turn:
            self._leave_behind(line)
        else:
            self._check_later()

    def _leave_behind(self, line: Line) -> None:
        """The batches of a write that takes long wait for it; what comes after them goes on in a line of its own."""
        behind = [one for part in line.parts for one in part] + line.waiting
        line.waiting = []
        self._line = Line()
        self._apart |= dict.fromkeys([one.batch for one in line.part], line)
        self._go_on(behind)
        self._let_go(line)
        self._watch(line)

    def _watch(self, line: Line) -> None:
        """Let batches of a line go as the steps that they wait for are done."""
        for _, step in line.steps:
            if not step.done():
                step.add_done_callback(lambda _: self._let_go(line))

    def _let_go(self, line: Line) -> None:
        """Batches whose steps of a write are done do not wait for its others."""
        busy: set[_Owner] = set()
        for owner, step in line.steps:
            if not step.done():
                busy |= owner if isinstance(owner, frozenset) else {owner}
        if not line.steps or not busy:
            return  # it has steps to come, or it ends now
        free = {one.batch for one in line.part} - busy
        for one in line.part:
            known = self._open.get(one.batch)
            if known is not None and keys.replies(known[0].records[one.index].endpoint) in busy:
                free.discard(one.batch)
        if not free:
            return
        done = [one for one in line.part if one.batch in free]
        line.part = [one for one in line.part if one.batch not in free]
        waiting = [one for part in line.parts for one in part] + line.waiting
        behind = [one for one in waiting if one.batch in free]
        line.waiting = [one for one in waiting if one.batch not in free]
        for batch in free:
            self._apart.pop(batch, None)
        self._count_written(done)
        self._go_on(behind)

    def _go_on(self, behind: list[Outgoing]) -> None:
        """These were put, and wait in no line."""
        for one in behind:
            (self._apart.get(one.batch) or self._line).waiting.append(one)
        if self._line.waiting and self._line.task is None:
            self._line.task = self._tasks.spawn(self._write_all(self._line), "responses")
        if self._check is None and self._line.task is not None:
            self._check_later()

    # -- one write -----------------------------------------------------------------------------------------------------

    def _is_staged(self, by_batch: dict[StreamedBatch, list[Outgoing]]) -> bool:
        """Whether these are of several models, and something has to be in the log before responses of any."""
        if len({streamed.batch.interface.name for streamed in by_batch}) == 1:
            return False
        jobs = [known[0].flags & FLAG_JOB for streamed in by_batch if (known := self._open.get(streamed)) is not None]
        return any(jobs) or any(streamed.resumable for streamed in by_batch)

    async def _write_models(self, by_batch: dict[StreamedBatch, list[Outgoing]], line: Line) -> None:
        """Write the responses of each model by themselves, because of what has to be written before."""
        models: dict[str, dict[StreamedBatch, list[Outgoing]]] = {}
        for streamed, ones in by_batch.items():
            models.setdefault(streamed.batch.interface.name, {})[streamed] = ones
        spawn = asyncio.get_running_loop().create_task
        steps = [(frozenset(some), spawn(self._write(some, None))) for some in models.values()]
        await self._all_done(steps, line)

    async def _write(self, by_batch: dict[StreamedBatch, list[Outgoing]], line: Line | None) -> None:
        """Write the responses of some batches. The steps of the last stage go to `line`, with what waits for them."""
        put = {streamed: len(ones) for streamed, ones in by_batch.items()}
        if [one for one in by_batch if one.resumable] and await self._append_progress(by_batch):
            return
        facts: list[tuple[_Owner, Coroutine[Any, Any, object]]] = []
        for streamed, ones in by_batch.items():
            if (known := self._open.get(streamed)) is not None:
                facts += [(streamed, report) for report in self._first_responses(streamed, known[0], ones)]
        if any(known[0].flags & FLAG_JOB for streamed in by_batch if (known := self._open.get(streamed)) is not None):
            # readers of a job see its responses at once: the next owner must know of them by then
            await asyncio.gather(*[report for _, report in facts])
            facts.clear()
            await self._keep(by_batch)
        settlements: list[tuple[_Owner, Coroutine[Any, Any, object]]] = []
        sent: list[tuple[str, bytes]] = []
        for streamed, ones in by_batch.items():
            known = self._open.get(streamed)
            if known is None:
                continue
            batch, settle = known
            records = [(batch.records[one.index].endpoint, self._of(batch, one)) for one in ones if not one.final]
            records = [(endpoint, record) for endpoint, record in records if endpoint and record]
            ended = {one.index: streamed.interrupted.get(one.index, one.record) for one in ones if one.final}
            if ended:
                last = streamed.all_ended and self._unwritten[streamed] == put[streamed]
                part = streamed.part(ended)
                over = [one for one in ones if one.final and not one.rescheduled]
                batch.ended.update(batch.records[one.index].id for one in over)
                settlements.append((streamed, settle(batch, part, records, last)))
                if marked := [batch.records[one.index].id for one in over if one.response_index]:
                    settlements.append((streamed, self._unmark(streamed, batch, marked)))
            else:
                sent += records
        replies = [(reply.stream, self._append(reply.stream, reply.fields)) for reply in replies_of(sent)]
        # one write, in this order: the log's connection keeps the order of calls of one tick
        spawn = asyncio.get_running_loop().create_task
        steps = [(owner, spawn(step)) for owner, step in (*facts, *replies, *settlements)]
        await self._all_done(steps, line)

    async def _all_done(self, steps: Sequence[tuple[_Owner, asyncio.Task[object]]], line: Line | None) -> None:
        """Wait for all steps, which are those of `line` now; then raise the first of their errors."""
        if line is not None:
            line.steps = steps
            if line is not self._line:
                self._watch(line)
        failure: Exception | None = None
        try:
            for _, step in steps:
                try:
                    await step
                except Exception as error:
                    failure = failure or error
        except asyncio.CancelledError:
            for _, step in steps:
                step.cancel()
            await asyncio.gather(*[step for _, step in steps], return_exceptions=True)
            raise
        if failure is not None:
            raise failure

    async def _append_progress(self, by_batch: dict[StreamedBatch, list[Outgoing]]) -> bool:
        """Append the progress of responses; those that the log refuses are left out. Their requests are cancelled, or
        end here if this attempt is the one that counts. True: the responses were sent in the same write.
        """
        known = {streamed: self._open[streamed][0] for streamed in by_batch if streamed in self._open}
        replies = self._replies_alone(known, by_batch)
        fenced, otherwise, sent = await append_progress(self._log, known, by_batch, replies)
        if sent:
            return True
        for streamed, indices in otherwise.items():
            for index in indices:
                streamed.interrupt(index)
        for streamed, indices in fenced.items():
            batch = known[streamed]
            if late := sum(batch.records[index].id not in batch.unwanted for index in indices):
                _log.warning("%d requests run elsewhere by now, or have ended: their responses are dropped", late)
            self._unwanted(batch, frozenset(batch.records[index].id for index in indices))
        for streamed, ones in by_batch.items():
            if refused := fenced.get(streamed, set()) | streamed.interrupted.keys():
                by_batch[streamed] = [one for one in ones if one.final or one.index not in refused]
        return False

    def _replies_alone(
        self, known: dict[StreamedBatch, SubmittedBatch], by_batch: dict[StreamedBatch, list[Outgoing]]
    ) -> list[Reply]:
        """The entries of these responses, where they may be written with their progress: in most steps of an engine
        nothing begins or ends. Empty where something else has to be written before or after them.
        """
        sent: list[tuple[str, bytes]] = []
        models: set[str] = set()
        for streamed, ones in by_batch.items():
            batch = known.get(streamed)
            if batch is None or batch.header is None or not streamed.resumable or streamed.interrupted:
                return []
            if batch.flags & FLAG_JOB:
                return []
            refers = batch.flags & FLAG_REPLY_BY_REFERENCE
            models.add(batch.header.model)
            for one in ones:
                if one.final or one.begins or (refers and len(one.record) >= BY_REFERENCE_BYTES):
                    return []
                if one.record and streamed.wanted(one.index):
                    sent.append((batch.records[one.index].endpoint, one.record))
        return replies_of(sent) if len(models) == 1 else []

    async def _keep(self, by_batch: dict[StreamedBatch, list[Outgoing]]) -> None:
        """Store the responses of jobs, all but final ones. A job that takes no more is cancelled."""
        keeping: list[Awaitable[object]] = []
        for streamed, ones in by_batch.items():
            known = self._open.get(streamed)
            if known is None or not any(record.is_job for record in known[0].records):
                continue
            of_request: dict[int, list[Outgoing]] = {}
            for one in ones:
                if known[0].records[one.index].is_job and one.record and not one.final:
                    of_request.setdefault(one.index, []).append(one)
            keeping += [self._keep_of(known[0], index, some) for index, some in of_request.items()]
        if keeping:
            await asyncio.gather(*keeping)

    async def _keep_of(self, batch: SubmittedBatch, index: int, ones: list[Outgoing]) -> None:
        assert batch.header is not None
        model, record, attempt = batch.header.model, batch.records[index], batch.header.attempts[index]
        taken = True

        async def keep() -> None:
            nonlocal taken
            records = [one.record for one in ones]
            taken = await self._log.add_job_responses(model, record.id, attempt, ones[0].response_index, records)

        await insist(keep, _NOT_TAKEN)
        if not taken:
            self._unwanted(batch, frozenset((record.id,)))

    def _first_responses(
        self, streamed: StreamedBatch, batch: SubmittedBatch, ones: list[Outgoing]
    ) -> list[Coroutine[Any, Any, object]]:
        """Report the requests that have a first response here: to the owner, and with marks for the next owner.

        Requests that end in the same write are left out, except jobs, whose responses can be read before their end.
        """
        ended = {one.index for one in ones if one.final and not one.rescheduled and not batch.records[one.index].is_job}
        begun = {one.index for one in ones if one.begins} - ended
        if not begun or batch.header is None:
            return []
        ids = [batch.records[index].id for index in sorted(begun)]
        reports: list[Coroutine[Any, Any, object]] = [
            self._reports.send(batch.header, _begun(self._executor, batch, ids))
        ]
        if not streamed.batch.interface.repeatable:
            key, times = keys.visible(batch.header.model), dict.fromkeys(ids, wall_ns() // 1000)
            reports.append(insist(lambda: self._log.set_times(key, times), _NOT_TAKEN))
        return reports

    async def _unmark(self, streamed: StreamedBatch, batch: SubmittedBatch, ids: Sequence[bytes]) -> None:
        """Remove the marks of requests that have ended. An owner removes those that stay."""
        if batch.header is not None and streamed.several and not streamed.batch.interface.repeatable:
            with contextlib.suppress(CharoniaError):
                await self._log.drop_times(keys.visible(batch.header.model), ids)

    def _of(self, batch: SubmittedBatch, one: Outgoing) -> bytes:
        """The record as it is sent; empty when the request is no longer wanted."""
        if not one.batch.wanted(one.index):
            return b""
        if not batch.flags & FLAG_REPLY_BY_REFERENCE or len(one.record) < BY_REFERENCE_BYTES:
            return one.record
        record = self._payloads.refer(batch.records[one.index], one.record)
        error = answer_too_large(len(record), one.batch.batch.interface.name)
        if error is None:
            return record
        one.batch.not_sent(one.index, one.response_index, *response_sizes([one.record]))
        return failed_response(record, error)

    async def _append(self, stream: bytes, fields: Sequence[Buffer]) -> None:
        await insist(lambda: self._log.append(stream, fields), _NOT_TAKEN)


def _parts(waiting: list[Outgoing]) -> Iterator[list[Outgoing]]:
    """Split responses into parts that are written one after the other.

    A write puts final responses last, so in an ordered batch no response may follow a final one in the same part.
    """
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


def _freed(executor: str, batch: SubmittedBatch) -> list[bytes]:
    assert batch.header is not None
    return [FIELD_FACT, pack_fact(SlotFreed(executor, batch.header.batch_id))]


def _begun(executor: str, batch: SubmittedBatch, ids: Sequence[bytes]) -> list[bytes]:
    assert batch.header is not None
    return [FIELD_FACT, pack_fact(ResponsesBegun(executor, batch.header.batch_id, b"".join(ids)))]
