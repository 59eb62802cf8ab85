"""A log in memory that takes jobs only when it is let."""

from __future__ import annotations

import asyncio
from typing import Any

from memory_log.log import MemoryLog

from charonia.facts.jobs import JobTicket


class Slow(MemoryLog):
    """Takes a job only when it is let: as at a level of durability that has a connection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def accept_job(self, *args: Any, **more: Any) -> JobTicket:
        self.asked.set()
        # what was sent is done by the log, whatever becomes of who sent it
        return await asyncio.shield(asyncio.ensure_future(self._later(*args, **more)))

    async def _later(self, *args: Any, **more: Any) -> JobTicket:
        await self.let.wait()
        return await super().accept_job(*args, **more)
