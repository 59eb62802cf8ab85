"""Reads a connection while large messages arrive, straight to their memory where a frame is long enough.

asyncio gives an ordinary protocol new bytes for each read. For a large message that is a copy, and new memory pages,
for each piece. This protocol reads into one reused buffer, copies the data of frames once, and reads the rest of a long
frame directly to its destination. The connection handles all other frames.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from .codec.grpc_messages import Assembler
from .codec.http2_frames import DATA, END_STREAM, HEAD, HEAD_BYTES, LARGEST_ID, PADDED, checked_length
from .connection_calls import Calls
from .outbox import Stream

WORTH_SWITCHING_BYTES = 1 << 16
"""So much of a message must be missing: switching the protocol twice costs more for less."""

_BUFFER_BYTES = 1 << 18
"""More than the largest frame, so that frames of other streams fit."""

_STRAIGHT_BYTES = 1 << 15
"""The rest of a frame is read directly if it is this long: that costs a system call."""

_MAX_IDLE_BUFFERS = 16

_idle_buffers: list[bytearray] = []


class Connection(Protocol):
    """The connection, as this reader uses it: it handles frames and bounds the data (`connection.Connection`)."""

    calls: Calls

    @property
    def is_over(self) -> bool: ...

    def connection_lost(self, exc: Exception | None, /) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def eof_received(self) -> bool: ...

    def read_large(self, reader: LargeReader, size: int) -> None: ...

    def comes_large(self, number: int, size: int) -> bool: ...

    def one(self, kind: int, flags: int, number: int, frame: bytes) -> None: ...

    def allows_large(self, stream: Stream) -> int: ...

    def count_large(self, stream: Stream, size: int) -> None: ...

    def count_data(self, number: int, size: int, *, ends: bool) -> None: ...


class LargeReader(asyncio.BufferedProtocol):
    """The protocol of a connection's transport while large messages arrive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffer = _idle_buffers.pop() if _idle_buffers else bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._held = 0
        """Bytes of an incomplete frame at the beginning of the buffer."""
        self._left = 0
        """Missing bytes of a frame of a large message."""
        self._size = self._number = self._flags = 0
        """Size, stream and flags of that frame."""
        self._straight = False
        self._ended = False

    def begin(self, come: memoryview) -> None:
        """Read data that has arrived already, from the beginning of a frame. Raises as the connection's frames do."""
        self._read(come)

    # -- transport ----------------------------------------------------------------------------------------------------

    def get_buffer(self, _sizehint: int) -> memoryview:
        if self._left >= _STRAIGHT_BYTES:
            target = self._target()
            if target is not None:
                self._straight = True
                return target[: self._left]
        self._straight = False
        return self._view[self._held :]

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.read_large(self, nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    # -- reading ------------------------------------------------------------------------------------------------------

    def came(self, nbytes: int) -> None:
        """`nbytes` were read into the latest buffer. Raises as the connection's frames do."""
        if not self._straight:
            self._read(self._view[: self._held + nbytes])
            return
        self._straight = False
        assembler = self._assembler()
        if assembler is not None:  # otherwise the call has just ended, and the data is dropped
            self._wrote(assembler, nbytes)
        self._left -= nbytes
        if not self._left:
            self._finish()

    def end(self) -> bytes:
        """Stop reading; returns the incomplete frame."""
        if self._ended:
            return b""
        self._ended = True
        rest = bytes(self._view[: self._held])
        self._view.release()
        if len(_idle_buffers) < _MAX_IDLE_BUFFERS:
            _idle_buffers.append(self._buffer)
        return rest

    @property
    def is_within(self) -> bool:
        """Whether a frame of a large message is incomplete: only this reader can continue."""
        return self._left > 0

    def _read(self, view: memoryview) -> None:
        size = len(view)
        connection = self._connection
        at = self._held = 0
        while True:
            if self._left:
                end = min(at + self._left, size)
                self._data(view[at:end])
                at = end
                if self._left:
                    return
                if connection.is_over:
                    return
            if size - at < HEAD_BYTES:
                break
            at = self._run(view, at)
            if size - at < HEAD_BYTES:
                break
            high, low, kind, flags, number = HEAD.unpack_from(view, at)
            length = checked_length(high << 8 | low)
            start, end = at + HEAD_BYTES, at + HEAD_BYTES + length
            if kind == DATA and not flags & PADDED and connection.comes_large(number & LARGEST_ID, length):
                self._size = self._left = length
                self._number, self._flags = number & LARGEST_ID, flags
                at = start
                continue
            if end > size:
                break
            connection.one(kind, flags, number & LARGEST_ID, bytes(view[at:end]))
            at = end
            if connection.is_over:
                return
        if at < size:
            self._held = size - at
            self._view[: self._held] = bytes(view[at:])

    def _run(self, view: memoryview, at: int) -> int:
        """Take consecutive whole DATA frames of one large message, counted together; returns where they end."""
        connection, size = self._connection, len(view)
        number = HEAD.unpack_from(view, at)[4]
        stream = connection.calls.ordinary(number)
        allowed = connection.allows_large(stream) if stream is not None else 0
        if stream is None or stream.assembler is None or not allowed:
            return at
        target = stream.assembler.target
        assert target is not None
        taken = 0
        while size - at >= HEAD_BYTES:
            high, low, kind, flags, other = HEAD.unpack_from(view, at)
            length = high << 8 | low
            start = at + HEAD_BYTES
            end = start + length
            after = taken + length
            if other != number or kind != DATA or flags or end > size or after > allowed or not length:
                break
            target[taken:after] = view[start:end]
            taken, at = after, end
        if taken:
            connection.count_large(stream, taken)
            self._number = number
            self._wrote(stream.assembler, taken)
            connection.count_data(number, taken, ends=False)
        return at

    def _data(self, part: memoryview) -> None:
        """Take the next part of the incomplete frame."""
        assembler = self._assembler()
        if assembler is not None and (target := assembler.target) is not None:
            target[: len(part)] = part
            self._wrote(assembler, len(part))
        self._left -= len(part)
        if not self._left:
            self._finish()

    def _wrote(self, assembler: Assembler, size: int) -> None:
        message = assembler.wrote(size)
        stream = self._stream()
        if message is not None and stream is not None:
            self._connection.calls.came(stream, [message])

    def _finish(self) -> None:
        """The frame is complete."""
        self._connection.count_data(self._number, self._size, ends=bool(self._flags & END_STREAM))

    def _stream(self) -> Stream | None:
        return self._connection.calls.ordinary(self._number)

    def _assembler(self) -> Assembler | None:
        stream = self._stream()
        return None if stream is None or stream.tail is not None else stream.assembler

    def _target(self) -> memoryview | None:
        assembler = self._assembler()
        return None if assembler is None else assembler.target
