"""The life of a connection: first settings, keep-alive, maximum age (G31), and its end.

It ends in order, after its calls and the client's acknowledgement, or at once with a reason (RFC 9113, section 6.8;
gRPC proposal A9).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Protocol

from .codec.http2_frames import LARGEST_ID, PING, ErrorCode, frame, goaway
from .codec.limits import KeepAlive
from .connection_calls import Calls
from .outbox import Outbox

_log = logging.getLogger(__name__)

FIRST_WORDS_S = 20.0
"""A client must have sent its settings, or opened a call, by then."""
_JITTER = 0.1
"""Otherwise connections of the same age would all end at once (gRPC proposal A9)."""
_CLOSING_S = 20.0
"""Time for the client to read the remaining data."""
_LINGER_S = 1.0
"""Time for the client to close, once it has learnt that the connection ends."""
_LEAVING_S = 5.0
"""Time for the client to answer the ping."""
_LEAVING_PING = b"leaving!"


class Living(Protocol):
    """The part of a connection that its timers use."""

    @property
    def has_calls(self) -> bool: ...

    @property
    def is_open(self) -> bool: ...

    def ping(self) -> None: ...

    def leave(self) -> None: ...

    def abort(self) -> None: ...


class Life:
    """The timers of one connection."""

    def __init__(self, connection: Living, keep_alive: KeepAlive) -> None:
        self._connection = connection
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.heard = False
        """Data was received since the last check."""
        self.unanswered_pings = 0
        """Pings sent since data was received."""

    def begin(self) -> None:
        keep_alive = self._keep_alive
        self._after("first words", FIRST_WORDS_S, self._expect_words)
        if keep_alive.time_s < 1e6:
            self._after("keep alive", keep_alive.time_s, self._look)
        if keep_alive.max_age_s:
            age_s = keep_alive.max_age_s * random.uniform(1 - _JITTER, 1 + _JITTER)
            self._after("age", age_s, self._leave)

    def end(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _after(self, what: str, delay_s: float, do: Callable[[], None]) -> None:
        self._timers[what] = self._loop.call_later(delay_s, do)

    def _expect_words(self) -> None:
        if not self._connection.is_open:
            self._connection.abort()

    def _look(self) -> None:
        keep_alive = self._keep_alive
        if self.heard:
            self.unanswered_pings = 0
        may = keep_alive.permit_without_calls or self._connection.has_calls
        most = keep_alive.max_pings_without_data
        if not self.heard and may and (not most or self.unanswered_pings < most):
            self.unanswered_pings += 1
            self._connection.ping()
            self._after("keep alive", keep_alive.timeout_s, self._expect_sign)
            return
        self.heard = False
        self._after("keep alive", keep_alive.time_s, self._look)

    def _expect_sign(self) -> None:
        if not self.heard:
            self._connection.abort()
            return
        self.heard = False
        self._after("keep alive", self._keep_alive.time_s, self._look)

    def _leave(self) -> None:
        self._connection.leave()
        if self._keep_alive.max_age_grace_s:
            self._after("age", self._keep_alive.max_age_grace_s, self._connection.abort)


class Ending:
    """The end of one connection. `last_id` returns the last stream that was accepted."""

    def __init__(self, out: Outbox, calls: Calls, last_id: Callable[[], int]) -> None:
        self._out = out
        self._calls = calls
        self._last_id = last_id
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.takes_no_calls = False
        self.is_closing = False
        """Received data is dropped."""
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
        """Accept no more calls than those on their way; the connection closes when all calls have ended.

        The client's answer to a ping shows that it knows: calls that it began before are served.
        """
        if self._consent is not None or self._transport is None:
            return
        self._out.put(goaway(LARGEST_ID, ErrorCode.NO_ERROR) + frame(PING, 0, 0, _LEAVING_PING))
        self._consent = self._loop.call_later(_LEAVING_S if has_client else 0.0, self._leave)

    def answered(self, ping: bytes) -> None:
        """The client has answered a ping of the server."""
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
        """Close because of a violation by the client."""
        _log.debug("a connection is closed: %s, %s", code.name, text)
        if self._transport is not None:
            self._out.put(goaway(self._last_id(), code, text))
            self.close()
            for stream in list(self._calls.streams.values()):
                self._calls.abandon(stream)

    def close(self) -> None:
        """Close once all data is sent and the client has closed its side.

        Until then data of the client is read and dropped: the kernel resets a socket that is closed with unread data,
        and the client would learn neither the reason nor which calls it can repeat elsewhere.
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
        except OSError:  # the client has left
            transport.close()

    def abort(self) -> None:
        """Close immediately."""
        if self._transport is not None:
            self._transport.abort()
