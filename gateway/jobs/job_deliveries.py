"""Notes in the log when a caller of this gateway is first given the outcome of a job.

It is written behind the answer, which waits for nothing: a note that the log does not take is missing. That a gateway
has given an answer to a connection is what can be known of it; no client says that it has it.
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
"""Notes under way. What is more than that, while the log is slow, is not noted."""

_PATIENCE_S = 1.0
"""For so long a gateway that stops waits for its last notes."""


class JobDeliveries:
    """Those of one gateway."""

    def __init__(self, log: Notes, gateway: str) -> None:
        self._log = log
        self._gateway = gateway
        self._known: dict[bytes, None] = {}
        self._tasks = Tasks()

    def given(self, model: str, job_id: bytes, retention_s: int) -> None:
        """A caller gets the outcome now; `retention_s` is how long the job's record stays after its end."""
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
        """Waits for the notes that are under way, but not for a log that is away."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._tasks.settled()
        await self._tasks.close()
