"""Queues what was written before this owner, page by page: at takeover and, where a window was full, later.

Which requests are settled is asked for each page; what a whole takeover reads and in which order is `recovery`'s.
"""

from __future__ import annotations

import asyncio
import logging

from batcher.entries.bursting import burst_wave
from batcher.entries.carriers import requests_of, work_of
from batcher.owner.owned import OwnedModel
from batcher.owner.schedulers import sequences_found
from batcher.scheduling.observations import BatchRunning, RequestQueued
from charonia.errors import CharoniaError
from charonia.eventlog.port import Entry
from charonia.wire import FIELD_WAVE, BatchHeader, Wave

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_PAGE = 500


async def restore_queue(owned: OwnedModel, stream: bytes) -> dict[bytes, RequestQueued]:
    """Queue what is unsettled of entries written before this owner, as far as the window goes; by request id.

    Entries of settled requests are deleted. The stream is open in `windows`.
    """
    owned.windows.catch_up = lambda stream: owned.spawn(restore_more(owned, stream))
    queued: dict[bytes, RequestQueued] = {}
    while entries := await owned.log.range(stream, owned.windows.after(stream), _PAGE):
        last_id = entries[-1].id
        entries = await _without_waves(owned, stream, entries)
        records = [record for entry in entries for record in requests_of(entry)]
        ids = [record.id for record in records]
        attempts = dict(zip(ids, await owned.log.unsettled(owned.model, ids), strict=True))
        # after it is known what is settled: what began before that is in the log by now
        await restore_sequences(owned)
        await owned.find_gone({r.endpoint for r in records if r.endpoint and attempts[r.id] >= 0})
        if owned.closed:
            return queued
        queued |= {request.id: request for request in owned.queue(stream, entries, attempts)}
        owned.windows.read(stream, last_id)
        if owned.windows.is_full(stream):
            break
    else:
        owned.windows.fell_behind(stream, False)
        return queued
    owned.windows.fell_behind(stream, True)
    return queued


async def _without_waves(owned: OwnedModel, stream: bytes, entries: list[Entry]) -> list[Entry]:
    """Burst the waves among these entries: it is not known which an executor has begun. Their requests follow later."""
    plain: list[Entry] = []
    for entry in entries:
        if FIELD_WAVE not in entry.fields:
            plain.append(entry)
            continue
        for wave in work_of(entry):
            if isinstance(wave, Wave):
                await burst_wave(owned.log, owned.model, stream, entry.id, wave)
    return plain


async def restore_sequences(owned: OwnedModel) -> None:
    """Learn of the live sequences that the log knows; those known already stay as they are."""
    if owned.is_sequential:
        for found in sequences_found(await owned.log.sequences(owned.model)):
            owned.observe(found)


async def restore_more(owned: OwnedModel, stream: bytes) -> None:
    """Read on where there was more than the window held at takeover."""
    while not owned.closed:
        try:
            await restore_queue(owned, stream)
            break
        except CharoniaError as error:
            _log.warning("the rest of %s cannot be read, trying again: %s", stream.decode(), error)
        await asyncio.sleep(_RETRY_S)
    if not owned.closed:
        owned.arm()


def restore_running(owned: OwnedModel, header: BatchHeader, executor: str, requests: list[RequestQueued]) -> None:
    """An executor holds this batch of a former owner; `requests` are its unsettled members.

    A batch of settled requests is finished: only its entry is not deleted yet, and its slot is free.
    """
    if requests:
        owned.given.add(header.batch_id, executor, requests)
        owned.given.sent(header.batch_id, elsewhere=True)
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
