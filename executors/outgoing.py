"""Responses of one instance on their way to the log, and how many there may be at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .streaming import StreamedBatch

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


@dataclass(slots=True)
class Outgoing:
    """One response on its way: of the request at `index` in its batch. `begins`: the first of several.

    An empty record says only that the request has ended: nobody wants its response.
    """

    batch: StreamedBatch
    index: int
    place: int
    record: bytes
    final: bool
    begins: bool = False
    again: bool = False
    """It has not ended: the model wants another turn (S41)."""


class Writer(Protocol):
    """Takes responses to where they go, in order."""

    def put(self, outgoing: Outgoing) -> None: ...

    def freed(self, batch: StreamedBatch) -> None:
        """The batch's instance is free although the batch has not ended."""
