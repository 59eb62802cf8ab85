"""Sends replies through Unix sockets of the gateways on this machine (docs/adr/0016).

A gateway that shares the payload directory listens in its part of it. A reply that cannot be sent at once goes through
the gateway's stream of the log: no reply depends on a socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from struct import Struct

from charonia.clock import monotonic_ns
from charonia.eventlog.payloads import PayloadDirectory

_log = logging.getLogger(__name__)

_SIZE = Struct("<I")
_TRY_AGAIN_NS = 1_000_000_000
_MOST_REPLY_BYTES = 1 << 24
"""Longer replies go through the log: a socket hands them over in many small parts."""
_MOST_UNSENT_BYTES = 1 << 20
"""A gateway with more unread bytes gets its replies through the log, which stores them."""


class _Peer:
    """One gateway's socket. Instances' threads and the event loop write to it; the loop writes the rest of a reply."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self.is_closed = False
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, reply: bytes) -> bool:
        """Write one reply; False when nothing of it was written. May be called in any thread."""
        if len(reply) > _MOST_REPLY_BYTES:
            return False
        data = _SIZE.pack(len(reply)) + reply
        with self._lock:
            if self.is_closed or len(self._unsent) > _MOST_UNSENT_BYTES:
                return False
            if self._unsent:
                self._unsent += data
                return True
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.is_closed = True
                self._loop.call_soon_threadsafe(self.close)
                return False
            if sent < len(data):
                self._unsent += memoryview(data)[sent:]
                self._loop.call_soon_threadsafe(self._watch)
            return True

    @property
    def is_sent(self) -> bool:
        """Whether no unwritten bytes are left, or the socket is closed."""
        return self.is_closed or not self._unsent

    def close(self) -> None:
        """Close the socket. Called in the event loop."""
        with self._lock:
            self.is_closed = True
            if self._socket.fileno() >= 0:
                self._loop.remove_reader(self._socket.fileno())
                self._loop.remove_writer(self._socket.fileno())
                self._socket.close()
            self._unsent.clear()

    def _watch(self) -> None:
        if not self.is_closed:
            self._loop.add_writer(self._socket.fileno(), self._write)

    def _write(self) -> None:
        with self._lock:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:
                self.is_closed = True
            if not self._unsent and not self.is_closed:
                self._loop.remove_writer(self._socket.fileno())
        if self.is_closed:
            self.close()

    def _read(self) -> None:
        """Close the socket: a gateway sends nothing, so readable means that it has gone."""
        try:
            if self._socket.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.close()


class ReplySockets:
    """One executor's sockets to gateways, by endpoint."""

    def __init__(self, directory: PayloadDirectory) -> None:
        self._directory = directory
        self._peers: dict[str, _Peer] = {}
        self._tried_ns: dict[str, int] = {}
        self._connecting: dict[str, asyncio.Task[None]] = {}

    def send(self, endpoint: str, reply: bytes) -> bool:
        """Write a reply to a gateway's socket; False when it must go through the log. May be called in any thread."""
        peer = self._peers.get(endpoint)
        return peer is not None and peer.send(reply)

    def seek(self, endpoint: str) -> None:
        """Connect to a gateway to which a reply could not be sent, if it has a socket on this machine."""
        peer = self._peers.get(endpoint)
        now_ns = monotonic_ns()
        if peer is not None and not peer.is_closed:
            return
        if endpoint in self._connecting or now_ns - self._tried_ns.get(endpoint, -_TRY_AGAIN_NS) < _TRY_AGAIN_NS:
            return
        path = self._directory.socket_path(endpoint)
        if not path:
            return
        if len(self._tried_ns) > 1024:  # of gateways that are no more
            self._tried_ns.clear()
            self._peers = {name: peer for name, peer in self._peers.items() if not peer.is_closed}
        self._tried_ns[endpoint] = now_ns
        self._connecting[endpoint] = asyncio.get_running_loop().create_task(self._connect(endpoint, path))

    def is_sent(self, endpoint: str) -> bool:
        """Whether the kernel has all that was written to a gateway, so that it arrives even if this process ends.

        Also true for a gateway that has gone.
        """
        peer = self._peers.get(endpoint)
        return peer is None or peer.is_sent

    async def close(self) -> None:
        for task in self._connecting.values():
            task.cancel()
        for peer in self._peers.values():
            peer.close()

    async def _connect(self, endpoint: str, path: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, path)
            self._peers[endpoint] = _Peer(sock)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):  # OSError: a gateway on another machine, or one that has gone
                raise
        finally:
            self._connecting.pop(endpoint, None)
