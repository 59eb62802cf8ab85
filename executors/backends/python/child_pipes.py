"""asyncio protocols for the executor's ends of a model process's socket and output pipe."""

from __future__ import annotations

import asyncio
from typing import Protocol

from .protocol.frames import Frame, FrameError, FrameReader


class PipeEvents(Protocol):
    """Gets the events of both pipes. Implemented by `child_process.ChildProcess`."""

    def frame_received(self, frame: Frame) -> None:
        """Handle one frame. Raises `FrameError`, or other exceptions for malformed content."""

    def may_write(self, writable: bool) -> None: ...

    def connection_ended(self) -> None: ...

    def output_received(self, data: bytes) -> None: ...

    def stream_ended(self) -> None: ...

    def kill(self, reason: str) -> None: ...


class FrameProtocol(asyncio.BufferedProtocol):
    """Reads frames from the socket."""

    def __init__(self, child: PipeEvents) -> None:
        self._child = child
        self._reader = FrameReader()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.received(nbytes):
                self._child.frame_received(frame)
        except (FrameError, ValueError, TypeError, IndexError) as error:
            self._child.kill(f"it does not keep to the protocol: {error}")

    def pause_writing(self) -> None:
        self._child.may_write(False)

    def resume_writing(self) -> None:
        self._child.may_write(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._child.connection_ended()


class OutputProtocol(asyncio.Protocol):
    """Reads the output of the process."""

    def __init__(self, child: PipeEvents) -> None:
        self._child = child

    def data_received(self, data: bytes) -> None:
        self._child.output_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._child.stream_ended()
