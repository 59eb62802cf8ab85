"""The responses of one request that has several: sent in their order, each once it is in the log, the last one settled.

Responses of a job are kept in its record before they are sent, as executors keep those of other models.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from charonia import keys
from charonia.errors import CharoniaError
from charonia.eventlog.port import JobLog
from charonia.wire import RequestRecord, record_fields

_log = logging.getLogger(__name__)

_RETRY_S = 0.2


class Outbox:
    """One request's. `attempt` is in every place: a new owner gives the same responses the same places."""

    def __init__(self, log: JobLog, model: str, record: RequestRecord, attempt: int) -> None:
        self.attempt = attempt
        self.count = 0
        """Responses given so far: the index of the next one."""
        self._log = log
        self._model = model
        self._record = record
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._then: Callable[[], None] | None = None
        self.running = False

    @property
    def place(self) -> tuple[int, int]:
        """The place of the next response."""
        return (self.attempt, self.count)

    def put(self, answer: bytes) -> bool:
        """Send a response that is not the last, at `place`. Whether `drain` must be started."""
        self._waiting.append((self.count, answer))
        self.count += 1
        return self._start()

    def end(self, then: Callable[[], None]) -> bool:
        """`then` is called when all before it is sent. Whether `drain` must be started."""
        self._then = then
        return self._start()

    def _start(self) -> bool:
        started, self.running = self.running, True
        return not started

    async def drain(self) -> None:
        """Send what waits; insist until the log has it."""
        try:
            while self._waiting:
                index, answer = self._waiting[0]
                try:
                    if self._record.is_job:
                        await self._log.add_job_responses(self._model, self._record.id, self.attempt, index, [answer])
                    if self._record.endpoint:
                        await self._log.append(keys.replies(self._record.endpoint), record_fields([answer]))
                except CharoniaError as error:
                    _log.warning("a response of '%s' cannot be sent, trying again: %s", self._model, error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._waiting.popleft()
        finally:
            self.running = False
        if self._then is not None:
            then, self._then = self._then, None
            then()
