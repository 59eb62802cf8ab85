"""What a queued request drags along: the log entry that carries it, deleted when all it carries is settled.

Deleting is only tidying: a successor finds an entry of settled requests and deletes it itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from msgspec import Struct

from batcher.scheduling.observations import RequestQueued
from charonia.errors import CharoniaError, InvalidRecord
from charonia.eventlog.port import Entry, Streams
from charonia.tensors import Buffer
from charonia.wire import RequestRecord, Wave, records_of, requests_in, unpack_request, work_in

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_GATHER_S = 0.05


def carried(entry: Entry) -> list[Buffer]:
    """The records of an entry; one whose fields cannot be told apart carries none, and is logged."""
    try:
        return records_of(entry.fields)
    except InvalidRecord as error:
        _log.error("entry %s carries no readable records: %s", entry.id.decode(errors="replace"), error)
        return []


def requests_of(entry: Entry) -> list[RequestRecord]:
    """The requests of an entry, those of a wave one by one, without those that cannot be read."""
    try:
        return requests_in(entry.fields)
    except InvalidRecord:
        return _readable(entry)


def work_of(entry: Entry) -> list[RequestRecord | Wave]:
    """What an entry carries, waves as they are, without what cannot be read."""
    try:
        return work_in(entry.fields)
    except InvalidRecord:
        return [*_readable(entry)]


def _readable(entry: Entry) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    for record in carried(entry):
        try:
            records.append(unpack_request(record))
        except InvalidRecord as error:
            _log.error("dropped an unreadable request in %s: %s", entry.id.decode(errors="replace"), error)
    return records


class CarrierEntry:
    """A queue entry and how many of its requests are not settled yet."""

    __slots__ = ("entry_id", "remaining", "stream")

    def __init__(self, stream: bytes, entry_id: bytes, remaining: int) -> None:
        self.stream = stream
        self.entry_id = entry_id
        self.remaining = remaining


class Carried(Struct, eq=False, gc=False):
    """What the scheduler hands back with a request: its record (of a wave, the wave) and the entry that carries it.

    `begun` is the highest attempt the log knows of: a settlement with a lower one would be fenced. `restored`: it was
    found at takeover, so every attempt is recorded, the first as well.
    """

    record: RequestRecord
    entry: CarrierEntry
    begun: int
    restored: bool = False
    settled: bool = False


def carrier_of(request: RequestQueued) -> Carried:
    """What this service put into the request for itself."""
    carried_ = request.carrier
    assert isinstance(carried_, Carried)
    return carried_


class Deletions:
    """Entries to delete, gathered for 50 ms (a command for each costs two wake-ups more) and insisted on until done."""

    def __init__(self, log: Streams) -> None:
        self._log = log
        self._wanted: dict[bytes, list[bytes]] = {}
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    def add(self, stream: bytes, entry_id: bytes) -> None:
        self._wanted.setdefault(stream, []).append(entry_id)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._delete(), name="deletions")

    async def _delete(self) -> None:
        while self._wanted and not self.closed:
            await asyncio.sleep(_GATHER_S)
            wanted, self._wanted = self._wanted, {}
            failed = False
            for stream, ids in wanted.items():
                try:
                    await self._log.delete_entries(stream, ids)
                except CharoniaError:
                    # the settlements are recorded; the wish is kept until the log is back
                    self._wanted.setdefault(stream, []).extend(ids)
                    failed = True
            if failed:
                await asyncio.sleep(_RETRY_S)

    async def done(self) -> None:
        """Wait until what was wanted so far is deleted."""
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def close(self) -> None:
        self.closed = True
        if self._task is not None:
            self._task.cancel()
