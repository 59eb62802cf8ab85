"""Writes a dispatch decision into the executor's batch stream, after recording the attempts that must be recorded.

Those are every attempt but the first, and the first of jobs, of what is journalled and of what was found at takeover:
a job that is cancelled before is never given out, and a request that ends one owner after the other is known to.
"""

from __future__ import annotations

import contextlib
from itertools import chain

from batcher.entries.carriers import carrier_of
from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import RequestQueued
from charonia import keys
from charonia.errors import CharoniaError, InvalidRecord
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import START, QueueLog
from charonia.facts.events import FIELD_FACT, ExecutionUnwanted, Fact, ResponsesWanted, VersionWanted, pack_fact
from charonia.tensors import Buffer
from charonia.wire import FIELD_HEADER, FIELD_WAVE, FLAG_JOB, FLAG_JOURNALLED, BatchHeader, record_fields

_PAGE = 500
_RECORDED = FLAG_JOB | FLAG_JOURNALLED


class Dispatcher:
    """One owner's way to the executors. `link` leads to the one in this process, if there is one."""

    def __init__(self, log: QueueLog, model: str, token: int, link: LocalLink | None) -> None:
        self._log = log
        self._model = model
        self._token = token
        self._link = link
        self.begins_all = False
        """Whether first attempts are recorded, too: of models that answer more than once. An owner that is lost with
        its executor leaves nothing else by which the next run is told from the one whose responses were seen."""
        self.facts = keys.facts(model)

    def must_begin(self, decision: DispatchBatch) -> bool:
        """Whether the attempt of any request has to be recorded."""
        if max(decision.attempts) > 1:
            return True
        for request in decision.requests:
            carried = request.carrier
            if carried.restored or carried.record.flags & _RECORDED:
                return True
        # another turn of the same attempt is recorded already
        return self.begins_all and any(map(_is_news, decision.requests, decision.attempts))

    async def begin_attempts(self, decision: DispatchBatch) -> tuple[DispatchBatch, list[RequestQueued]]:
        """The batch without what was settled meanwhile, and that. Raises `Cancelled` to a former owner."""
        going: dict[bytes, bool] = {}
        for attempt in sorted(set(decision.attempts)):
            members = [r for r, a in zip(decision.requests, decision.attempts, strict=True) if a == attempt]
            carried = [carrier_of(request) for request in members]
            recorded = self.begins_all or attempt > 1
            begun = [c for c in carried if recorded or c.record.flags & _RECORDED or c.restored]
            if not begun:
                continue
            ids = [c.record.id for c in begun]
            answers = await self._log.begin_attempt(
                self._model,
                self._token,
                ids,
                attempt,
                jobs=[c.record.id for c in begun if c.record.is_job],
                journalled=[c.record.id for c in begun if c.record.journalled],
                executor=decision.executor,
                batch_id=decision.batch_id,
            )
            for c in begun:
                c.begun = max(c.begun, attempt)
            going |= zip(ids, answers, strict=True)
        settled = [r for r in decision.requests if not going.get(r.id, True)]
        return decision.without({r.id for r in settled}) if settled else decision, settled

    async def tell_unwanted(self, executor: str, batch_id: str, ids: bytes) -> None:
        """Tell an executor that requests of a batch it has are settled, if the log is there: it only saves work."""
        with contextlib.suppress(CharoniaError):
            await self._tell(executor, ExecutionUnwanted(batch_id, ids))

    async def tell_responses_wanted(self, executor: str, batch_id: str, request_id: bytes, count: int) -> None:
        """Tell an executor how many responses of a request are wanted, if the log is there: its caller repeats it."""
        with contextlib.suppress(CharoniaError):
            await self._tell(executor, ResponsesWanted(batch_id, request_id, count))

    async def tell_wanted(self, executor: str, version: int) -> bool:
        """Tell an executor that requests wait for a version it would load; False when the log does not take it."""
        try:
            await self._tell(executor, VersionWanted(self._model, version))
        except CharoniaError:
            return False
        return True

    async def _tell(self, executor: str, fact: Fact) -> None:
        if self._link is not None and executor == self._link.executor:
            self._link.facts.hand(fact)
        else:
            await self._log.append(keys.batches(executor), [FIELD_FACT, pack_fact(fact)])

    def hand_over(self, decision: DispatchBatch) -> bool:
        """Give the batch to the executor in this process at once; False when it is another's, which `send` serves."""
        if self._link is None or decision.executor != self._link.executor:
            return False
        # held replies are all there is of settled work: they must outlive this process
        header = self._header(decision, self.facts if decision.via_owner else b"")
        self._link.batches.hand(header, [request.carrier.record for request in decision.requests])
        return True

    async def send(self, decision: DispatchBatch) -> None:
        """Append the batch. Raises what the log raises: then it was not sent, or it is not known to be."""
        if not self.hand_over(decision):
            await self._log.append(keys.batches(decision.executor), self._fields(decision))

    def _header(self, decision: DispatchBatch, report_to: bytes) -> BatchHeader:
        waves: tuple[tuple[bytes, bytes], ...] = ()
        if decision.requests[0].wave:
            carriers = [request.carrier.entry for request in decision.requests]
            waves = tuple([(carrier.stream, carrier.entry_id) for carrier in carriers])
        return BatchHeader(
            decision.batch_id,
            self._model,
            decision.version,
            decision.content_hash,
            self._token,
            decision.attempts,
            report_to,
            decision.via_owner,
            decision.sequences,
            waves,
        )

    def _fields(self, decision: DispatchBatch) -> list[Buffer]:
        """The entry of a batch."""
        header = self._header(decision, self.facts)
        records = [carrier_of(request).record for request in decision.requests]
        if header.waves:
            return [FIELD_HEADER, header.pack(), *chain.from_iterable((FIELD_WAVE, w.record) for w in records)]
        return [FIELD_HEADER, header.pack(), *record_fields([record.record for record in records])]

    async def held(self, executor: str) -> set[str]:
        """The ids of the batches in an executor's stream: given to it and not settled."""
        found: set[str] = set()
        after = START
        stream = keys.batches(executor)
        while entries := await self._log.range(stream, after, _PAGE):
            for entry in entries:
                with contextlib.suppress(InvalidRecord, ValueError):
                    found.add(BatchHeader.unpack(entry.fields[entry.fields.index(FIELD_HEADER) + 1]).batch_id)
            after = entries[-1].id
        return found


def _is_news(request: RequestQueued, attempt: int) -> bool:
    return carrier_of(request).begun < attempt
