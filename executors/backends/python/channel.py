"""The model process's end of the socket: blocking, any thread may send, one thread receives."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from .frames import Buffer, Frame, FrameReader, Kind, pack

_MAX_BUFFERS_PER_WRITE = 512


class ChannelClosed(Exception):
    """The executor is gone."""


class Channel:
    """Frames over a connected socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(True)
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()
        self._sending = threading.Lock()
        # A forked child of the model must neither write into the stream nor keep it open after our end.
        os.register_at_fork(after_in_child=self._drop_after_fork)
        self._owner = os.getpid()

    def send(self, kind: Kind, call: int, content: Any, data: Iterable[Buffer] = ()) -> None:
        """Write one frame whole. Raises `ChannelClosed`, also in processes forked from this one."""
        buffers = [memoryview(buffer).cast("B") for buffer in pack(kind, call, content, data) if len(buffer)]
        if os.getpid() != self._owner:
            raise ChannelClosed("a forked process has no connection to the executor")
        try:
            with self._sending:
                while buffers:
                    sent = self._socket.sendmsg(buffers[:_MAX_BUFFERS_PER_WRITE])
                    while buffers and sent >= len(buffers[0]):
                        sent -= len(buffers.pop(0))
                    if sent:
                        buffers[0] = buffers[0][sent:]
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> Frame:
        """The next frame. Raises `ChannelClosed` at the end of the stream, `FrameError` for bytes that are no frame."""
        while not self._frames:
            try:
                count = self._socket.recv_into(self._reader.get_buffer())
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if count == 0:
                raise ChannelClosed("the executor closed the connection")
            self._frames.extend(self._reader.received(count))
        return self._frames.popleft()

    def _drop_after_fork(self) -> None:
        self._socket.close()
