"""The batches that a model's owner has dispatched: sends them to their executors and tracks them until they end.

A batch goes at once to the executor in this process if nothing has to be written first; otherwise a task sends it. An
attempt is written before its batch is sent if it is the second or a later one, or if its request is a job, is
journalled, was found at the takeover, or is for a decoupled model. So a job that is cancelled before is never
dispatched, and the attempts of a request that kills one owner after another are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

from msgspec import Struct

from batcher.entries.carriers import RETRY_S, carried_of
from batcher.entries.refusals import Refusals
from batcher.scheduling.decisions import DispatchBatch, RejectRequest
from batcher.scheduling.observations import RequestQueued
from batcher.scheduling.queues.ledger import CUT_SHORT
from charonia import failpoints, keys
from charonia.clock import monotonic_ns
from charonia.errors import (
    Cancelled,
    CharoniaError,
    ErrorCode,
    InvalidArgument,
    InvalidRecord,
    StreamInterrupted,
)
from charonia.eventlog import port
from charonia.eventlog.local_link import LocalLink
from charonia.eventlog.port import START, Jobs, RequestLog
from charonia.eventlog.refusal_texts import batch_too_large
from charonia.facts.events import (
    FIELD_FACT,
    BatchDied,
    BatchDiedInCompany,
    BatchFinished,
    ExecutionUnwanted,
    Fact,
    ResponsesWanted,
    VersionWanted,
    pack_fact,
)
from charonia.tensors import Buffer
from charonia.wire import (
    FIELD_HEADER,
    FIELD_WAVE,
    FLAG_JOB,
    FLAG_JOURNALLED,
    PREFIX_BYTES,
    WAVE_BYTE,
    BatchHeader,
    record_fields,
)

from .quarantine import Quarantine, SuspectNote

_log = logging.getLogger(__name__)

_PAGE = 500
_SETTLES_NS = 5_000_000_000
"""An executor that has not settled the waves of a batch so long after their end does not settle them any more."""
_RECORDED = FLAG_JOB | FLAG_JOURNALLED

BatchEnd = BatchFinished | BatchDied | BatchDiedInCompany


class Owner(Protocol):
    """What batches need of their model's owner (`owned.OwnedModel`)."""

    closed: bool

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None: ...

    def step_down(self) -> None: ...

    def requests_settled(self, requests: Sequence[RequestQueued]) -> None: ...

    def batch_finished(self, batch_id: str, executor: str) -> None: ...

    def batch_returned(self, batch_id: str, executor: str, reason: str) -> None: ...

    def batch_too_large(self, batch_id: str, executor: str, message: str) -> None: ...


class _Batch(Struct, gc=False):
    """One dispatched batch. `sent_ns`: when an executor of another process got it, or was last known to have it.
    `is_burst`: its executor has it as waves, which the log has as requests by now.
    """

    executor: str
    requests: list[RequestQueued]
    is_sent: bool = False
    sent_ns: int = 0
    is_burst: bool = False


