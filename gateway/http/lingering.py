"""Closes an HTTP connection whose client is still sending, without losing the answer (RFC 9112, section 9.6).

If a server closes a socket with unread data, the kernel resets the connection and the client may lose the answer. So
the server closes its sending side, then reads and drops data for a while.
"""

from __future__ import annotations

import asyncio

LINGER_S = 30.0
"""How long the client may continue to send."""

SILENCE_S = 2.0
"""Interval of the checks; the connection ends at the first one that finds no new data since the one before."""

_dropped = bytearray(1 << 16)


class Lingering(asyncio.BufferedProtocol):
    """Reads from a transport until the client closes it, is silent, or `LINGER_S` have passed."""

    def __init__(self, transport: asyncio.Transport, connection: asyncio.Protocol) -> None:
        self._transport = transport
        self._connection = connection
        self._received = True
        self._checks_left = int(LINGER_S / SILENCE_S)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(SILENCE_S, self._check)

    def _check(self) -> None:
        if not self._received or not self._checks_left:
            self._transport.abort()  # the client may not read, either
            return
        self._received = False
        self._checks_left -= 1
        self._timer = self._loop.call_later(SILENCE_S, self._check)

    def get_buffer(self, _sizehint: int) -> bytearray:
        return _dropped

    def buffer_updated(self, _nbytes: int) -> None:
        self._received = True

    def eof_received(self) -> None:
        """Returning None has the transport close itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
