"""Frames of HTTP/2 read back, and a transport that keeps what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


def frames_of(data: bytes) -> list[Frame]:
    """All frames in `data`, which holds whole ones."""
    frames = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        end = at + 9 + size
        assert end <= len(data), "an incomplete frame"
        frames.append(
            Frame(data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9], "big"), data[at + 9 : end])
        )
        at = end
    return frames


class Written(asyncio.Transport):
    """`pauses` is called within writes, as transports do when they have enough."""

    def __init__(self) -> None:
        super().__init__()
        self._data = bytearray()
        self.count = 0
        self.pauses: Callable[[], None] | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._data += data
        self.count += 1
        if self.pauses is not None:
            self.pauses()

    def taken(self) -> bytes:
        """What was written since the last time."""
        data = bytes(self._data)
        self._data.clear()
        return data
