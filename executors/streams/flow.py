"""How many responses of one instance may be on their way to the log at once."""

from __future__ import annotations

import asyncio

MOST_WAITING_BYTES = 4 << 20
"""Bytes of responses that one instance may have on their way to the log; past it the instance is to wait."""
_RECORD_BYTES = 256
"""What a response counts for beside its record."""


class Flow:
    """The responses of one instance that are on their way to the log."""

    def __init__(self) -> None:
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def full(self) -> bool:
        return not self._room.is_set()

    def add(self, record: bytes) -> None:
        self._waiting_bytes += len(record) + _RECORD_BYTES
        if self._waiting_bytes > MOST_WAITING_BYTES:
            self._room.clear()

    def written(self, record: bytes) -> None:
        self._waiting_bytes -= len(record) + _RECORD_BYTES
        if self._waiting_bytes <= MOST_WAITING_BYTES // 2:
            self._room.set()

    async def room(self) -> None:
        await self._room.wait()
