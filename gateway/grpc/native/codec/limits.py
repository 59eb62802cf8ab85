"""What a connection may do before it is closed: pings (G31), frames that cost more than they say. Pure.

Times are those of the event loop, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MOST_STREAMS = 4096
"""Calls at once on one connection; clients are told, and wait."""
MANY_FIELDS = 100
"""No client has so many headers. Each costs some microseconds, so calls with more of them spend patience for each."""
MOST_BLOCKED_BYTES = 64 * 1024 * 1024
"""Answers that wait for the client to open its windows; then further calls are refused."""

_TWO_HOURS_S = 7200.0


class Patience:
    """Frames that bring no call further spend it; it grows again with time. Not for what a client does in good faith:
    a thousand calls cancelled at once, and five hundred a second from then on, are taken.
    """

    MOST = 8192
    A_SECOND = 2000
    FRAME, RESET, SETTINGS = 1, 4, 40
    """A ping, an empty or an unknown frame; a call that is reset; settings, which may concern every stream."""

    __slots__ = ("_left", "_since_s")

    def __init__(self, now_s: float) -> None:
        self._left = float(self.MOST)
        self._since_s = now_s

    def spend(self, cost: int, now_s: float) -> bool:
        """False when there is none left."""
        self._left = min(self.MOST, self._left + (now_s - self._since_s) * self.A_SECOND) - cost
        self._since_s = now_s
        return self._left >= 0


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How connections are kept and ended, in seconds; 0 for no limit where that is one (G31)."""

    time_s: float = 7200.0
    timeout_s: float = 20.0
    permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_ping_interval_without_data_s: float = 300.0
    max_ping_strikes: int = 2
    max_age_s: float = 0.0
    max_age_grace_s: float = 0.0

    @classmethod
    def of(cls, options: Mapping[str, int]) -> KeepAlive:
        """From options by grpc's names, in ms."""

        def seconds(name: str, default: float) -> float:
            return options[name] / 1000 if name in options else default

        return cls(
            time_s=seconds("grpc.keepalive_time_ms", 7200.0),
            timeout_s=seconds("grpc.keepalive_timeout_ms", 20.0),
            permit_without_calls=bool(options.get("grpc.keepalive_permit_without_calls", 0)),
            max_pings_without_data=options.get("grpc.http2.max_pings_without_data", 2),
            min_ping_interval_without_data_s=seconds("grpc.http2.min_ping_interval_without_data_ms", 300.0),
            max_ping_strikes=options.get("grpc.http2.max_ping_strikes", 2),
            max_age_s=seconds("grpc.max_connection_age_ms", 0.0),
            max_age_grace_s=seconds("grpc.max_connection_age_grace_ms", 0.0),
        )


class PingStrikes:
    """The pings of a client, counted as gRPC proposal A8 says."""

    __slots__ = ("_keep_alive", "_last_s", "_strikes")

    def __init__(self, keep_alive: KeepAlive) -> None:
        self._keep_alive = keep_alive
        self._strikes = 0
        self._last_s = -math.inf

    def is_enough(self, now_s: float, *, has_calls: bool, sent_data: bool) -> bool:
        """A ping came. Whether it is one too many.

        `sent_data`: headers or data went to the client since the one before. Then it may ping again, as it does to
        measure the connection.
        """
        if sent_data:
            self._strikes = 0
            self._last_s = -math.inf
        keep_alive = self._keep_alive
        interval_s = keep_alive.min_ping_interval_without_data_s
        if not has_calls and not keep_alive.permit_without_calls:
            interval_s = _TWO_HOURS_S
        if now_s < self._last_s + interval_s:
            self._strikes += 1
        self._last_s = now_s
        return bool(keep_alive.max_ping_strikes) and self._strikes > keep_alive.max_ping_strikes
