"""The short way of replies: a Unix socket of each gateway on this machine (docs/adr/0016).

A gateway that shares the payload directory listens in its part of it. What it cannot be sent at once goes through its
stream of the log, which is always the way out: no reply depends on a socket.
"""

from __future__ import annotations

import asyncio
import logging
from struct import Struct
from typing import cast

from charonia.clock import monotonic_ns
from charonia.eventlog.payloads import PayloadDirectory

_log = logging.getLogger(__name__)

_SIZE = Struct("<I")
_TRY_AGAIN_NS = 1_000_000_000
_MOST_UNSENT_BYTES = 1 << 20
"""A gateway that reads so slowly gets its replies through the log, which holds them for it."""


class _Peer(asyncio.Protocol):
    """One gateway's socket."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _exc: Exception | None) -> None:
        self.transport = None


class ReplySockets:
    """The sockets of one executor to gateways, by endpoint."""

    def __init__(self, directory: PayloadDirectory) -> None:
        self._directory = directory
        self._peers: dict[str, _Peer] = {}
        self._tried_ns: dict[str, int] = {}
        self._connecting: dict[str, asyncio.Task[None]] = {}

    def send(self, endpoint: str, reply: bytes) -> bool:
        """Write a reply to a gateway's socket; False when it has to go through the log."""
        peer = self._peers.get(endpoint)
        transport = peer.transport if peer is not None else None
        if transport is None or transport.is_closing():
            self._try(endpoint)
            return False
        if transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            return False
        transport.write(_SIZE.pack(len(reply)) + reply)
        return True

    def is_sent(self, endpoint: str) -> bool:
        """Whether the system has all that was written to a gateway: then it arrives, whatever becomes of this process.

        True for one that is gone as well: it waits for nothing.
        """
        peer = self._peers.get(endpoint)
        transport = peer.transport if peer is not None else None
        return transport is None or not transport.get_write_buffer_size()

    async def close(self) -> None:
        for task in self._connecting.values():
            task.cancel()
        for peer in self._peers.values():
            if peer.transport is not None:
                peer.transport.close()

    def _try(self, endpoint: str) -> None:
        now_ns = monotonic_ns()
        if endpoint in self._connecting or now_ns - self._tried_ns.get(endpoint, -_TRY_AGAIN_NS) < _TRY_AGAIN_NS:
            return
        path = self._directory.socket_path(endpoint)
        if not path:
            return
        if len(self._tried_ns) > 1024:  # of gateways that are no more
            self._tried_ns.clear()
            self._peers = {name: peer for name, peer in self._peers.items() if peer.transport is not None}
        self._tried_ns[endpoint] = now_ns
        self._connecting[endpoint] = asyncio.get_running_loop().create_task(self._connect(endpoint, path))

    async def _connect(self, endpoint: str, path: str) -> None:
        try:
            peer = _Peer()
            await asyncio.get_running_loop().create_unix_connection(lambda: peer, path)
            self._peers[endpoint] = peer
        except OSError:
            pass  # a gateway of another machine, or one that is gone
        finally:
            self._connecting.pop(endpoint, None)
