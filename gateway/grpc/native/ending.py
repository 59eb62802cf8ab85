"""How a connection ends: after its calls and the client's consent, or at once with a reason.

RFC 9113, section 6.8; gRPC proposal A9.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from .codec.http2_frames import LARGEST_ID, PING, ErrorCode, frame, goaway
from .connection_calls import Calls
from .outbox import Outbox

_log = logging.getLogger(__name__)

_CLOSING_S = 20.0
"""For a client to read what is on its way."""
_LINGER_S = 1.0
"""For a client to hear that the connection ends, and to end it."""
_LEAVING_S = 5.0
"""A client that does not answer by then never will."""
_LEAVING_PING = b"leaving!"


class Ending:
    """The end of one connection. `last_id` tells the last stream that was taken."""

    def __init__(self, out: Outbox, calls: Calls, last_id: Callable[[], int]) -> None:
        self._out = out
        self._calls = calls
        self._last_id = last_id
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.takes_no_calls = False
        self.is_closing = False
        """What comes from now on is not looked at."""
        self._consent: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = []
        calls.on_end = self._close_if_left

    def connect(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def lost(self) -> None:
        """The transport is closed."""
        self._transport = None
        for timer in (self._consent, *self._timers):
            if timer is not None:
                timer.cancel()

    def leave(self, *, has_client: bool) -> None:
        """Take no more calls than are on their way; the connection is closed when those there are have ended.

        The client's answer to a ping says that it has heard of it: what it began until then is served.
        """
        if self._consent is not None or self._transport is None:
            return
        self._out.put(goaway(LARGEST_ID, ErrorCode.NO_ERROR) + frame(PING, 0, 0, _LEAVING_PING))
        self._consent = self._loop.call_later(_LEAVING_S if has_client else 0.0, self._leave)

    def answered(self, ping: bytes) -> None:
        """The client has answered a ping of ours."""
        if ping == _LEAVING_PING and self._consent is not None:
            self._leave()

    def _leave(self) -> None:
        if self.takes_no_calls or self._transport is None:
            return
        self.takes_no_calls = True
        self._out.put(goaway(self._last_id(), ErrorCode.NO_ERROR))
        self._close_if_left()

    def _close_if_left(self) -> None:
        if self.takes_no_calls and not self._calls.streams:
            self.close()

    def give_up(self, code: ErrorCode, text: str) -> None:
        """Close because of what the client did."""
        _log.debug("a connection is closed: %s, %s", code.name, text)
        if self._transport is not None:
            self._out.put(goaway(self._last_id(), code, text))
            self.close()
            for stream in list(self._calls.streams.values()):
                self._calls.abandon(stream)

    def close(self) -> None:
        """Close after what is on its way, and after the client has.

        What it still sends is read and not looked at: a socket that is closed with something unread takes back what it
        has sent, and the client would not learn why it ends, nor which of its calls it can send again elsewhere.
        """
        transport = self._transport
        if transport is None or self.is_closing:
            return
        self._out.flush()
        self._out.disconnect()
        self.is_closing = True
        self._timers.append(self._loop.call_later(_CLOSING_S, self.abort))
        if transport.is_closing() or not transport.can_write_eof():
            transport.close()
            return
        self._timers.append(self._loop.call_later(_LINGER_S, transport.close))
        try:
            transport.write_eof()
        except OSError:  # the client has gone
            transport.close()

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()
