"""How a new owner finds out where a model's work stands: the unsettled tail, fed through the ordinary scheduler.

Readings, in this order: whether the queue is held back, the queue streams from their beginning as far as their windows
go (accepted), for each page of them which requests are unsettled, what live executors hold in their batch streams
(dispatched, still running), which batches died unheard, and of which requests responses were seen. Capacity is told to
the scheduler only afterwards, so nothing is dispatched twice. Whatever is written meanwhile arrives through the reader,
which goes on where the pages ended; the scheduler drops repetitions.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from batcher.entries.carriers import requests_of
from batcher.entries.interrupted import jobs_unseen, visible_requests
from batcher.owner.owned import OwnedModel
from batcher.scheduling.observations import QueueHeld, RequestQueued, ResponsesSeen
from charonia import keys
from charonia.errors import InvalidRecord
from charonia.eventlog.control import ControlPlane, facts_of
from charonia.eventlog.port import START, EventLog, Streams
from charonia.facts.events import FIELD_FACT, BatchDied, BatchDiedInCompany, OwnerChanged, ProcessJoined, pack_fact
from charonia.wire import FIELD_HEADER, BatchHeader

from .restoring import restore_queue, restore_running, restore_sequences

_log = logging.getLogger(__name__)
_PAGE = 500


async def newcomers(control: ControlPlane) -> set[str]:
    """Executors that are news here: a former owner may have heard of them, and given them batches."""
    joined = [fact for fact in await control.unheard() if isinstance(fact, ProcessJoined)]
    return {fact.incarnation for fact in joined if fact.role == "executor"}


async def recover(log: EventLog, owned: OwnedModel, executors: Collection[str]) -> int:
    """Restore `owned` from the log; returns the number of requests found unsettled.

    What comes from now on is read once the windows are followed, which the caller does.
    """
    if await log.paused(owned.model):
        owned.observe(QueueHeld(True))
    queued: dict[bytes, RequestQueued] = {}
    # until no lane is new: the fact of one opened meanwhile may have gone to a former owner that knew no better yet
    while lanes := [
        (stream, lane)
        for level, lane in await log.lanes(owned.model)
        if (stream := keys.queue(owned.model, level, lane)) not in owned.windows
    ]:
        for stream, lane in lanes:
            owned.windows.open(stream, lane)
        for stream, _ in lanes:
            queued |= await restore_queue(owned, stream)
    # also those of which nothing waits now
    await restore_sequences(owned)
    for executor in executors:
        await _restore_running(log, owned, executor, queued)
    await _restore_deaths(log, owned)
    await owned.end_leases_of_gone()
    for lost in await owned.notes.read(queued):
        if lost.executor not in executors:
            owned.observe(lost)
    if marked := await visible_requests(log, owned.model):
        owned.observe(ResponsesSeen(marked - await jobs_unseen(log, owned.model, marked, queued)))
    return len(queued)


async def _restore_running(log: Streams, owned: OwnedModel, executor: str, queued: dict[bytes, RequestQueued]) -> None:
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
                restore_running(owned, header, executor, [queued[i] for i in ids if i in queued])
        after = entries[-1].id


async def _restore_deaths(log: Streams, owned: OwnedModel) -> None:
    """What a batch died of must be known before its requests are given out again; the reader brings it once more."""
    after = START
    while entries := await log.range(keys.facts(owned.model), after, _PAGE):
        for entry in entries:
            for fact in facts_of(entry):
                if isinstance(fact, BatchDied | BatchDiedInCompany):
                    owned.on_death(fact)
        after = entries[-1].id


async def ask_for_streams(log: Streams, owned: OwnedModel) -> None:
    """Have executors say again what they told the former owner of batches that they have still: freed slots, begun
    responses. For models that answer more than once.
    """
    fact = pack_fact(OwnerChanged(owned.model))
    for executor in owned.given.older_than(0):
        await log.append(keys.batches(executor), [FIELD_FACT, fact])
