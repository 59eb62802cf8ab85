"""The servers of a Redis Cluster by slot, and changes of them.

redis-py does the discovery, at any known server that answers. `cluster_log` sends commands.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from charonia.errors import StartupError
from charonia.tasks import Tasks, periodic

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from .address import Address

_logger = logging.getLogger(__name__)

Place = tuple[str, int]

_SLOTS = 16384
_INTERVAL_S = 1.0
_SOON_S = 0.02
_ANSWER_S = 1.0
_FIRST_ANSWER_S = 5.0
"""As for a log of one server: a process that starts knows no slots, and ends with an error without them."""


def slot_of(key: bytes) -> int:
    """The slot of a key: CRC16 (XMODEM) of its hash tag, or of all of it, modulo 16384."""
    opening = key.find(b"{")
    if opening >= 0:
        closing = key.find(b"}", opening + 1)
        if closing > opening + 1:
            key = key[opening + 1 : closing]
    return binascii.crc_hqx(key, 0) % _SLOTS


class Topology:
    """The primaries by slot. `listeners` are called in the event loop after every change."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._known: list[Place] = list(address.nodes)
        self._starts: list[int] = []
        self._ranges: list[tuple[int, Place]] = []
        self._asked: tuple[Place, Redis] | None = None
        self._tasks = Tasks()
        self._looking: asyncio.Task[None] | None = None
        self.listeners: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Read the topology for the first time. Raises `StartupError`."""
        found = await self._look(_FIRST_ANSWER_S)
        await self._forget()  # servers asked from now on have a shorter time limit
        if not found:
            raise StartupError(f"the event log at {self._address.text} cannot be reached: no server names its slots")
        watching = periodic(self.refresh, _INTERVAL_S, "the log's slots could not be read")
        self._tasks.spawn(watching, "watch of the log's slots")

    async def close(self) -> None:
        await self._tasks.close()
        await self._forget()

    def place(self, slot: int) -> Place | None:
        """The primary of a slot; None while no server has it."""
        at = bisect_right(self._starts, slot) - 1
        if at < 0:
            return None
        last, place = self._ranges[at]
        return place if slot <= last else None

    @property
    def places(self) -> list[Place]:
        """Every primary."""
        return list(dict.fromkeys(place for _, place in self._ranges))

    async def refresh(self) -> None:
        """Read the topology again, once for all concurrent callers."""
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.spawn(self._look_soon(), "reading of the log's slots")
        await asyncio.shield(self._looking)

    async def _look_soon(self) -> None:
        await asyncio.sleep(_SOON_S)
        await self._look()

    async def _look(self, answer_s: float = _ANSWER_S) -> bool:
        """Ask servers one after the other until one answers; returns whether one did."""
        for place in list(self._known):
            try:
                answer = await self._client(place, answer_s).execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except Exception as error:  # redis-py raises various errors for a server that is no member
                _logger.debug("%s:%d does not name the slots: %s", *place, error)
                await self._forget()
                continue
            if answer:
                self._learn(place, answer)
                return True
            await self._forget()
        return False

    def _client(self, place: Place, answer_s: float) -> Redis:
        if self._asked is not None and self._asked[0] == place:
            return self._asked[1]
        from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        address = self._address
        ways: dict[str, Any] = {
            "host": place[0],
            "port": place[1],
            "username": address.username or None,
            "password": address.password or None,
            "socket_timeout": answer_s,
            "socket_connect_timeout": answer_s,
            "retry": Retry(NoBackoff(), 0),
        }
        if address.tls is not None:
            ways |= {"connection_class": over_tls(SSLConnection, address)}
        else:
            ways |= {"connection_class": Connection}
        client = Redis(connection_pool=ConnectionPool(**ways))
        self._asked = (place, client)
        return client

    async def _forget(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            try:
                await asked[1].aclose()
                await asked[1].connection_pool.disconnect()
            except Exception as error:
                _logger.debug("a connection could not be closed: %s", error)

    def _learn(self, asked: Place, answer: list[Any]) -> None:
        found: list[tuple[int, int, Place]] = []
        replicas: list[Place] = []
        for first, last, primary, *others in answer:
            found.append((int(first), int(last), _place(primary, asked)))
            replicas += [_place(other, asked) for other in others]
        found.sort()
        starts = [first for first, _, _ in found]
        ranges = [(last, place) for _, last, place in found]
        # the server that answered is asked first the next time; those of the URL stay known
        self._known = list(dict.fromkeys([asked, *[p for _, p in ranges], *replicas, *self._address.nodes]))
        if (starts, ranges) != (self._starts, self._ranges):
            self._starts, self._ranges = starts, ranges
            for listener in list(self.listeners):
                listener()


def _place(server: list[Any], asked: Place) -> Place:
    """The address of a server; one that does not know its own has the address at which it was asked."""
    host = server[0].decode() if isinstance(server[0], bytes) else str(server[0] or "")
    return (host or asked[0], int(server[1]))


def over_tls(connection: Any, address: Address) -> Any:
    """redis-py's TLS connection with the context of the URL."""

    class OverTls(connection):  # type: ignore[misc]
        def _connection_arguments(self) -> Any:
            return {"host": self.host, "port": self.port, "ssl": address.tls}

    return OverTls
