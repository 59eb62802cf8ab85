"""The end of an HTTP connection whose client still sends: what comes is dropped, so that its answer is not lost.

A connection that is closed before all has been read of it is reset by the system, and the client's system throws away
the answer with it. So the server says that it sends no more, and reads on for a while (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio

LINGER_S = 30.0
"""How long a client may go on sending."""

SILENCE_S = 2.0
"""A client that has sent nothing for so long, or for twice that, has nothing more to send."""

_dropped = bytearray(1 << 16)


class Lingering(asyncio.BufferedProtocol):
    """The protocol of a transport that reads until the client ends, is silent, or has had `LINGER_S`."""

    def __init__(self, transport: asyncio.Transport, connection: asyncio.Protocol) -> None:
        self._transport = transport
        self._connection = connection
        self._came = True
        self._looks_left = int(LINGER_S / SILENCE_S)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(SILENCE_S, self._look)

    def _look(self) -> None:
        if not self._came or not self._looks_left:
            self._transport.abort()  # the client may not read, either
            return
        self._came = False
        self._looks_left -= 1
        self._timer = self._loop.call_later(SILENCE_S, self._look)

    def get_buffer(self, _sizehint: int) -> bytearray:
        return _dropped

    def buffer_updated(self, _nbytes: int) -> None:
        self._came = True

    def eof_received(self) -> None:
        """The client ends, too: the transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
