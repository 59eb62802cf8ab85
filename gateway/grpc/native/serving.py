"""What all connections of a native front share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from charonia.offload.pool import Offload
from gateway.grpc.calling import Methods
from gateway.grpc.statuses import Refusal

from .codec.call_headers import CallHeaders
from .codec.grpc_messages import AllocateMessage
from .codec.limits import MOST_STREAMS, KeepAlive
from .grpc_lane import GrpcLane
from .outbox import Outbox

FIRST_CONNECTION_ID = 1000
"""Smaller ids are the server's and its listening sockets' (channelz)."""


@dataclass(slots=True)
class Tally:
    """What happened on a connection, or on several (channelz). Times are those of the monotonic clock, 0 for never.

    Only what is rare is counted one by one: what has ended well is all that has begun and did nothing else.
    """

    started: int = 0
    refused: int = 0
    """Calls that ended with another status than OK."""
    reset: int = 0
    """Calls that ended without a status."""
    open: int = 0
    received: int = 0
    """Messages; each call of the lane counts as one when it begins."""
    silent: int = 0
    """Streaming calls that ended well: their end is no message, as that of a unary call is."""
    streamed: int = 0
    """Messages of streaming calls."""
    keep_alives: int = 0
    last_started_ns: int = 0
    last_received_ns: int = 0
    last_sent_ns: int = 0

    @property
    def succeeded(self) -> int:
        return self.started - self.open - self.refused - self.reset

    @property
    def sent(self) -> int:
        """Messages."""
        return self.succeeded - self.silent + self.streamed


class CountedCalls(Protocol):
    """The calls of a connection (`connection_calls.Calls`)."""

    tally: Tally
    streams: dict[int, Any]


class Connection(Protocol):
    """A connection as its server sees it (`connection.Connection`)."""

    id: int
    window: int
    out: Outbox

    @property
    def calls(self) -> CountedCalls: ...

    def tally(self) -> Tally: ...

    def extra(self, name: str) -> Any: ...

    def leave(self) -> None: ...

    def cut_all(self, reason: Refusal) -> list[asyncio.Task[Any]]: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(slots=True)
class Serving:
    """`compression_level` is zlib's, 0 for none; `most_decompressed_bytes` bounds what a compressed message becomes,
    `most_held_bytes` what large messages that have not come whole may hold together. `room` is where large messages of
    methods that take views are received.
    """

    methods: Methods
    keep_alive: KeepAlive
    compression_level: int
    most_decompressed_bytes: int
    most_held_bytes: int = 1 << 30
    held_bytes: int = 0
    allocate_message: AllocateMessage | None = None
    offload: Offload = field(default_factory=Offload)
    known_headers: dict[bytes, CallHeaders] = field(default_factory=dict)
    connections: set[Connection] = field(default_factory=set)
    most_streams: int = MOST_STREAMS
    past: Tally = field(default_factory=Tally)
    """The calls of connections that were lost."""
    next_id: Callable[[], int] = field(default_factory=lambda: count(FIRST_CONNECTION_ID).__next__)
    lane: GrpcLane | None = None
    """Recognises the calls of all connections; None where it is off."""
    left: asyncio.Event | None = None
    """Set when there are no connections, for who waits for that now."""
