"""Flow control of one HTTP connection: when no more of it is read, and who waits until it takes more."""

from __future__ import annotations

import asyncio
from collections.abc import Sized

HIGH_WATER_BYTES = 65_536
"""Of a body nobody has asked for, no more is read."""


class FlowControl:
    """`waiting` are the connection's requests that wait for their turn; with `max_waiting` nothing more is read."""

    __slots__ = ("_max_waiting", "_transport", "_waiting", "_writable", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport, waiting: Sized, max_waiting: int) -> None:
        self._transport = transport
        self._waiting = waiting
        self._max_waiting = max_waiting
        self._writable = asyncio.Event()
        self.read_paused = False
        self.write_paused = False

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless enough requests wait."""
        if self.read_paused and len(self._waiting) < self._max_waiting:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()

    async def drain(self) -> None:
        """Wait until the connection takes more, or is lost."""
        while self.write_paused:
            await self._writable.wait()
