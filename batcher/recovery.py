"""How a new owner finds out where a model's work stands: the unsettled tail, fed through the ordinary scheduler.

Three readings, in this order: the queue streams from their beginning (accepted), for each page of them which requests
are unsettled, and what live executors hold in their batch streams (dispatched, still running). Capacity is told to the
scheduler only afterwards, so nothing is dispatched twice. Whatever is written meanwhile arrives through the reader,
which goes on where the pages ended; the scheduler drops repetitions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from charonia import keys
from charonia.errors import InvalidRecord
from charonia.eventlog.port import START, Entry, EventLog
from charonia.wire import FIELD_HEADER, BatchHeader, unpack_request

from .carriers import carried
from .owned import OwnedModel
from .scheduling.observations import RequestQueued

_log = logging.getLogger(__name__)
_PAGE = 500


async def recover(log: EventLog, owned: OwnedModel, executors: Iterable[str]) -> int:
    """Restore `owned` from the log and start following it; returns the number of requests found unsettled."""
    followed: dict[bytes, bytes] = {}
    queued: dict[bytes, RequestQueued] = {}
    # until no lane is new: the fact of one opened meanwhile may have gone to a former owner that knew no better yet
    while lanes := [
        s for level, lane in await log.lanes(owned.model) if (s := keys.queue(owned.model, level, lane)) not in followed
    ]:
        for stream in lanes:
            followed[stream] = await _restore_queue(log, owned, stream, queued)
    for executor in executors:
        await _restore_running(log, owned, executor, queued)
    owned.follow(followed.items())
    return len(queued)


async def _restore_queue(log: EventLog, owned: OwnedModel, stream: bytes, queued: dict[bytes, RequestQueued]) -> bytes:
    """Restore one queue stream, adding to `queued`; the id of its last entry."""
    after = START
    while entries := await log.range(stream, after, _PAGE):
        ids = [request_id for entry in entries for request_id in _request_ids(entry)]
        attempts = dict(zip(ids, await log.unsettled(owned.model, ids), strict=True))
        queued |= owned.restore(stream, entries, attempts)
        after = entries[-1].id
    return after


async def _restore_running(log: EventLog, owned: OwnedModel, executor: str, queued: dict[bytes, RequestQueued]) -> None:
    after = START
    stream = keys.batches(executor)
    while entries := await log.range(stream, after, _PAGE):
        for entry in entries:
            try:
                header = BatchHeader.unpack(entry.fields[entry.fields.index(FIELD_HEADER) + 1])
            except (InvalidRecord, ValueError) as error:
                _log.error("skipped an unreadable batch in %s: %s", stream.decode(), error)
                continue
            if header.model == owned.model:
                ids = _request_ids(entry)
                owned.restore_running(header, executor, [queued[i] for i in ids if i in queued])
        after = entries[-1].id


def _request_ids(entry: Entry) -> Iterable[bytes]:
    for record in carried(entry):
        try:
            yield unpack_request(record).id
        except InvalidRecord:
            continue
