"""How many responses of one instance may be on their way to the log at once."""

from __future__ import annotations

import asyncio

MAX_UNWRITTEN_BYTES = 4 << 20
"""Bytes of responses that one instance may have on their way to the log; past it the instance is to wait."""
_RECORD_BYTES = 256
"""What a response counts for beside its record."""


class FlowControl:
    """The responses of one instance that are on their way to the log."""

    def __init__(self) -> None:
        self._unwritten_bytes = 0
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()

    @property
    def full(self) -> bool:
        return not self._has_capacity.is_set()

    def add(self, record: bytes) -> None:
        self._unwritten_bytes += len(record) + _RECORD_BYTES
        if self._unwritten_bytes > MAX_UNWRITTEN_BYTES:
            self._has_capacity.clear()

    def written(self, record: bytes) -> None:
        self._unwritten_bytes -= len(record) + _RECORD_BYTES
        if self._unwritten_bytes <= MAX_UNWRITTEN_BYTES // 2:
            self._has_capacity.set()

    async def wait_for_capacity(self) -> None:
        await self._has_capacity.wait()
