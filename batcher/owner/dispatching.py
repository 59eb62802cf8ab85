"""Writes a dispatch decision into the executor's batch stream, after recording the attempts that must be recorded.

Those are every attempt but the first, and the first of jobs, of what is journalled and of what was found at takeover:
a job that is cancelled before is never given out, and a request that ends one owner after the other is known to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any, cast

from batcher.entries.carriers import carrier_of
from batcher.scheduling.decisions import DispatchBatch
from batcher.scheduling.observations import RequestQueued
from charonia import keys
from charonia.errors import CharoniaError, InvalidRecord
from charonia.eventlog.colocated import ColocatedLog
from charonia.eventlog.port import START, EventLog
from charonia.facts.events import FIELD_FACT, ExecutionUnwanted, ResponsesWanted, VersionWanted, pack_fact
from charonia.tensors import Buffer
from charonia.wire import FIELD_HEADER, FIELD_RECORD, FIELD_WAVE, FLAG_JOB, FLAG_JOURNALLED, BatchHeader, record_fields

_PAGE = 500
_RECORDED = FLAG_JOB | FLAG_JOURNALLED


class Dispatcher:
    """One owner's way to the executors. `local_executor` is the one in this process, "" for none."""

    def __init__(self, log: EventLog, model: str, token: int, *, local_executor: str) -> None:
        self._log = log
        self._model = model
        self._token = token
        self._local_executor = local_executor
        self._local_batches = keys.LOCAL + keys.batches(local_executor)
        self._colocated = log if isinstance(log, ColocatedLog) else None
        """The log through which an executor in this process is reached."""
        self.begins_all = False
        """Whether first attempts are recorded, too: of models that answer more than once. An owner that is lost with
        its executor leaves nothing else by which the next run is told from the one whose responses were seen."""
        self.facts_shared = keys.facts(model)
        self.facts_local = keys.LOCAL + self.facts_shared

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

    def hear(self, told: Callable[[list[Any]], None] | None) -> None:
        """Be told at once of the ends of batches in this process; None to be told no more."""
        if self._colocated is not None:
            self._colocated.take_over(self.facts_local, told)

    async def tell_unwanted(self, executor: str, batch_id: str, ids: bytes) -> None:
        """Tell an executor that requests of a batch it has are settled, if the log is there: it only saves work."""
        stream = keys.batches(executor)
        if executor == self._local_executor:
            stream = keys.LOCAL + stream
        with contextlib.suppress(CharoniaError):
            await self._log.append(stream, [FIELD_FACT, pack_fact(ExecutionUnwanted(batch_id, ids))])

    async def tell_responses_wanted(self, executor: str, batch_id: str, request_id: bytes, count: int) -> None:
        """Tell an executor how many responses of a request are wanted, if the log is there: its caller repeats it."""
        stream = keys.batches(executor)
        if executor == self._local_executor:
            stream = keys.LOCAL + stream
        with contextlib.suppress(CharoniaError):
            await self._log.append(stream, [FIELD_FACT, pack_fact(ResponsesWanted(batch_id, request_id, count))])

    async def tell_wanted(self, executor: str, version: int) -> bool:
        """Tell an executor that requests wait for a version it would load; False when the log does not take it."""
        stream = keys.batches(executor)
        if executor == self._local_executor:
            stream = keys.LOCAL + stream
        try:
            await self._log.append(stream, [FIELD_FACT, pack_fact(VersionWanted(self._model, version))])
        except CharoniaError:
            return False
        return True

    def hand_over(self, decision: DispatchBatch) -> bool:
        """Give the batch to the executor in this process at once; False when it is another's, which `send` serves."""
        if self._colocated is None or decision.executor != self._local_executor:
            return False
        header, records = self._header(decision), [request.carrier.record for request in decision.requests]
        if not self._colocated.hand(self._local_batches, header, records):
            self._colocated.append_here(*self._entry(decision))
        return True

    async def send(self, decision: DispatchBatch) -> None:
        """Append the batch. Raises what the log raises: then it was not sent, or it is not known to be."""
        await self._log.append(*self._entry(decision))

    def _header(self, decision: DispatchBatch) -> BatchHeader:
        local = decision.executor == self._local_executor
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
            # held replies are all there is of settled work: they must outlive this process
            self.facts_local if local and not decision.via_owner else self.facts_shared,
            decision.via_owner,
            decision.sequences,
            waves,
        )

    def _entry(self, decision: DispatchBatch) -> tuple[bytes, list[Buffer]]:
        """The stream and the fields of a batch."""
        header = self._header(decision)
        records = [carrier_of(request).record for request in decision.requests]
        stream = keys.batches(decision.executor)
        if decision.executor == self._local_executor:
            # an executor in this process gets header and records as they are: nothing is copied or read twice
            decoded = chain.from_iterable(zip(repeat(FIELD_RECORD), records, strict=False))
            return keys.LOCAL + stream, cast(list[Buffer], [FIELD_HEADER, header, *decoded])
        if header.waves:
            return stream, [FIELD_HEADER, header.pack(), *chain.from_iterable((FIELD_WAVE, w.record) for w in records)]
        return stream, [FIELD_HEADER, header.pack(), *record_fields([record.record for record in records])]

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
