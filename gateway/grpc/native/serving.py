"""What all connections of a native front share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from charonia.offload.pool import Offload
from gateway.grpc.calling import Methods
from gateway.grpc.statuses import Refusal

from .codec.call_headers import CallHeaders
from .codec.grpc_messages import Room
from .codec.limits import KeepAlive
from .grpc_lane import GrpcLane


class Connection(Protocol):
    """A connection as its server sees it (`connection.Connection`)."""

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
    room: Room | None = None
    offload: Offload = field(default_factory=Offload)
    known_headers: dict[bytes, CallHeaders] = field(default_factory=dict)
    connections: set[Connection] = field(default_factory=set)
    lane: GrpcLane | None = None
    """Recognises the calls of all connections; None where it is off."""
    left: asyncio.Event | None = None
    """Set when there are no connections, for who waits for that now."""
