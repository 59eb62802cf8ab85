"""Restores a model's work for a new owner: feeds the unsettled part of the log through the ordinary scheduler.

Reads, in this order: whether the queue is held back; the queue streams from their beginning up to their windows
(accepted); for each page which requests are unsettled; the batch streams of live executors (dispatched, running); which
batches failed without a report; and which requests have visible responses. The scheduler learns of capacity only
afterwards, so nothing is dispatched twice. Anything written in the meantime arrives through the reader, which continues
where the pages ended; requests that are read again are joined with the known ones.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from functools import partial

from batcher.entries.bursting import burst_wave
from batcher.entries.carriers import RETRY_S, carried_of, requests_of, work_of
from batcher.owner.owned import OwnedModel
from batcher.scheduling.observations import BatchRunning, RequestQueued, ResponsesSeen, SequenceFound
from charonia import keys
from charonia.errors import InvalidRecord
from charonia.eventlog.control import ControlPlane
from charonia.eventlog.port import START, Entry, EventLog, Jobs, Streams, WaveLog
from charonia.facts.events import (
    FIELD_FACT,
    BatchDied,
    BatchDiedInCompany,
    ExecutionUnwanted,
    OwnerChanged,
    ProcessJoined,
    facts_of,
    pack_fact,
)
from charonia.facts.sequence_states import SequenceAbout
from charonia.tasks import insist
from charonia.wire import FIELD_HEADER, FIELD_WAVE, BatchHeader, Wave

_log = logging.getLogger(__name__)
_PAGE = 500
_ALL_US = 1 << 52
_MOST_MARKED = 10_000


async def newcomers(control: ControlPlane) -> set[str]:
    """Executors that are new to this batcher: a former owner may have known them, and given them batches."""
    joined = [fact for fact in await control.unheard() if isinstance(fact, ProcessJoined)]
    return {fact.incarnation for fact in joined if fact.role == "executor"}


async def recover(log: EventLog, owned: OwnedModel, executors: Collection[str]) -> int:
    """Restore `owned` from the log; returns the number of unsettled requests found. The caller then follows the
    windows, which reads later entries.
    """
    if await log.paused(owned.model):
        owned.hold(True)
    queued: dict[bytes, RequestQueued] = {}
    # until no lane is new: a former owner may have read the fact of a lane that was opened in the meantime
    while lanes := [
        (stream, lane)
        for level, lane in await log.lanes(owned.model)
        if (stream := keys.queue(owned.model, level, lane)) not in owned.windows.lanes
    ]:
        for stream, lane in lanes:
            owned.windows.open(stream, lane)
        for stream, _ in lanes:
            queued |= await _restore_queue(owned, stream)
    # also lanes in which nothing waits now
    await _restore_sequences(owned)
    for executor in executors:
        await _restore_running(log, owned, executor, queued)
    await _restore_deaths(log, owned)
    await owned.end_leases_of_gone()
    for lost in await owned.suspect_note.read(queued):
        if lost.executor not in executors:
            owned.observe(lost)
    if marked := await visible_requests(log, owned.model):
        owned.observe(ResponsesSeen(marked - await jobs_unseen(log, owned.model, marked, queued)))
    return len(queued)


async def _restore_queue(owned: OwnedModel, stream: bytes) -> dict[bytes, RequestQueued]:
    """Queue unsettled requests written before this owner, as far as the window goes; returns them by request id.
    Entries of settled requests are deleted. The stream is open in `windows`.
    """
    owned.windows.catch_up = lambda stream: owned.spawn(_restore_more(owned, stream))
    queued: dict[bytes, RequestQueued] = {}
    while entries := await owned.log.range(stream, owned.windows.lanes[stream].after, _PAGE):
        last_id = entries[-1].id
        entries = await _without_waves(owned, stream, entries)
        records = [record for entry in entries for record in requests_of(entry)]
        ids = [record.id for record in records]
        attempts = dict(zip(ids, await owned.log.unsettled(owned.model, ids), strict=True))
        # after the settled requests are known: any attempt that began before is in the log by now
        await _restore_sequences(owned)
        await owned.find_gone({r.endpoint for r in records if r.endpoint and attempts[r.id] >= 0})
        if owned.closed:
            return queued
        queued |= {request.id: request for request in owned.queue(stream, entries, attempts)}
        owned.windows.lanes[stream].after = last_id
        if owned.windows.is_full(stream):
            break
    else:
        owned.windows.fell_behind(stream, False)
        return queued
    owned.windows.fell_behind(stream, True)
    return queued


async def _without_waves(owned: OwnedModel, stream: bytes, entries: list[Entry]) -> list[Entry]:
    """Burst the waves among these entries: an executor may have begun any of them. Their requests follow later."""
    plain: list[Entry] = []
    for entry in entries:
        if FIELD_WAVE not in entry.fields:
            plain.append(entry)
            continue
        for wave in work_of(entry):
            if isinstance(wave, Wave):
                await burst_wave(owned.log, owned.model, stream, entry.id, wave)
    return plain


async def _restore_sequences(owned: OwnedModel) -> None:
    """Add the live sequences in the log; those already known stay as they are."""
    if owned.is_sequential:
        for found in _sequences_found(await owned.log.sequences(owned.model)):
            owned.observe(found)


def _sequences_found(records: Mapping[bytes, bytes]) -> Iterator[SequenceFound]:
    """The log's records of live sequences; unreadable ones are logged and left out."""
    for key, about in records.items():
        try:
            yield SequenceFound(SequenceAbout.unpack(key, about))
        except InvalidRecord as error:
            _log.error("the record of sequence %r cannot be read: %s", key, error)


