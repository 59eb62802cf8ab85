"""An executor's sockets to gateways, for the replies of waves (docs/adr/0016).

A gateway that shares the payload directory listens in its part of it. A reply is sent as its size and its bytes.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass
from struct import Struct

from charonia.clock import monotonic_ns
from charonia.eventlog.payloads import PayloadDirectory
from charonia.tasks import Tasks

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
        self._taken_bytes = 0
        """Of all replies, sent or not."""
        self.is_closed = False
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, *replies: bytes) -> bool:
        """Write replies, or keep them until the socket takes them; False when one is too long for it, or together they
        are longer than what may be kept, or none can be written: then each must be tried alone, or go through the log.
        May be called in any thread.
        """
        if max(map(len, replies)) > _MOST_REPLY_BYTES:
            return False
        if len(replies) > 1 and sum(map(len, replies)) > _MOST_UNSENT_BYTES:
            return False
        pieces: list[bytes] = []
        for reply in replies:
            pieces += _SIZE.pack(len(reply)), reply
        data = b"".join(pieces)
        size = len(data)
        with self._lock:
            if self.is_closed or len(self._unsent) > _MOST_UNSENT_BYTES:
                return False
            if self._unsent:
                self._unsent += data
                self._taken_bytes += size
                return True
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.is_closed = True
                self._loop.call_soon_threadsafe(self.close)
                return False
            self._taken_bytes += size
            if sent < size:
                self._unsent += memoryview(data)[sent:]
                self._loop.call_soon_threadsafe(self._watch)
            return True

    def mark(self) -> Mark | None:
        """The end of the replies so far; None if no unwritten bytes are left, and of a closed socket."""
        return None if self.is_closed or not self._unsent else Mark(self, self._taken_bytes)

    def has_sent(self, end_bytes: int) -> bool:
        """Whether so many bytes of all replies are sent. True of a closed socket, whatever was cut off."""
        with self._lock:
            return self.is_closed or self._taken_bytes - len(self._unsent) >= end_bytes

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


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in what is written to a gateway's socket."""

    peer: _Peer
    end_bytes: int

    @property
    def is_passed(self) -> bool:
        """Whether all before it is sent, or the socket is closed."""
        return self.peer.has_sent(self.end_bytes)


class ReplySockets:
    """One executor's sockets to gateways, by endpoint."""

    def __init__(self, directory: PayloadDirectory) -> None:
        self._directory = directory
        self._peers: dict[str, _Peer] = {}
        self._tried_ns: dict[str, int] = {}
        self._connecting: set[str] = set()
        self._tasks = Tasks()

    def send(self, endpoint: str, *replies: bytes) -> bool:
        """Write replies to a gateway's socket with one call; False when none was written: each must be tried alone,
        or go through the log. May be called in any thread.
        """
        peer = self._peers.get(endpoint)
        return peer is not None and peer.send(*replies)

    def seek(self, endpoint: str) -> None:
        """Begin to connect to a gateway without an open connection: after its first reply went through the log, or when
        its connection has ended. At most once a second; not if the gateway has no socket on this machine.
        """
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
        self._connecting.add(endpoint)
        self._tasks.spawn(self._connect(endpoint, path), f"socket of {endpoint}")

    def mark(self, endpoint: str) -> Mark | None:
        """The end of the replies to a gateway that wait here for its socket; None if none does: the kernel has all, so
        they arrive even if this process ends. Also None once the connection has ended: what was cut off had no reader.
        """
        peer = self._peers.get(endpoint)
        return None if peer is None else peer.mark()

    async def close(self) -> None:
        self._tasks.cancel()
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
            self._connecting.discard(endpoint)
