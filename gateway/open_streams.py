"""Counts the responses of a gateway's streamed requests, of any protocol, and publishes what is open (ADR 0059).

A stream is a request whose responses are sent one by one, from its admission to its last response. What is open is a
note in the log, which the console reads (`charonia.facts.stream_notes`). While none is open nothing is written.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import Notes
from charonia.facts.stream_notes import MOST, TTL_S, StreamRow, StreamsNote
from charonia.tasks import Tasks

INTERVAL_S = 2.0
"""That of the console's readings."""

_log = logging.getLogger(__name__)


class OpenStream:
    """One stream. `responses` and `last_ns` are set by the loop that sends it."""

    __slots__ = ("client_id", "last_ns", "model", "responses", "since_ns", "tenant", "version")

    def __init__(self, model: str, version: int, tenant: str, client_id: str) -> None:
        self.model, self.version, self.tenant, self.client_id = model, version, tenant, client_id
        self.since_ns = wall_ns()
        self.last_ns = 0
        self.responses = 0


class OpenStreams:
    """The streams of one gateway, those that are open the longest first."""

    def __init__(self, log: Notes, incarnation: str, *, interval_s: float = INTERVAL_S) -> None:
        self._log = log
        self._key = keys.open_streams(incarnation)
        self._interval_s = interval_s
        self._open: dict[OpenStream, None] = {}
        self._publishing = False
        self._published = False
        self._complained = False
        self._tasks = Tasks()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, model: str, version: int, tenant: str, client_id: str) -> OpenStream:
        """Count a stream from now; `closed` has to follow."""
        stream = OpenStream(model, version, tenant, client_id)
        self._open[stream] = None
        if not self._publishing:
            self._publishing = True
            self._tasks.spawn(self._publish(), "open streams")
        return stream

    def closed(self, stream: OpenStream) -> None:
        """The stream has ended."""
        del self._open[stream]

    def note(self) -> StreamsNote:
        """What is open now."""
        rows = tuple(
            StreamRow(
                one.model,
                one.version,
                one.tenant,
                one.client_id,
                one.since_ns // 1000,
                one.last_ns // 1000,
                one.responses,
            )
            for one in islice(self._open, MOST)
        )
        return StreamsNote(len(self._open), wall_ns() // 1000, rows)

    async def close(self) -> None:
        """Publish nothing more; the last note expires."""
        await self._tasks.close()

    async def _publish(self) -> None:
        """Write the note as long as streams are open, and once more when none is: then it is empty."""
        while self._open or self._published:
            await asyncio.sleep(self._interval_s)
            if self._open or self._published:
                await self._write()
        self._publishing = False

    async def _write(self) -> None:
        note = self.note()
        try:
            await self._log.put_note(self._key, note.pack(), TTL_S)
        except CharoniaError as error:
            if not self._complained:  # the streams themselves need no note
                self._complained = True
                _log.warning("open streams are not published: %s", error)
            self._published = False
        else:
            self._complained = False
            self._published = bool(note.rows)