async def _restore_more(owned: OwnedModel, stream: bytes) -> None:
    """Read on in streams that were longer than their window at takeover."""
    read = partial(_restore_queue, owned, stream)
    complaint = f"the rest of {stream.decode()} cannot be read"
    await insist(read, complaint, first_s=RETRY_S, last_s=RETRY_S, given_up=lambda: owned.closed)
    if not owned.closed:
        owned.arm()


async def _restore_running(log: EventLog, owned: OwnedModel, executor: str, queued: dict[bytes, RequestQueued]) -> None:
    after = START
    stream = keys.batches(executor)
    while entries := await log.range(stream, after, _PAGE):
        for entry in entries:
            if entry.fields and entry.fields[0] == FIELD_FACT:
                continue
            try:
                header = BatchHeader.unpack(entry.fields[entry.fields.index(FIELD_HEADER) + 1])
            except (InvalidRecord, ValueError) as error:
                _log.error("skipped an unreadable batch in %s: %s", stream.decode(), error)
                continue
            if header.model == owned.model:
                ids = [record.id for record in requests_of(entry)]
                is_burst = FIELD_WAVE in entry.fields
                _restore_batch(owned, header, executor, [queued[i] for i in ids if i in queued], is_burst=is_burst)
                if not is_burst:
                    others = [request_id for request_id in ids if request_id not in queued]
                    await _stop_settled(log, owned, header.batch_id, executor, others)
        after = entries[-1].id


def _restore_batch(
    owned: OwnedModel, header: BatchHeader, executor: str, requests: list[RequestQueued], *, is_burst: bool
) -> None:
    """An executor has this batch of a former owner; `requests` are its unsettled members. A batch of settled requests
    is finished, or is stopped: its slot is free, or soon will be.
    """
    if requests:
        owned.dispatched.restore(header.batch_id, executor, requests, is_burst=is_burst)
        owned.observe(
            BatchRunning(
                header.batch_id,
                executor,
                header.version,
                requests,
                header.via_owner,
                header.sequences,
                header.content_hash,
            )
        )


async def _stop_settled(log: EventLog, owned: OwnedModel, batch_id: str, executor: str, ids: list[bytes]) -> None:
    """Stop those of these requests that are settled and still run. A cancel settles a request first, and the former
    owner may be lost before it tells the executor. A stream may never end by itself.
    """
    attempts = await log.unsettled(owned.model, ids)
    settled = b"".join(one for one, attempt in zip(ids, attempts, strict=True) if attempt < 0)
    if settled:
        fact = pack_fact(ExecutionUnwanted(batch_id, settled))
        await log.append(keys.batches(executor), [FIELD_FACT, fact])


async def _restore_deaths(log: Streams, owned: OwnedModel) -> None:
    """The failure of a batch must be known before its requests are dispatched again; the reader brings it once more."""
    after = START
    while entries := await log.range(keys.facts(owned.model), after, _PAGE):
        for entry in entries:
            for fact in facts_of(entry):
                if isinstance(fact, BatchDied | BatchDiedInCompany):
                    owned.on_death(fact)
        after = entries[-1].id


async def ask_for_streams(log: Streams, owned: OwnedModel) -> None:
    """Have executors repeat what they reported to the former owner about their current batches: freed slots, first
    responses. For models that answer more than once.
    """
    fact = pack_fact(OwnerChanged(owned.model))
    for executor in owned.dispatched.older_than(0):
        await log.append(keys.batches(executor), [FIELD_FACT, fact])


async def visible_requests(log: WaveLog, model: str, until_us: int = _ALL_US) -> frozenset[bytes]:
    """The unsettled requests with visible responses, as executors have marked them in the log; other marks are removed.
    Raises what the log raises.
    """
    ids = await log.due(keys.visible(model), until_us, _MOST_MARKED)
    attempts = await log.unsettled(model, ids)
    over = [i for i, attempt in zip(ids, attempts, strict=True) if attempt < 0]
    if over:
        await log.drop_times(keys.visible(model), over)
    return frozenset(ids) - frozenset(over)


async def jobs_unseen(
    log: Jobs, model: str, marked: Collection[bytes], queued: Mapping[bytes, RequestQueued]
) -> set[bytes]:
    """The marked jobs without a kept response: their executor was lost between both writes, so they may run again."""
    unseen: set[bytes] = set()
    for request_id in marked:
        request = queued.get(request_id)
        is_job = request is not None and carried_of(request).record.is_job
        if is_job and not await log.job_responses(model, request_id, count=1):
            unseen.add(request_id)
    return unseen
