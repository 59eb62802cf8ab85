"""The state that all connections of a native front share."""

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
from .codec.limits import MAX_HTTP2_STREAMS, KeepAlive
from .grpc_lane import GrpcLane
from .outbox import Outbox

FIRST_CONNECTION_ID = 1000
"""Smaller ids are those of the server and its listening sockets (channelz)."""


@dataclass(slots=True)
class Tally:
    """Counts of one connection, or several (channelz). Times are monotonic, 0 for never.

    Only rare events are counted one by one: calls that ended well are the rest.
    """

    started: int = 0
    refused: int = 0
    """Calls that ended with another status than OK."""
    reset: int = 0
    """Calls that ended without a status."""
    open: int = 0
    received: int = 0
    """Messages; a call of the lane counts as one when it begins."""
    silent: int = 0
    """Streaming calls that ended well: unlike a unary call's, their end is no message."""
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
    """A connection, as its server uses it (`connection.Connection`)."""

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
    """The shared state.

    `compression_level` is zlib's, 0 for none; `max_decompressed_bytes` bounds a decompressed message, `max_held_bytes`
    the incomplete messages of all connections. `allocate_message` returns memory for large messages of methods that
    take views.
    """

    methods: Methods
    keep_alive: KeepAlive
    compression_level: int
    max_decompressed_bytes: int
    max_held_bytes: int = 1 << 30
    held_bytes: int = 0
    allocate_message: AllocateMessage | None = None
    offload: Offload = field(default_factory=Offload)
    known_headers: dict[bytes, CallHeaders] = field(default_factory=dict)
    connections: set[Connection] = field(default_factory=set)
    max_streams: int = MAX_HTTP2_STREAMS
    past: Tally = field(default_factory=Tally)
    """Counts of closed connections."""
    next_id: Callable[[], int] = field(default_factory=lambda: count(FIRST_CONNECTION_ID).__next__)
    lane: GrpcLane | None = None
    """Recognises calls of all connections; None where it is off."""
    left: asyncio.Event | None = None
    """Set when the last connection has closed; made by its waiter."""
