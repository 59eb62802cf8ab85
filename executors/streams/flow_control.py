"""Limits the responses of one instance that are not yet written to the log."""

from __future__ import annotations

import asyncio

MAX_UNWRITTEN_BYTES = 4 << 20
"""Unwritten responses that one instance may have. The instance must wait when it has more."""
_RECORD_BYTES = 256
"""Overhead that is counted for each response."""


class FlowControl:
    """Counts one instance's unwritten responses. After the limit is reached, half of them must be written first."""

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