class DispatchedBatches:
    """The dispatched batches of one model, by id. `link` leads to the executor in this process, if there is one."""

    def __init__(
        self,
        owner: Owner,
        log: RequestLog,
        link: LocalLink | None,
        model: str,
        token: int,
        note: SuspectNote,
        quarantine: Quarantine,
        refusals: Refusals,
    ) -> None:
        self._owner = owner
        self._log = log
        self._link = link
        self._model = model
        self._token = token
        self._note = note
        self._quarantine = quarantine
        self._refusals = refusals
        self._batches: dict[str, _Batch] = {}
        self._put_off: dict[str, BatchEnd] = {}
        self.streams = self.streams_once = False
        """Requests may have several responses; they are not run again once one was visible. First attempts are recorded
        then, too: if an owner is lost with its executor, only the record distinguishes the next run from the run whose
        responses were visible.
        """
        self.resumable = False
        """A run goes on where the lost one was."""
        self.wanted: dict[bytes, int] = {}
        """How many responses are wanted, for requests whose callers limit them (S55)."""

    def __contains__(self, batch_id: object) -> bool:
        return batch_id in self._batches

    def __len__(self) -> int:
        return len(self._batches)

    # -- sending ------------------------------------------------------------------------------------------------------

    def dispatch(self, decision: DispatchBatch) -> None:
        """Send a batch to its executor. If the log does not take it, it returns to the owner."""
        batch = self._batches[decision.batch_id] = _Batch(decision.executor, decision.requests)
        link = self._link
        # batches that need a note take `_send`: suspects, and restored ones, whose attempt must be recorded
        if link is None or decision.executor != link.executor or decision.suspects or self._must_begin(decision):
            self._owner.spawn(self._send(decision))
            return
        failpoints.hit("batcher.formed")
        self._hand_over(link, decision)
        batch.is_sent = True
        if self.wanted:
            self._tell_responses_wanted([request.id for request in decision.requests])
        failpoints.hit("batcher.dispatched")

    async def _send(self, decision: DispatchBatch) -> None:
        """Send a batch that needs a record first, or that is for another process."""
        failpoints.hit("batcher.formed")
        link = self._link if self._link is not None and decision.executor == self._link.executor else None
        try:
            if self._must_begin(decision):
                decision, settled = await self.begin_attempts(decision)
                self._owner.requests_settled(settled)
                if self._is_over(decision):
                    return  # its executor was lost in the meantime
                if self.streams_once and (cut := await jobs_cut_short(self._log, self._model, decision)):
                    decision = decision.without({one.request.id for one in cut})
                    await self._refusals.settle(cut)
                self._shrink(decision)
                if not decision.requests:
                    return
            # a batch that was given up by now would stay for ever
            if decision.suspects == "apart" and decision.batch_id in self._batches:
                await self._quarantine.enter(decision.executor, decision.batch_id)
            if link is not None and decision.batch_id in self._batches and self._may_end_us(decision):
                await self._note.write(decision)
            decision = self._still_wanted(decision)
            if self._is_over(decision):
                return
            if link is not None:
                self._hand_over(link, decision)
            else:
                try:
                    await self._log.append(keys.batches(decision.executor), self._fields(decision))
                except InvalidArgument as error:
                    self._owner.batch_too_large(decision.batch_id, decision.executor, error.message)
                    return
            self._sent(decision.batch_id, elsewhere=link is None)
            if cancelled := b"".join([request.id for request in decision.requests if request.cancelled]):
                self.stop_executions(decision.executor, decision.batch_id, cancelled, gentle=True)
            if self.wanted:
                self._tell_responses_wanted([request.id for request in decision.requests])
            failpoints.hit("batcher.dispatched")
        except Cancelled:
            self._owner.step_down()
        except CharoniaError as error:
            # not dispatched, or not known to be: a duplicate run is settled once
            _log.warning("batch %s could not be dispatched: %s", decision.batch_id, error)
            asyncio.get_running_loop().call_later(RETRY_S, self._not_dispatched, decision)

    @staticmethod
    def _may_end_us(decision: DispatchBatch) -> bool:
        """Whether a batch may end the executor, and this owner with it: of suspects, or found at takeover."""
        return bool(decision.suspects) or any(request.carrier.restored for request in decision.requests)

    def _must_begin(self, decision: DispatchBatch) -> bool:
        """Whether the attempt of any request has to be recorded."""
        if max(decision.attempts) > 1:
            return True
        for request in decision.requests:
            carried = request.carrier
            if carried.restored or carried.record.flags & _RECORDED:
                return True
        # another turn of the same attempt is recorded already
        return self.streams and any(map(_is_news, decision.requests, decision.attempts))

    async def begin_attempts(self, decision: DispatchBatch) -> tuple[DispatchBatch, list[RequestQueued]]:
        """Splits a batch into the part to run and its settled requests. Raises `Cancelled` to a former owner."""
        going: dict[bytes, bool] = {}
        for attempt in sorted(set(decision.attempts)):
            members = [r for r, a in zip(decision.requests, decision.attempts, strict=True) if a == attempt]
            carried = [carried_of(request) for request in members]
            recorded = self.streams or attempt > 1
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

    def _still_wanted(self, decision: DispatchBatch) -> DispatchBatch:
        """The batch without requests that ended while it was prepared: their end was reported to the executor before it
        had the batch. A step of a sequence stays: later steps build upon it.
        """
        ended = {request.id for request in decision.requests if request.settled}
        if ended and decision.sequences is None and decision.batch_id in self._batches:
            decision = decision.without(ended)
            self._shrink(decision)
        return decision

    def _shrink(self, decision: DispatchBatch) -> None:
        """The unsettled part of a batch that is being prepared; an empty one is finished."""
        if decision.batch_id in self._batches:
            self._batches[decision.batch_id].requests = decision.requests
        if not decision.requests:
            self._owner.batch_finished(decision.batch_id, decision.executor)

    def _is_over(self, decision: DispatchBatch) -> bool:
        return self._owner.closed or decision.batch_id not in self._batches

    def _sent(self, batch_id: str, *, elsewhere: bool) -> None:
        """Its executor has a batch from now on; `elsewhere`: in another process."""
        batch = self._batches.get(batch_id)
        if batch is not None:
            batch.is_sent = True
            batch.sent_ns = monotonic_ns() if elsewhere else 0

    def _not_dispatched(self, decision: DispatchBatch) -> None:
        if not self._owner.closed:
            self._owner.batch_returned(decision.batch_id, decision.executor, "not sent")

    def _hand_over(self, link: LocalLink, decision: DispatchBatch) -> None:
        # held replies are the only copy of the answers of settled requests: they must outlive this process
        header = self._header(decision, keys.facts(self._model) if decision.via_owner else b"")
        link.batches.hand(header, [request.carrier.record for request in decision.requests])

    def _fields(self, decision: DispatchBatch) -> list[Buffer]:
        """The entry of a batch. Raises `InvalidArgument` where it has several records and the log would not take it."""
        header = self._header(decision, keys.facts(self._model))
        records = [carried_of(request).record.record for request in decision.requests]
        limit_bytes = port.MAX_ENTRY_BYTES if header.waves else port.MAX_RECORD_BYTES
        if len(records) > 1 and (size_bytes := sum(map(len, records))) > limit_bytes:
            raise batch_too_large(size_bytes, len(records), self._model, limit_bytes)
        if header.waves:
            return [FIELD_HEADER, header.pack(), *chain.from_iterable((FIELD_WAVE, record) for record in records)]
        return [FIELD_HEADER, header.pack(), *record_fields(records)]

    def _header(self, decision: DispatchBatch, report_to: bytes) -> BatchHeader:
        waves: tuple[tuple[bytes, bytes], ...] = ()
        if decision.requests[0].wave:
            waves = tuple([(r.carrier.entry.stream, r.carrier.entry.entry_id) for r in decision.requests])
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

    # -- what else executors are sent ---------------------------------------------------------------------------------

    def want_responses(self, request_id: bytes, count: int) -> None:
        """Set how many responses of a request are wanted, and notify the executor that runs it, now or later."""
        self.wanted[request_id] = max(count, self.wanted.get(request_id, 0))
        self._tell_responses_wanted([request_id])

    def _tell_responses_wanted(self, ids: Iterable[bytes]) -> None:
        for request_id in ids:
            count, holder = self.wanted.get(request_id), self.holder(request_id)
            if count is not None and holder is not None:
                executor, batch_id = holder
                # its caller repeats it
                self._owner.spawn(self._try_to_tell(executor, ResponsesWanted(batch_id, request_id, count)))

    def stop_executions(self, executor: str, batch_id: str, ids: bytes, *, gentle: bool = False) -> None:
        """Requests of a batch that an executor has are settled: it only saves work to notify it.

        `gentle`: they are not, and their model is asked to end them.
        """
        fact = ExecutionUnwanted(batch_id, b"", ids) if gentle else ExecutionUnwanted(batch_id, ids)
        self._owner.spawn(self._try_to_tell(executor, fact))

    async def ask_to_load(self, executor: str, version: int) -> bool:
        """Ask an executor to load a version that requests wait for; False when the log does not take it."""
        try:
            await self._tell(executor, VersionWanted(self._model, version))
        except CharoniaError:
            return False
        return True

    async def _try_to_tell(self, executor: str, fact: Fact) -> None:
        with contextlib.suppress(CharoniaError):
            await self._tell(executor, fact)

    async def _tell(self, executor: str, fact: Fact) -> None:
        if self._link is not None and executor == self._link.executor:
            self._link.facts.hand(fact)
        else:
            await self._log.append(keys.batches(executor), [FIELD_FACT, pack_fact(fact)])

    # -- ends ---------------------------------------------------------------------------------------------------------

    def end(self, batch_id: str) -> list[RequestQueued]:
        """A batch ended; returns its requests, none when it had ended before."""
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            return []
        if batch.is_burst:
            self._put_off.pop(batch_id, None)
        if self._quarantine.holders:
            self._quarantine.leave(batch_id)
        if batch_id in self._note.aboard:
            del self._note.aboard[batch_id]
            if not self._note.aboard and not self._owner.closed:
                self._owner.spawn(self._note.erase())
        return batch.requests

    def puts_off(self, fact: BatchEnd) -> bool:
        """Keep this report of a batch's end until all its requests with an outcome are settled; False if they are.

        An executor reports the end of waves before it settles them. Requests of burst waves must run again if it is
        killed in between.
        """
        batch = self._batches.get(fact.batch_id)
        if batch is None or not batch.is_burst or _is_settled(batch, fact):
            return False
        batch.sent_ns = monotonic_ns()
        self._put_off[fact.batch_id] = fact
        return True

    def take_put_off(self) -> list[BatchEnd]:
        """Return the kept reports of batches whose requests are settled now, and keep them no longer."""
        if not self._put_off:
            return []
        taken = [fact for batch_id, fact in self._put_off.items() if _is_settled(self._batches[batch_id], fact)]
        for fact in taken:
            del self._put_off[fact.batch_id]
        return taken

    def lose(self, executor: str, reason: str) -> None:
        """An executor is lost: ignore late reports about its batches, because later runs have taken their place."""
        for batch_id in [batch_id for batch_id, batch in self._batches.items() if batch.executor == executor]:
            self.came_back(self.end(batch_id), executor, reason)

    def came_back(self, requests: Iterable[RequestQueued], executor: str, reason: str) -> None:
        """Write into the records of jobs that they are queued again: their batch came back without their outcome.
        Scripts write the beginning and the end of a job together with the act; this is only for readers, so it is tried
        once, and written before the next attempt.
        """
        for carrier in [carried_of(request) for request in requests]:
            if carrier.record.is_job and not carrier.settled:
                self._owner.spawn(self._note_return(carrier.record.id, {"executor": executor, "reason": reason}))

    async def _note_return(self, job_id: bytes, detail: dict[str, object]) -> None:
        with contextlib.suppress(CharoniaError):
            await self._log.add_job_event(self._model, job_id, "returned", detail)

    def close(self) -> None:
        """This owner dispatches nothing any more."""
        for batch_id in list(self._batches):
            self.end(batch_id)

    # -- repairs ------------------------------------------------------------------------------------------------------

    def restore(self, batch_id: str, executor: str, requests: list[RequestQueued], *, is_burst: bool = False) -> None:
        """Add a former owner's batch that an executor has; `is_burst`: as waves, and `requests` are theirs."""
        self._batches[batch_id] = _Batch(executor, requests, True, monotonic_ns(), is_burst)

    def unsent(self, executor: str) -> list[str]:
        """Batches that were decided for an executor and not sent yet."""
        return [i for i, batch in self._batches.items() if batch.executor == executor and not batch.is_sent]

    def holder(self, request_id: bytes) -> tuple[str, str] | None:
        """The executor and the batch that have a request or wave."""
        for batch_id, batch in self._batches.items():
            if batch.is_sent and any(request.id == request_id for request in batch.requests):
                return batch.executor, batch_id
        return None

    def requests(self, batch_id: str) -> list[RequestQueued]:
        return self._batches[batch_id].requests if batch_id in self._batches else []

    def verified(self, batch_id: str) -> None:
        """The executor still has the batch: do not ask about it for a while."""
        batch = self._batches.get(batch_id)
        if batch is not None and batch.sent_ns:
            batch.sent_ns = monotonic_ns()

    def older_than(self, age_ns: int) -> dict[str, list[str]]:
        """By executor of another process, the batches it has had for at least this long, without those whose end was
        put off just now.
        """
        now_ns = monotonic_ns()
        before_ns = now_ns - age_ns
        put_off_ns = min(before_ns, now_ns - _SETTLES_NS)
        found: dict[str, list[str]] = {}
        for batch_id, batch in self._batches.items():
            if 0 < batch.sent_ns <= (put_off_ns if batch_id in self._put_off else before_ns):
                found.setdefault(batch.executor, []).append(batch_id)
        return found

    async def held(self, executor: str) -> set[str]:
        """The ids of the batches in an executor's stream: sent to it and not settled."""
        found: set[str] = set()
        after = START
        stream = keys.batches(executor)
        while entries := await self._log.range(stream, after, _PAGE):
            for entry in entries:
                with contextlib.suppress(InvalidRecord, ValueError):
                    found.add(BatchHeader.unpack(entry.fields[entry.fields.index(FIELD_HEADER) + 1]).batch_id)
            after = entries[-1].id
        return found


