"""Writes a dispatch decision into the executor's batch stream, after raising the attempts of what runs again."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import chain, repeat
from typing import cast

from charonia import keys
from charonia.errors import InvalidRecord
from charonia.eventlog.port import START, EventLog
from charonia.tensors import Buffer
from charonia.wire import FIELD_HEADER, FIELD_RECORD, BatchHeader, record_fields

from .carriers import carrier_of
from .scheduling.decisions import DispatchBatch
from .scheduling.observations import RequestQueued

_PAGE = 500


class Dispatcher:
    """One owner's way to the executors. `local_executor` is the one in this process, "" for none."""

    def __init__(self, log: EventLog, model: str, token: int, *, local_executor: str) -> None:
        self._log = log
        self._model = model
        self._token = token
        self._local_executor = local_executor
        self.facts_shared = keys.facts(model)
        self.facts_local = keys.LOCAL + self.facts_shared

    async def begin_attempts(self, decision: DispatchBatch) -> tuple[DispatchBatch, list[RequestQueued]]:
        """The batch without what was settled meanwhile, and that. Raises `Cancelled` to a former owner."""
        kept: list[RequestQueued] = []
        attempts: list[int] = []
        settled: list[RequestQueued] = []
        for attempt in sorted(set(decision.attempts)):
            members = [r for r, a in zip(decision.requests, decision.attempts, strict=True) if a == attempt]
            going = [True] * len(members)
            if attempt > 1:
                going = await self._log.begin_attempt(self._model, self._token, [r.id for r in members], attempt)
                for request in members:
                    carried = carrier_of(request)
                    carried.begun = max(carried.begun, attempt)
            for request, goes in zip(members, going, strict=True):
                if goes:
                    kept.append(request)
                    attempts.append(attempt)
                else:
                    settled.append(request)
        return replace(decision, requests=kept, attempts=tuple(attempts)), settled

    async def send(self, decision: DispatchBatch) -> None:
        """Append the batch. Raises what the log raises: then it was not sent, or it is not known to be."""
        local = decision.executor == self._local_executor
        header = BatchHeader(
            decision.batch_id,
            self._model,
            decision.version,
            decision.content_hash,
            self._token,
            decision.attempts,
            # held replies are all there is of settled work: they must outlive this process
            self.facts_local if local and not decision.via_owner else self.facts_shared,
            decision.via_owner,
        )
        records = [carrier_of(request).record for request in decision.requests]
        fields: list[Buffer] = [FIELD_HEADER, header.pack()]
        stream = keys.batches(decision.executor)
        if local:
            # an executor in this process gets the records as they are decoded: nothing is copied or read twice
            fields += chain.from_iterable(zip(repeat(FIELD_RECORD), cast(list[Buffer], records), strict=False))
            stream = keys.LOCAL + stream
        else:
            fields += record_fields([record.record for record in records])
        await self._log.append(stream, fields)

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
