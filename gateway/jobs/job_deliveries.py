"""Notes in the log when this gateway first gives the outcome of a job to a caller (ADR 0070).

A note is written after the answer, which does not wait for it; if the log fails, the note is missing. A note says that
the gateway wrote the answer to a connection. Whether the client received it is not known.
"""

from __future__ import annotations

import asyncio
import contextlib

from charonia import keys
from charonia.clock import wall_ns
from charonia.errors import CharoniaError
from charonia.eventlog.port import Notes
from charonia.facts.delivery_notes import DeliveryNote
from charonia.tasks import Tasks

_LEAST_KEPT_S = 60
"""The minimum time that a note is kept, also of a job whose record goes at once."""
_MOST_KNOWN = 1_000
"""Jobs remembered here, so that one whose result is asked for again and again costs the log nothing more."""
_MOST_AT_ONCE = 200
"""Max notes being written. While the log is slow, deliveries beyond that are not noted."""

_PATIENCE_S = 1.0
"""How long a gateway that stops waits for its last notes."""


class JobDeliveries:
    """Writes the delivery notes of one gateway."""

    def __init__(self, log: Notes, gateway: str) -> None:
        self._log = log
        self._gateway = gateway
        self._known: dict[bytes, None] = {}
        self._tasks = Tasks()

    def given(self, model: str, job_id: bytes, retention_s: int) -> None:
        """Note that a caller gets the outcome now; `retention_s` is how long the job's record stays after its end."""
        if job_id in self._known or len(self._tasks) >= _MOST_AT_ONCE:
            return
        self._known[job_id] = None
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        note = DeliveryNote(wall_ns() // 1000, self._gateway).pack()
        self._tasks.spawn(self._write(model, job_id, note, max(retention_s, _LEAST_KEPT_S)))

    async def _write(self, model: str, job_id: bytes, note: bytes, ttl_s: int) -> None:
        key = keys.job_delivery(model, job_id)
        try:
            if await self._log.notes([key]) == [None]:
                await self._log.put_note(key, note, ttl_s)
        except CharoniaError:
            self._known.pop(job_id, None)  # the next answer tries again

    async def close(self) -> None:
        """Wait for the notes being written, for a second at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._tasks.settled()
        await self._tasks.close()
