"""What all connections of a native front share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.grpc.calling import Methods

from .call_headers import CallHeaders
from .limits import KeepAlive
from .messages import Room

if TYPE_CHECKING:
    from .connection import Connection
    from .lane import GrpcLane


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
    known_headers: dict[bytes, CallHeaders] = field(default_factory=dict)
    connections: set[Connection] = field(default_factory=set)
    lane: GrpcLane | None = None
    """Recognises the calls of all connections; None where it is off."""
    left: asyncio.Event | None = None
    """Set when there are no connections, for who waits for that now."""
