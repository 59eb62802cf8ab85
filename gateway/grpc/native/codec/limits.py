"""Limits of what a connection may do: pings (G31), and frames that are cheap to send and costly to handle. Pure.

Times are those of the event loop, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MAX_HTTP2_STREAMS = 4096
"""Concurrent HTTP/2 streams, thus calls, of one connection; announced to clients, whose further calls wait."""
MANY_FIELDS = 100
"""Calls with more headers spend patience for each header, which costs microseconds: no ordinary client has so many."""
MAX_BLOCKED_BYTES = 64 * 1024 * 1024
"""Answers that wait for the client's windows; beyond it further calls are refused."""

_TWO_HOURS_S = 7200.0


class Patience:
    """A budget that frames spend which advance no call; it refills with time. It allows what well-behaved clients do:
    cancel a thousand calls at once, and five hundred a second from then on.
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
        """False if none is left."""
        self._left = min(self.MOST, self._left + (now_s - self._since_s) * self.A_SECOND) - cost
        self._since_s = now_s
        return self._left >= 0


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How connections are kept alive and ended (G31). Times in seconds; 0 means no limit where there may be none."""

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
        """From options with grpc's names, in ms."""

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
    """Counts a client's excessive pings (gRPC proposal A8)."""

    __slots__ = ("_keep_alive", "_last_s", "_strikes")

    def __init__(self, keep_alive: KeepAlive) -> None:
        self._keep_alive = keep_alive
        self._strikes = 0
        self._last_s = -math.inf

    def is_enough(self, now_s: float, *, has_calls: bool, sent_data: bool) -> bool:
        """Whether this ping is one too many.

        `sent_data`: headers or data were sent to the client since the ping before. Then it may ping again, as clients
        do to measure the connection.
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