def without_outcome(fact: BatchDied | BatchDiedInCompany, members: Iterable[RequestQueued]) -> frozenset[bytes]:
    """The ids of the requests without an outcome, of a batch with these members. An executor that has waves reports
    waves, also where a new owner has burst them and has their requests.
    """
    ids = frozenset(fact.ids[at : at + 16] for at in range(0, len(fact.ids), 16))
    return ids.union([one.id for one in members if one.id[:PREFIX_BYTES] + WAVE_BYTE in ids])


def _is_settled(batch: _Batch, fact: BatchEnd) -> bool:
    """Whether all requests of a batch that have an outcome are settled."""
    left = frozenset[bytes]() if isinstance(fact, BatchFinished) else without_outcome(fact, batch.requests)
    return all(carried_of(request).settled or request.id in left for request in batch.requests)


def _is_news(request: RequestQueued, attempt: int) -> bool:
    return carried_of(request).begun < attempt


async def jobs_cut_short(log: Jobs, model: str, decision: DispatchBatch) -> list[RejectRequest]:
    """Refusals for the jobs of a batch that were begun before and have kept responses. Raises what the log raises."""
    cut: list[RejectRequest] = []
    places = decision.sequences.places if decision.sequences is not None else (None,) * len(decision.requests)
    for request, attempt, place in zip(decision.requests, decision.attempts, places, strict=True):
        if place is not None and place.again:
            continue  # its responses are those of this very attempt
        if attempt > 1 and carried_of(request).record.is_job and await log.job_responses(model, request.id, count=1):
            message = StreamInterrupted(CUT_SHORT.format(why="what ran it was lost")).message
            cut.append(RejectRequest(request, ErrorCode.UNAVAILABLE, message, "BACKEND"))
    return cut
